"""What Winograd's algorithms choose their tiles by: the sizes worth trying, the layers refused, the errors allowed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autoconv.cpu.common.correlation import CorrelationAxis
from autoconv.cpu.transform.geometry import LARGEST_TILE, Plan, Side
from autoconv.layer import ConvLayer

MOST = 3  # sizes of tiles among a layer's candidates, ...
SMALL = 10**7  # ... unless it has so few operations that one will do
FEWEST_TAPS = 4  # of a block, among the candidates
MOST_GATHERS = 16  # vectors of channels that several parts share: each has code of its own
LARGEST_STEP = 8  # input pixels between neighbours of a piece: more would be loads without end


def most_sizes(layer: ConvLayer) -> int:
    """How many sizes of tiles are among a layer's candidates."""
    return MOST if layer.flops > SMALL else 1


def sizes(axis: CorrelationAxis) -> range:
    """Sizes of tiles worth trying along an axis: blocks of few taps save little."""
    taps = -(-len(axis.taps) // Side(axis, 1).phases)
    return range(2, LARGEST_TILE + 2 - min(taps, FEWEST_TAPS)) if taps > 1 else range(1, 2)


def refusals(layer: ConvLayer, m: tuple[int, int], cuts: Sequence[Plan]) -> list[str]:
    """Reasons against a layer's correlations in tiles of m outputs, in whatever direction."""
    reasons = []
    sides = [side for plan in cuts for side in (plan.rows, plan.columns)]
    if all(side.r == 1 for side in sides):
        reasons.append(f"the filter is {layer.R}x{layer.S}: no neighbouring taps in any phase of its stride")
    if (largest := max(m)) >= LARGEST_TILE:
        reasons.append(f"m={largest}: at most {LARGEST_TILE} points on a side keep the error small, more than outputs")
    if (gathers := max([plan.c_blocks for plan in cuts if plan.mixed], default=0)) > MOST_GATHERS:
        reasons.append(f"few channels in many parts of the filter: {gathers} vectors of them, more than {MOST_GATHERS}")
    if (period := max(side.period for side in sides)) > LARGEST_STEP:
        reasons.append(f"its pieces are {period} pixels apart, more than {LARGEST_STEP}")
    return reasons


def cap(sides: Iterable[Side]) -> float:
    """Largest float32 error, some times what was measured on random tiles of two channels and more."""
    return max(map(_cap, sides))


def _cap(side: Side) -> float:
    if side.tile <= 6:
        return 4e-6
    return 1e-5 if side.tile == 7 or (side.tile == 8 and side.m <= 4) else 3e-5
