"""Where the arrays of a graph lie: which share memory, how long each lives, and whether there is memory for them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autoconv.common.text import size
from autoconv.device import Device
from autoconv.errors import ConfigError
from autoconv.networks.graph import Graph, Node
from autoconv.networks.layer_list import layer_of
from autoconv.networks.operators import (
    Concat,
    Conv,
    ConvTranspose,
    Elementwise,
    FusedConv,
    Operator,
    Pool,
    Reshape,
    Resize,
    Slice,
)

ALIGNMENT = 256  # bytes: whole cache lines, and what CUDA's libraries want of scratch memory

# What lies in an arena: an array, by its name, or a step's scratch memory, by its number, which no name can be.
Place = str | int


class Views:
    """Which arrays lie within others: reshaped ones, slices, parts of a concatenation, what is overwritten in place.

    Some channels of several images lie apart in the array of all channels, image by image: so they can where all that
    store and read them have kernels for arrays with a pitch.

    Parameters
    ----------
    graph : Graph
    alignment : int
        Bytes on whose multiples alone arrays may begin.
    pitched : bool
        Whether a device has such kernels.

    Attributes
    ----------
    free : set of str
        Nodes that have nothing to do, since their array is another's memory, or its parts are written into it.
    """

    def __init__(self, graph: Graph, alignment: int = 1, pitched: bool = True) -> None:
        self.graph, self.alignment, self._pitches = graph, alignment, pitched
        self.free: set[str] = set()
        self._gathered: dict[tuple[str, int], int] = {}  # of a concatenation's inputs, those that are computed in place
        self._within: dict[str, tuple[str, int]] = {}  # of an array: whose memory it lies in, and from which byte on
        self._apart: set[str] = set()  # those whose images lie apart in the array right around them
        self._inside: defaultdict[str, list[str]] = defaultdict(list)  # of an array: those that lie right in it
        self._users: defaultdict[str, list[Node]] = defaultdict(list)  # in order; a batch in parts has many nodes
        self._outputs = {*graph.outputs.values()}
        for node in graph.nodes.values():
            for name in node.inputs:
                self._users[name].append(node)
        for node in graph.nodes.values():
            place, apart = _place_in_input(graph, node)
            able = not apart or (pitched and self._all_read_apart(node.name))
            if place is not None and place % alignment == 0 and able:
                self._put(node.name, node.inputs[0], place, apart)
                self.free.add(node.name)
        for node in graph.nodes.values():
            if isinstance(node.operator, Elementwise):
                self._overwrite(node)
            elif isinstance(node.operator, Concat):
                self._gather(node)

    @property
    def computed(self) -> list[Node]:
        """The nodes that have something to do, in order."""
        return [node for node in self.graph.nodes.values() if node.name not in self.free]

    def root(self, name: str) -> tuple[str, int]:
        """The array in whose memory one lies, and from which byte on; itself and 0 where that is none."""
        offset = 0
        while name in self._within:
            name, further = self._within[name]
            offset += further
        return name, offset

    def pitch(self, name: str) -> int | None:
        """Bytes from one image of an array to the next, where more than the images lies between; else None."""
        found = None
        while name in self._within:
            into, _ = self._within[name]
            if name in self._apart:
                whole = self.graph.types[into]
                found = whole.nbytes // whole.shape[0]
            name = into
        return found

    def within(self, node: Node, place: int) -> int | None:
        """From which byte of a concatenation one of its inputs lies there already; None where it has to be copied."""
        return self._gathered.get((node.name, place))

    def _put(self, name: str, into: str, place: int, apart: bool = False) -> None:
        """Have an array lie in another's memory, its images apart or without a gap."""
        self._within[name] = into, place
        self._inside[into].append(name)
        if apart:
            self._apart.add(name)

    def _own(self, name: str) -> bool:
        """Whether memory belongs to a node that computes into it."""
        return name in self.graph.nodes and name not in self._within

    def _overwrite(self, node: Node) -> None:
        """An expression of an array that nobody needs afterwards is stored over it."""
        for name in node.inputs:
            same = self.graph.types[name] == self.graph.types[node.name]
            last = self._users[name][-1] is node and name not in self._outputs
            if same and last and self._own(name) and not self._seen_elsewhere(name):
                self._put(node.name, name, 0)
                return

    def _seen_elsewhere(self, name: str) -> bool:
        """Whether what lies in an array's memory, as parts of a concatenation do, is needed but for computing it."""
        inside, left = set[str](), [name]
        while left:
            inside.add(value := left.pop())
            left += self._inside[value]
        seen = (user.name for value in inside - {name} for user in self._users[value])
        return not (inside - {name}).isdisjoint(self._outputs) or not inside.issuperset(seen)

    def _gather(self, node: Node) -> None:
        """Parts of a concatenation that are contiguous, in each image at least, are computed where they belong."""
        graph, axis = self.graph, node.operator.axis  # type: ignore[attr-defined]
        images = math.prod(graph.types[node.name].shape[:axis])
        if images != 1 and not (self._pitches and axis == 1 and images):
            return
        place = n = 0
        while n < len(node.inputs):
            root, parts = self.root(node.inputs[n])[0], self._whole(node.inputs[n:], images)
            able = parts and place % self.alignment == 0 and self._own(root) and root != node.name
            if able and (images == 1 or self._can_lie_apart(root)):
                self._put(root, node.name, place, images != 1)
                self._gathered |= {(node.name, n + part): place + offset for part, offset in enumerate(parts)}
            for _ in parts or [0]:
                place += graph.types[node.inputs[n]].nbytes // images
                n += 1
        if all((node.name, n) in self._gathered for n in range(len(node.inputs))):
            self.free.add(node.name)

    def _whole(self, names: Sequence[str], images: int) -> list[int]:
        """How far from one another the first of some arrays lie, which together are one, as all parts of a split are.

        In bytes of one image of several; empty where there is none that they fill.
        """
        root, offsets, end = self.root(names[0])[0], [], 0
        for name in names:
            if self.root(name) != (root, end):
                break
            offsets.append(end)
            end += self.graph.types[name].nbytes // images
            if end == self.graph.types[root].nbytes // images:
                return offsets
        return []

    def _can_lie_apart(self, name: str) -> bool:
        """Whether the images of an array may lie apart, with all that lies in it."""
        left = [name]
        while left:
            value = left.pop()
            same = value in (name, *self._apart) or self.graph.types[value] == self.graph.types[self._within[value][0]]
            if not same or not self._stores_apart(self.graph.nodes[value]) or not self._all_read_apart(value):
                return False
            left += self._inside[value]
        return True

    def _stores_apart(self, node: Node) -> bool:
        """Whether what computes a node can store images with a pitch: a residual would need the same."""
        if isinstance(node.operator, FusedConv):
            return not node.operator.convolutions[-1].residual
        if isinstance(node.operator, Conv | ConvTranspose):
            layer = layer_of(self.graph, node)
            return layer is not None and not layer.residual
        return node.name in self._apart or _has_pitches(node.operator)

    def _all_read_apart(self, name: str) -> bool:
        """Whether all that read an array can read images with a pitch; who takes a result of the network cannot."""
        return name not in self._outputs and all(
            user.inputs.count(name) == 1 and name == user.inputs[0]
            if isinstance(user.operator, Conv | ConvTranspose | FusedConv)
            else _has_pitches(user.operator) or user.name in self._apart
            for user in self._users[name]
        )


def _has_pitches(operator: Operator) -> bool:
    """Whether an operator that is no layer has kernels for images with a pitch."""
    if isinstance(operator, Pool):
        return operator.layout == "NCHW"
    return isinstance(operator, Concat | Elementwise) or (isinstance(operator, Resize) and operator.axis > 0)


def _place_in_input(graph: Graph, node: Node) -> tuple[int | None, bool]:
    """From which byte of a node's first input its output lies there, and whether its images do so apart.

    None where it has other memory.
    """
    if isinstance(node.operator, Reshape):
        return 0, False
    if not isinstance(node.operator, Slice):
        return None, False
    shape, slice_ = graph.types[node.inputs[0]].shape, node.operator
    cut = [n for n, count in enumerate(slice_.counts) if count != shape[n]]
    several = math.prod(slice_.counts[: cut[-1]] if cut else (1,)) != 1
    if any(step != 1 for step in slice_.steps) or (several and cut != [1]):
        return None, False
    itemsize = graph.types[node.name].nbytes // max(math.prod(slice_.counts), 1)
    return itemsize * sum(start * math.prod(shape[n + 1 :]) for n, start in enumerate(slice_.starts)), several


@dataclass(frozen=True)
class Block:
    """Memory that is needed from one step to another, both included."""

    nbytes: int
    first: int
    last: int


def own_outputs(graph: Graph, views: Views) -> dict[str, str]:
    """Outputs that fill the memory they lie in, which is then new for every run; by that memory's name."""
    found: dict[str, str] = {}
    for name, value in graph.outputs.items():
        root, offset = views.root(value)
        whole = graph.types[root].nbytes == graph.types[value].nbytes
        if offset == 0 and whole and root in graph.nodes and root not in found:
            found[root] = name
    return found


def blocks(views: Views, scratch: Sequence[int] = ()) -> dict[Place, Block]:
    """What lies in the arena: arrays, and the scratch memory of steps.

    Parameters
    ----------
    views : Views
    scratch : sequence of int
        Bytes of scratch memory of each node that is computed; none by default.

    Returns
    -------
    dict of Place to Block
    """
    graph, nodes = views.graph, views.computed
    first: dict[str, int] = {}
    last: dict[str, int] = {}
    outside = own_outputs(graph, views)
    found: dict[Place, Block] = {n: Block(nbytes, n, n) for n, nbytes in enumerate(scratch) if nbytes}
    for n, node in enumerate(nodes):
        for name in (node.name, *node.inputs):
            root = views.root(name)[0]
            first.setdefault(root, n)
            last[root] = n
    for value in graph.outputs.values():
        last[views.root(value)[0]] = len(nodes)
    for root, start in first.items():
        if root in graph.nodes and root not in outside:
            found[root] = Block(graph.types[root].nbytes, start, last[root])
    return found


def arranged(blocks: Mapping[Place, Block]) -> tuple[dict[Place, int], int]:
    """Offsets at which blocks can lie in one arena, so that none meet while both are needed; and the arena's bytes.

    The largest first, each into the smallest gap that is large enough ("greedy by size for offset calculation":
    Pisarchyk and Lee, "Efficient memory management for deep neural net inference", 2020, algorithm 3).
    """
    offsets: dict[Place, int] = {}
    total = 0
    for name, block in sorted(blocks.items(), key=lambda item: (-item[1].nbytes, item[1].first, str(item[0]))):
        size = rounded(block.nbytes)
        near = sorted(
            (offsets[other], offsets[other] + rounded(blocks[other].nbytes))
            for other in offsets
            if blocks[other].first <= block.last and block.first <= blocks[other].last
        )
        best, least = None, math.inf
        end = 0
        for start, stop in near:
            if size <= start - end < least:
                best, least = end, start - end
            end = max(end, stop)
        offsets[name] = end if best is None else best
        total = max(total, offsets[name] + size)
    return offsets, total


def arena_bytes(views: Views, scratch: Sequence[int] = ()) -> int:
    """Bytes of the arena for what `blocks` finds."""
    return arranged(blocks(views, scratch))[1]


def rounded(nbytes: int) -> int:
    """Bytes up to where the next block may begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def check_fits(graph: Graph, device: Device) -> None:
    """Refuse what no memory could hold, which to plan may take minutes; nodes need hold no more than one image."""
    there, whole = device.memory(), {*graph.inputs, *graph.outputs.values()}
    for name, found in graph.types.items():
        need = found.nbytes if name in whole else found.nbytes // max((1, *found.shape[:1]))
        if need > there:
            takes = f"takes {size(need)}{'' if name in whole else ' for one image'}"
            raise ConfigError(
                f"{graph.name}: array {name!r}: {found} {takes}, and {device.name} has {size(there)} of memory"
            )
