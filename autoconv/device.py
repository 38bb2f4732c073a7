"""`Device`: where candidates run, and which there are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from autoconv.algorithm import Array
from autoconv.errors import ArrayError

if TYPE_CHECKING:
    from types import ModuleType

    from autoconv.algorithm import Algorithm, Params
    from autoconv.layer import ConvLayer


@dataclass(frozen=True)
class Operands:
    """The arrays of one launch.

    Attributes
    ----------
    a, b, out, bias, residual, workspace : array
        As `Kernel.run` takes them.
    copies : dict of int to list of array
        By the `id` of an array that other launches take too: its copies so far, which a stopwatch uses, and adds to.
    """

    a: Array
    b: Array
    out: Array
    bias: Array | None
    residual: Array | None
    workspace: Array
    copies: dict[int, list[Array]] = field(default_factory=dict)


@dataclass(frozen=True)
class Stopwatch:
    """Two ways to take one sample, in seconds, of a launch on given operands.

    Attributes
    ----------
    cold : callable
        With the filters not in cache, input and output warm, as a layer finds them in a network.
    hot : callable
        With everything as the last run left it.
    """

    cold: Callable[[], float]
    hot: Callable[[], float]


def with_its_sign(array: Any, name: str, written: bool) -> Any:
    """An array that is no view of PyTorch's yet to be negated, which it exports without the sign.

    Raises
    ------
    ArrayError
        For such a view that will be written to: of others a copy will do.
    """
    if not (callable(is_negative := getattr(array, "is_neg", None)) and is_negative()):
        return array
    if written:
        raise ArrayError(f"{name}: expected an array that holds its own values, got a view that is negated when read")
    return array.resolve_neg()


class Device(ABC):
    """One processor. A frozen dataclass of plain values, so that a worker process can open the same one.

    Attributes
    ----------
    kind : str
        "cpu" or "cuda"; also the package in which its algorithms are.
    alignment : int
        Bytes of which the address of every array that a kernel takes is a multiple, whatever its elements are.
    pitched : bool
        Whether kernels can store images apart, as parts of larger ones.
    """

    kind: str
    alignment: int = 1
    pitched: bool = False

    @property
    @abstractmethod
    def key(self) -> str:
        """Canonical text of what makes times comparable; part of every record's key."""

    @property
    def lesser_keys(self) -> tuple[str, ...]:
        """Keys of the same hardware with fewer features, whose facts are true of this device too."""
        return ()

    @property
    @abstractmethod
    def name(self) -> str:
        """What people call it."""

    @property
    @abstractmethod
    def facts(self) -> dict[str, Any]:
        """What is known of the hardware, for `info` and for estimates."""

    @property
    def estimated_from(self) -> str:
        """What estimates know of the hardware, as text: another one, other estimates."""
        return repr(sorted(self.facts.items()))

    @property
    @abstractmethod
    def versions(self) -> dict[str, str]:
        """The software that times depend on; a record from other versions is checked again."""

    @property
    @abstractmethod
    def xp(self) -> ModuleType:
        """The array module: numpy or cupy."""

    @abstractmethod
    def owns(self, array: object) -> bool:
        """Whether this is an array that kernels of this device can take.

        Parameters
        ----------
        array : object

        Returns
        -------
        bool
        """

    @abstractmethod
    def adopt(self, array: object, name: str, *, written: bool = False) -> Array:
        """A foreign array (anything that speaks DLPack) as one of this device's, sharing memory.

        Parameters
        ----------
        array : object
        name : str
            What messages call it.
        written : bool
            Whether it will be written to: else a view that PyTorch is yet to negate is copied.

        Returns
        -------
        array

        Raises
        ------
        ArrayError
            When it is no array, lies on another device, or is such a view and will be written to.
        """

    def hand_back(self, array: object, own: Array) -> None:  # noqa: B027  (nothing by default)
        """Have the library of a foreign array wait for what was launched on its memory, as far as it does not anyway.

        Parameters
        ----------
        array : object
        own : array
            What `adopt` made of it.
        """

    @abstractmethod
    def ready(self, array: Array) -> bool:
        """Whether kernels can take the array as it is: contiguous, its elements aligned.

        Parameters
        ----------
        array : array

        Returns
        -------
        bool
        """

    @abstractmethod
    def writable(self, array: Array) -> bool:
        """Whether the array may be written to.

        Parameters
        ----------
        array : array

        Returns
        -------
        bool
        """

    def overlap(self, a: Array, b: Array) -> bool:
        """Whether two contiguous arrays share memory.

        Parameters
        ----------
        a, b : array

        Returns
        -------
        bool
        """
        return bool(self.xp.may_share_memory(a, b))

    @abstractmethod
    def memory(self) -> int:
        """Bytes of all memory that this process may have there, as far as is known.

        Returns
        -------
        int
        """

    @abstractmethod
    def memory_available(self) -> int:
        """Bytes that can still be allocated, as far as is known.

        Returns
        -------
        int
        """

    @abstractmethod
    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An uninitialised contiguous array, aligned for the kernels.

        Parameters
        ----------
        shape : tuple of int
        dtype : NumPy dtype

        Returns
        -------
        array
        """

    def buffer(self, nbytes: int) -> Array:
        """An uninitialised byte buffer, aligned for the kernels.

        Parameters
        ----------
        nbytes : int

        Returns
        -------
        array of nbytes bytes
        """
        return self.empty((nbytes,), "uint8")

    def asarray(self, array: Any) -> Array:
        """An array of NumPy's as one of this device's.

        Parameters
        ----------
        array : array

        Returns
        -------
        array
            The same, where it is one already.
        """
        with self.selected():
            return self.xp.asarray(array)

    @abstractmethod
    def stream(self) -> int:
        """What separates concurrent launches: the thread on a CPU, thread and current stream on a GPU.

        Below 0 while launches are recorded into a graph, to be run later and more than once.

        Returns
        -------
        int
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for what was launched."""

    def selected(self) -> AbstractContextManager[object]:
        """A context in which this is the current one of several devices.

        Returns
        -------
        context manager
        """
        return nullcontext()

    def elsewhere(self) -> bool:
        """Whether another of several devices is the current one.

        Returns
        -------
        bool
        """
        return False

    def lost(self) -> str:
        """Why nothing can run on it any more in this process; empty when all is well.

        Returns
        -------
        str
        """
        return ""

    def get_ready_for(self, layer: ConvLayer, candidates: Sequence[tuple[Algorithm[Any], Params]]) -> None:  # noqa: B027  (nothing by default)
        """Begin, ahead of time, what would take long while these candidates are built and timed one by one.

        An error here is left for `Algorithm.build` to meet and report.

        Parameters
        ----------
        layer : ConvLayer
        candidates : sequence of (Algorithm, params)
        """

    @abstractmethod
    def stopwatch(self, launch: Callable[[Operands], None], operands: Operands) -> Stopwatch:
        """How to time `launch` on these operands.

        Parameters
        ----------
        launch : callable
            Launches the kernel once on the `Operands` it is given.
        operands : Operands

        Returns
        -------
        Stopwatch
        """

    @abstractmethod
    def peak_flops(self, dtype: str) -> float:
        """Operations per second that estimates reckon with: nominal, or on record, so the same in every process.

        Parameters
        ----------
        dtype : str
            Of the arrays, such as "float32".

        Returns
        -------
        float
        """

    @abstractmethod
    def bandwidth(self) -> float:
        """Bytes per second from memory that estimates reckon with, likewise.

        Returns
        -------
        float
        """

    def survey(self) -> None:  # noqa: B027  (nothing by default)
        """Measure what estimates reckon with, where that is measured and not on record yet.

        To be called while nobody else times on the device.
        """

    def pace(self) -> float:
        """How many times as long as at its best the device takes now; 1 where nothing is known of it.

        Returns
        -------
        float
        """
        return 1.0

    def measured_peak(self, dtype: str) -> float:
        """Operations per second that the device really reaches at most; measured once, if not on record.

        Parameters
        ----------
        dtype : str
            Of the arrays, such as "float32".

        Returns
        -------
        float
        """
        return self.peak_flops(dtype)
