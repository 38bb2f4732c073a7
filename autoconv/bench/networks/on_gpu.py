"""A model of PyTorch's on a GPU: a CUDA graph of ours against CUDA graphs of PyTorch's own, on one stream."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from autoconv.bench.gpu.baselines import BASELINES, settle
from autoconv.bench.gpu.helper import AGREEMENT, commit
from autoconv.bench.networks.models import pytorch_images, pytorch_model
from autoconv.bench.networks.race import NetworkRace
from autoconv.bench.race import SLOT, interleaved
from autoconv.bench.suites import OURS
from autoconv.common.arrays import host
from autoconv.common.text import one_line
from autoconv.cuda.device import CUDA
from autoconv.cuda.timing import REPLAYS
from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.tuning.planner import forget_plans

FORMATS = {"torch": "contiguous_format", "torch_cl": "channels_last"}  # of PyTorch's contestants
WARM = 3  # runs before a capture, in which cuDNN's algorithms are timed

Run = Callable[[], Any]


def raced_on_gpu(
    name: str,
    batch: int,
    device: CUDA,
    rounds: int,
    budget: float | None,
    *,
    say: Callable[[str], None] = lambda line: None,
) -> NetworkRace:
    """A race on one GPU, with the same weights and the same random images, in float32 without TF32.

    Ours is tuned, and takes and gives arrays as `CompiledNetwork.run` does: images are copied to where its graph reads
    them, and its answers from where it leaves them. PyTorch's are replays alone, of the model with batch normalisation
    folded, its algorithms timed by `cudnn.benchmark`, in either memory format.

    Parameters
    ----------
    name : str
        As for `pytorch_model`.
    batch : int
    device : CUDA
    rounds : int
    budget : float, optional
        Seconds of timing for each layer; without one, as many as it takes.
    say : callable
        Called with what is done next.

    Returns
    -------
    NetworkRace
        Of PyTorch's that fail, and those whose answers differ from ours by more than 1e-3, why.

    Raises
    ------
    ConfigError, PlanError
        When autoconv itself cannot load or run it.
    RuntimeError
        When PyTorch cannot be kept from TF32.
    """
    import torch

    settle()
    found = NetworkRace(name, batch, device, rounds)
    model, size = pytorch_model(name)
    images = pytorch_images(batch, size)
    with device.selected(), torch.cuda.device(device.index):
        release(device)  # what another model may have left
        net = _tuned(found, model.eval(), images, budget, say)
        release(device)
        stream = device.xp.cuda.Stream(non_blocking=True)
        with stream, torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            x = device.asarray(images.numpy())
            runs: dict[str, Run] = {OURS: partial(net.run, x)}
            answers = {OURS: host(runs[OURS]())}
            for contestant, layout in FORMATS.items():
                say(f"{name}: capturing {contestant}")
                began = time.perf_counter()
                try:
                    runs[contestant] = _replayed(model, images, device, getattr(torch, layout))
                    answers[contestant] = runs[contestant]().cpu().numpy()
                except Exception as failure:  # whatever PyTorch does, ours and the others go on
                    found.failures[contestant] = one_line(failure, 200)
                found.loading[contestant] = time.perf_counter() - began
            found.judge(answers, AGREEMENT["float32"])
            say(f"{name}: timing")
            samplers = {who: _sampler(runs[who], stream, device) for who in answers if who not in found.failures}
            found.times = interleaved(samplers, rounds)
    return found


def release(device: CUDA) -> None:
    """Give back the memory that nobody holds any more: CuPy's pool and PyTorch's do not know of each other."""
    import torch

    forget_plans()  # whose kernels have memory of their own
    gc.collect()
    device.xp.get_default_memory_pool().free_all_blocks()
    torch.cuda.empty_cache()


def _tuned(
    found: NetworkRace, model: Any, images: Any, budget: float | None, say: Callable[[str], None]
) -> CompiledNetwork:
    """Our network of a model on the CPU, after tuning; and what is to be known of it."""
    from autoconv.networks.torch_reader import exported, translated

    say(f"{found.network}: loading")
    began = time.perf_counter()
    graph = translated(exported(model, (images,)), found.network)
    net = CompiledNetwork(graph, found.device, {"vendors": False})
    found.loading[OURS] = time.perf_counter() - began
    say(f"{found.network}: tuning")
    began = time.perf_counter()
    net.tune("hybrid", budget=budget)
    found.device.synchronize()
    found.facts = {
        "budget": budget,
        "tuning": round(time.perf_counter() - began, 3),
        "arena_bytes": net.arena_bytes,
        "weight_bytes": net.weight_bytes,
        "candidates": {name: str(plan.candidate) for name, plan in net.plans.items()},
        "in_nhwc": len(net.in_nhwc),
        "pytorch": BASELINES["torch, NCHW"].version(),
        "commit": commit(),
    }
    return net


def _replayed(model: Any, images: Any, device: CUDA, memory_format: Any) -> Run:
    """A replay of PyTorch's own graph of the model, whose input and output stay where they are."""
    import torch
    from torch.fx.experimental.optimization import fuse

    folded = _there(fuse(model), device).to(memory_format=memory_format)  # of a copy
    x = _there(images, device).contiguous(memory_format=memory_format)
    with torch.inference_mode():
        for _ in range(WARM):
            folded(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            answer = folded(x)

    def replay() -> Any:
        graph.replay()
        return answer

    replay.held = folded, x  # type: ignore[attr-defined]  # of which the graph has only the addresses
    return replay


def _there(what: Any, device: CUDA) -> Any:
    """A model or a tensor of PyTorch's on the GPU."""
    return what.to(f"cuda:{device.index}")


def _sampler(run: Run, stream: Any, device: CUDA) -> Callable[[], float]:
    """What takes one sample: seconds of a run, as the mean of as many in a row as fill a slot."""
    cupy = device.xp
    start, stop = cupy.cuda.Event(), cupy.cuda.Event()

    def mean(count: int) -> float:
        run()  # the host is ahead from here on
        start.record(stream)
        for _ in range(count):
            run()
        stop.record(stream)
        stop.synchronize()
        return float(cupy.cuda.get_elapsed_time(start, stop)) / 1e3 / count

    return partial(mean, max(REPLAYS, round(SLOT / mean(REPLAYS))))
