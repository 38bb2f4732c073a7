"""How launches on a GPU are timed: events around replays of a graph, so that the host's own time is not counted."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from autoconv.algorithm import Array
from autoconv.device import Operands

if TYPE_CHECKING:
    from types import ModuleType

REPLAYS = 4  # of the graph, to a sample
MOST_SETS = 64  # operand sets to a graph; small layers cannot fill the L2 with a sensible number of them
LEAST_LAUNCHES = 8  # to a graph: enough to make the replay's own cost small


def operand_sets(nbytes: int, l2_bytes: int) -> int:
    """How many operand sets of this size are together larger than twice the L2, so that each comes from memory."""
    return min(2 * l2_bytes // max(nbytes, 1) + 2, MOST_SETS)


def replayer(
    cupy: ModuleType, launch: Callable[[Operands], None], operands: Operands, sets: int
) -> Callable[[], float]:
    """What takes one sample: seconds of a launch, as the mean of a replayed graph of them over so many operand sets."""
    given = (operands.a, operands.b, operands.out, operands.bias, operands.residual)
    others = zip(*(_copies(array, sets - 1, operands.copies) for array in given), strict=True)
    copies = [operands]
    for a, b, out, bias, residual in others:
        copies.append(Operands(a, b, out, bias, residual, operands.workspace))
    stream = cupy.cuda.Stream(non_blocking=True)
    launches = max(sets, LEAST_LAUNCHES)
    cupy.cuda.get_current_stream().synchronize()  # the copies must be there

    def launch_all() -> None:
        for i in range(launches):
            launch(copies[i % sets])

    graph = capture(stream, launch_all, lambda: launch(operands))
    return _Replay(cupy, graph, stream, launches, (copies, launch))


class _Replay:
    """Takes a sample with each call; holds what a graph has only the addresses of."""

    def __init__(self, cupy: ModuleType, graph: Any, stream: Any, launches: int, held: object) -> None:
        self._cupy, self._graph, self._stream, self._launches, self._held = cupy, graph, stream, launches, held
        self._start, self._stop = cupy.cuda.Event(), cupy.cuda.Event()

    def __call__(self) -> float:
        with self._stream:
            self._graph.launch(self._stream)
            self._start.record(self._stream)
            for _ in range(REPLAYS):
                self._graph.launch(self._stream)
            self._stop.record(self._stream)
        self._stop.synchronize()
        seconds = float(self._cupy.cuda.get_elapsed_time(self._start, self._stop)) / 1e3
        return seconds / (REPLAYS * self._launches)


def capture(stream: Any, launch: Callable[[], None], first: Callable[[], None] | None = None) -> Any:
    """What a function launches while a stream of CuPy's is the current one, as a graph.

    Before that `first` runs, the function itself unless another is given: what is loaded or allocated once must not be
    captured.
    """
    with stream:
        (first or launch)()
        stream.begin_capture()
        try:
            launch()
        except BaseException:  # a stream left capturing makes every later call of the driver fail
            with contextlib.suppress(Exception):  # the capture may be invalid already, which is no news
                stream.end_capture()
            raise
        graph = stream.end_capture()
        graph.upload(stream)
    return graph


def _copies(array: Array | None, count: int, shared: dict[int, list[Array]]) -> list[Array | None]:
    """So many of an array, made once for all who share it."""
    if array is None:
        return [None] * count
    kept = shared.get(id(array), [])
    while len(kept) < count:
        kept.append(array.copy())
    return list(kept[:count])
