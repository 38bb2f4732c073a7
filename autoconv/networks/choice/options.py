"""What a caller asks of a whole network, checked once: for each of its layers, and for all of them together."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from inspect import signature
from typing import Any

from autoconv.device import Device
from autoconv.errors import PlanError
from autoconv.records.cache import TuningCache
from autoconv.tuning.planner import number, plan, resolved_cache

WHOLE = ("memory_limit", "tolerance")  # limits of a network, and not of each of its layers
OWN = {"device", "weights", "again", "build"}  # of `plan`, and here what a network says of each of its layers


@dataclass(frozen=True)
class NetworkOptions:
    """The options of a network.

    Attributes
    ----------
    cache : TuningCache
        Where facts are kept, of layers and of the whole.
    memory_limit : int or None
        Most bytes of all arrays between input and output, scratch memory included.
    tolerance : float or None
        The largest error that may be expected of the outputs, relative to the largest output.
    layers : dict of str to object
        All others, as for `plan` of each layer, which checks them.
    """

    cache: TuningCache
    memory_limit: int | None
    tolerance: float | None
    layers: Mapping[str, Any]

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> NetworkOptions:
        """Those that a caller gave by name.

        Raises
        ------
        PlanError
            For the first that is no option of a network, or for a value that a limit of the whole or the cache cannot
            have.
        """
        keywords = (name for name, each in signature(plan).parameters.items() if each.kind is each.KEYWORD_ONLY)
        known = [*sorted({*keywords} - OWN), "memory_limit"]
        for name, value in options.items():
            if name not in known:
                raise PlanError(f"{name}={value!r}: expected an option of a network: {', '.join(known)}")
        return cls(
            cache=resolved_cache(options.get("cache")),
            memory_limit=number(options.get("memory_limit"), "memory_limit", int),
            tolerance=number(options.get("tolerance"), "tolerance", float),
            layers={name: value for name, value in options.items() if name not in ("cache", *WHOLE)},
        )

    @property
    def limits(self) -> dict[str, Any]:
        """What is asked of layers and of the whole, by name."""
        return {**self.layers, **{name: getattr(self, name) for name in WHOLE}}

    def of_layers(self, device: Device) -> dict[str, Any]:
        """For `plan` of every layer: without limits of the whole."""
        return {"device": device, "cache": self.cache, **self.layers}
