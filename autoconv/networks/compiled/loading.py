"""`load`: a network from a file, ready to run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from autoconv.errors import ConfigError
from autoconv.networks import files, onnx_reader
from autoconv.networks.compiled import saved
from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.registry import resolve


def load(path: str | Path, batch: int | None = None, *, device: Any = None, **options: Any) -> CompiledNetwork:
    """A network from an ONNX file, or from one that `CompiledNetwork.save` wrote, ready to run.

    Layers run by what is on record for them, or by the best estimate; `CompiledNetwork.tune` measures.

    Parameters
    ----------
    path : str or Path
        An ONNX file, which the extra `onnx` reads, or a saved network.
    batch : int, optional
        Images at a time, where the file leaves that open; else it has to be the file's.
    device : Device or str, optional
        The CPU, or one of fewer threads; or a GPU, "cuda" or "cuda:1". There all kernels are one CUDA graph, which is
        launched on CuPy's current stream; arrays are CuPy's.
    **options
        As for `plan`: `workspace_limit`, `deterministic`, `vendors` (False unless given), `exact`, `cache`,
        `denormals`, `allow_tf32`. And `input_shapes`: whole shapes of inputs by name, in place of what the file says;
        `memory_limit`: most bytes of all arrays between input and output, scratch memory included, of one run at a
        time: nodes then run for as many images at a time as fit, and layers by the best that fit together; and
        `tolerance`: the largest error of the outputs that may be expected, relative to the largest output, from what
        is recorded of all layers; unless given, 6 times what is expected of exact algorithms, in float32.

    Returns
    -------
    CompiledNetwork

    Raises
    ------
    ConfigError
        When the file cannot be read, or has what is not known here, or arrays that are larger than the memory; the
        message names file, node and operator.
    PlanError
        As `plan` does, and for a node that the kernels of a GPU do not compute.

    Examples
    --------
    >>> import autoconv
    >>> net = autoconv.load("model.onnx", batch=1)  # doctest: +SKIP
    """
    found = resolve(device)
    if not isinstance(path, str | Path):
        raise ConfigError(f"path={path!r}: expected a file's path, as str or Path")
    if batch is not None and (type(batch) is not int or batch < 1):
        raise ConfigError(f"batch={batch!r}: expected an integer of at least 1")
    kept = saved.read(Path(path)) if saved.is_saved(Path(path)) else None
    shapes = options.pop("input_shapes", None)
    if kept is not None and shapes is not None:
        raise ConfigError(f"{path}: input_shapes: expected None for a saved network, whose shapes are known")
    if kept is None:
        files.refuse_layer_list(path)
    graph = onnx_reader.read(path, batch, shapes) if kept is None else kept.graph
    if batch is not None and not any(wanted.shape[:1] == (batch,) for wanted in graph.inputs.values()):
        told = ", ".join(f"{wanted.shape} of input {name!r}" for name, wanted in graph.inputs.items())
        raise ConfigError(f"{path}: batch={batch}: the file says {told or 'that there are no inputs'}")
    known = kept.choices if kept is not None and kept.device == found.key else None
    return CompiledNetwork(graph, found, {"vendors": False, **options}, known)
