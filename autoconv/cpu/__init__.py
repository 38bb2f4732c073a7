"""Convolution on a CPU: the table of contents of its algorithms."""

from autoconv.algorithm import Algorithm
from autoconv.cpu.depthwise import Depthwise
from autoconv.cpu.depthwise_wgrad import DepthwiseWgrad
from autoconv.cpu.direct import Direct
from autoconv.cpu.fft import TiledFFT
from autoconv.cpu.floor.direct import Direct as NumpyDirect
from autoconv.cpu.floor.fft import FFT
from autoconv.cpu.floor.gemm import Gemm
from autoconv.cpu.floor.winograd import Winograd as NumpyWinograd
from autoconv.cpu.phases import DepthwisePhases, DirectPhases, WinogradPhases
from autoconv.cpu.pixel import Pixel
from autoconv.cpu.pointwise import Pointwise
from autoconv.cpu.vendor import Onnxruntime, Torch
from autoconv.cpu.winograd import Winograd
from autoconv.cpu.winograd_wgrad import WinogradWgrad

ALGORITHMS: tuple[Algorithm, ...] = (
    Direct(),
    Winograd(),
    WinogradWgrad(),
    DepthwiseWgrad(),
    DirectPhases(),
    WinogradPhases(),
    DepthwisePhases(),
    TiledFFT(),
    Pixel(),
    Pointwise(),
    Depthwise(),
    NumpyDirect(),
    Gemm(),
    FFT(),
    NumpyWinograd(),
    Torch(),
    Onnxruntime(),
)
