"""What the command and `Plan.explain` print on this machine, written into the README and the page "Why this one".

`python docs/gallery.py [NAME...]` times the layers anew, all or some, in a cache of its own: run it on a quiet machine.
A text stands after a mark `<!-- gallery: NAME -->`, as one block.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import tempfile
import termios
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from autoconv import ConvLayer, TuningCache, plan
from autoconv.registry import this_device

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "pages" / "why-this-one.md"
COLUMNS = 130  # of the terminal that the command believes to write to: no candidate is folded
LAYERS = {
    "winograd": ConvLayer(N=1, C=128, H=28, W=28, K=128, R=3, S=3, padding=1),
    "pointwise": ConvLayer(N=1, C=256, H=28, W=28, K=128, R=1, S=1),
    "stem": ConvLayer(N=1, C=3, H=224, W=224, K=64, R=7, S=7, stride=2, padding=3),
    "large": ConvLayer(N=1, C=32, H=56, W=56, K=32, R=15, S=15, padding=7),
    "depthwise": ConvLayer(N=1, C=128, H=56, W=56, K=128, R=3, S=3, padding=1, groups=128),
    "dgrad": ConvLayer(N=8, C=64, H=56, W=56, K=128, R=3, S=3, stride=2, padding=1, direction="dgrad"),
}
README = "tune"  # the text there
WHOLE = "winograd"  # this one with the reasons against all others


def explained(cache: TuningCache, names: Sequence[str]) -> dict[str, str]:
    """What `explain` says of layers, with constant weights where there are any."""
    texts = {}
    for name in names:
        layer = LAYERS[name]
        found = plan(layer, weights="constant", vendors=False, cache=cache, isolate=True)
        text = found.explain()
        texts[name] = text if name == WHOLE else text.partition("\n\n  out:")[0]
    return texts


def tuned() -> str:
    """What the command prints on a terminal, without its colours."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    command = ["tune", "configs/alexnet.yaml"]
    with subprocess.Popen(
        [sys.executable, "-m", "autoconv", *command], cwd=ROOT, stdout=slave, stderr=subprocess.DEVNULL
    ):
        os.close(slave)
        written = b""
        while part := _read(master):
            written += part
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\r", "", written.decode())
    lines = [line.rstrip() for line in plain.strip("\n").splitlines()]
    return "\n".join([f"$ autoconv {' '.join(command)}", *lines])


def _read(master: int) -> bytes:
    try:
        return os.read(master, 1 << 16)
    except OSError:  # the other end is closed
        return b""


def put(path: Path, name: str, text: str) -> None:
    """Replace the block after a mark."""
    mark = f"<!-- gallery: {name} -->"
    found = re.compile(rf"{re.escape(mark)}\n```text\n.*?^```$", re.MULTILINE | re.DOTALL)
    before = path.read_text(encoding="utf-8")
    after, count = found.subn(lambda _: f"{mark}\n```text\n{text}\n```", before)
    if count != 1:
        raise SystemExit(f"{path}: expected one block after {mark}, got {count}")
    path.write_text(after, encoding="utf-8")


def main(*names: str) -> None:
    """Measure, then write: "tune", or layers by their names."""
    if unknown := set(names).difference((README, *LAYERS)):
        raise SystemExit(f"{', '.join(unknown)}: expected some of {', '.join((README, *LAYERS))}")
    wanted = names or (README, *LAYERS)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["AUTOCONV_CACHE_DIR"] = folder
        if README in wanted:
            put(ROOT / "README.md", README, tuned())
        for name, text in explained(TuningCache(system=None), [name for name in LAYERS if name in wanted]).items():
            put(PAGE, name, text)
    date = datetime.now(UTC).strftime("%B %Y")
    put(PAGE, "machine", f"{this_device().name}, {date}")


if __name__ == "__main__":
    main(*sys.argv[1:])
