"""What our kernels are compared with on a GPU: cuDNN, autotuned by PyTorch, in both memory formats."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from autoconv.algorithm import Array
from autoconv.common.arrays import CHANNELS_FIRST, CHANNELS_LAST
from autoconv.cuda.timing import LEAST_LAUNCHES, REPLAYS, operand_sets
from autoconv.device import Device
from autoconv.layer import ConvLayer
from autoconv.vendors.base import installed, release
from autoconv.vendors.torch import torch_convolution, uneven_padding

Sample = Callable[[], float]


def settle() -> None:
    """Have cuDNN's algorithms timed by PyTorch, and nothing of float32 computed in TF32.

    Raises
    ------
    RuntimeError
        When PyTorch still says TF32, as where all of its backends were told to.
    """
    import torch

    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    cudnn.benchmark = True
    cudnn.allow_tf32 = matmul.allow_tf32 = False
    precisions = {"convolutions": cudnn.conv.fp32_precision, "products": matmul.fp32_precision}  # what is in force
    if allowed := [what for what, precision in precisions.items() if precision == "tf32"]:
        raise RuntimeError(f"expected no TF32 in PyTorch: torch.backends allows it for {' and '.join(allowed)}")


@dataclass(frozen=True)
class Baseline:
    """A way to call PyTorch, with `cudnn.benchmark` on and TF32 off, replayed as a graph like ours."""

    channels_last: bool

    def missing(self) -> str:
        """Why it cannot take part; empty when it can."""
        if not installed("torch"):
            return "torch is not installed"
        import torch

        return "" if torch.cuda.is_available() else "torch sees no GPU"

    def version(self) -> str:
        """Of PyTorch, and of the cuDNN and CUDA that it runs on."""
        if self.missing():
            return release("torch")
        import torch

        cudnn: Any = torch.backends.cudnn
        return f"{torch.__version__}, cuDNN {cudnn.version()}, CUDA {torch.version.cuda}, TF32 off"

    def prepare(self, layer: ConvLayer, device: Device, a: Array, b: Array) -> tuple[Sample, Array]:
        """Seconds of a run, filters and input in its own format beforehand; and its answer.

        Raises
        ------
        ValueError
            When torch has no such layer.
        """
        import torch

        if (uneven := uneven_padding(layer)) is not None:
            raise ValueError(uneven)
        settle()
        memory_format = torch.channels_last if self.channels_last else torch.contiguous_format

        def tensor(array: Array) -> Any:
            found: Any = torch.utils.dlpack.from_dlpack(array)
            first = found.permute(CHANNELS_FIRST) if layer.layout == "NHWC" else found
            return first.clone(memory_format=memory_format)

        with torch.inference_mode():
            x, w = tensor(a), tensor(b)
            nbytes = a.nbytes + b.nbytes + layer.numpy_dtype.itemsize * math.prod(layer.output_shape)
            sets = operand_sets(nbytes, int(device.facts["l2_bytes"]))
            copies: list[tuple[Any, Any]] = [(x, w), *((x.clone(), w.clone()) for _ in range(sets - 1))]
            launches = max(sets, LEAST_LAUNCHES)
            for x, w in copies[:2] * 2:  # cuDNN's own search is over before the capture
                answer = torch_convolution(layer, x, w, None, None)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            answers = []  # all kept: the block of one that is dropped is the next one's, and stays in the L2
            with torch.cuda.graph(graph):
                for i in range(launches):
                    x, w = copies[i % sets]
                    answers.append(torch_convolution(layer, x, w, None, None))
        event: Any = torch.cuda.Event
        start, stop = event(enable_timing=True), event(enable_timing=True)

        def sample() -> float:
            graph.replay()
            start.record()
            for _ in range(REPLAYS):
                graph.replay()
            stop.record()
            stop.synchronize()
            return float(start.elapsed_time(stop) / 1e3 / (REPLAYS * launches))

        # The graph has only their addresses, and what nobody holds torch gives back when it captures the next one.
        sample.held = copies, answers  # type: ignore[attr-defined]
        with torch.inference_mode():
            answer = torch_convolution(layer, *copies[0], bias=None, residual=None)
        ours = answer.permute(CHANNELS_LAST) if layer.layout == "NHWC" else answer
        return sample, device.adopt(ours.contiguous(), "torch's answer")


BASELINES = {"torch, NCHW": Baseline(channels_last=False), "torch, channels_last": Baseline(channels_last=True)}
