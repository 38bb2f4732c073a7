"""The chart of the page "The machine": what this machine was measured to do, drawn into `pages/machine.svg`.

`python docs/machine.py` measures the machine if that is not on record: run it on a quiet one. Needs the extra `report`.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.figure import Figure

from autoconv.cpu.device import CPU
from autoconv.cpu.machine.model import Machine

PAGE = Path(__file__).parent / "pages" / "machine.svg"
CURVES = {
    "read": "read, all threads",
    "write": "written, all threads",
    "read_one": "read, one thread",
    "stream": "written past the caches",
}


def draw(machine: Machine, name: str) -> Figure:
    """Bandwidth above, latency below, and where levels end."""
    figure = Figure(figsize=(8, 6), layout="constrained")
    bandwidth, latency = figure.subplots(2, sharex=True)
    for field, label in CURVES.items():
        curve = getattr(machine, field)
        if curve is not None:
            bandwidth.plot(*zip(*((size, rate / 1e9) for size, rate in curve.points), strict=True), label=label)
    bandwidth.set(xscale="log", yscale="log", ylabel="GB/s", title=name)
    bandwidth.legend()
    if machine.chase is not None:
        latency.plot(*zip(*((size, 1e9 / rate) for size, rate in machine.chase.points), strict=True))
    latency.set(xscale="log", yscale="log", ylabel="latency, ns", xlabel="working set")
    sizes = [1 << n for n in range(13, 29, 3)]
    latency.set_xticks(sizes, [f"{n >> 20} MiB" if n >> 20 else f"{n >> 10} KiB" for n in sizes])
    bandwidth.set_yticks(rates := [10, 20, 50, 100, 200, 500], map(str, rates))
    latency.set_yticks(times := [1, 2, 5, 10, 20, 50, 100, 200], map(str, times))
    for axes in (bandwidth, latency):
        axes.minorticks_off()
        for end in machine.caches:
            axes.axvline(end, color="grey", linestyle=":")
        axes.grid(alpha=0.3)
    return figure


if __name__ == "__main__":
    mpl.rcParams.update({"svg.hashsalt": "autoconv", "svg.fonttype": "none"})  # the same file from the same figures
    device = CPU.current()
    device.survey()
    draw(device.machine, device.name).savefig(PAGE, metadata={"Date": None})
