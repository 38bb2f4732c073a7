"""`Signature`: the arrays that a layer takes and gives, and how what does not fit is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autoconv.algorithm import Array
from autoconv.common.epilogue import activations
from autoconv.common.epilogue.quantization import operand_of
from autoconv.device import Device
from autoconv.errors import ArrayError
from autoconv.layer import ConvLayer, Shape

# The first and the second, where the output goes if the caller says so, values for channels, and the residual.
Operands = tuple[Array, Array, Array | None, Sequence[Array], Array | None]

_NAMES = {"fwd": ("x", "w", "y"), "dgrad": ("dy", "w", "dx"), "wgrad": ("x", "dy", "dw")}


class Signature:
    """What a layer takes and gives on a device.

    Arrays of other libraries are adopted, and what does not fit is refused. A run then copies what its kernel cannot
    take as it lies. Who plans for arrays has all of them checked before.

    Parameters
    ----------
    layer : ConvLayer
    device : Device

    Attributes
    ----------
    finishes : bool
        Whether the layer takes operands of an epilogue.
    """

    def __init__(self, layer: ConvLayer, device: Device) -> None:
        self._layer, self._device, self._names = layer, device, _NAMES[layer.direction]
        self._a_shape, self._b_shape = layer.input_shapes
        self._dtype, self._b_dtype = layer.numpy_dtype, layer.w_numpy_dtype
        self._out_shape, self._out_dtype = layer.output_shape, layer.output_numpy_dtype
        self.finishes = layer.channel_values > 0 or layer.residual or layer.quantized

    def check(
        self, x: Any, w: Any, bias: Any = None, residual: Any = None, out: Any = None, slope: Any = None
    ) -> Operands:
        """The operands of a run, none of which it would refuse.

        Parameters
        ----------
        x, w, bias, residual, out, slope
            As `Plan.run` takes them, without packed weights.

        Returns
        -------
        Operands

        Raises
        ------
        ArrayError
            As by `Plan.run`.
        """
        return self.with_others(self.first(x), self.second(w), bias, residual, out, slope)

    def with_others(self, a: Array, b: Array, bias: Any, residual: Any, out: Any, slope: Any) -> Operands:
        """The same, of two operands that are checked or packed.

        Parameters
        ----------
        a, b : array
            Of the device.
        bias, residual, out, slope
            As `Plan.run` takes them.

        Returns
        -------
        Operands

        Raises
        ------
        ArrayError
            As by `output` and `epilogue`.
        """
        y = None if out is None else self.output(out, a, b)
        if bias is None and residual is None and slope is None and not self.finishes:
            return a, b, y, (), None
        return a, b, y, *self.epilogue(bias, residual, slope, y)

    def first(self, array: Any) -> Array:
        """The first operand.

        Parameters
        ----------
        array : array

        Returns
        -------
        array
            One of the device's, as it lies.

        Raises
        ------
        ArrayError
            For another shape or type, and for what is no array of the device.
        """
        return self._operand(array, self._names[0], self._a_shape, self._dtype)

    def second(self, array: Any) -> Array:
        """The second operand, likewise.

        Parameters
        ----------
        array : array

        Returns
        -------
        array

        Raises
        ------
        ArrayError
        """
        return self._operand(array, self._names[1], self._b_shape, self._b_dtype)

    def output(self, out: Any, a: Array, b: Array) -> Array:
        """Where the output goes.

        Parameters
        ----------
        out : array
        a, b : array
            The operands, of the device.

        Returns
        -------
        array
            One of the device's.

        Raises
        ------
        ArrayError
            For another shape or type, and for what is not contiguous, not writable, or overlaps an operand.
        """
        device = self._device
        y = out if device.owns(out) else device.adopt(out, "out", written=True)
        if y.shape != self._out_shape or y.dtype != self._out_dtype:
            raise ArrayError(
                f"out: expected {self._out_dtype} {self._out_shape} for {self._names[2]} of the {self._layer.layout} "
                f"layer {self._layer}, got {y.dtype} {tuple(y.shape)}"
            )
        if not device.ready(y):
            raise ArrayError("out: expected a contiguous array with aligned elements, as a new one is")
        if not device.writable(y):
            raise ArrayError("out: expected a writable array, got a read-only one")
        self._keep_apart(y, "an operand", a, b)
        return y

    def epilogue(self, bias: Any, residual: Any, slope: Any, y: Array | None) -> tuple[list[Array], Array | None]:
        """The operands of the epilogue.

        Parameters
        ----------
        bias, residual, slope : array, Quantization or None
        y : array, optional
            What `output` gave, where the caller says where the output goes.

        Returns
        -------
        list of arrays, array or None
            The values for channels, of bias and slope or what stands for a `Quantization`; and the residual.

        Raises
        ------
        ArrayError
            For one that the layer does not have, or the lack of one that it has; and as for other operands.
        """
        layer = self._layer
        if layer.quantized:
            if residual is None and slope is None:
                return [operand_of(layer, bias)], None
            bias = None
        ends = ("bias", bias, layer.bias), ("residual", residual, layer.residual)
        for name, given, there in (*ends, ("slope", slope, activations.has_slopes(layer.activation))):
            if given is None and there:
                raise ArrayError(f"{name}: expected an array, as the layer has one ({layer}), got None")
            if given is not None and not there:
                raise ArrayError(f"{name}: expected None, as the layer has none ({layer}), got an array")
        shape, given = (layer.output_channels,), (("bias", bias), ("slope", slope))
        values = [self._operand(one, name, shape, self._dtype) for name, one in given if one is not None]
        if residual is not None:
            residual = self._operand(residual, "residual", self._out_shape, self._dtype)
        if y is not None:
            self._keep_apart(y, "bias, residual or slope", *values, *(() if residual is None else (residual,)))
        return values, residual

    def _operand(self, array: Any, name: str, shape: Shape, dtype: Any) -> Array:
        if not self._device.owns(array):
            array = self._device.adopt(array, name)
        if array.shape != shape or array.dtype != dtype:
            raise ArrayError(
                f"{name}: expected {dtype} {shape} for the {self._layer.layout} layer {self._layer}, "
                f"got {array.dtype} {tuple(array.shape)}"
            )
        return array

    def _keep_apart(self, y: Array, what: str, *operands: Array) -> None:
        """Refuse an output that shares memory with what is read while it is written; what is copied first is not."""
        device = self._device
        if any(device.ready(one) and device.overlap(y, one) for one in operands):
            raise ArrayError(f"out: expected memory of its own, got an array that overlaps {what}")
