"""`Plan`: a chosen candidate, ready to run, with all the evidence for the choice."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from autoconv.algorithm import Array, Candidate, Kernel
from autoconv.common.arrays import like
from autoconv.common.epilogue.quantization import Quantization
from autoconv.common.packed_weights import PackedWeights
from autoconv.common.text import count, duration
from autoconv.device import Device
from autoconv.errors import ArrayError
from autoconv.layer import ConvLayer
from autoconv.plans.signature import Operands, Signature
from autoconv.records.explanation import candidate_table
from autoconv.records.limits import Limits
from autoconv.records.schema import Facts

if TYPE_CHECKING:
    from autoconv.tuning.candidates import CandidateSet

Source = Literal["profile", "cache", "heuristic", "user"]


class Plan:
    """How one layer is computed on one device. Made by `autoconv.plan`; may be used from several threads.

    A copy of a plan is the plan itself. A process that unpickles one makes it again, for the same candidate, without
    timing anything: machine code does not travel.

    Attributes
    ----------
    layer : ConvLayer
        What is computed.
    device : Device
        Where.
    candidate : Candidate
        How.
    source : "profile", "cache", "heuristic" or "user"
        Whether candidates were timed now, the choice comes from recorded times, from estimates, or
        from the caller.
    timed : int
        Candidates timed to make this plan; 0 when the records sufficed.
    limits : Limits
        What the caller allowed.
    """

    def __init__(
        self,
        layer: ConvLayer,
        device: Device,
        candidate: Candidate,
        make_kernel: Callable[[ConvLayer], Kernel],
        source: Source,
        *,
        facts: Mapping[Candidate, Facts],
        candidate_set: Callable[[], CandidateSet],
        ranking: Callable[[], Sequence[Candidate]],
        limits: Limits,
        restore: Callable[..., Plan],
        timed: int = 0,
    ) -> None:
        self.layer, self.device, self.candidate, self.source = layer, device, candidate, source
        self._facts, self._ranking = facts, ranking
        self._candidate_set, self._restore = candidate_set, restore
        self.limits, self.timed = limits, timed
        self._make_kernel = make_kernel
        self._binding = (layer, candidate, device, limits.denormals)
        self._signature = Signature(layer, device)
        self._out_shape, self._out_dtype = layer.output_shape, layer.output_numpy_dtype
        self._workspaces: dict[int, Array] = {}  # by thread, stream or capture
        self._packed: dict[int, Array] = {}
        self._pinned: list[Array] = []  # copies that graphs read

    def __copy__(self) -> Plan:
        return self

    def __deepcopy__(self, memo: object) -> Plan:
        return self

    def __reduce__(self) -> tuple[Callable[..., Plan], tuple[object, ...]]:
        return self._restore, (self.layer, self.device, str(self.candidate), self.limits)

    def from_records(self) -> Plan:
        """The same plan as a later call finds it: from the cache, nothing timed.

        Returns
        -------
        Plan
        """
        return Plan(
            self.layer,
            self.device,
            self.candidate,
            lambda layer: self.kernel if layer == self.layer else self.kernel_of(layer),
            "cache",
            facts=self._facts,
            candidate_set=self._candidate_set,
            ranking=self._ranking,
            limits=self.limits,
            restore=self._restore,
        )

    @functools.cached_property
    def facts(self) -> dict[str, Facts]:
        """What is recorded of every candidate, by its name."""
        return {str(candidate): facts for candidate, facts in self._facts.items()}

    @functools.cached_property
    def ranking(self) -> list[str]:
        """The names of the candidates that satisfy the limits, best first."""
        return [str(candidate) for candidate in self._ranking()]

    @functools.cached_property
    def reasons(self) -> dict[str, list[str]]:
        """Why candidates cannot run, or were not worth timing, by their names."""
        return {str(candidate): reasons for candidate, reasons in self._reasons.items()}

    @functools.cached_property
    def _reasons(self) -> dict[Candidate, list[str]]:
        offered = self._candidate_set()
        untimed = {candidate: facts for candidate, facts in offered.expected.items() if candidate not in self._facts}
        found, grids = dict(offered.reasons), dict[Candidate, list[float]]()
        for candidate, expected in untimed.items():
            if offered.searched(candidate):  # of a grid, one line for all
                grids.setdefault(Candidate(candidate.algorithm), []).append(expected.time)
            else:
                found[candidate] = offered.pruned.get(candidate, [f"not timed; estimated: {duration(expected.time)}"])
        for family, times in grids.items():
            untold = f"{count(len(times), 'choice')} of parameters not timed"
            found[family] = [f"{untold}; estimated: {duration(min(times))} or more"]
        return found

    @functools.cached_property
    def kernel(self) -> Kernel:
        """What `run` launches, for those who arrange operands and scratch memory themselves; built once."""
        return self.kernel_of(self.layer)

    def kernel_of(self, layer: ConvLayer) -> Kernel:
        """The candidate's kernel, built anew, for this layer with other memory, such as an output with a pitch.

        Parameters
        ----------
        layer : ConvLayer
            The plan's own, or one whose kernels take the same packed filters.

        Returns
        -------
        Kernel
        """
        with self.device.selected():
            return self._make_kernel(layer)

    @property
    def workspace_bytes(self) -> int:
        """Bytes of scratch memory per thread (and stream, on a GPU): the kernel's, and room to pack varying filters."""
        packed = self.kernel.packed_bytes if self.limits.weights == "varying" else 0
        return self.kernel.workspace_bytes + packed

    @functools.cached_property
    def timings(self) -> dict[str, float]:
        """Seconds of every timed candidate, packing included where weights vary, by its name, the fastest first."""
        timed = {name: self.limits.cost(facts) for name, facts in self.facts.items() if facts.failure is None}
        return dict(sorted(timed.items(), key=lambda item: item[1]))

    @property
    def cut_short(self) -> bool:
        """Whether a budget ended before every candidate's turn; a larger one goes on with the others."""
        return any(facts.unreached and not facts.starved for facts in self._facts.values())

    def run(
        self,
        x: Array,
        w: Array | PackedWeights,
        bias: Array | Quantization | None = None,
        residual: Array | None = None,
        out: Array | None = None,
        slope: Array | None = None,
    ) -> Array:
        """Compute the layer: (x, w) -> y, (dy, w) -> dx or (x, dy) -> dw.

        On a GPU this launches on CuPy's current stream and does not wait. While that stream is captured into a graph,
        scratch memory is the capture's own, and lives as long as the plan. Another library's current stream waits, by
        DLPack, for a result or an `out` that is its array; not where other operands alone are its arrays.

        Parameters
        ----------
        x : array
            The first operand: x, or dy for dgrad. Of `layer.input_shapes[0]`, the layer's dtype and layout. An array
            that is not contiguous is copied. What speaks DLPack is taken too, and the same kind is given back.
        w : array or PackedWeights
            The second: w, or dy for wgrad. Of `layer.input_shapes[1]`, likewise; in place of filters, what `pack` gave.
        bias : array of `layer.output_channels` values or Quantization, optional
            Exactly when the layer has one; a `Quantization` when the layer is quantised.
        residual : array of `layer.output_shape`, optional
            Exactly when the layer has one.
        out : array, optional
            Contiguous, aligned, of the output's shape and dtype, overlapping no other operand.
        slope : array of `layer.output_channels` values, optional
            Exactly when the layer ends with PReLU.

        Returns
        -------
        array of `layer.output_shape`
            `out`, if given; else a new array.

        Raises
        ------
        ArrayError
            For a wrong shape, dtype, layout or device, a bias, residual or slope that the layer does not have (or the
            lack of one that it has), and an `out` that is not contiguous, not writable, a view that PyTorch negates
            when it is read, or overlaps.

        Examples
        --------
        >>> import numpy as np
        >>> from autoconv import ConvLayer, plan
        >>> made = plan(ConvLayer(N=1, C=2, H=5, W=5, K=3, R=3, S=3), "heuristic")
        >>> made.run(np.ones((1, 2, 5, 5), np.float32), np.ones((3, 2, 3, 3), np.float32)).shape
        (1, 3, 3, 3)
        """
        device = self.device
        if device.elsewhere():
            with device.selected():
                return self.run(x, w, bias, residual, out, slope)
        signature, packed = self._signature, type(w) is PackedWeights
        a, b = signature.first(x), self._unwrap(w) if packed else signature.second(w)
        y = self.run_checked(signature.with_others(a, b, bias, residual, out, slope), packed)
        if out is not None:
            device.hand_back(out, y)
            return out
        return y if device.owns(x) else like(x, y)

    def run_checked(self, operands: Operands, packed: bool = False) -> Array:
        """Compute the layer for what a `Signature` of it has let pass, on the device that is selected.

        Parameters
        ----------
        operands : Operands
        packed : bool
            Whether the second are filters that `pack` gave.

        Returns
        -------
        array
            The device's, where the operands say, or a new one.
        """
        device, kernel = self.device, self.kernel
        first, second, out, values, residual = operands
        a, b = self._ready(first), second if packed else self._ready(second)
        stream = device.stream()
        workspace = self._scratch(self._workspaces, stream, kernel.workspace_bytes)
        y = device.empty(self._out_shape, self._out_dtype) if out is None else out
        bias, residual = self._joined(values), None if residual is None else self._ready(residual)
        if kernel.packed_bytes and not packed:
            room = self._scratch(self._packed, stream, kernel.packed_bytes)
            kernel.pack(b, room)
            kernel.run(a, room, y, bias, residual, workspace)
            self._packed[stream] = room
        else:
            kernel.run(a, b, y, bias, residual, workspace)
        self._workspaces[stream] = workspace
        return y

    def pack(self, w: Array) -> PackedWeights:
        """The filters transformed once, for constant weights; bound to this plan's layer, candidate and device.

        Parameters
        ----------
        w : array
            The filters, of `layer.w_shape`, dtype and layout. They are copied.

        Returns
        -------
        PackedWeights
            For `run`, of this plan and of others for the same layer, candidate and device.

        Raises
        ------
        ArrayError
            For `wgrad`, which has no filters among its operands, and as `run` does.

        Examples
        --------
        >>> import numpy as np
        >>> from autoconv import ConvLayer, plan
        >>> made = plan(ConvLayer(N=1, C=2, H=5, W=5, K=3, R=3, S=3), "heuristic", weights="constant")
        >>> packed = made.pack(np.ones((3, 2, 3, 3), np.float32))
        >>> float(made.run(np.ones((1, 2, 5, 5), np.float32), packed).max())
        18.0
        """
        if self.layer.direction == "wgrad":
            raise ArrayError("w: wgrad computes the filters' gradient, so there are no weights to pack")
        with self.device.selected():
            b = self._ready(self._signature.second(w))
            if self.kernel.packed_bytes:
                packed = self.device.buffer(self.kernel.packed_bytes)
                self.kernel.pack(b, packed)
            else:
                packed = self.device.empty(b.shape, b.dtype)
                packed[...] = b
            self.device.synchronize()
        return PackedWeights(self._binding, packed)

    def _scratch(self, kept: dict[int, Array], stream: int, nbytes: int) -> Array:
        """Memory of the current thread, stream or capture, taken out while in use: a signal's handler may run, too."""
        found = kept.pop(stream, None)
        return self.device.buffer(nbytes) if found is None else found

    def _ready(self, array: Array) -> Array:
        """An operand as kernels can take it: itself, or a copy."""
        if self.device.ready(array):
            return array
        fresh = self.device.empty(array.shape, array.dtype)
        fresh[...] = array
        return self._kept(fresh)

    def _joined(self, values: Sequence[Array]) -> Array | None:
        """Arrays of a value for each channel, one behind the other."""
        if len(values) < 2:
            return self._ready(values[0]) if values else None
        fresh = self.device.empty((self.layer.channel_values,), values[0].dtype)
        for n, one in enumerate(values):
            fresh[n * len(one) : (n + 1) * len(one)] = one
        return self._kept(fresh)

    def _kept(self, fresh: Array) -> Array:
        """An array that a run made for a kernel; one that a graph will read is kept as long as the plan."""
        if self.device.stream() < 0:
            self._pinned.append(fresh)
        return fresh

    def _unwrap(self, weights: PackedWeights) -> Array:
        if self.layer.direction == "wgrad":
            raise ArrayError("dy: expected an array, got packed weights: wgrad takes (x, dy)")
        if weights.binding is not self._binding and weights.binding != self._binding:
            layer, candidate, device, denormals = weights.binding
            raise ArrayError(
                f"w: expected weights packed for {self.candidate} of {self.layer} on {self.device.name} with "
                f"denormals={self.limits.denormals!r}, got some for {candidate} of {layer} on {device.name} with "
                f"denormals={denormals!r}"
            )
        return weights.buffer

    def explain(self) -> str:
        """Every candidate with its times, spread, error and workspace, or the reasons why it was out.

        The time is of a run with cold filters, as in a network; the hot one of a layer that runs by itself.

        Returns
        -------
        str
            Lines to print, the winner marked by `>`.
        """
        layer = self.layer
        lines = [
            str(layer),
            f"  {layer.flops / 1e9:.3f} GFLOP, {layer.bytes / 1e6:.2f} MB, {layer.arithmetic_intensity:.1f} FLOP/B",
            f"  on {self.device.name}",
            f"  {self.candidate}, from {self.source}"
            + (f" ({count(self.timed, 'candidate')} timed)" if self.timed else " (nothing timed)"),
        ]
        lines += candidate_table(layer, self.candidate, self._ranking(), self._facts, self._reasons, self.limits)
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Plan {self.layer} by {self.candidate}, from {self.source}>"
