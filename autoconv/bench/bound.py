"""What a layer takes at least on the measured machine, computed as the candidate computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from autoconv.common.candidate import Candidate
from autoconv.cpu.device import CPU
from autoconv.cpu.fft.algorithm import TiledFFT
from autoconv.cpu.transform.geometry import Tiling
from autoconv.cpu.winograd.algorithm import Winograd
from autoconv.layer import ConvLayer
from autoconv.registry import algorithms

# Of the transforms, how a layer is cut, and the multiplications of a point: a complex one takes three of two parts.
TRANSFORMS: Mapping[str, tuple[Callable[..., Sequence[Tiling]], float]] = {
    "winograd": (Winograd().tilings, 1.0),
    "fft": (TiledFFT().tilings, 1.5),
}


def multiplications(layer: ConvLayer, device: CPU, candidate: Candidate) -> float | None:
    """Multiply-adds of a forward layer; transforms not counted.

    Parameters
    ----------
    layer : ConvLayer
    device : CPU
    candidate : Candidate

    Returns
    -------
    float or None
        Of a tile's points where tiles are transformed, of the convolution as it is defined where the algorithm is
        exact, and None of others.
    """
    if candidate.algorithm in TRANSFORMS:
        cut, each = TRANSFORMS[candidate.algorithm]
        return each * sum(map(_products, cut(layer, device, dict(candidate.items))))
    exact = any(known.exact for known in algorithms(device) if known.name == candidate.algorithm)
    return layer.macs if exact else None


def _products(tiling: Tiling) -> int:
    c = tiling.correlation
    depth = 1 if tiling.depth == 1 else c.C * tiling.subfilters  # without the lanes that are filled up
    return c.groups * tiling.tile_rows * tiling.columns.tiles * tiling.points * depth * c.K


def least_seconds(layer: ConvLayer, device: CPU, candidate: Candidate) -> float | None:
    """The bound: the multiplications over the measured peak, or the bytes of the operands over the measured bandwidth.

    Parameters
    ----------
    layer : ConvLayer
    device : CPU
    candidate : Candidate

    Returns
    -------
    float or None
        The larger of the two times: neither can be avoided, and both may go on at once. Operands come from where a
        working set of their size lies. None where the multiplications are not known.
    """
    products = multiplications(layer, device, candidate)
    if products is None:
        return None
    reading = device.machine.reading(layer.bytes, layer.bytes / device.threads)
    return max(2 * products / device.peak_flops(layer.dtype), reading)
