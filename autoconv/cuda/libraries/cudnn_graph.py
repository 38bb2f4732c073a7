"""cuDNN's graph interface by ctypes: every engine it offers for a convolution, and plans to run them by.

Everything is a descriptor: created of a kind, given attributes, finalized, and only then of use to another
(cuDNN API Reference, "cudnn_graph"). Engines newer than the numbered algorithms are offered here alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import threading
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from autoconv.cuda.libraries.cublas_cufft import LibraryError, opened
from autoconv.cuda.libraries.cudnn import CROSS_CORRELATION, PROPAGATE_NAN, TYPES, call, handle, library
from autoconv.layer import ConvLayer

KINDS = {"convolution": 1, "engine": 2, "configuration": 3, "heuristics": 4, "plan": 5, "knob": 7, "fwd": 10}
KINDS |= {"wgrad": 11, "dgrad": 12, "graph": 15, "pack": 16, "tensor": 17, "pointwise": 0, "step": 13}
ELEMENTS: dict[str, tuple[int, Any]] = {  # of attributes: cuDNN's number of their type, and the type
    "handle": (0, ctypes.c_void_p),
    "dtype": (1, ctypes.c_int),
    "bool": (2, ctypes.c_bool),
    "int64": (3, ctypes.c_int64),
    "float": (4, ctypes.c_float),
    "double": (5, ctypes.c_double),
    "pointer": (6, ctypes.c_void_p),
    "mode": (7, ctypes.c_int),
    "heuristic": (8, ctypes.c_int),
    "knob": (9, ctypes.c_int),
    "nan": (10, ctypes.c_int),
    "numerical": (11, ctypes.c_int),
    "function": (14, ctypes.c_int),
    "descriptor": (15, ctypes.c_void_p),
    "behaviour": (19, ctypes.c_int),
}


def _from(first: int, **elements: str) -> dict[str, tuple[int, str]]:
    """Attributes with neighbouring numbers: each with its own and what it is made of."""
    return {name: (first + i, of) for i, (name, of) in enumerate(elements.items())}


def _operation(first: int) -> dict[str, tuple[int, str]]:
    """The attributes of a convolution, which are in the same order in every direction; its factors of two types."""
    narrow = _from(first, alpha_float="float", beta_float="float")
    wide = _from(first, alpha_double="double", beta_double="double")
    operands = _from(first + 2, convolution="descriptor", w="descriptor", x="descriptor", y="descriptor")
    return narrow | wide | operands


ATTRIBUTES: dict[str, dict[str, tuple[int, str]]] = {
    "pointwise": _from(0, function="function", compute="dtype", nan="nan"),
    "convolution": _from(100, compute="dtype", mode="mode", dilations="int64", strides="int64")
    | _from(104, after="int64", before="int64", dimensions="int64"),
    "heuristics": _from(200, mode="heuristic", graph="descriptor", results="descriptor"),
    "configuration": _from(300, engine="descriptor") | _from(302, knobs="descriptor", workspace="int64"),
    "plan": _from(400, handle="handle", configuration="descriptor", workspace="int64"),
    "knob": _from(600, type="knob", value="int64"),
    "fwd": _operation(700),
    "dgrad": _operation(706),
    "wgrad": _operation(712),
    "step": _from(750, pointwise="descriptor", x="descriptor", operand="descriptor", y="descriptor"),
    "graph": _from(800, handle="handle", operations="descriptor", engines="int64"),
    "tensor": _from(900, alignment="int64", dtype="dtype", extents="int64", strides="int64")
    | _from(906, id="int64", virtual="bool"),
    "pack": _from(1000, ids="int64", pointers="pointer") | _from(1003, workspace="pointer"),
    "engine": _from(1300, graph="descriptor", number="int64")
    | _from(1303, numerical="numerical")
    | _from(1305, behaviour="behaviour"),
}
ADD, RELU = 0, 100
RANKING, FALLBACK = 3, 2  # heuristics: mode A, the fastest expected first; and what works without a promise of speed
NOTES = {0: "tensor_core", 1: "narrow_inputs", 2: "narrow_sums", 3: "fft", 4: "nondeterministic", 5: "winograd"}
RUNTIME_COMPILATION = 0
MOST_VALUES = 64  # notes of an engine, or knobs, of which there are 46 types: to ask how many there are gives 0
ALIGNMENT = 16  # bytes, of every array that a kernel is given
OPERANDS = {"fwd": "xwy", "dgrad": "ywx", "wgrad": "xyw"}  # a, b and out of a kernel; a tensor's id is its letter
PACKS = 8  # sets of addresses that a plan remembers

Knobs = tuple[tuple[int, int], ...]  # type and value of each


class Descriptor:
    """One of the interface's objects, destroyed with this one; what it is made of lives as long."""

    def __init__(self, kind: str) -> None:
        self.kind, self.at = kind, ctypes.c_void_p()
        self._parts: list[Descriptor] = []
        call("cudnnBackendCreateDescriptor", KINDS[kind], ctypes.byref(self.at))
        # not when the process ends, which frees everything, and may have ended CUDA before
        weakref.finalize(self, library().cudnnBackendDestroyDescriptor, self.at).atexit = False

    @classmethod
    def of(cls, kind: str, **attributes: Any) -> Descriptor:
        """A finalized one; an attribute is a value or a sequence of them.

        Raises
        ------
        LibraryError
            When the library does not take what it is made of.
        """
        made = cls(kind)
        for name, given in attributes.items():
            values = given if isinstance(given, Sequence) else (given,)
            made._parts += [value for value in values if isinstance(value, Descriptor)]
            number, element, of = made._attribute(name)
            array = (of * len(values))(
                *[value.at.value if isinstance(value, Descriptor) else value for value in values]
            )
            call("cudnnBackendSetAttribute", made.at, number, element, ctypes.c_int64(len(values)), array)
        call("cudnnBackendFinalize", made.at)
        return made

    def _attribute(self, name: str) -> tuple[int, int, Any]:
        """Its number, and both the number and the type of its elements."""
        number, of = ATTRIBUTES[self.kind][name]
        return number, *ELEMENTS[of]

    def _get(self, name: str, most: int, array: Any) -> int:
        """How many values there are, after filling an array with them as far as it goes."""
        number, element, _ = self._attribute(name)
        count = ctypes.c_int64()
        call("cudnnBackendGetAttribute", self.at, number, element, ctypes.c_int64(most), ctypes.byref(count), array)
        return count.value

    def numbers(self, name: str, most: int = 1) -> list[int]:
        """The values of an attribute."""
        array = (self._attribute(name)[-1] * most)()
        return list(array[: self._get(name, most, array)])

    def descriptors(self, name: str, kind: str, most: int | None = None) -> list[Descriptor]:
        """Those that an attribute holds, however many unless the most is said: the library fills ones it is given."""
        found = [Descriptor(kind) for _ in range(self._get(name, 0, None) if most is None else most)]
        if not found:
            return []
        array = (ctypes.c_void_p * len(found))(*[each.at.value for each in found])
        return found[: self._get(name, len(found), array)]


class Engine(NamedTuple):
    """An engine with a choice of its knobs, and what cuDNN notes of it."""

    number: int
    knobs: Knobs
    notes: frozenset[str]
    compiles: bool  # when a plan is made: a second or so
    ranked: bool  # by expected speed


def _engine(configuration: Descriptor, ranked: bool = False) -> Engine:
    (engine,) = configuration.descriptors("engine", "engine", 1)
    knobs = configuration.descriptors("knobs", "knob", MOST_VALUES)
    chosen = sorted((knob.numbers("type")[0], knob.numbers("value")[0]) for knob in knobs)
    notes = frozenset(NOTES[number] for number in engine.numbers("numerical", MOST_VALUES) if number in NOTES)
    compiles = RUNTIME_COMPILATION in engine.numbers("behaviour", MOST_VALUES)
    return Engine(engine.numbers("number")[0], tuple(chosen), notes, compiles, ranked)


@functools.cache
def _ready() -> None:
    """See to it that cuBLASLt is loaded: where the interface does not find it, it ends the process.

    Raises
    ------
    LibraryError
        When it cannot be.
    """
    found = library()
    major = found.cudnnGetCudartVersion() // 1000
    name, folder = f"libcublasLt.so.{major}", Path(found._name).parent
    wheels = (folder, folder / f"../../cu{major}/lib", folder / "../../cublas/lib") if folder.is_absolute() else ()
    for place in (name, *(str(where / name) for where in wheels)):
        with contextlib.suppress(OSError):
            ctypes.CDLL(place)
            return
    opened((name,), "cupy_backends.cuda.libs.cublas")


def _tensor(layer: ConvLayer, letter: str, extents: tuple[int, ...]) -> Descriptor:
    """Of shape N, C, H, W or K, C, R, S, its strides those of the layout; a digit's is only passed on, unrounded."""
    _, C, H, W = extents
    strides = (C * H * W, H * W, W, 1) if layer.layout == "NCHW" else (H * W * C, 1, W * C, C)
    virtual = letter.isdigit()
    return Descriptor.of(
        "tensor",
        id=ord(letter),
        dtype=TYPES[layer.accumulator.name if virtual else layer.dtype],
        extents=extents,
        strides=strides,
        alignment=ALIGNMENT,
        virtual=virtual,
    )


def _steps(layer: ConvLayer) -> list[str]:
    """The epilogue, in the order that most engines take; they want a bias, which may be of zeros."""
    if not layer.has_epilogue:
        return []
    return ["r"] * layer.residual + ["b"] + ["relu"] * (layer.activation == "relu")


def operands(layer: ConvLayer) -> str:
    """Letters of the arrays that a plan of the layer is run on: a, b, out, the residual and the bias."""
    return OPERANDS[layer.direction] + "".join(letter for letter in _steps(layer) if letter != "relu")


def _step(layer: ConvLayer, step: str, x: Descriptor, y: Descriptor) -> Descriptor:
    compute = TYPES[layer.accumulator.name]
    if step == "relu":
        relu = Descriptor.of("pointwise", function=RELU, compute=compute, nan=PROPAGATE_NAN)
        return Descriptor.of("step", pointwise=relu, x=x, y=y)
    addition = Descriptor.of("pointwise", function=ADD, compute=compute)
    shape = (layer.N, layer.K, layer.P, layer.Q) if step == "r" else (1, layer.K, 1, 1)
    return Descriptor.of("step", pointwise=addition, x=x, operand=_tensor(layer, step, shape), y=y)


@functools.lru_cache(maxsize=256)
def graph(gpu: int, layer: ConvLayer) -> Descriptor:
    """The layer as a graph of operations, on the current GPU, whose number is given.

    Raises
    ------
    LibraryError
        When there is no library, it has no such interface, or it does not take the layer.
    """
    _ready()
    (top, bottom), (left, right) = layer.padding
    convolution = Descriptor.of(
        "convolution",
        compute=TYPES[layer.accumulator.name],
        mode=CROSS_CORRELATION,
        dimensions=2,
        dilations=layer.dilation,
        strides=layer.stride,
        before=(top, left),
        after=(bottom, right),
    )
    scalar = "double" if layer.dtype == "float64" else "float"
    steps, shape = _steps(layer), (layer.N, layer.K, layer.P, layer.Q)
    results = [_tensor(layer, letter, shape) for letter in (*map(str, range(len(steps))), "y")]
    operations = [
        Descriptor.of(
            layer.direction,
            **{f"alpha_{scalar}": 1.0, f"beta_{scalar}": 0.0},
            convolution=convolution,
            x=_tensor(layer, "x", (layer.N, layer.C, layer.H, layer.W)),
            w=_tensor(layer, "w", (layer.K, layer.C // layer.groups, layer.R, layer.S)),
            y=results[0],
        )
    ]
    operations += [_step(layer, step, *pair) for step, pair in zip(steps, itertools.pairwise(results), strict=True)]
    return Descriptor.of("graph", operations=operations, handle=handle(gpu).value)


def offered(gpu: int, layer: ConvLayer) -> list[Engine]:
    """What the heuristics name, in their order, then every other engine that takes the layer, as it comes.

    Left out is what they name twice, and what they do not name and is compiled at run time.

    Raises
    ------
    LibraryError
        As `graph`, or when it offers none.
    """
    of, found = graph(gpu, layer), dict[tuple[int, Knobs], Engine]()
    refusals = []
    for mode in (RANKING, FALLBACK):
        try:
            results = Descriptor.of("heuristics", graph=of, mode=mode).descriptors("results", "configuration")
        except LibraryError as error:
            refusals.append(error)
            continue
        for configuration in results:
            engine = _engine(configuration, mode == RANKING)
            found.setdefault(engine[:2], engine)
    named = {number for number, _ in found}
    for number in range(of.numbers("engines")[0]):
        if number not in named:
            with contextlib.suppress(LibraryError):  # it does not take the layer, as most of them
                engine = _engine(_configuration(of, number, ()))
                if not engine.compiles:
                    found[number, ()] = engine
    if not found:
        raise refusals[0] if refusals else LibraryError("cuDNN's heuristics name no engine")
    return list(found.values())


def _configuration(of: Descriptor, number: int, knobs: Knobs) -> Descriptor:
    engine = Descriptor.of("engine", graph=of, number=number)
    chosen = [Descriptor.of("knob", type=kind, value=value) for kind, value in knobs]
    return Descriptor.of("configuration", engine=engine, **({"knobs": chosen} if chosen else {}))


def configured(gpu: int, layer: ConvLayer, number: int, knobs: Knobs) -> tuple[Engine, int]:
    """An engine by its number and knobs, and the bytes of scratch it needs: without a plan, as cuDNN can since 9.2.

    Raises
    ------
    LibraryError
        As `graph`, or when there is no such engine for the layer.
    """
    made = _configuration(graph(gpu, layer), number, knobs)
    return _engine(made), made.numbers("workspace")[0]


class ExecutionPlan:
    """An engine made ready to run a layer.

    Raises
    ------
    LibraryError
        As `configured`, or when the engine does not compile.
    """

    def __init__(self, gpu: int, layer: ConvLayer, number: int, knobs: Knobs) -> None:
        configuration = _configuration(graph(gpu, layer), number, knobs)
        self._plan = Descriptor.of("plan", handle=handle(gpu).value, configuration=configuration)
        self.workspace_bytes = self._plan.numbers("workspace")[0]
        self._pack = functools.lru_cache(maxsize=PACKS)(functools.partial(_packed, operands(layer)))
        self._lock = threading.Lock()  # plans are not safe for two threads at a time, say cuDNN's release notes

    def run(self, gpu: int, stream: int, scratch: int, *arrays: int) -> None:
        """Launch on a stream; scratch and arrays, in the order of `operands`, by their addresses."""
        mine = handle(gpu)
        call("cudnnSetStream", mine, ctypes.c_void_p(stream))
        with self._lock:
            call("cudnnBackendExecute", mine, self._plan.at, self._pack(scratch, *arrays).at)


def _packed(letters: str, scratch: int, *arrays: int) -> Descriptor:
    return Descriptor.of("pack", ids=tuple(map(ord, letters)), pointers=arrays, workspace=scratch)
