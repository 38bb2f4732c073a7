"""Rewriting a graph so that less has to be run, to the same answers."""

from __future__ import annotations

from collections.abc import Callable

from autoconv.networks.graph import Graph
from autoconv.networks.passes.epilogue import fuse_activation, fuse_residual, fuse_slopes
from autoconv.networks.passes.folding import fold_padding, fold_scaling
from autoconv.networks.passes.fusion import fuse_elementwise, inline_scalars
from autoconv.networks.passes.identities import drop_identities
from autoconv.networks.passes.normalization import fuse_normalization
from autoconv.networks.passes.products import transpose_matrices
from autoconv.networks.passes.quantization import fold_quantization
from autoconv.networks.passes.views import sink_views

PASSES: tuple[Callable[[Graph], None], ...] = (
    drop_identities,
    fold_quantization,
    sink_views,
    drop_identities,
    fold_padding,
    transpose_matrices,
    fold_scaling,
    fuse_residual,
    inline_scalars,
    fuse_activation,
    fuse_slopes,
    fuse_normalization,
    fuse_elementwise,
    fuse_activation,  # those that were chains of nodes
)


def optimized(graph: Graph) -> Graph:
    """A graph that computes the same by fewer nodes: all passes, one after the other."""
    found = graph.copy()
    for rewrite in PASSES:
        rewrite(found)
        found.clean()
    return found
