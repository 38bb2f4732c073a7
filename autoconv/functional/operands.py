"""What the functions on arrays share: arrays as kernels take them, and the plan for a layer."""

from __future__ import annotations

import functools
from typing import Any

from autoconv.common import arguments
from autoconv.common.arrays import CHANNELS_FIRST, CHANNELS_LAST, like
from autoconv.errors import ArrayError
from autoconv.layer import LAYOUTS, ConvLayer, Pair, Sides
from autoconv.plans.signature import Signature
from autoconv.registry import device_of, resolve
from autoconv.tuning.planner import REMEMBERED, plan

BUDGET = 0.2  # seconds of timing that the first call with a new shape may cost in mode "hybrid"

Padding = int | Pair | Sides | str


def arrays_of(layout: Any, options: dict[str, Any], **given: Any) -> tuple[dict[str, Any], Any, Any]:
    """The four-dimensional arrays as the kernels take them, their layout, and the way back for the result.

    The device among the options becomes the one that is meant, or that of the first array.
    """
    layout, wanted = arguments.choice(layout, "layout", LAYOUTS), options.get("device")
    device = options["device"] = resolve(wanted) if wanted is not None else device_of(next(iter(given.values())))
    known = ("x", "w", "dy", "residual", "out")
    arrays: dict[str, Any] = {name: given.get(name) for name in known}
    for name, array in given.items():
        if array is None and name in ("residual", "out"):
            continue
        if not device.owns(array):
            array = arrays[name] = device.adopt(array, name, written=name == "out")
        if array.ndim != 4:
            raise ArrayError(f"{name} has shape {tuple(array.shape)}: expected four dimensions ({layout})")
    first = arrays[name := next(iter(given))]
    if not first.dtype.isnative:
        raise ArrayError(f"{name} is {first.dtype}: expected the order of bytes of this machine")
    if layout == "NCHW" and _channels_last(first) and (arrays["out"] is None or _channels_last(arrays["out"])):
        last = {name: None if array is None else array.transpose(CHANNELS_LAST) for name, array in arrays.items()}
        return last, "NHWC", lambda result: result.transpose(CHANNELS_FIRST)
    return arrays, layout, lambda result: result


def _channels_last(array: Any) -> bool:
    """Whether an array of shape N, C, H, W lies in memory as N, H, W, C, and not as its shape says."""
    return bool(not array.flags.c_contiguous and array.transpose(CHANNELS_LAST).flags.c_contiguous)


def extents_of(array: Any, layout: str) -> tuple[int, int, int, int]:
    """N, C, H, W of images, or K, C, R, S of filters."""
    n, *rest = array.shape
    return (n, *rest) if layout == "NCHW" else (n, rest[2], rest[0], rest[1])


def computed(layer: ConvLayer, options: dict[str, Any], *operands: Any) -> Any:
    """What a layer gives for the operands of `Plan.run`, which are checked before anything is planned for them."""
    device = options["device"]
    checked = _signature(layer, device).check(*operands)
    mode = options.get("mode", "hybrid")
    defaults: dict[str, Any] = {"mode": mode, "budget": default_budget(mode)}
    made = plan(layer, **(defaults | options))
    with device.selected():
        return made.run_checked(checked)


def handed_back(result: Any, first: Any, out: Any, options: dict[str, Any]) -> Any:
    """The result as an array of the same kind as the first operand; or `out`, in which it lies."""
    with options["device"].selected():  # whose stream another library is to wait for
        if out is None:
            return like(first, result)
        options["device"].hand_back(out, result)
    return out


_signature = functools.lru_cache(maxsize=REMEMBERED)(Signature)


def default_budget(mode: str) -> float | None:
    """Seconds that timing may take in a mode where the caller says nothing of them; None for no limit."""
    return BUDGET if mode == "hybrid" else None
