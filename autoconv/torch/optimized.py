"""`optimize`: a model of PyTorch as a network of ours, behind the interface of a module."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import numpy as np
import torch
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._pytree import tree_flatten, tree_unflatten

from autoconv.errors import ArrayError, ConfigError
from autoconv.functional.operands import default_budget
from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.networks.torch_reader import exported, translated
from autoconv.torch.operators import device_in_force, has_tangent, is_wrapped, not_taken, without_memory
from autoconv.tuning.choice import check_mode
from autoconv.vendors.torch import array, tensor


class OptimizedModule(torch.nn.Module):
    """A model with constant parameters, run as a `CompiledNetwork`. Made by `autoconv.torch.optimize`.

    It takes what the model took, of the shapes of the example, and gives what the model gave. It has no parameters and
    no gradients. Several threads may call it at once. A copy of it is the module itself.

    Attributes
    ----------
    network : CompiledNetwork
        What runs: `network.explain()` and `network.profile(...)` tell how, `network.save(path)` keeps it for
        `autoconv.load`.
    """

    def __init__(self, network: CompiledNetwork, program: Any) -> None:
        super().__init__()
        self.network = network
        signature, call = program.graph_signature, program.call_spec
        self._spec, self._out_spec = call.in_spec, call.out_spec
        self._inputs = [_constant(s.arg) for s in signature.input_specs if s.kind is InputKind.USER_INPUT]
        self._outputs = [_constant(s.arg) for s in signature.output_specs]

    def __copy__(self) -> OptimizedModule:
        return self

    def __deepcopy__(self, memo: object) -> OptimizedModule:  # as of a plan: nothing in it changes what it gives
        return self

    def __reduce__(self) -> NoReturn:
        name = self.network.graph.name
        raise ConfigError(f"{name}: cannot be pickled: network.save(path) keeps it, and autoconv.load reads that")

    @torch.compiler.disable
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives for such inputs.

        Parameters
        ----------
        *args, **kwargs
            As the model took them.

        Returns
        -------
        tensor, or whatever the model gives
            New tensors.

        Raises
        ------
        ArrayError
            For another structure, shape or type than the example's, for inputs that require a gradient, for those that
            `torch.func` transforms, as `vmap` does, or makes within `grad` and its like, for those without memory, as
            `torch.export` has, and while `torch.jit.trace` or `make_fx` records.
        """
        if torch.jit.is_tracing():  # which sees nothing of what is computed here, and keeps the answer
            raise ArrayError(f"{self.network.graph.name}: expected a call outside torch.jit.trace, as it records none")
        leaves, spec = tree_flatten((args, kwargs))
        if spec != self._spec:
            raise ArrayError(f"{self.network.graph.name}: expected inputs like the example, {self._spec}, got {spec}")
        arrays = self._arrays(leaves)
        if get_proxy_mode() is not None:
            raise ArrayError(f"{self.network.graph.name}: expected a call outside make_fx, as it records none")
        found = self.network.run(*arrays)
        results = iter(found.values() if isinstance(found, dict) else (found,))
        return tree_unflatten([tensor(next(results)) if c is None else c[0] for c in self._outputs], self._out_spec)

    def _arrays(self, leaves: list[Any]) -> list[Any]:
        """The tensors among the inputs; the rest has to be as it was in the example."""
        arrays, name = [], self.network.graph.name
        for leaf, constant in zip(leaves, self._inputs, strict=True):
            if constant is not None:
                if not _same(leaf, constant[0]):
                    raise ArrayError(f"{name}: expected {constant[0]!r} as in the example, got {_told(leaf)}")
                continue
            if got := not_taken(leaf) or without_memory(leaf):
                raise ArrayError(f"{name}: expected a dense tensor on the CPU, got {got}")
            if (leaf.requires_grad and torch.is_grad_enabled()) or has_tangent(leaf):
                raise ArrayError(
                    f"{name}: expected an input without a gradient, as there is none to be had: detach it, or call "
                    f"within torch.no_grad()"
                )
            if is_wrapped(leaf.detach()):  # as `grad` wraps all that is made within it, views for NumPy too
                raise ArrayError(f"{name}: expected a tensor of its own, got one within a transform of torch.func")
            arrays.append(array(leaf))
        return arrays

    def extra_repr(self) -> str:
        """The network."""
        return repr(self.network)


def _same(leaf: Any, constant: Any) -> bool:
    """Whether an input is the very number, text or None in the example: `1` is not `True`, and `0.0` is not `-0.0`."""
    if type(leaf) is not type(constant):
        return False
    if isinstance(leaf, float):  # of no number, NaN, there is one
        same_sign = math.copysign(1, leaf) == math.copysign(1, constant)
        return (leaf == constant and same_sign) or (math.isnan(leaf) and math.isnan(constant))
    return bool(leaf == constant)


def _told(leaf: Any) -> str:
    """An input in a message: of arrays the type and shape, as their values may be any number."""
    if isinstance(leaf, torch.Tensor | np.ndarray):
        return f"{type(leaf).__name__} of {str(leaf.dtype).removeprefix('torch.')} {tuple(leaf.shape)}"
    return repr(leaf)


def _constant(argument: Any) -> tuple[Any] | None:
    """The value of an input or output that is no array; None for arrays."""
    return (argument.value,) if isinstance(argument, ConstantArgument) else None


def _asks_for_exact(program: Any) -> bool:
    """Whether a convolution of ours in an exported program, transposed or not, is told to be exact."""
    places = {
        ours: [argument.name for argument in ours._schema.arguments].index("exact")
        for ours in (torch.ops.autoconv.conv2d.default, torch.ops.autoconv.conv_transpose2d.default)
    }
    return any(node.target in places and node.args[places[node.target]] for node in program.graph.nodes)


def optimize(model: torch.nn.Module, example: Any, *, mode: str = "hybrid", **options: Any) -> OptimizedModule:
    """A model that gives the same answers, faster: its operators become kernels of ours, run in one call.

    `torch.export` traces it; batch normalisation is folded into filters, activations and sums into the convolutions.
    Its parameters are constants from now on. PyTorch runs the operators that have no kernel here.

    A model that has an `autoconv.torch.Conv2d` or `ConvTranspose2d`, or calls `autoconv.torch.conv2d` or
    `conv_transpose2d`, with `exact=True` is `exact` as a whole, unless `exact=False` is given here; their `mode` and
    `vendors` do not count.

    Parameters
    ----------
    model : torch.nn.Module
        In evaluation mode.
    example : tensor, or tuple of inputs
        Of the shapes and types that it will be called with. Those that stand in it twice are two inputs. Memory format
        makes no difference, but where PyTorch itself rounds by it: upsampling is as for that of the example.
    mode : str
        As for `autoconv.plan`: how each layer's algorithm is chosen. "hybrid" times the most promising candidates, for
        0.2 s per layer unless told otherwise; "profile" times all of them, "heuristic" none.
    **options
        As for `autoconv.plan`: `budget`, `progress`, `workspace_limit`, `deterministic`, `tolerance`, `exact`,
        `vendors` (False unless given), `cache`, `denormals`.

    Returns
    -------
    OptimizedModule

    Raises
    ------
    ConfigError
        For a model in training mode, one that `torch.export` cannot trace, or that does more than compute its outputs,
        as one that changes its inputs or buffers; for parameters elsewhere than on the CPU; and for an operator that
        gives arrays of shapes that are not known before it runs, or no arrays, that makes random numbers of constants
        alone, or that reads memory by strides; the message names module and operator.
    PlanError
        For an unknown mode, and as `autoconv.plan` does.

    Examples
    --------
    >>> import torch, autoconv.torch
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
    >>> fast = autoconv.torch.optimize(model, torch.rand(1, 3, 16, 16), mode="heuristic")
    >>> fast(torch.rand(1, 3, 16, 16)).shape
    torch.Size([1, 8, 14, 14])
    """
    name = type(model).__name__
    if not isinstance(model, torch.nn.Module):
        raise ConfigError(f"model: expected a torch.nn.Module, got {name}")
    if model.training:
        raise ConfigError(f"{name}: expected a model in evaluation mode: call model.eval() first")
    device = device_in_force()
    check_mode(mode, device)  # there may be no layer to refuse it
    program = exported(model, example if isinstance(example, tuple) else (example,))
    timing = {"budget": options.pop("budget", default_budget(mode))}
    asked = {"exact": True} if _asks_for_exact(program) else {}
    network = CompiledNetwork(translated(program, name), device, {"vendors": False, **asked, **options})
    return OptimizedModule(network if mode == "heuristic" else network.tune(mode, **timing), program)
