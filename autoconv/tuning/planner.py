"""`plan`, the one door: candidates → reasons → recorded facts, or new ones → the best under the limits.

Here options are checked and plans remembered. Behind it, in the order of a call: `lookup` (what is on record),
`staleness` (whether that still answers), `racing` (what to time, and against whom) and `choice` (the best, or why there
is none).
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any, Literal, TypeVar, get_args

import numpy as np

from autoconv.algorithm import Algorithm, Kernel
from autoconv.common import split_products
from autoconv.common.forks import renew_in_children
from autoconv.device import Device
from autoconv.errors import PlanError
from autoconv.layer import ConvLayer
from autoconv.plans import Plan
from autoconv.records.cache import TuningCache
from autoconv.records.limits import Denormals, Limits, Weights
from autoconv.registry import algorithms, resolve
from autoconv.tuning.choice import choose
from autoconv.tuning.lookup import Request
from autoconv.tuning.measurement import Progress

REMEMBERED = 1024  # plans kept in memory
ENDLESS = 1e9  # seconds of a budget that is none

INTEGERS = (int, np.integer)
NUMBERS = (*INTEGERS, float, np.floating)
T = TypeVar("T", int, float)

_plans: OrderedDict[object, Plan] = OrderedDict()  # by what they were asked for with; the last used at the end
_lock = threading.Lock()
renew_in_children(sys.modules[__name__], "_lock")
_watchers: tuple[Callable[[Plan], None], ...] = ()  # who is told of every plan that is asked for


def plan(
    layer: ConvLayer,
    mode: str = "profile",
    *,
    device: Device | str | None = None,
    workspace_limit: int | None = None,
    deterministic: bool = False,
    tolerance: float | None = None,
    allow_tf32: bool = False,
    weights: Weights = "varying",
    vendors: bool | Literal["loaded"] = "loaded",
    exact: bool = False,
    denormals: Denormals = "flush",
    budget: float | None = None,
    cache: TuningCache | None = None,
    isolate: bool = False,
    again: bool = False,
    progress: Progress | None = None,
    build: bool = True,
) -> Plan:
    """The fastest way to compute a layer on a device, under the caller's limits.

    Parameters
    ----------
    layer : ConvLayer
    mode : str
        "profile": from recorded facts, and where any candidate has none, time those.
        "hybrid": likewise, but only for the few that the estimates make most promising, and for a winner that has
        changed.
        "heuristic": from recorded facts if there are any, else from estimates; never time.
        "cached": from recorded facts only; a miss is an error, and so is a winner whose algorithm has changed since,
        until the layer is tuned again.
        Or the name of an algorithm, such as "numpy.gemm", or of a candidate, as `explain` lists them.
    device : Device or str, optional
        This machine's CPU, all of it, unless given; "cuda" is CuPy's current GPU, "cuda:1" another.
    workspace_limit : int, optional
        Most bytes of scratch memory, packed filters included where weights vary.
    deterministic : bool
        Only candidates that give the same bits every time.
    tolerance : float, optional
        Largest measured error, as `max|y - ref| / max(sum |x||w|)`. Of a candidate that was never timed, the error that
        hardly one like it exceeds.
    allow_tf32 : bool
        Whether tensor cores may round float32 operands to 10 bits.
    weights : "varying" or "constant"
        Whether transforming the filters counts in every run, or is done once by `Plan.pack`.
    vendors : "loaded", True or False
        Vendor libraries among the candidates: those this process has imported, all installed, or none.
    exact : bool
        Only algorithms that do no more to a sum than reorder it: no Winograd, no Fourier transforms, and no vendor
        libraries, which do not say. The others are neither timed nor listed, and are timed when they are asked for.
    denormals : "flush" or "keep"
        Whether operands and results too small for a normal number of the type that is computed with (2**-126 in
        float32) may count as 0, which costs nothing; or are kept, at which many processors are slow. Times are those
        of normal numbers in either case.
    budget : float, optional
        Seconds that a race may take; compilation and verification come on top. There are further races, of as many
        seconds each, under new versions of the libraries that times depend on, and of finer forms of what a tolerance
        leaves out. In mode "hybrid", no further candidate of a race is begun once compilation and verification have
        taken 2.5 times as long, and two are ready.
    cache : TuningCache, optional
        Where facts are kept; the user's own unless given.
    isolate : bool
        Build, verify and time in a worker process, which may crash or hang without harm.
    again : bool
        In modes "profile" and "hybrid", where all has been timed before: those near the best race once more. What
        disturbs a machine passes, and costs some candidates more than others.
    progress : callable, optional
        Called with an `Event` before every step of the tuning.
    build : bool
        Whether to build the kernel now, or when it is first needed: what is known of a layer can be asked without one.

    Returns
    -------
    Plan
        Ready to run, with the evidence for the choice. The same call gives the same plan again, from memory, until
        `forget_plans`, a better one of the layer, or a thousand others.

    Raises
    ------
    PlanError
        For an unknown mode, candidate, device, option or value in the environment; when no candidate satisfies the
        limits; in mode "cached", when records do not suffice; and, as `autoconv.errors.DeviceLostError`, when a
        candidate left a GPU unusable.

    Examples
    --------
    >>> import numpy as np
    >>> layer = ConvLayer(N=1, C=2, H=5, W=5, K=3, R=3, S=3, padding=1)
    >>> made = plan(layer, "heuristic", exact=True)
    >>> made.run(np.ones(layer.x_shape, np.float32), np.ones(layer.w_shape, np.float32)).shape
    (1, 3, 5, 5)
    """
    device = resolve(device)
    cache = resolved_cache(cache)
    allowed = _allowed_vendors(device, vendors)
    limits = workspace_limit, deterministic, tolerance, allow_tf32, weights, allowed, exact, denormals
    kinds = tuple(map(type, (budget, *limits)))  # 1 and 1.0 are equal to True, and refused in its place
    key = layer, mode, device, limits, budget, kinds, cache, split_products.allowed()
    again, isolate, build = _bool(again, "again"), _bool(isolate, "isolate"), _bool(build, "build")
    if not (progress is None or callable(progress)):
        raise PlanError(f"progress={progress!r}: expected a function or None")
    if not again and (found := _remembered(key)) is not None:
        if _watchers:
            _tell(found)
        if build:
            _ = found.kernel
        return found
    if not isinstance(layer, ConvLayer):
        raise PlanError(f"layer: expected a ConvLayer, got {type(layer).__name__}")
    if weights not in get_args(Weights):
        raise PlanError(f"weights={weights!r}: expected 'varying' or 'constant'")
    if denormals not in get_args(Denormals):
        raise PlanError(f"denormals={denormals!r}: expected 'flush' or 'keep'")
    checked = Limits(
        workspace_limit=number(workspace_limit, "workspace_limit", int),
        deterministic=_bool(deterministic, "deterministic"),
        tolerance=number(tolerance, "tolerance", float),
        allow_tf32=_bool(allow_tf32, "allow_tf32"),
        weights=weights,
        vendors=allowed,
        exact=_bool(exact, "exact"),
        denormals=denormals,
    )
    seconds = number(budget, "budget", float)
    if seconds is not None and seconds >= ENDLESS:
        seconds = None
    with device.selected():
        made = _made(Request(layer, device, cache, checked, seconds, isolate, progress), mode, again)
        if build:
            _ = made.kernel
    _remember(key, made)
    _tell(made)
    return made


def watch(watcher: Callable[[Plan], None]) -> None:
    """Call a function with every plan from now on that somebody asks for, those that are remembered included."""
    global _watchers
    with _lock:
        _watchers = (*_watchers, watcher)


def unwatch(watcher: Callable[[Plan], None]) -> None:
    """Call it no more."""
    global _watchers
    with _lock:
        _watchers = tuple(other for other in _watchers if other != watcher)


def _tell(found: Plan) -> None:
    for watcher in _watchers:
        watcher(found)


def forget_plans() -> None:
    """Forget the plans that this process keeps in memory, and the cache that is opened for it.

    The next call of `plan` reads the records again: after another process has tuned, say, or somebody has deleted them.
    What is on record stays, and so do plans that somebody holds, those of networks among them. Where
    `AUTOCONV_CACHE_DIR` names another folder, `plan` looks there by itself.

    Examples
    --------
    >>> layer = ConvLayer(N=1, C=2, H=5, W=5, K=3, R=3, S=3)
    >>> made = plan(layer, "heuristic")
    >>> made is plan(layer, "heuristic")
    True
    >>> forget_plans()
    >>> made is plan(layer, "heuristic")
    False
    """
    with _lock:
        _plans.clear()
    _default_cache.cache_clear()


def resolved_cache(cache: TuningCache | None) -> TuningCache:
    """The cache that a caller means: the user's own, one for all of the process, unless one is given.

    Raises
    ------
    PlanError
        For anything else.
    """
    found = _default_cache(os.environ.get("AUTOCONV_CACHE_DIR")) if cache is None else cache
    if not isinstance(found, TuningCache):
        raise PlanError(f"cache={found!r}: expected a TuningCache or None")
    return found


@functools.cache
def _default_cache(directory: str | None) -> TuningCache:
    return TuningCache(directory)


def _allowed_vendors(device: Device, vendors: object) -> frozenset[str]:
    if vendors == "loaded":
        return frozenset(name for name, adapter in _adapters(device).items() if adapter.loaded())
    if vendors is True:
        return frozenset(name for name, adapter in _adapters(device).items() if _installed(adapter))
    if vendors is False:
        return frozenset()
    raise PlanError(f"vendors={vendors!r}: expected 'loaded', True or False")


@functools.cache
def _installed(adapter: Algorithm[Any]) -> bool:
    return adapter.installed()


@functools.cache
def _adapters(device: Device) -> dict[str, Algorithm[Any]]:
    """One algorithm of each vendor."""
    return {a.vendor: a for a in algorithms(device) if a.vendor is not None}


def number(value: object, name: str, kind: type[T]) -> T | None:
    """A number of at least 0 as a plain one, be it NumPy's; or None."""
    if value is None:
        return None
    noun, kinds = ("an integer", INTEGERS) if kind is int else ("a number", NUMBERS)
    if isinstance(value, bool) or not isinstance(value, kinds) or not value >= 0:
        raise PlanError(f"{name}={value!r}: expected {noun} of at least 0, or None")
    return kind(value)


def _bool(value: object, name: str) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise PlanError(f"{name}={value!r}: expected True or False")
    return bool(value)


def _remembered(key: object) -> Plan | None:
    """The plan under a key; None also where the key cannot be one, as it holds a list, say."""
    try:
        with _lock:
            found = _plans.get(key)
            if found is not None:
                _plans.move_to_end(key)
    except TypeError:
        return None
    return found


def _remember(key: object, made: Plan) -> None:
    """Keep a plan; of too many, those stay that were used last.

    One that was timed for takes the place of all of its layer: it serves requests for less effort.
    """
    with _lock:
        if made.timed:
            for old in [old for old, kept in _plans.items() if kept.layer == made.layer]:
                del _plans[old]
        _plans[key] = made if made.source != "profile" else made.from_records()
        while len(_plans) > REMEMBERED:
            _plans.popitem(last=False)


def _made(request: Request, mode: object, again: bool) -> Plan:
    """The plan of the candidate that is chosen."""
    choice = choose(request, mode, again)
    request = replace(request, progress=None)  # which holds no list of candidates until it is asked for one

    def make_kernel(layer: ConvLayer) -> Kernel:
        algorithm = request.algorithms[choice.candidate.algorithm]
        kernel = algorithm.build(layer, request.device, choice.candidate.params)
        if request.limits.denormals == "keep":
            kernel.keep_denormals()
        return kernel

    return Plan(
        layer=request.layer,
        device=request.device,
        candidate=choice.candidate,
        make_kernel=make_kernel,
        source=choice.source,
        facts=choice.facts,
        candidate_set=lambda: request.candidate_set,
        ranking=choice.ranking,
        limits=request.limits,
        restore=_restored,
        timed=choice.timed,
    )


def _restored(layer: ConvLayer, device: Device, candidate: str, limits: Limits) -> Plan:
    """The plan that another process pickled.

    Where its error was measured it was within the tolerance; here nothing may be known of it but what is usual.
    """
    options: dict[str, Any] = {field.name: getattr(limits, field.name) for field in fields(limits)}
    options |= {"device": device, "vendors": bool(limits.vendors)}
    with contextlib.suppress(PlanError):
        return plan(layer, candidate, **options)
    return plan(layer, candidate, **(options | {"tolerance": None}))
