"""The contract every algorithm keeps, on every kind of device."""

from __future__ import annotations

import importlib.util
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from autoconv.accuracy import USUAL, absolute_bound_for, bound_for, exact_error
from autoconv.common import code_hash
from autoconv.common.candidate import Candidate as Candidate  # its name belongs to the contract
from autoconv.layer import DIRECTIONS, DTYPES, GROUPINGS, LAYOUTS, ConvLayer

if TYPE_CHECKING:
    from autoconv.device import Device

Array = Any  # a numpy.ndarray on a CPU, a cupy.ndarray on a GPU
Params = Mapping[str, int | str]
D = TypeVar("D", bound="Device", contravariant=True)

PADDING_ONLY = "every tap falls on padding: the result is 0, and rounding would make it something else"


class Kernel(ABC):
    """A candidate built for one layer on one device: ready to launch, and stateless between launches.

    Attributes
    ----------
    workspace_bytes : int
        Size of the scratch memory that every `run` is handed.
    packed_bytes : int
        Size of the packed filters, or 0. Where it is not 0, `run` takes what `pack` has filled in place of filters.
    """

    workspace_bytes: int = 0
    packed_bytes: int = 0

    def pack(self, w: Array, packed: Array) -> None:
        """Transform the filters once, into the form that `run` takes.

        Parameters
        ----------
        w : array of the layer's `w_shape`, dtype and layout
            The filters; contiguous.
        packed : array of `packed_bytes` bytes
            Where the transformed filters go; aligned to 64 bytes.

        Raises
        ------
        NotImplementedError
            When `packed_bytes` is 0: this kernel uses the filters as they are.
        """
        raise NotImplementedError(f"{type(self).__name__} uses the filters as they are")

    def keep_denormals(self) -> None:  # noqa: B027  # most kernels keep them anyway
        """From now on, compute with denormal operands and results where this kernel would count them as 0."""

    @abstractmethod
    def run(self, a: Array, b: Array, out: Array, bias: Array | None, residual: Array | None, workspace: Array) -> None:
        """Compute `out` from `a` and `b`.

        What the three are depends on the layer's direction; shapes are those of NCHW, in NHWC the channels come
        last:

        | direction | `a`                | `b`                       | `out`                     |
        |-----------|--------------------|---------------------------|---------------------------|
        | `fwd`     | `x`: N, C, H, W    | `w`: K, C/groups, R, S    | `y`: N, K, P, Q           |
        | `dgrad`   | `dy`: N, K, P, Q   | `w`: K, C/groups, R, S    | `dx`: N, C, H, W          |
        | `wgrad`   | `x`: N, C, H, W    | `dy`: N, K, P, Q          | `dw`: K, C/groups, R, S   |

        Parameters
        ----------
        a, b : array of `layer.input_shapes`
            The operands; contiguous, of the layer's dtypes and layout, on the device. `b` is the packed byte buffer
            where `packed_bytes` is not 0.
        out : array of `layer.output_shape`
            Every element is written. Nothing else is, but the workspace.
        bias : array of `layer.channel_values` values, or None
            Given exactly when that is not 0: the biases, if the layer has them, and behind them the slopes, if it ends
            with PReLU. Of a quantised layer, `Quantization.operand`.
        residual : array of `layer.output_shape`, or None
            Given exactly when the layer has a residual.
        workspace : array of at least `workspace_bytes` bytes
            Scratch memory, aligned to 64 bytes, with anything in it.
        """


class Algorithm(ABC, Generic[D]):
    """One family of candidates on one kind of device. Stateless; one instance serves every layer.

    A family says what it is made for by the attributes `directions` to `epilogue`. Its methods are only asked about
    layers which that declaration covers. `docs/pages/add-an-algorithm.md` has a complete one.

    Attributes
    ----------
    name : str
        What candidates, plans and records call it, such as "gemm" or "direct.polyphase".
    directions, dtypes, layouts, groupings : tuple of str
        The values of these properties of a `ConvLayer` that it takes: "fwd", "float32", "NCHW", "dense" and so on.
    dilated : bool
        Whether it takes dilated filters.
    epilogue : tuple of str
        The directions in which it applies bias, residual and activation.
    activations : tuple of str
        The names of the activations that it applies.
    takes_all : bool
        Whether it takes every valid layer that it can compile in reasonable time, under any limits. Others are
        verified against it, and no estimate keeps it out of a race.
    exact : bool
        Whether sums are only reordered, so that the error bound is that of a direct sum.
    deterministic : bool
        Whether it gives the same bits every time.
    spreads_nonfinite : bool
        Whether a NaN or infinity in the input may reach outputs whose receptive field does not hold it.
    skips_padding : bool
        Whether padding is left out of the sums. Others may multiply its zeros, so that an infinity or NaN among the
        filters (in wgrad, in dy) makes NaN of sums in which it meets nothing but padding.
    tf32 : bool
        Whether it rounds float32 operands to TF32, which callers have to allow.
    keeps_denormals : bool
        Whether its kernels can compute with denormals (`Kernel.keep_denormals`).
    vendor : str or None
        The library that an adapter calls, for `vendors=` to switch.
    asks_vendor : bool
        Whether only that library knows the candidates, so that they are listed only where it may be used.
    pool : str
        Whose threads it runs on: the idle spinning of one pool slows another down.
    searched : bool
        Whether its candidates are a grid of whatever is legal, of which a search times a part; else all are timed.
    stands_in_for : str or None
        The faster algorithm that it replaces where that one cannot run.
    finer : mapping
        What a candidate's finer form has more: one that errs less, and is timed only where a tolerance asks for it.
    float32_bound : float
        Its `bound` in float32, where that is the same for all parameters.
    """

    name: ClassVar[str]
    directions: ClassVar[tuple[str, ...]] = DIRECTIONS
    dtypes: ClassVar[tuple[str, ...]] = tuple(DTYPES)
    layouts: ClassVar[tuple[str, ...]] = LAYOUTS
    groupings: ClassVar[tuple[str, ...]] = GROUPINGS
    dilated: ClassVar[bool] = True
    epilogue: ClassVar[tuple[str, ...]] = ("fwd",)
    activations: ClassVar[tuple[str, ...]] = ("relu",)
    takes_all: ClassVar[bool] = False
    exact: ClassVar[bool] = False
    deterministic: ClassVar[bool] = True
    spreads_nonfinite: ClassVar[bool] = False
    skips_padding: ClassVar[bool] = False
    tf32: ClassVar[bool] = False
    keeps_denormals: ClassVar[bool] = True
    vendor: ClassVar[str | None] = None
    asks_vendor: ClassVar[bool] = False
    pool: ClassVar[str] = ""
    searched: ClassVar[bool] = False
    stands_in_for: ClassVar[str | None] = None
    finer: ClassVar[Params] = {}
    float32_bound: ClassVar[float] = 2e-6  # of sums in whatever order, and of Fourier transforms

    def installed(self) -> bool:
        """Whether the vendor's library, if it needs one, could be loaded; its package is looked for, not imported.

        Returns
        -------
        bool
        """
        return self.vendor is None or importlib.util.find_spec(self.vendor) is not None

    def loaded(self) -> bool:
        """Whether this process has loaded the vendor's library.

        Returns
        -------
        bool
        """
        return self.vendor is None or self.vendor in sys.modules

    @property
    def version(self) -> str:
        """What distinguishes this implementation's timings and list of candidates from an older one's.

        A hash of the family's code, unless it calls another library. A record that knows every candidate of today's
        versions is not compared with the lists again. An algorithm that is no part of this package has to define it.
        """
        return code_hash.version(type(self).__module__)

    @abstractmethod
    def candidates(self, layer: ConvLayer, device: D) -> Iterable[Params]:
        """The parameter sets worth asking `why_not` about, favourites first; the same list in every process.

        Parameters
        ----------
        layer : ConvLayer
        device : Device

        Returns
        -------
        iterable of mappings
            Parameters by name; `[{}]` for a single candidate without parameters.
        """

    def unsupported(self, layer: ConvLayer) -> list[str]:
        """Every reason why the layer lies outside the declared capabilities, on whatever device.

        Parameters
        ----------
        layer : ConvLayer

        Returns
        -------
        list of str
        """
        alone = layer.groups == layer.C and "depthwise" in self.groupings  # a single channel is dense and depthwise
        declared: tuple[tuple[str, str, tuple[str, ...]], ...] = (
            ("direction", layer.direction, self.directions),
            ("dtype", layer.dtype, self.dtypes),
            ("layout", layer.layout, self.layouts),
            ("channels", "depthwise" if alone else layer.grouping, self.groupings),
            ("activation", (layer.activation or "none").partition(":")[0], ("none", *self.activations)),
        )
        outside = [(what, " or ".join(allowed), given) for what, given, allowed in declared if given not in allowed]
        reasons = [f"{what}: expected {allowed}, got {given}" for what, allowed, given in outside]
        if layer.dilation != (1, 1) and not self.dilated:
            reasons.append(f"dilation: expected 1x1, got {'x'.join(map(str, layer.dilation))}")
        if layer.has_epilogue and layer.direction not in self.epilogue:
            reasons.append("epilogue: expected none, got bias, residual or activation")
        return reasons

    def why_not(self, layer: ConvLayer, device: D, params: Params) -> list[str]:
        """Every reason against running these parameters on this layer; empty when it can run.

        Parameters
        ----------
        layer : ConvLayer
        device : Device
        params : mapping
            One set of parameters, of those that `candidates` gives.

        Returns
        -------
        list of str
        """
        return self.unsupported(layer) or self.refusals(layer, device, params)

    @abstractmethod
    def refusals(self, layer: ConvLayer, device: D, params: Params) -> list[str]:
        """Every reason against these parameters on a layer that the declared capabilities cover.

        Parameters
        ----------
        layer : ConvLayer
        device : Device
        params : mapping
            One of `candidates`.

        Returns
        -------
        list of str
            The reasons, in the form `name=value: expected ...`.
        """

    def workspace_bytes(self, layer: ConvLayer, device: D, params: Params) -> int:
        """Bytes of scratch memory of a run with packed filters, equal to the built kernel's.

        Parameters
        ----------
        layer : ConvLayer
        device : Device
        params : mapping
            One of `candidates`.

        Returns
        -------
        int
        """
        return 0

    def packed_bytes(self, layer: ConvLayer, device: D, params: Params) -> int:
        """Bytes of the packed filters, equal to the built kernel's; 0 when the filters are used as they are.

        Parameters
        ----------
        layer : ConvLayer
        device : Device
        params : mapping
            One of `candidates`.

        Returns
        -------
        int
        """
        return 0

    @abstractmethod
    def estimate(self, layer: ConvLayer, device: D, params: Params) -> float:
        """Predicted seconds of one run with packed filters.

        Parameters
        ----------
        layer : ConvLayer
        device : Device
        params : mapping
            One of `candidates`.

        Returns
        -------
        float
        """

    def bound(self, layer: ConvLayer, params: Params) -> float:
        """Largest acceptable error, in the layer's dtype.

        Parameters
        ----------
        layer : ConvLayer
        params : mapping
            One of `candidates`.

        Returns
        -------
        float
            A bound of `max|y - ref| / max(sum |x||w|)`.
        """
        return bound_for(layer, self.float32_bound)

    def usual_error(self, layer: ConvLayer, params: Params, rms: bool = False) -> float:
        """What a candidate errs of usual operands, most often within a factor of two or three.

        Parameters
        ----------
        layer : ConvLayer
        params : mapping
            One of `candidates`.
        rms : bool
            As if all places erred alike, by the root of the mean square, where some err more than others.

        Returns
        -------
        float
            As `bound` has it.
        """
        return bound_for(layer, exact_error(layer)) if self.exact else USUAL * self.bound(layer, params)

    def absolute_bound(self, layer: ConvLayer, params: Params, largest: float = 1.0) -> float:
        """Largest acceptable error on top of `bound`, where numbers run out of exponents.

        An operand or a result below the least normal number may count as 0: that is rounding to a multiple of that
        number instead of to so many bits, and may grow on its way as rounding may within `bound`. Arrays of float16
        keep their own denormals, to half a unit of which the output is rounded.

        Parameters
        ----------
        layer : ConvLayer
        params : mapping
            One of `candidates`.
        largest : float
            The largest absolute value among the operands.

        Returns
        -------
        float
            In the units of the output.
        """
        if layer.quantized:
            return 0.0
        return absolute_bound_for(layer, self.bound(layer.replace(dtype=layer.accumulator.name), params), largest)

    @abstractmethod
    def build(self, layer: ConvLayer, device: D, params: Params) -> Kernel:
        """The kernel; compiles what it has to. Asked only when `why_not` is empty.

        Parameters
        ----------
        layer : ConvLayer
        device : Device
        params : mapping
            One of `candidates`.

        Returns
        -------
        Kernel
        """

    def all(self, layer: ConvLayer, device: D) -> list[Candidate]:
        """Every candidate for the layer, runnable or not; none where the declared capabilities do not cover it.

        Parameters
        ----------
        layer : ConvLayer
        device : Device

        Returns
        -------
        list of Candidate
        """
        offered = () if self.unsupported(layer) else self.candidates(layer, device)
        return [Candidate(self.name, tuple(params.items())) for params in offered]
