"""The page "Measured on a GPU": what `autoconv bench --device cuda` found on hardware.

`python docs/measured.py` writes it from what is kept in `docs/results`.
"""

from __future__ import annotations

from pathlib import Path

from autoconv.bench.gpu import read
from autoconv.bench.gpu.agenda import targets
from autoconv.bench.gpu.report import markdown

DOCS = Path(__file__).parent
PAGE, RESULTS = DOCS / "pages" / "measured.md", DOCS / "results"
GPUS = "h100", "h200"
INTRODUCTION = """# Measured on a GPU

What runs found on two GPUs, in the terms of [the command](gpu.md#measure-on-a-gpu). On an H100, in half an hour in
all: all layers of AlexNet, VGG-16, ResNet-50 and GoogLeNet forward in float32, and of every other target as many
as there was time for, chosen evenly from the longest to the shortest. On an H200, in twenty minutes in all, half
of them beside other work of its processor: the six unusual layers, all of 3x3 and 5x5 in float32, 39 to 48 layers
of every other target, and checks of 2197 cases. The other side is cuDNN as PyTorch autotunes it
(`cudnn.benchmark`), in both of its memory formats; but above 60 GFLOP to a layer of float32 only in NCHW on the
H100, as its search in the other takes longest. Arrays in NCHW are compared with PyTorch's in `channels_last` too,
which were put in that order beforehand: for float16 that says what the order costs, not what a kernel for NCHW
could do. Filters are transformed in every run, on either side.

In float32 most of ours that win multiply on tensor cores, each product as six of bfloat16 parts or three of tf32, which
`exact=True` leaves out. They err less than what they are compared with: products of parts by at most 9e-8 of the sum
of magnitudes, where cuDNN's in float32 err by up to 3.4e-7; Winograd for 3x3 filters by 1.7e-6, where cuDNN's does by
up to 3.5e-6. TF32 is off on both sides.

What PyTorch answers is held to ours, within 1e-3 of the largest value in float32. Where it differs by more, as in
three gradients of 5x5 filters, it has no time here: cuDNN's own Winograd for such filters errs by 2e-4 to 1.3e-3 of
the sum of magnitudes, and its search looks at time alone. The tuner refuses it ("wrong result"); ours err by at most
1.0e-6 there.

`python docs/measured.py` writes this page.
"""


def page() -> str:
    """All of it."""
    return "\n".join([INTRODUCTION, *map(section, GPUS)])


def section(gpu: str) -> str:
    """What a folder of results says."""
    found = markdown(read(RESULTS / gpu), targets(), 0)
    return found.replace("# ", "## ", 1).replace("\nINCOMPLETE", "\n- INCOMPLETE")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
