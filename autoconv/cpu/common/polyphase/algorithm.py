"""The gradient of a strided layer's input as one convolution of unit stride, which another algorithm computes."""

from __future__ import annotations

import math
from collections.abc import Iterable

from autoconv.algorithm import Algorithm, Array, Kernel, Params
from autoconv.common.epilogue import activations
from autoconv.cpu.codegen import compiler
from autoconv.cpu.codegen.ir import LINE
from autoconv.cpu.common.algorithm import BIAS, OUT, RESIDUAL, WORKSPACE, A, NativeCall, NativeKernel, imprecise
from autoconv.cpu.common.correlation import pitches
from autoconv.cpu.common.grid import largest_divisor
from autoconv.cpu.common.polyphase.geometry import polyphase_axes, unit_stride_layer
from autoconv.cpu.common.polyphase.kernels import emit
from autoconv.cpu.device import CPU
from autoconv.cpu.pool import Entry
from autoconv.layer import ConvLayer

MOST_WASTE = 2.0  # multiply-adds, including those with taps that some components lack, for each that counts
MOST_COMPONENTS = 4096


class PolyphaseKernel(NativeKernel):
    """Another algorithm's kernel between the two passes, some images at a time.

    Packed filters have room for those of the unit-stride layer.

    Parameters
    ----------
    layer : ConvLayer
    program : Program
        The passes.
    threads : int
    inner : NativeKernel
        Of the unit-stride layer of so many images as are computed `together`.
    together, filters, images : int
        How many those are, and bytes of the unit-stride layer's filters and output.
    """

    def __init__(
        self,
        layer: ConvLayer,
        program: compiler.Program,
        threads: int,
        inner: NativeKernel,
        together: int,
        filters: int,
        images: int,
    ) -> None:
        self._layer, self._program, self._inner, self._together = layer, program, inner, together
        self._deinterleave, self._interleave = Entry(program, "pack", threads), Entry(program, "run", threads)
        self.packed_bytes, self.workspace_bytes = inner.packed_bytes + filters, inner.workspace_bytes + images

    def pack(self, w: Array, packed: Array) -> None:
        filters = packed[self._inner.packed_bytes :]
        self._deinterleave(w, None, filters)
        if self._inner.packed_bytes:
            self._inner.pack(filters, packed[: self._inner.packed_bytes])

    def keep_denormals(self) -> None:
        for part in (self._inner, self._deinterleave, self._interleave):
            part.keep_denormals()

    def calls(self) -> list[NativeCall]:
        layer, images = self._layer, (WORKSPACE, self._inner.workspace_bytes)
        of_input, of_output = (elements * layer.itemsize for elements in pitches(layer))
        found = []
        for n in range(0, layer.N, self._together):
            within = {A: (A, n * of_input), OUT: images, BIAS: None, RESIDUAL: None}
            for call in self._inner.calls():
                takes = [
                    None if part is None else _moved(within.get(part[0], (part[0], 0)), part[1]) for part in call.takes
                ]
                found.append(NativeCall(call.program, takes, call.party))
            place = n * of_output
            stored = [images, None, (OUT, place), (BIAS, 0), (RESIDUAL, place), None]
            found.append(NativeCall(self._program, stored))
        return found

    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        images = workspace[self._inner.workspace_bytes :]
        for n in range(0, len(a), self._together):
            some = slice(n, n + self._together)
            self._inner.run(a[some], b, images, None, None, workspace)
            self._interleave(images, None, out[some], bias, None if residual is None else residual[some])


def _moved(part: tuple[int, int] | None, further: int) -> tuple[int, int] | None:
    """A part of an operand from some byte of it on."""
    return None if part is None else (part[0], part[1] + further)


class Polyphase(Algorithm[CPU]):
    """dgrad of strided layers by another algorithm's forward pass, whose candidates these are.

    With a channel for each polyphase component, the gradient is a convolution of unit stride, whose output is
    interleaved into dx by whole vectors in a second pass. The components are those of Vaidyanathan, "Multirate Systems
    and Filter Banks" (1993), chapter 4; of convolutions, Dumoulin and Visin (2016), arXiv:1603.07285, draw the gradient
    with the zeros that this leaves out, and Shi et al. (2016), arXiv:1609.05158 and arXiv:1609.07009, interleave
    channels in the same way (sub-pixel convolution).

    Parameters
    ----------
    inner : Algorithm
        What computes the unit-stride layer.
    **declared : tuple of str
        Capabilities other than those below, such as `layouts`.
    """

    directions = ("dgrad",)
    groupings = ("dense", "grouped")
    dilated = False  # neighbouring taps would be of different components
    epilogue = ("dgrad",)
    activations = activations.NAMES
    pool = "autoconv"
    searched = True
    spreads_nonfinite = True  # taps that a component lacks are zeros, and multiplied

    def __init__(self, inner: Algorithm[CPU], **declared: tuple[str, ...]) -> None:
        self.inner = inner
        same = {name: getattr(inner, name) for name in ("dtypes", "exact", "keeps_denormals")}
        vars(self).update(same, name=f"{inner.name}.polyphase", **declared)

    @property
    def version(self) -> str:
        """The inner algorithm's, whose family has this one in its table."""
        return self.inner.version

    def unsupported(self, layer: ConvLayer) -> list[str]:
        """What is declared, and what of the layer is against any inner algorithm: it may have no unit-stride layer."""
        return super().unsupported(layer) + imprecise(layer) or self._unfit(layer)

    def _unfit(self, layer: ConvLayer) -> list[str]:
        reasons = []
        if layer.stride == (1, 1):
            return ["stride: expected more than one polyphase component, got that of stride 1x1"]
        rows, columns = polyphase_axes(layer)
        if min(*rows.padding, *columns.padding) < 0:
            reasons.append(f"padding={layer.padding}: expected that every output sees some input")
        if (waste := rows.stride * rows.taps * columns.stride * columns.taps / (layer.R * layer.S)) > MOST_WASTE:
            taps = f"R={layer.R}, S={layer.S}: components of {rows.taps}x{columns.taps} taps"
            reasons.append(f"{taps}: expected at most {MOST_WASTE:g} times as many as the filter has, got {waste:.1f}")
        if (components := rows.stride * columns.stride) > MOST_COMPONENTS:
            reasons.append(f"stride: expected at most {MOST_COMPONENTS} polyphase components, got {components}")
        if layer.has_epilogue and layer.itemsize < 4:
            reasons.append(f"dtype: expected no epilogue of sums that are stored as {layer.dtype} before it")
        if layer.C == 1 and "dense" in self.groupings:
            reasons.append("C=1: expected several channels, whose components fill vectors")
        return reasons or self.inner.unsupported(unit_stride_layer(layer))

    def candidates(self, layer: ConvLayer, device: CPU) -> Iterable[Params]:
        return [candidate.params for candidate in self.inner.all(_in_cache(layer, device)[1], device)]

    def refusals(self, layer: ConvLayer, device: CPU, params: Params) -> list[str]:
        return self.inner.why_not(_in_cache(layer, device)[1], device, params)

    def workspace_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        inner = _in_cache(layer, device)[1]
        return self.inner.workspace_bytes(inner, device, params) + _bytes_in_lines(inner.y_shape, layer.itemsize)

    def packed_bytes(self, layer: ConvLayer, device: CPU, params: Params) -> int:
        inner = _in_cache(layer, device)[1]
        return self.inner.packed_bytes(inner, device, params) + _bytes_in_lines(inner.w_shape, layer.itemsize)

    def estimate(self, layer: ConvLayer, device: CPU, params: Params) -> float:
        some, inner = _in_cache(layer, device)
        machine = device.machine
        components, output = (_bytes_in_lines(shape, layer.itemsize) for shape in (inner.y_shape, some.x_shape))
        part = (components + output) / machine.threads
        moved = machine.reading(components, part) + machine.writing(output, part)
        return layer.N / some.N * (self.inner.estimate(inner, device, params) + moved)

    def bound(self, layer: ConvLayer, params: Params) -> float:
        return self.inner.bound(unit_stride_layer(layer), params)

    def usual_error(self, layer: ConvLayer, params: Params, rms: bool = False) -> float:
        """What transforms err, of the inner algorithm; sums only by the gradient's own terms, as zeros add nothing."""
        if self.exact:
            return super().usual_error(layer, params, rms)
        return self.inner.usual_error(unit_stride_layer(layer), params, rms)

    def build(self, layer: ConvLayer, device: CPU, params: Params) -> Kernel:
        some, inner = _in_cache(layer, device)
        program = compiler.build(emit, device.instruction_set, some)
        sizes = _bytes_in_lines(inner.w_shape, layer.itemsize), _bytes_in_lines(inner.y_shape, layer.itemsize)
        kernel = self.inner.build(inner, device, params)
        assert isinstance(kernel, NativeKernel)
        return PolyphaseKernel(layer, program, device.threads, kernel, some.N, *sizes)


def _in_cache(layer: ConvLayer, device: CPU) -> tuple[ConvLayer, ConvLayer]:
    """The layer of as many images as are interleaved while they are in the LLC; and the unit-stride layer of them."""
    one = unit_stride_layer(layer.replace(N=1))
    room = device.machine.caches[2] // 4 // _bytes_in_lines(one.y_shape, layer.itemsize)
    together = largest_divisor(layer.N, room)
    return layer.replace(N=together), one.replace(N=together)


def _bytes_in_lines(shape: tuple[int, ...], itemsize: int) -> int:
    """Bytes of an array in whole cache lines."""
    return -(-math.prod(shape) * itemsize // LINE) * LINE
