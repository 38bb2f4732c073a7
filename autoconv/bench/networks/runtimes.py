"""What runs a network, by name: ours, and other libraries', at their default settings but for float32 and threads."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from autoconv.algorithm import Array
from autoconv.bench.baselines import mnn, ncnn, openvino
from autoconv.bench.baselines import torch as pytorch
from autoconv.bench.baselines.base import Library
from autoconv.bench.networks.models import fixed
from autoconv.bench.networks.torch_module import torch_module
from autoconv.bench.suites import OURS
from autoconv.cpu.device import CPU
from autoconv.errors import PlanError
from autoconv.networks import onnx_reader
from autoconv.networks.compiled.loading import load
from autoconv.vendors.onnxruntime import bound_arrays, model_session

Inputs = Mapping[str, Array]


class Loaded(NamedTuple):
    """A network, ready to run on some inputs.

    Parameters
    ----------
    run : callable
        One run. What it returns is in the runtime's own format.
    read : callable
        Makes the outputs of that, as NumPy arrays in the order of the file, outside of the clock.
    facts : dict
        What else it can tell of itself, in plain JSON types.
    """

    run: Callable[[], Any]
    read: Callable[[Any], list[Array]]
    facts: Mapping[str, Any] = {}


@dataclass(frozen=True)
class Runtime(Library):
    """Something that runs a network from an ONNX file of static shapes.

    Parameters
    ----------
    load : callable
        `load(path, inputs, device)` reads the file. It raises PlanError where the library cannot run the network.
    """

    load: Callable[[Path, Inputs, CPU], Loaded]


def _ours(path: Path, inputs: Inputs, device: CPU) -> Loaded:
    net = load(path, device=device)
    facts = {"arena_bytes": net.arena_bytes, "weight_bytes": net.weight_bytes, "foreign": net.foreign}

    def read(y: Any) -> list[Array]:
        return list(y.values()) if isinstance(y, dict) else [y]

    arrays = [inputs[name] for name in net.graph.inputs]  # by place: an input may have any name
    return Loaded(lambda: net.run(*arrays), read, facts)


def _onnxruntime(path: Path, inputs: Inputs, device: CPU) -> Loaded:
    session = model_session(path.read_bytes(), device.threads)
    binding = bound_arrays(session, inputs, {})
    for output in session.get_outputs():
        binding.bind_output(output.name)
    return Loaded(lambda: session.run_with_iobinding(binding), lambda _: binding.copy_outputs_to_cpu())


def _openvino(path: Path, inputs: Inputs, device: CPU) -> Loaded:
    import openvino as library

    compiled = openvino.core().compile_model(str(path), "CPU", openvino.settings(device.threads))
    request = compiled.create_infer_request()
    tensors = {name: library.Tensor(array, shared_memory=True) for name, array in inputs.items()}
    for name, tensor in tensors.items():
        request.set_tensor(name, tensor)

    def run(_kept: object = (tensors, inputs)) -> None:  # the request itself does not keep their memory
        request.infer(share_outputs=True)  # or it copies them

    return Loaded(run, lambda _: [np.array(request.get_tensor(output).data) for output in compiled.outputs])


def _torch(channels_last: bool, compiled: bool) -> Callable[[Path, Inputs, CPU], Loaded]:
    def load_module(path: Path, inputs: Inputs, device: CPU) -> Loaded:
        import torch

        pytorch.pin(device.threads)
        graph = onnx_reader.read(path)
        module = torch_module(graph)
        tensors = [torch.from_numpy(inputs[name]) for name in graph.inputs]
        if channels_last:
            module = module.to(memory_format=torch.channels_last)
            tensors = [x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in tensors]
        if compiled:
            import torch._inductor.config

            torch._inductor.config.freezing = True
            module = torch.compile(module)

        def run() -> Any:
            with torch.no_grad():  # under inference_mode nothing is frozen
                return module(*tensors)

        if compiled:
            run()  # which compiles it: that is loading
        return Loaded(run, lambda found: [y.numpy() for y in found])

    return load_module


def _ncnn(path: Path, inputs: Inputs, device: CPU) -> Loaded:
    """Its networks are of one image: several run one after the other, each on all threads."""
    import ncnn as library
    import onnx
    import pnnx

    if len(inputs) != 1:
        raise PlanError(f"its converter takes networks of one input, got {len(inputs)}")
    ((taken, x),) = inputs.items()
    model = onnx.load(path)
    for value in model.graph.input:
        if value.name == taken:
            value.type.tensor_type.shape.dim[0].ClearField("dim_value")
    net = ncnn.empty_net(device.threads)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "one.onnx")
        source.write_bytes(fixed(model, 1).SerializeToString())
        files = {"pnnxparam": "p.param", "pnnxbin": "p.bin", "pnnxpy": "p.py", "pnnxonnx": "p.onnx"}
        files |= {"ncnnparam": "n.param", "ncnnbin": "n.bin", "ncnnpy": "n.py"}
        told = [f"{name}={Path(folder, file)}" for name, file in files.items()]
        shape = ",".join(map(str, (1, *x.shape[1:])))
        arguments = [pnnx.EXEC_PATH, str(source), f"inputshape=[{shape}]f32", "fp16=0", *told]
        code = subprocess.run(arguments, capture_output=True, cwd=folder, check=False).returncode
        if code:
            raise PlanError(f"its converter ended with {code}")
        if net.load_param(str(Path(folder, "n.param"))) or net.load_model(str(Path(folder, "n.bin"))):
            raise PlanError("it does not take the converted network")
    (given,), names = net.input_names(), net.output_names()
    images = [library.Mat(image) for image in x]

    def answered(image: Any) -> list[Any]:
        extractor = net.create_extractor()
        extractor.input(given, image)
        found = []
        for name in names:
            y = library.Mat()
            failed = extractor.extract(name, y)  # without an array to extract into, it copies
            if failed:
                raise RuntimeError(f"ncnn failed with {failed}")
            found.append(y)
        return found

    return Loaded(
        lambda: [answered(image) for image in images],
        lambda found: [np.stack([np.array(y) for y in of_all]) for of_all in zip(*found, strict=True)],
    )


def _mnn(path: Path, inputs: Inputs, device: CPU) -> Loaded:
    with mnn.silent():
        import MNN.expr
        import onnx

        model = onnx.load(path)
        names = [output.name for output in model.graph.output]
        module = mnn.converted(model.SerializeToString(), [*inputs], names, device.threads)
        first, own = MNN.expr.NCHW, MNN.expr.NC4HW4
        variables = [MNN.expr.convert(MNN.expr.const(x, list(x.shape), first), own) for x in inputs.values()]

    def read(found: Any) -> list[Array]:
        return [np.array(MNN.expr.convert(y, first).read()) for y in found]

    return Loaded(lambda: module.forward(variables), read)


RUNTIMES = {
    runtime.name: runtime
    for runtime in (
        Runtime("onnxruntime", "ONNX Runtime", ("onnxruntime", "onnx"), _onnxruntime),
        Runtime("openvino", "OpenVINO", ("openvino",), _openvino),
        Runtime("torch", "PyTorch, NCHW", ("torch", "onnx"), _torch(channels_last=False, compiled=False)),
        Runtime("torch_cl", "PyTorch, channels_last", ("torch", "onnx"), _torch(channels_last=True, compiled=False)),
        Runtime("torch_compiled", "PyTorch, compiled", ("torch", "onnx"), _torch(channels_last=False, compiled=True)),
        Runtime("ncnn", "ncnn", ("ncnn", "pnnx", "onnx"), _ncnn),
        Runtime("mnn", "MNN", ("MNN", "onnx"), _mnn),
    )
}
AUTOCONV = Runtime(OURS, "autoconv", ("autoconv",), _ours)
