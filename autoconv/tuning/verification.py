"""How a candidate's answer is checked before it may win.

Output and workspace lie between guard zones and are filled with NaN; afterwards the guards must be
intact, the inputs unchanged, and every element must agree with `direct`'s output for the same random
input, computed in float64; of quantised layers it must be equal. That reference is itself checked by a route
that shares no code with it: float64 sums, element by element, on a sample of corners, borders and interior,
and a random projection over the output channels (Freivalds' check), which sees every element at once. What is large
is done where the arrays are: on a GPU, NumPy's part is CuPy's. CuPy compiles each of its kernels at first use, a
quarter of a second and more each, of `all` and `any` seconds: so what is small is looked at on the host.
Every candidate pays for its check: so answers are compared piece by piece, while they lie in a cache.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

from autoconv import registry
from autoconv.algorithm import Algorithm, Array, Kernel, Params
from autoconv.common.arrays import host
from autoconv.common.epilogue import activations
from autoconv.common.epilogue.quantization import Quantization, finished, meanings
from autoconv.common.types import INTEGERS, MOST_TERMS, ROUNDING
from autoconv.device import Device
from autoconv.errors import AutoconvError
from autoconv.layer import ConvLayer
from autoconv.tuning import reference

GUARD_BYTES = 4096
GUARD = 0xA5
SAMPLES_PER_AXIS = 3  # first, last and one in between
PIECE = {"cpu": 1 << 15, "cuda": 1 << 27}  # elements compared at a time: on a GPU each time is a launch and a wait


class WrongResultError(AutoconvError, RuntimeError):
    """A candidate gave a wrong answer or wrote where it must not."""


@dataclass(frozen=True)
class Fenced:
    """An array between two guard zones."""

    array: Array
    raw: Array

    @classmethod
    def allocate(cls, device: Device, shape: tuple[int, ...], dtype: np.dtype[Any]) -> Self:
        """An array of NaN (all bits set, which is a NaN in every float type) between intact guards."""
        nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
        raw = device.buffer(nbytes + 2 * GUARD_BYTES)
        fenced = cls(raw[GUARD_BYTES : GUARD_BYTES + nbytes].view(dtype).reshape(shape), raw)
        fenced.poison()
        return fenced

    def poison(self, value: int = 0xFF) -> None:
        """Fill the array with NaN, or with bytes of another value, and repair the guards."""
        self.raw[:] = value
        self.raw[:GUARD_BYTES] = GUARD
        self.raw[-GUARD_BYTES:] = GUARD

    def intact(self) -> bool:
        """Whether nobody wrote into a guard zone."""
        guards = host(self.raw[:GUARD_BYTES]), host(self.raw[-GUARD_BYTES:])
        return all((guard == GUARD).all() for guard in guards)


class Verifier:
    """Random operands for one layer, the right answer to them, and the check of a candidate's.

    The operands lie in [-1, 1), those of quantised layers are integers of their types' whole range. `check` gives the
    error `max|y - ref| / max(sum |a||b|)`.
    """

    def __init__(self, layer: ConvLayer, device: Device, seed: int = 0) -> None:
        self.layer, self.device = layer, device
        rng = np.random.default_rng(seed)

        def draw(shape: tuple[int, ...]) -> Array:
            values = rng.random(shape, dtype=np.float32)
            np.subtract(2 * values, 1, out=values)
            array = device.empty(shape, layer.numpy_dtype)
            array[...] = device.xp.asarray(values.astype(layer.numpy_dtype, copy=False))
            return array

        if layer.quantized:
            self.a, self.b, self.bias = (device.xp.asarray(t) for t in quantized_operands(layer, rng))
        else:
            self.a, self.b = map(draw, layer.input_shapes)
            self.bias = draw((layer.channel_values,)) if layer.channel_values else None
        self.residual = draw(layer.output_shape) if layer.residual else None
        operands = {"a": self.a, "b": self.b, "bias": self.bias, "residual": self.residual}
        self._inputs = {name: array for name, array in operands.items() if array is not None}
        self._pristine = {name: array.copy() for name, array in self._inputs.items()}
        self._out = Fenced.allocate(device, layer.output_shape, layer.output_numpy_dtype)
        self.copies: dict[int, list[Array]] = {id(array): [] for array in (*self._inputs.values(), self.out)}
        self.reference, self.magnitude, self.largest = self._reference()
        self._first = device.empty(layer.output_shape, layer.output_numpy_dtype)
        self._difference = device.empty((min(self.reference.size, PIECE[device.kind]),), np.float64)

    def _reference(self) -> tuple[Array, float, float]:
        """The answer in float64, the largest `sum |a||b|` (with the epilogue's terms, at most 1 each) and output.

        The largest output is that before or after the activation, whichever is larger.
        """
        layer, device, xp = self.layer, self.device, self.device.xp
        plain = _plain(layer)
        a, b = self.a.astype(np.float64), self.b.astype(np.float64)
        if layer.quantized:
            a -= meanings(layer, self.bias)[2]
        out = _run_direct(plain, device, a, b)
        magnitude = float(_run_direct(plain, device, xp.abs(a), xp.abs(b)).max())
        check_convolution(plain, a, b, out, magnitude, xp)
        if layer.quantized:
            out = finished(layer, xp.rint(out), self.bias, 1 if layer.layout == "NCHW" else 3)
            return out, max(magnitude, 1.0), 0.0
        values = None if self.bias is None else self.bias.astype(np.float64)
        bias, slopes = (
            None if part is None else part.reshape((-1, 1, 1) if layer.layout == "NCHW" else (-1,))
            for part in activations.parted(values, layer.bias, layer.activation)
        )
        if bias is not None:
            out += bias
        if self.residual is not None:
            out += self.residual.astype(np.float64)
        magnitude = max(magnitude, float(np.finfo(np.float32).tiny)) + layer.bias + layer.residual
        largest = float(xp.abs(out).max())
        if layer.activation is not None:
            out = activations.applied(layer.activation, out, slopes)
            largest = max(largest, float(xp.abs(out).max()))
        return out, max(magnitude, largest), largest

    def allowed(self, algorithm: Algorithm[Any], params: Params) -> float:
        """The error that an answer of a candidate may have.

        It is the algorithm's bound. That grants outputs of narrow types the rounding of a value as large as the largest
        `sum |a||b|`; sums of many random terms are far smaller than that, and a lost channel of theirs would pass
        unseen. So what is granted here is the rounding of the largest output, twice, since a library may round before
        its epilogue and after it.
        """
        bound = algorithm.bound(self.layer, params)
        bound -= ROUNDING.get(self.layer.dtype, 0.0) * max(1 - 2 * self.largest / self.magnitude, 0)
        return bound + algorithm.absolute_bound(self.layer, params) / self.magnitude  # of operands of at most 1

    @property
    def out(self) -> Array:
        """Room for an answer, to time with."""
        return self._out.array

    def rest(self) -> int:
        """Give back what only timing needs, until the next race; the bytes that are still held."""
        for copies in self.copies.values():
            copies.clear()
        held = (*self._inputs.values(), *self._pristine.values(), self._out.raw, self._first, self.reference)
        return sum(array.nbytes for array in held)

    def check(self, kernel: Kernel, weights: Array) -> tuple[float, bool]:
        """The error of a kernel's answer, and whether a second run gave the same bits.

        Parameters
        ----------
        kernel : Kernel
        weights : Array
            The packed filters, or `self.b` where it takes them as they are.

        Raises
        ------
        WrongResultError
            When a guard zone or an input was written to, or an element was left unwritten.
        """
        scratch = Fenced.allocate(self.device, (kernel.workspace_bytes,), np.dtype(np.uint8))
        self._first[...] = self._answer(kernel, weights, scratch)
        second = self._answer(kernel, weights, scratch, poison=0 if self.layer.quantized else 0xFF)
        for name, now in self._inputs.items():
            if not self._same_bits(now, self._pristine[name]):
                now[...] = self._pristine[name]  # the next candidate deserves the right ones
                raise WrongResultError(f"wrote to its input {name}")
        largest = float(np.max([float(difference.max()) for difference in self._differences()]))
        if math.isnan(largest):
            unwritten = sum(int(self.device.xp.isnan(difference).sum()) for difference in self._differences())
            raise WrongResultError(f"left {unwritten} of {self._first.size} elements unwritten or not a number")
        same = self._same_bits(self._first, second)
        if self.layer.quantized and not same:
            raise WrongResultError("left elements unwritten, or gave another answer the second time")
        return largest / self.magnitude, same

    def _answer(self, kernel: Kernel, weights: Array, scratch: Fenced, poison: int = 0xFF) -> Array:
        """What a kernel writes over NaN, or over bytes of another value."""
        self._out.poison(poison)
        kernel.run(self.a, weights, self.out, self.bias, self.residual, scratch.array)
        self.device.synchronize()
        if not self._out.intact():
            raise WrongResultError("wrote outside its output")
        if not scratch.intact():
            raise WrongResultError(f"wrote outside its workspace of {kernel.workspace_bytes} bytes")
        return self.out

    def _differences(self) -> Iterator[Array]:
        """How far the first answer lies from the right one, piece by piece; the next takes a piece's place."""
        for answer, right in self._pieces(self._first, self.reference):
            difference = self._difference[: answer.size]
            difference[...] = answer
            difference -= right
            yield self.device.xp.abs(difference, out=difference)

    def _pieces(self, *arrays: Array) -> Iterator[tuple[Array, ...]]:
        """The same elements of each of some contiguous arrays of a size, as many at a time as are compared at once."""
        flat, size = [array.reshape(-1) for array in arrays], PIECE[self.device.kind]
        for start in range(0, flat[0].size, size):
            yield tuple(array[start : start + size] for array in flat)

    def _same_bits(self, one: Array, other: Array) -> bool:
        """Whether two contiguous arrays alike have the same bits, compared by words as far as they go."""
        whole = one.nbytes // 8 * 8
        bits, others = (array.reshape(-1).view(np.uint8) for array in (one, other))
        words = self._pieces(bits[:whole].view(np.uint64), others[:whole].view(np.uint64))
        unlike = (int((mine != its).view(np.uint8).max()) for mine, its in words)  # CuPy has that reduction compiled
        return not any(unlike) and bool((host(bits[whole:]) == host(others[whole:])).all())


def quantized_operands(layer: ConvLayer, rng: np.random.Generator) -> tuple[Array, Array, Array]:
    """Input, filters and meaning of a quantised layer, of which the output uses its whole range, and more."""
    x, w = (
        rng.integers(limits.min, limits.max, shape, limits.dtype, endpoint=True)
        for limits, shape in zip(
            map(np.iinfo, (layer.numpy_dtype, layer.w_numpy_dtype)), layer.input_shapes, strict=True
        )
    )
    bias = rng.integers(-10000, 10000, layer.K) if layer.C * layer.R * layer.S < MOST_TERMS - 1 else None
    x_zero, y_zero = (
        int(rng.integers(-64, 64)) + (128 if dtype == "uint8" else 0) if dtype in INTEGERS else 0
        for dtype in (layer.dtype, layer.output_dtype)
    )
    spread = 74.0 * 74.0 * math.sqrt(layer.C // layer.groups * layer.R * layer.S)  # of sums of such numbers
    scale = 1.0 if layer.output_dtype == "int32" else rng.uniform(0.5, 2.0, layer.K) * 100 / spread
    return x, w, Quantization(scale, x_zero, y_zero, bias).operand(layer)


def direct(layer: ConvLayer, device: Device) -> Kernel:
    """The kernel that all others are verified against.

    Raises
    ------
    WrongResultError
        When there is none.
    """
    algorithm, params = _direct(layer, device)
    return algorithm.build(layer, device, params)


def reference_seconds(layer: ConvLayer, device: Device) -> float:
    """Seconds that the right answer to a layer is expected to take, and the sums of absolute values.

    Raises
    ------
    WrongResultError
        When there is no kernel to compute it.
    """
    plain = _plain(layer)
    algorithm, params = _direct(plain, device)
    return 2 * algorithm.estimate(plain, device, params)


def _plain(layer: ConvLayer) -> ConvLayer:
    """A layer in float64, without its epilogue."""
    return layer.replace(dtype="float64", bias=False, residual=False, activation=None)


def _direct(layer: ConvLayer, device: Device) -> tuple[Algorithm[Any], Params]:
    """The first candidate in the device's table of an algorithm that takes every layer, if it can run here."""
    for algorithm in registry.algorithms(device):
        if algorithm.takes_all and not algorithm.unsupported(layer):
            for params in algorithm.candidates(layer, device):
                if not algorithm.why_not(layer, device, params):
                    return algorithm, params
    raise WrongResultError(f"no direct algorithm of {device.name} takes {layer}, so nothing can be verified")


def _run_direct(layer: ConvLayer, device: Device, a: Array, b: Array) -> Array:
    kernel = direct(layer, device)
    out = device.empty(layer.output_shape, layer.numpy_dtype)
    weights = b
    if kernel.packed_bytes:
        weights = device.buffer(kernel.packed_bytes)
        kernel.pack(b, weights)
    kernel.run(a, weights, out, None, None, device.buffer(kernel.workspace_bytes))
    device.synchronize()
    return out


def check_convolution(layer: ConvLayer, a: Any, b: Any, out: Any, magnitude: float, xp: Any = np) -> None:
    """Hold a float64 convolution against sums of another route.

    Parameters
    ----------
    layer : ConvLayer
    a, b, out : float64 arrays
        Operands and answer.
    magnitude : float
        The largest `sum |a||b|`.
    xp : module
        What they are arrays of, and what computes: NumPy or CuPy.

    Raises
    ------
    WrongResultError
        When they differ by more than float64 rounding of sums of that magnitude.
    """
    rng = np.random.default_rng(1)
    a4, b4, out4 = (_channels_first(layer, array, xp) for array in (a, b, out))
    axes = [sorted({0, n - 1, *rng.integers(0, n, SAMPLES_PER_AXIS - 2).tolist()}) for n in out4.shape]
    indices = list(itertools.product(*axes))
    for index in indices:
        given, value = float(out4[index]), _summed(layer, a4, b4, index, xp)
        if not abs(given - value) <= 1e-12 * (magnitude + 1):
            raise WrongResultError(f"direct itself gives {given}, not {value}, at {index} of {layer}")
    narrow, project_a, project_b, project_out = _projection(layer, rng, xp)
    want = reference.convolve(narrow, project_a(a), project_b(b), xp=xp)
    terms = max(layer.C, layer.K) // layer.groups
    if not float(xp.abs(project_out(out) - want).max()) <= 1e-11 * terms * (magnitude + 1):
        raise WrongResultError(f"direct itself fails the random projection on {layer}")


def _channels_first(layer: ConvLayer, array: Any, xp: Any) -> Any:
    return array if layer.layout == "NCHW" else xp.moveaxis(array, -1, 1)


def _summed(layer: ConvLayer, a: Any, b: Any, index: tuple[int, ...], xp: Any) -> float:
    """One element of the answer as the sum of its products; channels-first arrays."""
    (top, _), (left, _) = layer.padding
    (sh, sw), (dh, dw) = layer.stride, layer.dilation
    c_group, k_group = layer.C // layer.groups, layer.K // layer.groups

    def crossed(array: Any, rows: list[int], columns: list[int]) -> Any:  # ..., rows, columns
        return array[..., xp.asarray(rows, dtype=np.int64)[:, None], xp.asarray(columns, dtype=np.int64)]

    if layer.direction == "wgrad":  # a = x, b = dy: every pixel, for one tap
        k, c, r, s = index
        rows = [p for p in range(layer.P) if 0 <= p * sh - top + r * dh < layer.H]
        columns = [q for q in range(layer.Q) if 0 <= q * sw - left + s * dw < layer.W]
        x = a[:, k // k_group * c_group + c]
        seen = crossed(x, [p * sh - top + r * dh for p in rows], [q * sw - left + s * dw for q in columns])
        return float((seen * crossed(b[:, k], rows, columns)).sum())
    n, channel, i, j = index
    if layer.direction == "fwd":  # pairs of a tap and what it meets
        over = [(r, i * sh - top + r * dh) for r in range(layer.R)]
        across = [(s, j * sw - left + s * dw) for s in range(layer.S)]
        height, width, first = layer.H, layer.W, channel // k_group * c_group
        pixels, filters = a[n, first : first + c_group], b[channel]
    else:
        over = [(r, (i + top - r * dh) // sh) for r in range(layer.R) if (i + top - r * dh) % sh == 0]
        across = [(s, (j + left - s * dw) // sw) for s in range(layer.S) if (j + left - s * dw) % sw == 0]
        height, width, first = layer.P, layer.Q, channel // c_group * k_group
        pixels, filters = a[n, first : first + k_group], b[first : first + k_group, channel % c_group]
    over = [(r, h) for r, h in over if 0 <= h < height]
    across = [(s, v) for s, v in across if 0 <= v < width]
    taps = crossed(filters, [r for r, _ in over], [s for s, _ in across])
    return float((host(crossed(pixels, [h for _, h in over], [v for _, v in across])) * host(taps)).sum())


def _projection(layer: ConvLayer, rng: np.random.Generator, xp: Any) -> tuple[ConvLayer, Any, Any, Any]:
    """A layer of one channel per group on one side, and how its arrays follow from the given ones.

    The sum over K (for dgrad: over C), weighted at random, of an answer is the answer for operands
    summed with the same weights; with probability 1 no wrong element escapes.
    """
    side = "C" if layer.direction == "dgrad" else "K"
    count = getattr(layer, side) // layer.groups
    v = xp.asarray(rng.uniform(0.5, 1.5, (layer.groups, count)))
    axis = 1 if layer.layout == "NCHW" else -1

    def images(array: Any) -> Any:  # N, groups * count, ... -> N, groups, ...
        if layer.layout == "NHWC":
            return xp.einsum("nhwgc,gc->nhwg", array.reshape(*array.shape[:-1], layer.groups, count), v)
        N, _, height, width = array.shape
        parted = array.reshape(N, layer.groups, count, height * width)
        return xp.matmul(v[:, None], parted).reshape(N, layer.groups, height, width)

    def filters(array: Any) -> Any:
        parted = array.reshape(layer.groups, -1, *array.shape[1:])
        if side == "K":
            return xp.einsum("gk...,gk->g...", parted, v)
        parted = xp.moveaxis(parted, axis + 1 if axis > 0 else -1, -1)
        summed = xp.einsum("gk...c,gc->gk...", parted, v).reshape(layer.K, layer.R, layer.S)
        return xp.expand_dims(summed, axis)

    def same(array: Any) -> Any:
        return array

    narrow = layer.replace(**{side: layer.groups})
    first, second, out = {
        "fwd": (same, filters, images),
        "dgrad": (same, filters, images),
        "wgrad": (same, images, filters),
    }[layer.direction]
    return narrow, first, second, out
