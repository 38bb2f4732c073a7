"""The error that a network may have as a whole: which of its layers may err, so that it takes the least time.

Which candidates and layouts take the least time within a limit on the sum of squared errors is a knapsack problem. It
is solved by a price (Everett, "Generalized Lagrange multiplier method for solving problems of optimum allocation of
resources", 1963): at a price in seconds for the square of an error, layouts and candidates are chosen exactly, and
whatever is chosen is the fastest that errs no more than it does. The price is the least, by bisection, at which the
limit is kept; what that leaves of the limit (the duality gap) single layers take, those first that gain most.

Where no limit is given, error has a small price all the same, as of choices that are nearly as fast as the fastest some
err several times less; and a network of float32 errs no more than a few times what it would by exact algorithms.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import NamedTuple

from autoconv import registry
from autoconv.accuracy import exact_error
from autoconv.algorithm import Candidate
from autoconv.cpu.device import CPU
from autoconv.device import Device
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.networks.choice.candidate import best_in_network, cost, finer_error, timed_in_network
from autoconv.networks.choice.choose import plan_alone
from autoconv.networks.choice.errors import EXACT, FREE, Price, combined, error_by, sensitivities, unmixed
from autoconv.networks.choice.layout_choice import arrays_in_nhwc
from autoconv.networks.choice.options import NetworkOptions
from autoconv.networks.graph import Graph
from autoconv.networks.layer_list import layer_of
from autoconv.networks.passes.batch_split import Images, split
from autoconv.networks.passes.layouts import laid_out
from autoconv.plans import Plan
from autoconv.tuning.candidates import UNUSUAL
from autoconv.tuning.choice import MODES, TIMING
from autoconv.tuning.lookup import shared_across_limits
from autoconv.tuning.planner import plan

STEPS = 10  # of the bisection, which then knows the price to a part in 250
HALVINGS = 3  # of the price that single layers have where the limit is not reached
GROWTH = 16.0  # of the price, until it is high enough
SPARED = 0.05  # of the least time: what all the error of the fastest choice is worth where no limit is given
ROUNDS = 3  # of timing what errs less: the price falls as others do
ALIKE = 1.3  # times an error: one as good, in the eyes of one who foretells it
APART = 4.0  # times an error: so much more leaves room for others between


class PricedLayouts(NamedTuple):
    """The layouts of a network's arrays, and what errors of its layers cost.

    Attributes
    ----------
    in_nhwc : frozenset of str
        The nodes whose arrays are in NHWC.
    prices : dict of str to Price
        What a layer's error costs, by the name of its node.
    limit : float
        What the network may be expected to err.
    """

    in_nhwc: frozenset[str]
    prices: dict[str, Price]
    limit: float = math.inf


class Chosen(NamedTuple):
    """Of one layer: the seconds that its candidate costs, none where nothing is on record, and its error."""

    seconds: float
    error: float


@shared_across_limits()
def chosen_within(graph: Graph, device: Device, options: NetworkOptions, mode: str) -> PricedLayouts:
    """The layouts, and the prices of error, at which a network takes the least time within its tolerance.

    Without a tolerance, the limit is `EXACT` times what the network is expected to err by exact algorithms, where all
    layers are in float32 and TF32 is not allowed; and where something is on record of every layer, error costs at least
    as much as is worth `SPARED` of the time. On a GPU there is no limit until then: of what its kernels usually err no
    more is known than their bounds, which Winograd's are well within.

    Parameters
    ----------
    graph, device
        As for `arrays_in_nhwc`.
    options : NetworkOptions
    mode : str
        As for `plan`. One that times has more timed where a limit leaves out the fastest: candidates that err as little
        as those that are chosen, of which few may have been; and exact algorithms where nothing else keeps a tolerance.

    Returns
    -------
    PricedLayouts

    Raises
    ------
    PlanError
        For a tolerance below what the most exact candidates come to.
    """
    tolerance = options.tolerance
    search = _Search(graph, device, options, mode)
    if mode not in MODES:
        return search.chosen(0.0)
    found = search.chosen(0.0)
    recorded = search.all_recorded()
    search.time_no_more()
    if tolerance is None and not recorded and not isinstance(device, CPU):
        return found
    error = search.error(found)
    if tolerance is None and recorded and error:
        found = search.chosen(SPARED * search.least_seconds() / error**2)
        error = search.error(found)
    limit = search.usual_limit() if tolerance is None else tolerance
    if error <= limit:
        return found._replace(limit=limit)
    least = search.least()
    if least > limit and mode in TIMING:
        search.time_exact_ones(mode)
        least = search.least()
    if tolerance is not None and least > limit and search.all_recorded():
        raise PlanError(
            f"{graph.name}: tolerance={tolerance}: expected at least {least:.1e}, which the most exact candidates of "
            "its layers on record come to; `tune` with this tolerance times exact ones where none is on record"
        )
    return search.timed_within(max(limit, least), mode)


def priced_in_parts(
    graph: Graph, device: Device, options: NetworkOptions, mode: str, chosen: PricedLayouts, images: Images
) -> PricedLayouts | None:
    """The same layouts, with prices at which a network keeps its limit that runs in parts of the batch.

    Of layers of fewer images other candidates are on record, which take and err more or less at the prices of the whole
    batch's.

    Parameters
    ----------
    graph, device, options, mode
        As for `chosen_within`.
    chosen : PricedLayouts
        What that gave.
    images : mapping of str to int
        The parts, as `split` takes them.

    Returns
    -------
    PricedLayouts or None
        None where what is on record of the parts errs more at any price.
    """
    if not images or math.isinf(chosen.limit):
        return chosen
    search = _Search(graph, device, options, mode, chosen.in_nhwc, images)
    search.time_no_more()
    if search.error(chosen) <= chosen.limit:
        return chosen
    found = search.timed_within(chosen.limit, mode)
    return found if search.error(found) <= chosen.limit * (1 + 1e-9) else None


def expected_error(
    graph: Graph, plans: Mapping[str, Plan], device: Device, exact: Collection[str] = frozenset()
) -> float:
    """The error expected of a network's outputs, relative to the largest.

    Parameters
    ----------
    graph : Graph
        After all passes.
    plans : mapping of str to Plan
        By the names of nodes.
    device : Device
    exact : collection of str
        Nodes that are not computed by their plans, but by another exact algorithm.

    Returns
    -------
    float
    """
    kept = unmixed(graph)
    errors = {
        name: exact_error(made.layer)
        if name in exact
        else error_by(made, str(made.candidate), device, name not in kept)
        for name, made in plans.items()
    }
    return combined(errors, sensitivities(graph))


def check_error(graph: Graph, plans: Mapping[str, Plan], device: Device, options: NetworkOptions) -> None:
    """Refuse plans that do not keep the tolerance, as far as something is on record of them.

    Raises
    ------
    PlanError
        For such, as a memory limit or a mode that names an algorithm may leave no others.
    """
    if not keeps_error(graph, plans, device, options):
        error = expected_error(graph, plans, device)
        raise PlanError(
            f"{graph.name}: tolerance={options.tolerance}: expected at least {error:.1e} under the other limits"
        )


def keeps_error(graph: Graph, plans: Mapping[str, Plan], device: Device, options: NetworkOptions) -> bool:
    """Whether plans keep the tolerance, as far as something is on record of them."""
    tolerance = options.tolerance
    if tolerance is None or not all(str(made.candidate) in made.timings for made in plans.values()):
        return True
    return expected_error(graph, plans, device) <= tolerance * (1 + 1e-9)


class _Search:
    """Looks for the least price: of the whole batch, or of some parts of it, whose layouts are chosen."""

    def __init__(
        self,
        graph: Graph,
        device: Device,
        options: NetworkOptions,
        mode: str,
        in_nhwc: frozenset[str] | None = None,  # None while layouts are to be chosen, too
        images: Images = MappingProxyType({}),
    ) -> None:
        self.graph, self.device, self.options, self.mode = graph, device, options, mode
        self.weights, self.kept = sensitivities(graph), unmixed(graph)
        self.in_nhwc, self.parts = in_nhwc, split(laid_out(graph, in_nhwc or ()), images)
        split_graph = self.parts.graph
        nodes = [node for node in split_graph.nodes.values() if layer_of(split_graph, node) is not None]
        self.nodes = {self.parts.origin(node.name): node for node in nodes}  # any of its parts
        self.times = Counter(self.parts.origin(node.name) for node in nodes)

    def chosen(self, price: float) -> PricedLayouts:
        """What is chosen at a price of the square of the network's error."""
        prices = {name: self._price(name, price * weight) for name, weight in self.weights.items()} if price else {}
        if self.in_nhwc is not None:
            return PricedLayouts(self.in_nhwc, prices)
        return PricedLayouts(arrays_in_nhwc(self.graph, self.device, self.options, self.mode, prices), prices)

    def error(self, found: PricedLayouts) -> float:
        """Of a choice."""
        layers = {name: self._layer(name, found.prices.get(name, FREE), name in found.in_nhwc) for name in self.weights}
        return self._combined(layers)

    def all_recorded(self) -> bool:
        """Whether something is on record of every layer."""
        return all(self._plan(name).timings for name in self.weights)

    def least(self) -> float:
        """The least error that candidates on record have, all in NCHW."""
        errors = {}
        for name in self.weights:
            price = self._price(name, 1.0)
            made = self._plan(name, price)
            timed = timed_in_network(made, self.device) or [str(made.candidate)]
            errors[name] = min(error_by(made, one, self.device, price.mixed) for one in timed)
        return combined(errors, self.weights)

    def time_exact_ones(self, mode: str) -> None:
        """Time exact algorithms, as a mode does, for every layer of which none is on record."""
        exact = {algorithm.name for algorithm in registry.algorithms(self.device) if algorithm.exact}
        for name in self.weights:
            made = self._plan(name)
            if not any(Candidate.parse(one).algorithm in exact for one in timed_in_network(made, self.device)):
                wanted = {"weights": made.limits.weights, **self.options.of_layers(self.device), "exact": True}
                plan(made.layer, mode, **wanted)

    def time_others_as_exact(self, found: PricedLayouts, mode: str) -> bool:
        """Time others that err as little, as a mode does, for every layer whose fastest errs too much; whether it did.

        Of candidates that nobody took for the fastest, only one or two of each error may have been timed, and finer
        forms of those that err too much only where somebody asked for them. Where a budget has ended before these had
        their turn, what is on record may err either far too much or far less than it has to, at several times the
        time: so those between the two are asked for as well.
        """
        timed = 0
        for name, price in found.prices.items():
            price = price.share(self.times[name])
            made = self._plan(name, price, name in found.in_nhwc)
            read = self._read(name)
            chosen, fastest = (best_in_network(made, self.device, one, read) for one in (price, FREE))
            if chosen != fastest:
                low, high = (error_by(made, one, self.device, mixed=False) for one in (chosen, fastest))
                asked = [UNUSUAL * ALIKE * low]
                if high > APART * low:
                    asked.append(UNUSUAL * ALIKE * math.sqrt(low * high))
                if (finer := finer_error(made, self.device, price, read)) is not None:
                    asked.append(ALIKE * finer)
                for most in asked:
                    wanted = {"weights": made.limits.weights, **self.options.of_layers(self.device), "tolerance": most}
                    timed += plan(made.layer, mode, **wanted, build=False).timed
        return timed > 0

    def timed_within(self, limit: float, mode: str) -> PricedLayouts:
        """What takes the least time within a limit, after a mode that times has timed what else might."""
        found = self.within(limit)
        for _ in range(ROUNDS if mode in TIMING else 0):
            if not self.time_others_as_exact(found, mode):
                break
            found = self.within(limit)
        return found._replace(limit=limit)

    def within(self, limit: float) -> PricedLayouts:
        """What takes the least time within a limit that can be kept."""
        price = (self.least_seconds() or 1.0) / max(limit, 1e-30) ** 2 / GROWTH**2
        found = self.chosen(price)
        while self.error(found) > limit * (1 + 1e-9) and not math.isinf(price):
            price *= GROWTH
            found = self.chosen(price)
        below, above = price / GROWTH, price
        for _ in range(STEPS):
            middle = math.sqrt(below * above)
            tried = self.chosen(middle)
            if self.error(tried) <= limit:
                found, above = tried, middle
            else:
                below = middle
        return self._spent(found, limit)

    def _spent(self, found: PricedLayouts, limit: float) -> PricedLayouts:
        """A choice in which single layers have a lower price, as far as the limit leaves room for it."""
        prices, in_nhwc = dict(found.prices), found.in_nhwc
        layers = {name: self._layer(name, price, name in in_nhwc) for name, price in prices.items()}
        for halving in range(1, HALVINGS + 1):
            lower = {name: price.share(2**halving) for name, price in found.prices.items()}
            quicker = {name: self._layer(name, price, name in in_nhwc) for name, price in lower.items()}
            for name in sorted(quicker, key=lambda name: quicker[name].seconds - layers[name].seconds):
                tried = layers | {name: quicker[name]}
                if quicker[name].seconds < layers[name].seconds and self._combined(tried) <= limit:
                    layers, prices[name] = tried, lower[name]
        return PricedLayouts(in_nhwc, prices)

    def _combined(self, layers: Mapping[str, Chosen]) -> float:
        return combined({name: layer.error for name, layer in layers.items()}, self.weights)

    def _layer(self, name: str, price: Price, in_nhwc: bool) -> Chosen:
        """What is chosen for a layer at its price."""
        price = price.share(self.times[name])  # its error counts once
        made, read = self._plan(name, price, in_nhwc), self._read(name)
        best = best_in_network(made, self.device, price, read)
        seconds = self.times[name] * cost(made, self.device, best, read=read) if best in made.timings else 0.0
        return Chosen(seconds, error_by(made, best, self.device, name not in self.kept))

    def usual_limit(self) -> float:
        """Of a network's error where none is given; none of types that round more than sums in float32 do."""
        layers = {name: self._plan(name).layer for name in self.weights}
        if self.options.layers.get("allow_tf32") or any(layer.dtype != "float32" for layer in layers.values()):
            return math.inf
        return EXACT * combined({name: exact_error(layer) for name, layer in layers.items()}, self.weights)

    def time_no_more(self) -> None:
        """From now on choose from records alone: all that is to be timed has been."""
        self.mode = "heuristic" if self.mode in TIMING else self.mode

    def least_seconds(self) -> float:
        """Of all layers, each by its fastest candidate on record."""
        return sum(self.times[name] * min(self._plan(name).timings.values(), default=0.0) for name in self.weights)

    def _layer_of(self, name: str) -> ConvLayer:
        layer = layer_of(self.parts.graph, self.nodes[name])
        assert layer is not None
        return layer

    def _plan(self, name: str, price: Price = FREE, in_nhwc: bool = False) -> Plan:
        layer = self._layer_of(name).replace(layout="NHWC") if in_nhwc else self._layer_of(name)
        options = self.options.of_layers(self.device)
        return plan_alone(self.parts.graph, self.nodes[name], layer, self.mode, options, price)

    def _price(self, name: str, seconds: float) -> Price:
        """Infinite for a layer of which nothing is on record, where a caller says how much the network may err."""
        known = self.options.tolerance is None or self._plan(name).timings
        return Price(seconds if known else math.inf, mixed=name not in self.kept)

    def _read(self, name: str) -> bool:
        return name not in self.graph.outputs.values()
