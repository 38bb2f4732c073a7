"""`CompiledNetwork`: a graph with a kernel for every node, ready to run."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np

from autoconv.algorithm import Array
from autoconv.common.forks import renew_in_children
from autoconv.common.text import count, reason, size
from autoconv.cpu.fused.geometry import FusedBlocking
from autoconv.device import Device
from autoconv.errors import ArrayError, ConfigError
from autoconv.networks.choice.batch import remember, ways_to_split
from autoconv.networks.choice.choose import PricesOf, no_prices, planned
from autoconv.networks.choice.fused import with_fused
from autoconv.networks.choice.options import NetworkOptions
from autoconv.networks.choice.tolerance import (
    PricedLayouts,
    check_error,
    chosen_within,
    expected_error,
    keeps_error,
    priced_in_parts,
)
from autoconv.networks.compiled import listing, saved
from autoconv.networks.compiled.listing import StepTime
from autoconv.networks.graph import Graph
from autoconv.networks.passes import optimized
from autoconv.networks.run.contest import quickest, repeatable
from autoconv.networks.run.instance import Instance, Schedule
from autoconv.networks.run.memory import check_fits
from autoconv.networks.run.planned import Choices, Planned
from autoconv.networks.run.runtime import for_device, inputs_of, instance_of
from autoconv.networks.run.schedules import Packed, scheduled
from autoconv.plans import Plan

if TYPE_CHECKING:
    from autoconv.networks.run.cuda_instance import CudaInstance


class Running(NamedTuple):
    """What was chosen, and the steps of that very choice: one value, which `tune` may replace at any time."""

    made: Planned
    schedule: Schedule


class CompiledNetwork:
    """A network, ready to run: made by `autoconv.load`.

    All its kernels run in one call, on the threads of the device, in memory that is arranged beforehand. Several
    threads may run it at once; each then has memory of its own. A copy of it is the network itself.

    Attributes
    ----------
    device : CPU or CUDA
        Where.
    """

    def __init__(
        self,
        graph: Graph,
        device: Device,
        options: Mapping[str, Any],
        known: Choices | None = None,  # of the nodes of a graph after all passes
    ) -> None:
        self.device = device
        self._first = for_device(optimized(graph) if known is None else graph, device)  # all in NCHW
        check_fits(self._first, device)
        self._options = dict(options)
        self._lock = threading.RLock()  # a signal's handler, which may run the network, too, may come at any moment
        renew_in_children(self, "_lock", threading.RLock)
        self._instances: list[Instance | CudaInstance] = []  # idle ones
        self._compile("heuristic", known)

    def _compile(self, mode: str, known: Choices | None = None, **changes: Any) -> None:
        """Choose layouts, parts of the batch and plans, but for what is known of them, and arrange all anew."""
        options = NetworkOptions.of({**self._options, **changes})
        ways, prices_of = self._ways(mode, options) if known is None else ([known], no_prices)
        found = []
        for n, way in enumerate(ways):
            kind = "heuristic" if n else mode  # those after the first rest on what has been timed
            made = planned(self._first, way, self.device, options, kind, prices_of)
            as_meant = (made.in_nhwc, made.parts.images) == (way.in_nhwc, way.images)
            fused = known.fused if known is not None and as_meant else None
            found.append(with_fused(made, self.device, options, kind, fused))
        if known is not None and not keeps_error(self._first, found[0].plans, self.device, options):
            self._compile(mode, **changes)  # as if nothing were known
            return
        check_error(self._first, found[0].plans, self.device, options)
        found[1:] = [made for made in found[1:] if keeps_error(self._first, made.plans, self.device, options)]
        packed: Packed = {}
        schedules = [scheduled(made, self.device, packed, options.layers.get("denormals") == "keep") for made in found]
        best = 0
        if len(found) > 1 and repeatable(schedules[0]):
            best, seconds = quickest(schedules, options.cache)
            remember(found[best].parts.whole, found[best].parts.images, seconds, self.device, options)
        instance = instance_of(schedules[best])
        with self._lock:
            self._running = Running(found[best], schedules[best])
            idle, self._instances = self._instances, [instance]
        for one in idle:
            one.finish()

    def _ways(self, mode: str, options: NetworkOptions) -> tuple[list[Choices], PricesOf]:
        """In which parts of the batch it may run, and the prices at which it keeps the limit of error in any parts."""
        chosen = chosen_within(self._first, self.device, options, mode)
        known: dict[object, PricedLayouts | None] = {}

        def priced(way: Choices) -> PricedLayouts | None:
            key = way.in_nhwc, *way.images.items()
            if key not in known:
                here = chosen._replace(in_nhwc=way.in_nhwc)
                known[key] = priced_in_parts(self._first, self.device, options, mode, here, way.images)
            return known[key]

        parts = ways_to_split(self._first, chosen.in_nhwc, self.device, options, mode, chosen.prices)
        ways = [Choices(in_nhwc=chosen.in_nhwc, images=images) for images in parts]
        able = [way for way in ways if priced(way) is not None]
        return able or [Choices(in_nhwc=chosen.in_nhwc)], lambda way: (priced(way) or chosen).prices

    def save(self, path: str | Path) -> None:
        """Write the network as it is after all passes, with its choices, so that another process need not find them.

        Parameters
        ----------
        path : str or Path
            `autoconv.load` reads it. What is there is replaced in one step.

        Raises
        ------
        ConfigError
            When it cannot be written.

        Examples
        --------
        >>> import autoconv
        >>> autoconv.load("model.onnx").tune().save("model.autoconv")  # doctest: +SKIP
        >>> net = autoconv.load("model.autoconv")  # doctest: +SKIP
        """
        if not isinstance(path, str | os.PathLike):
            raise ConfigError(f"path={path!r}: expected a path, as str or Path")
        try:
            saved.write(Path(path), self._first, self._running.made.choices, self.device)
        except ConfigError:
            raise
        except (OSError, ValueError) as error:  # ValueError: a name with a null byte
            raise ConfigError(f"{path}: cannot be written: {reason(error)}") from None

    @property
    def graph(self) -> Graph:
        """What is computed, after all passes, in the layouts that were chosen."""
        return self._running.made.parts.whole

    @property
    def plans(self) -> dict[str, Plan]:
        """How each convolution and fully connected layer is computed, by the name of its node.

        On a CPU each product of two computed matrices, too.
        """
        return self._running.made.plans

    @property
    def in_nhwc(self) -> frozenset[str]:
        """The nodes whose arrays are in NHWC; all other arrays are as the model states them."""
        return self._running.made.in_nhwc

    @property
    def images(self) -> dict[str, int]:
        """The nodes that are computed for so many images at a time; all others are for the whole batch."""
        return self._running.made.parts.images

    @property
    def fused(self) -> dict[str, FusedBlocking]:
        """The nodes that one kernel computes together with those before them, and how it is cut."""
        return self._running.made.fused

    @property
    def arena_bytes(self) -> int:
        """Bytes of all arrays between input and output, scratch memory included, of one run at a time."""
        return self._running.schedule.arena_bytes

    @property
    def weight_bytes(self) -> int:
        """Bytes of all filters as kernels read them, and of other constants."""
        return self._running.schedule.weight_bytes

    @property
    def error(self) -> float:
        """The error expected of the outputs, relative to the largest, from what is recorded of the layers."""
        return expected_error(self._first, self.plans, self.device)

    @property
    def foreign(self) -> list[str]:
        """The nodes that no kernel of ours computes."""
        return listing.foreign(*self._running)

    def tune(self, mode: str = "profile", **options: Any) -> CompiledNetwork:
        """Time the candidates of every layer that has no facts yet, and run by the best from now on.

        Layers are timed in NCHW, and in NHWC where the whole may gain by that; then layouts and candidates of all are
        chosen together. Where arrays of a batch do not stay in the caches, the network also runs in parts of it; and
        depthwise layers also run in one kernel with the 1x1 layers beside them. What is quicker stays.

        Parameters
        ----------
        mode : str
            As for `plan`.
        **options
            As for `plan`: `budget`, `isolate`, `progress`; and `tolerance`, in place of the one given to `load`. With
            `isolate=True` candidates for a CPU are also compiled by several processes at once.

        Returns
        -------
        CompiledNetwork
            This one.

        Raises
        ------
        PlanError
            As `plan` does, and when no candidates together keep the tolerance.

        Examples
        --------
        >>> import autoconv
        >>> net = autoconv.load("model.onnx").tune(budget=0.2)  # doctest: +SKIP
        """
        self._compile(mode, **options)
        return self

    def run(self, /, *arrays: Array, **named: Array) -> Any:
        """Compute the outputs.

        On a GPU this launches on CuPy's current stream, which must not be captured, and does not wait.

        Parameters
        ----------
        *arrays : array
            The inputs, in the order of the file; of the shapes and types that `graph.inputs` says. As for a plan, what
            speaks DLPack is taken too.
        **named : array
            Inputs by name, in place of those.

        Returns
        -------
        array, or dict of str to array
            The output; where there are several, by name. Memory of its own.

        Raises
        ------
        ArrayError
            For an input that is missing, that the network does not have, or of another shape or type; or for numbers
            that a node which another library runs does not take, such as places that a table does not have.

        Examples
        --------
        >>> import autoconv, numpy as np
        >>> net = autoconv.load("model.onnx", batch=1)  # doctest: +SKIP
        >>> y = net.run(np.zeros((1, 3, 224, 224), np.float32))  # doctest: +SKIP
        """
        inputs = inputs_of(self.graph, self.device, arrays, named)
        with self._lock:
            schedule = self._running.schedule
            instance = next((one for one in self._instances if one.available()), None)
            self._instances = [one for one in self._instances if one is not instance]
        instance = instance or instance_of(schedule)
        found = instance.run(inputs)
        with self._lock:
            kept = instance.schedule is self._running.schedule and len(self._instances) < instance.most_idle
            if kept:
                self._instances.append(instance)
        if not kept:
            instance.finish()
        return found if len(found) > 1 else next(iter(found.values()))

    def profile(self, /, *arrays: Array, repeat: int = 10, alone: bool = False, **named: Array) -> list[StepTime]:
        """Time every step of a run, where it stands in the sequence; the steps are then calls of their own.

        Parameters
        ----------
        *arrays : array
            Inputs, as for `run`.
        repeat : int
            How many runs to take the medians of.
        alone : bool
            Whether caches are emptied before each step, but for its inputs, its output and its scratch memory, as they
            are where the candidates of a layer are timed. What that takes is not counted.
        **named : array
            Inputs by name; one called `repeat` or `alone` has to go in order.

        Returns
        -------
        list of StepTime
            In the order in which steps run.

        Raises
        ------
        ArrayError
            As `run` does, and when `repeat` is no integer of at least 1.
        """
        if type(repeat) is not int or repeat < 1:
            raise ArrayError(f"repeat={repeat!r}: expected an integer of at least 1")
        inputs = inputs_of(self.graph, self.device, arrays, named)
        made, schedule = self._running
        instance, runs = instance_of(schedule, apart=True), []
        instance.run(inputs)
        for _ in range(repeat):
            seconds: list[float] = []
            instance.run(inputs, seconds, alone)
            runs.append(seconds)
        return listing.times(listing.lines(made, schedule.steps), np.median(runs, axis=0).tolist(), made.plans)

    def explain(self) -> str:
        """What runs every node, and in how much memory.

        Returns
        -------
        str
            Lines to print.
        """
        made, schedule = self._running
        listed, foreign = listing.lines(made, schedule.steps), listing.foreign(made, schedule)
        arrays, weights = size(schedule.arena_bytes), size(schedule.weight_bytes)
        error = expected_error(self._first, made.plans, self.device)
        return "\n".join(
            [
                f"{self.graph.name}: {count(len(listed), 'step')}, "
                + (f"{len(foreign)} of them not by a kernel of ours" if foreign else "all by kernels of ours")
                + f", in {count(schedule.segments, 'call')}",
                f"  {arrays} of arrays and scratch memory, {weights} of weights; an error of {error:.1e} expected",
                *listing.table(listed, made.parts.whole),
            ]
        )

    def __copy__(self) -> CompiledNetwork:
        return self

    def __deepcopy__(self, memo: object) -> CompiledNetwork:  # as of a plan: nothing in it changes what it gives
        return self

    def __reduce__(self) -> NoReturn:
        raise ConfigError(f"{self.graph.name}: cannot be pickled: save(path) keeps it, and autoconv.load reads that")

    def __repr__(self) -> str:
        return f"<CompiledNetwork {self.graph.name} on {self.device.name}>"
