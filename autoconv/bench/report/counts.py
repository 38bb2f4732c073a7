"""How much there is to compute and to move: a layer's operations by algorithm, and its operands."""

from __future__ import annotations

import math

from autoconv.cpu.codegen.ir import VECTOR_BYTES
from autoconv.cpu.common.grid import register_tiles
from autoconv.cpu.device import CPU
from autoconv.layer import ConvLayer


def padded_input(layer: ConvLayer) -> int:
    """Elements of the input with its padding.

    Parameters
    ----------
    layer : ConvLayer

    Returns
    -------
    int
    """
    return layer.N * layer.C * (layer.H + sum(layer.padding[0])) * (layer.W + sum(layer.padding[1]))


def multiply_adds_per_byte(layer: ConvLayer) -> float:
    """Multiply-adds of the direct sum for every byte of padded input, filters and output, each moved once.

    Parameters
    ----------
    layer : ConvLayer

    Returns
    -------
    float
    """
    elements = padded_input(layer) + math.prod(layer.w_shape) + math.prod(layer.y_shape)
    return layer.macs / (layer.itemsize * elements)


def input_over_filters(layer: ConvLayer) -> float:
    """Elements of the padded input for every coefficient of the filters.

    Parameters
    ----------
    layer : ConvLayer

    Returns
    -------
    float
    """
    return padded_input(layer) / math.prod(layer.w_shape)


def product_extents(layer: ConvLayer) -> tuple[int, int, int]:
    """Rows, columns and depth of the matrix product that im2col makes of a group of the layer.

    Parameters
    ----------
    layer : ConvLayer

    Returns
    -------
    tuple of int
        Their product, times the groups, is the layer's multiply-adds.
    """
    filters, pixels = layer.K // layer.groups, layer.N * layer.P * layer.Q
    window = layer.C // layer.groups * layer.R * layer.S
    return {
        "fwd": (filters, pixels, window),
        "dgrad": (window, pixels, filters),
        "wgrad": (filters, window, pixels),
    }[layer.direction]


def gemm_multiply_adds(layer: ConvLayer, device: CPU) -> int:
    """Multiply-adds of that matrix product in whole register tiles, of those of the device that fill up least.

    Parameters
    ----------
    layer : ConvLayer
    device : CPU

    Returns
    -------
    int
        As many as the layer has, and those on lanes and broadcasts past its edges.
    """
    lanes = VECTOR_BYTES[device.instruction_set] // layer.accumulator.itemsize
    rows, columns, depth = product_extents(layer)
    outputs = (
        _whole(rows, vectors * lanes) * _whole(columns, broadcasts)
        for vectors, broadcasts in register_tiles(device.instruction_set)
    )
    return layer.groups * depth * min(outputs)


def _whole(extent: int, tile: int) -> int:
    return math.ceil(extent / tile) * tile
