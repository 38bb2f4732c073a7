"""`Plan`: a chosen candidate, ready to run; and what is asked of the arrays that it takes."""

from autoconv.common.packed_weights import PackedWeights
from autoconv.plans.plan import Plan, Source

__all__ = ["PackedWeights", "Plan", "Source"]
