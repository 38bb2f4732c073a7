"""What a layer takes at least on the measured machine, computed as the candidate computes it."""

from __future__ import annotations

from autoconv.algorithm import Algorithm
from autoconv.common.candidate import Candidate
from autoconv.cpu.common.tiles.algorithm import TileAlgorithm
from autoconv.cpu.device import CPU
from autoconv.cpu.fft.geometry import FourierTiling
from autoconv.cpu.matrix.algorithm import Matrix
from autoconv.cpu.transform.algorithm import TransformAlgorithm
from autoconv.cpu.transform.geometry import Tiling
from autoconv.layer import ConvLayer
from autoconv.registry import by_name


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
        exact or a matrix unit's, and None of others. One whose numbers are multiplied in parts counts once.
    """
    algorithm = _algorithm(device, candidate)
    if isinstance(algorithm, TransformAlgorithm):
        return sum(map(_products, algorithm.tilings(layer, device, candidate.params)))
    plain = algorithm is not None and (algorithm.exact or isinstance(algorithm, TileAlgorithm))
    return layer.macs if plain else None


def _algorithm(device: CPU, candidate: Candidate) -> Algorithm[CPU] | None:
    return by_name(device).get(candidate.algorithm)


def _products(tiling: Tiling) -> int:
    c = tiling.correlation
    depth = 1 if tiling.depth == 1 else c.C * tiling.subfilters  # without the lanes that are filled up
    # Of two complex numbers the product is three of real ones.
    points = 3 * tiling.frequencies if isinstance(tiling, FourierTiling) else tiling.points
    return c.groups * tiling.tile_rows * tiling.columns.tiles * points * depth * c.K


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
    return max(2 * products / _peak(layer, device, candidate), reading)


def _peak(layer: ConvLayer, device: CPU, candidate: Candidate) -> float:
    """Operations per second on a layer's numbers by the unit that a candidate multiplies with."""
    algorithm = _algorithm(device, candidate)
    if isinstance(algorithm, TileAlgorithm):
        rate = device.machine.tiles(device.matrix_unit or "", "bfloat16")
        return (algorithm.rate(device) if isinstance(algorithm, Matrix) else rate) / algorithm.products[layer.dtype]
    return device.peak_flops(layer.dtype)
