"""How a network runs, and what was chosen for it, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from autoconv.cpu.fused.geometry import FusedBlocking
from autoconv.networks.passes.batch_split import Images, Split
from autoconv.networks.run.memory import Views
from autoconv.plans import Plan


@dataclass(frozen=True)
class Choices:
    """What was chosen for a network, by the names of its nodes after all passes.

    Attributes
    ----------
    candidates : dict of str to str
        Of layers; those that are not among them are chosen anew.
    in_nhwc : frozenset of str
        The nodes whose arrays are in NHWC.
    images : dict of str to int
        The nodes that are computed for so many images at a time.
    fused : dict of str to FusedBlocking
        The nodes that one kernel computes together with those before them, and how it is cut.
    """

    candidates: Mapping[str, str] = field(default_factory=dict)
    in_nhwc: frozenset[str] = frozenset()
    images: Images = field(default_factory=dict)
    fused: Mapping[str, FusedBlocking] = field(default_factory=dict)


@dataclass(frozen=True)
class Planned:
    """How a graph runs.

    Attributes
    ----------
    parts : Split
        The graph in its layouts, and in the parts of the batch in which it runs.
    views : Views
        Of the graph in parts.
    plans : dict of str to Plan
        By the names of nodes in the graph before it was split.
    in_nhwc : frozenset of str
        The nodes whose arrays are in NHWC.
    fused : dict of str to FusedBlocking
        The nodes that one kernel computes together with those before them, and how it is cut.
    """

    parts: Split
    views: Views
    plans: dict[str, Plan]
    in_nhwc: frozenset[str]
    fused: dict[str, FusedBlocking] = field(default_factory=dict)

    @property
    def choices(self) -> Choices:
        """What has to be known to plan the same again."""
        candidates = {name: str(plan.candidate) for name, plan in self.plans.items()}
        return Choices(candidates, self.in_nhwc, self.parts.images, self.fused)
