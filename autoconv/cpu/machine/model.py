"""`Machine`: what a processor was measured to do, in plain numbers that estimates are computed from."""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass, fields
from typing import Any

from autoconv.cpu.machine.checks import CURVES, checked
from autoconv.cpu.machine.curve import Curve
from autoconv.errors import RecordError

BUSY = 0.05  # share of the processor used by others from which on a measurement is repeated, and marked
LINE = 64  # bytes that come together: `codegen` has it too, which is only loaded where kernels are


@dataclass(frozen=True)
class Machine:
    """The measured machine: one processor with its vectors and number of threads.

    What was not measured is None: a machine known by somebody's notes has gaps. What takes its place is said where it
    is asked for.

    Attributes
    ----------
    threads : int
    when : str
        Date and time of the measurement, ISO 8601; free text for a machine that was not measured here.
    thorough : bool
        Whether it took seconds, or was a first quick look.
    busy : float
        The share of the processor that others used meanwhile.
    peaks : dict of str to dict of str to float
        Operations per second of all threads, by unit (an instruction set, or a unit for matrices) and type; of int8, by
        the fastest instruction whose sums are exact.
    read_one, read : Curve
        Reading by one thread, and by all of them: a working set of so many bytes in all, a part of it for each.
    write, stream : Curve or None
        Writing by all threads, through the caches and past them.
    chase : Curve or None
        Loads per second of one thread that follows a chain through a working set: one over the latency.
    jumps : Curve or None
        Lines per second that all threads load in no order, none of which waits for another: a working set of so many
        bytes in all, a part of it for each.
    handed : Curve or None
        Bytes per second that all threads write, and then read what another one has written: a working set of so many
        bytes in all, a part of it for each. It need not fall: what has left a core's own caches is had sooner.
    transform : float or None
        Vectors of a transform's axis per second and thread, read, combined and stored.
    call, barrier, wake : float or None
        Seconds of a call that computes nothing, of a region of all threads beside it, and of the first such region when
        the threads were asleep.
    caches : tuple of int
        Bytes of three levels as one thread finds them: two end where loads take twice as long as further in, the last
        where reading on end takes half as long again.
    """

    threads: int
    when: str
    thorough: bool
    busy: float
    peaks: dict[str, dict[str, float]]
    read_one: Curve
    read: Curve
    write: Curve | None
    stream: Curve | None
    chase: Curve | None
    jumps: Curve | None
    handed: Curve | None
    transform: float | None
    call: float | None
    barrier: float | None
    wake: float | None
    caches: tuple[int, int, int]

    def flops(self, unit: str, dtype: str) -> float:
        """Operations per second of all threads.

        Parameters
        ----------
        unit : str
            An instruction set, or a unit for matrices.
        dtype : str
            In which the unit computes; 16-bit types are computed with in float32 by vector units. Bytes of either sign
            are int8, and count as float32 where that was not measured.

        Returns
        -------
        float

        Raises
        ------
        KeyError
            Where that was not measured.
        """
        peaks = self.peaks[unit]
        name = "int8" if dtype == "uint8" else dtype
        return peaks[name] if name in peaks else peaks["float32"]

    def multiply_adds(self, unit: str, dtype: str, lanes: int) -> float:
        """Vectors of multiply-adds per second of one thread.

        Parameters
        ----------
        unit, dtype : str
            As for `flops`.
        lanes : int
            Of a vector.

        Returns
        -------
        float
        """
        return self.flops(unit, dtype) / (2 * lanes * self.threads)

    def word_products(self, unit: str, channels: int, lanes: int) -> float:
        """Vectors of products of words, each added to a sum, per second of one thread.

        Where bytes were not measured, as many as multiply-adds of float32.

        Parameters
        ----------
        unit : str
            An instruction set.
        channels : int
            Products of bytes that a word adds up.
        lanes : int
            Words of a vector.

        Returns
        -------
        float
        """
        measured = self.peaks[unit].get("int8")
        if measured is None:
            return self.multiply_adds(unit, "float32", lanes)
        return measured / (2 * channels * lanes * self.threads)

    def loads(self, nbytes: int) -> float:
        """Vectors per second that one thread loads from its first cache, as many as it multiplies if not measured.

        Parameters
        ----------
        nbytes : int
            Of a vector.

        Returns
        -------
        float
        """
        measured = self.read_one.rate(self.caches[0] / 2) / nbytes
        return (
            measured
            if self.read_one.points[0][0] <= self.caches[0]
            else max(measured, self._most_multiply_adds(nbytes))
        )

    def transforms(self, nbytes: int) -> float:
        """Vectors per second that one thread transforms on one axis.

        Where that was not measured, each takes as long as four multiply-adds: it is loaded, combined twice, and stored.

        Parameters
        ----------
        nbytes : int
            Of a vector.

        Returns
        -------
        float
        """
        return self.transform if self.transform is not None else self._most_multiply_adds(nbytes) / 4

    def tiles(self, unit: str, dtype: str) -> float:
        """Operations per second that all threads do with a matrix unit; with vectors, where it was not measured.

        Parameters
        ----------
        unit, dtype : str
            As for `flops`.

        Returns
        -------
        float
        """
        measured = self.peaks.get(unit, {}).get(dtype)
        return measured or max(types["float32"] for types in self.peaks.values() if "float32" in types)

    def _most_multiply_adds(self, nbytes: int) -> float:
        most = max(types["float32"] for types in self.peaks.values() if "float32" in types)
        return most / (2 * (nbytes // 4) * self.threads)

    @functools.cached_property
    def memory(self) -> float:
        """Bytes per second that all threads read from memory."""
        return self.read.points[-1][1]

    @functools.cached_property
    def beyond(self) -> int:
        """Bytes of a working set that no cache has a part of: from there on reading is nearly as slow as it gets."""
        slow = 1.25 * self.read_one.points[-1][1]
        return next(size for size, rate in self.read_one.points if rate <= slow)

    def reading(self, nbytes: float, out_of: float) -> float:
        """Seconds in which all threads together read bytes, each out of a working set of its own.

        Parameters
        ----------
        nbytes : float
            Of all threads together.
        out_of : float
            Bytes of one thread's working set.

        Returns
        -------
        float
        """
        return nbytes / self.read.rate(out_of * self.threads)

    def jumping(self, nbytes: float, out_of: float, through: float) -> float:
        """As `reading`, but in jumps that nothing foresees: a thread waits for as many lines at a time as it can.

        Where that was not measured, they come no slower than on end.

        Parameters
        ----------
        nbytes, out_of : float
            As for `reading`.
        through : float
            Bytes among which one thread jumps, be they its own or shared.

        Returns
        -------
        float
        """
        waits = nbytes / LINE / self.jumps.rate(through * self.threads) if self.jumps is not None else 0.0
        return max(self.reading(nbytes, out_of), waits)

    @property
    def ahead(self) -> float | None:
        """Lines that a thread waits for at a time, in the largest working set through which a chain was followed.

        None where that was not measured.
        """
        if self.jumps is None or self.chase is None:
            return None
        return self.jumps.rate(self.chase.last * self.threads) / (self.threads * self.chase.rate(self.chase.last))

    def writing(self, nbytes: float, into: float, past: bool = False) -> float:
        """Seconds in which all threads together write bytes, each into a working set of its own.

        Where writing was not measured, it takes as long as to read the lines and to write them.

        Parameters
        ----------
        nbytes, into : float
            As for `reading`.
        past : bool
            Past the caches.

        Returns
        -------
        float
        """
        curve = self.stream if past else self.write
        if curve is not None:
            return nbytes / curve.rate(into * self.threads)
        return (1 if past else 2) * self.reading(nbytes, into)

    def handing(self, nbytes: float, through: float) -> float:
        """Seconds by which it takes all threads longer to write and read bytes when another one has written them.

        Where that was not measured, it takes no longer.

        Parameters
        ----------
        nbytes : float
            Of all threads together.
        through : float
            Bytes that are handed on at a time, by all threads together.

        Returns
        -------
        float
        """
        if self.handed is None:
            return 0.0
        part = through / self.threads
        alone = self.writing(nbytes, part) + self.reading(nbytes, part)
        return max(nbytes / self.handed.rate(through) - alone, 0.0)

    def to_json(self) -> dict[str, Any]:
        """What `from_json` reads.

        Returns
        -------
        dict
            Of JSON's own types; what was not measured is null.
        """
        data: dict[str, Any] = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in CURVES:
            data[name] = None if data[name] is None else [list(point) for point in data[name].points]
        return data | {"caches": list(self.caches)}

    @classmethod
    def from_json(cls, data: object) -> Machine:
        """The machine that `to_json` wrote, every number of it checked.

        Parameters
        ----------
        data : object
            As JSON has it.

        Returns
        -------
        Machine

        Raises
        ------
        RecordError
            For anything else; the message names the field, what it holds and what is expected.
        """
        return cls(**checked(data, {field.name for field in fields(cls)}))

    @property
    def text(self) -> str:
        """As JSON, on one line; what `parse` reads."""
        return json.dumps(self.to_json(), separators=(",", ":"))

    @staticmethod
    def parse(text: str) -> Machine:
        """The machine of a text.

        Parameters
        ----------
        text : str

        Returns
        -------
        Machine

        Raises
        ------
        RecordError
            Where the text is no JSON, or `from_json` refuses it.
        """
        return _parsed(text)


@functools.lru_cache(64)
def _parsed(text: str) -> Machine:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RecordError(f"machine={text!r:.80}: expected JSON, got {error}") from None
    return Machine.from_json(data)
