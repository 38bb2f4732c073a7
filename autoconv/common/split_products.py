"""The environment variable that forbids to compute products from those of narrower parts, where that errs more."""

from __future__ import annotations

import os

SPLIT_PRODUCTS = "AUTOCONV_SPLIT_PRODUCTS"


def forbidden() -> list[str]:
    """The reason against products of parts that err more than sums in the type itself; none unless it is set to 0."""
    if os.environ.get(SPLIT_PRODUCTS) != "0":
        return []
    return [f"{SPLIT_PRODUCTS}=0: expected no products of parts that err more than sums in float32"]
