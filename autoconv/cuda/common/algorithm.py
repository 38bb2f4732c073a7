"""What CUDA algorithms share: kernels as units of text, their launch, reasons from their occupancy."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, ClassVar, TypeVar

from autoconv.algorithm import Algorithm, Array, Kernel, Params
from autoconv.cuda.codegen.occupancy import limits_of
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.model import Demand, seconds
from autoconv.layer import ConvLayer

if TYPE_CHECKING:
    from autoconv.cuda.device import CUDA

Launch = Callable[..., None]  # arrays, or None for a null pointer
PART_ALIGNMENT = 256  # bytes, of each part of a workspace
TileT = TypeVar("TileT")


class Tickets:
    """Counters that are zero whenever a kernel begins, as each of its launches leaves them.

    Runs that may overlap have workspaces of their own, and so they get tickets of their own: those that belong to where
    their workspace lies. They are zeros before the first launch, also where that is captured, and stay where they are,
    since graphs hold their address.

    Parameters
    ----------
    device : CUDA
    count : int
    """

    def __init__(self, device: CUDA, count: int) -> None:
        self._device, self._count = device, count
        self._of: dict[int, Array] = {}  # by the workspace's address

    def beside(self, workspace: Array) -> Array:
        """Those of runs in this workspace."""
        address = self._device.address(workspace)
        found = self._of.get(address)
        if found is None:
            found = self._of[address] = self._device.zeros(4 * self._count)
        return found


class Chain(Kernel):
    """Kernels launched one after the other on the current stream.

    Each of `steps` is a launch and the names of its arguments among `a b out bias residual workspace tickets`;
    `packing`, where there is one, is launched on the filters and the buffer for the packed ones.
    """

    def __init__(
        self,
        steps: Sequence[tuple[Launch, tuple[str, ...]]],
        workspace_bytes: int = 0,
        packing: Launch | None = None,
        packed_bytes: int = 0,
        tickets: Tickets | None = None,
    ) -> None:
        order = ("a", "b", "out", "bias", "residual", "workspace", "tickets")
        self._steps = [(launch, tuple(map(order.index, names))) for launch, names in steps]
        self._packing, self._tickets = packing, tickets
        self.workspace_bytes = workspace_bytes
        self.packed_bytes = packed_bytes

    def pack(self, w: Array, packed: Array) -> None:
        if self._packing is None:
            super().pack(w, packed)
        else:
            self._packing(w, packed)

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        tickets = self._tickets.beside(workspace) if self._tickets else None
        arguments = (a, b, out, bias, residual, workspace, tickets)
        for launch, indices in self._steps:
            launch(*[arguments[i] for i in indices])


class CudaAlgorithm(Algorithm["CUDA"]):
    """A family whose kernels are written in CUDA C++; `files` are their paths in `autoconv.cuda`."""

    activations = ("relu", "prelu")
    files: ClassVar[tuple[str, ...]]

    @abstractmethod
    def units(self, layer: ConvLayer, params: Params) -> tuple[Unit, ...]:
        """Every kernel of a candidate, in the order of launch; asked only when nothing forbids the layer."""

    def unfit(self, layer: ConvLayer, params: Params) -> list[str]:
        """Every reason against these parameters that holds on every device."""
        return []

    def incapable(self, layer: ConvLayer, params: Params, capability: int) -> list[str]:
        """What the kernels ask for that GPUs of a compute capability (times ten) have not."""
        return [reason for unit in self.units(layer, params) for reason in _lacking(unit, capability)]

    def refusals(self, layer: ConvLayer, device: CUDA, params: Params) -> list[str]:
        return self.unfit(layer, params) or self.incapable(layer, params, device.facts["compute_capability"])

    @abstractmethod
    def demands(self, layer: ConvLayer, device: CUDA, params: Params) -> list[Demand]:
        """What each launch of a run with packed filters asks for."""

    def estimate(self, layer: ConvLayer, device: CUDA, params: Params) -> float:
        return seconds(device, self.demands(layer, device, params))

    def load(self, device: CUDA, units: Sequence[Unit]) -> list[Launch]:
        """The units compiled for the device."""
        return [device.load(unit) for unit in units]


class TF32(CudaAlgorithm):
    """A family on float32 arrays that are rounded to tf32's ten bits: only where the caller allows it."""

    dtypes: ClassVar[tuple[str, ...]] = ("float32",)
    exact = False
    tf32 = True
    float32_bound = 2.0**-10  # both factors of every product lose up to 2**-11


def _lacking(unit: Unit, capability: int) -> list[str]:
    """Why a unit cannot run at the occupancy it was designed for."""
    limits, reasons = limits_of(capability), []
    if capability < unit.capability:
        reasons.append(f"compute capability: expected {unit.capability / 10} or above, got {capability / 10}")
    if unit.shared > limits.shared_per_block:
        reasons.append(
            f"shared memory of {unit.function}: expected at most {limits.shared_per_block} bytes, got {unit.shared}"
        )
    if max(unit.grid[1:]) > 65535 or unit.grid[0] > 2**31 - 1:
        blocks = "x".join(map(str, unit.grid))
        reasons.append(f"grid of {unit.function}: expected at most {2**31 - 1}x65535x65535 blocks, got {blocks}")
    return reasons


def tile_of(tiles: Sequence[TileT], params: Params, *names: str) -> TileT:
    """The tile whose fields of these names are as the parameters say.

    Raises
    ------
    LookupError
        When there is none: parameters that `no_tile` has something against.
    """
    for tile in tiles:
        if all(getattr(tile, name) == params[name] for name in names):
            return tile
    raise LookupError(*no_tile(tiles, params, *names))


def no_tile(tiles: Sequence[object], params: Params, *names: str) -> list[str]:
    """The reason against parameters that name no tile; none where they name one."""
    known = dict.fromkeys(tuple(getattr(tile, name) for name in names) for tile in tiles)
    given = tuple(params[name] for name in names)
    if given in known:
        return []
    expected, got = " or ".join("x".join(map(str, tile)) for tile in known), "x".join(map(str, given))
    return [f"{'x'.join(names)}: expected {expected}, got {got}"]


def aligned(nbytes: int) -> int:
    """Bytes of a part of the workspace, so that the next one begins aligned."""
    return ceil_div(nbytes, PART_ALIGNMENT) * PART_ALIGNMENT


def ceil_div(a: int, b: int) -> int:
    """`a / b`, rounded up."""
    return -(-a // b)
