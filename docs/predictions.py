"""The page "Predicted on GPUs": what the estimates say of every layer of the GPU benchmark's targets.

`python docs/predictions.py` writes it; it takes some minutes and needs no GPU.
"""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from autoconv import registry
from autoconv.bench.gpu.agenda import Target, targets
from autoconv.bench.gpu.predicted import GPUS, predictions
from autoconv.common.text import duration, shape
from autoconv.layer import ConvLayer

PAGE = Path(__file__).parent / "pages" / "predicted.md"
Prediction = tuple[float, str]  # seconds, and the algorithm
INTRODUCTION = """# Predicted on GPUs

**Predicted, not measured** (for what an H100 took, see [Measured on a GPU](measured.md)). For every layer of the
targets of `autoconv bench --device cuda`, the candidate of ours that is estimated to be the quickest, and its time,
with the figures of the GPUs' data sheets: highest clock, memory bandwidth, size of the L2. The same estimates rank
candidates before anything is timed; [On a GPU](gpu.md#the-model) says what they count. TF32 is off, other libraries
are left out. `python docs/predictions.py` writes this page.
"""


def best(layer: ConvLayer) -> list[Prediction]:
    """On each GPU."""
    found = []
    for gpu in GPUS:
        ours = [one for one in registry.algorithms(gpu) if one.vendor is None]
        seconds, candidate = predictions(layer, gpu, ours)[0]
        found.append((seconds, candidate.algorithm))
    return found


def table(titles: list[str], rows: list[list[str]]) -> str:
    """As Markdown."""
    lines = (titles, ["---"] + ["--:"] * (len(titles) - 1), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def section(target: Target, found: dict[ConvLayer, list[Prediction]]) -> str:
    """Every layer of a target."""
    rows = [
        [f"N{layer.N} {shape(layer)}", *(f"{duration(seconds)} `{name}`" for seconds, name in found[layer])]
        for layer in target.layers
    ]
    return f"## {target.name}\n\n" + table(["layer", *(gpu.model for gpu in GPUS)], rows)


def summary(wanted: list[Target], found: dict[ConvLayer, list[Prediction]]) -> str:
    """Of each target: all its layers once, at what rate of the direct sum's operations, and what is chosen most."""
    rows = []
    for target in wanted:
        cells = [target.name]
        for gpu in range(len(GPUS)):
            chosen = [found[layer][gpu] for layer in target.layers]
            seconds = sum(time for time, _ in chosen)
            rate = sum(layer.flops for layer in target.layers) / seconds / 1e12
            (name, _), *_ = Counter(name for _, name in chosen).most_common(1)
            cells.append(f"{duration(seconds)}, {rate:.0f} TFLOP/s, `{name}`")
        rows.append(cells)
    return table(["target", *(gpu.model for gpu in GPUS)], rows)


def page() -> str:
    """All of it."""
    wanted = targets()
    layers = list(dict.fromkeys(layer for target in wanted for layer in target.layers))
    with ProcessPoolExecutor() as pool:
        found = dict(zip(layers, pool.map(best, layers, chunksize=16), strict=True))
    return "\n".join([INTRODUCTION, summary(wanted, found), *(section(target, found) for target in wanted)])


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
