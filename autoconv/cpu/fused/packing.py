"""Filters as the kernel of fused layers reads them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoconv.algorithm import Array
from autoconv.cpu.fused.geometry import Caches, FusedBlocking, FusedLayers, line_tile


def packed(
    instruction_set: str, layers: FusedLayers, blocking: FusedBlocking, caches: Caches, filters: Sequence[Array]
) -> Array:
    """All layers' filters in one array, those of dense layers block by block of what a register tile takes.

    Parameters
    ----------
    instruction_set : str
    layers : FusedLayers
    blocking : FusedBlocking
    caches : Caches
    filters : sequence of array
        Of each layer, in its own shape; float32.

    Returns
    -------
    array
        One-dimensional, float32.
    """
    found = []
    for (role, layer), w in zip(layers.roles.items(), filters, strict=True):
        if role == "depthwise":
            found.append(w.reshape(-1))
            continue
        together = blocking.channels if role == "before" else layer.K
        TK = line_tile(instruction_set, layer, together, caches).TK
        rows = w.reshape(-1, together, layer.C * layer.R * layer.S)
        for group in rows:
            found += [group[first : first + TK].T.reshape(-1) for first in range(0, together, TK)]
    return np.ascontiguousarray(np.concatenate(found), np.float32)
