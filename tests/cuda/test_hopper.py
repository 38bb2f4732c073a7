"""The asynchronous units of Hopper on the emulator, what they complain of; and the tensor maps they work with."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from layers import edge
from ml_dtypes import bfloat16
from simt.cases import check
from simt.emulator import MISSING, Emulated, EmulationError, launcher
from simt.planted import Planted, caught

from autoconv.cuda.codegen import tensor_map as module
from autoconv.cuda.codegen.occupancy import register_cap
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.codegen.tensor_map import TensorMap, TensorMapError, passing
from autoconv.cuda.hopper.hopper import (
    CAPABILITY,
    PRODUCER_REGISTERS,
    TILES,
    WARPGROUP,
    Hopper,
    pass_axes,
    passes,
    pixel_map,
)
from autoconv.layer import DIRECTIONS, ConvLayer

needs_compiler = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")
SCHEDULES = range(16)
DEVICE = Emulated(capability=CAPABILITY)
HOPPER = Hopper()


def layer_of(**fields: Any) -> ConvLayer:
    given = {"N": 2, "C": 64, "H": 9, "W": 8, "K": 64, "R": 3, "S": 3, "padding": 1}
    return ConvLayer(**(given | {"dtype": "float16", "layout": "NHWC"} | fields))


# ---- tensor maps


def walked(tensor_map: TensorMap, tap: tuple[int, int]) -> list[tuple[int, int, int]]:
    """The pixels (image, row, column) that im2col copies go through for one tap, by the manual's words."""
    width, height, images = tensor_map.extents[1:]
    rows = range(tensor_map.lower[1], height + tensor_map.upper[1], tensor_map.pixel_strides[1])
    columns = range(tensor_map.lower[0], width + tensor_map.upper[0], tensor_map.pixel_strides[0])
    return [(n, h + tap[0], w + tap[1]) for n in range(images) for h in rows for w in columns]


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"padding": ((0, 2), (1, 0)), "stride": (2, 1)},
        {"dilation": (2, 3), "padding": (2, 4), "stride": (1, 2)},
        {"R": 1, "S": 1, "stride": 2, "padding": 0},
        {"R": 2, "S": 5, "padding": (3, 4), "dilation": (3, 1), "stride": (2, 2)},
    ],
)
def test_a_pass_goes_through_the_pixels_that_its_taps_meet(fields: dict[str, Any], direction: str) -> None:
    """All passes together bring every product of the convolution once, each to the right output."""
    layer = layer_of(direction=direction, **fields)
    found = set()
    for rows, columns in passes(layer):
        for i in range(rows.taps):
            for j in range(columns.taps):
                places = walked(pixel_map(layer, (rows, columns), 64), (i * rows.tap_stride, j * columns.tap_stride))
                assert len(places) == layer.N * rows.pixels * columns.pixels
                for number, (n, h, w) in enumerate(places):
                    y, x = divmod(number % (rows.pixels * columns.pixels), columns.pixels)
                    tap = rows.first_tap + i * rows.next_tap, columns.first_tap + j * columns.next_tap
                    if direction == "dgrad":
                        out = rows.offset + y * layer.stride[0], columns.offset + x * layer.stride[1]
                        if 0 <= h < layer.P and 0 <= w < layer.Q:
                            found.add((n, *out, h, w, *tap))
                    elif 0 <= h < layer.H and 0 <= w < layer.W:
                        found.add((n, h, w, y, x, *tap))
    wanted = {
        (n, h, w, p, q, r, s)
        for n in range(layer.N)
        for p in range(layer.P)
        for q in range(layer.Q)
        for r in range(layer.R)
        for s in range(layer.S)
        for h in [p * layer.stride[0] - layer.padding[0][0] + r * layer.dilation[0]]
        for w in [q * layer.stride[1] - layer.padding[1][0] + s * layer.dilation[1]]
        if 0 <= h < layer.H and 0 <= w < layer.W
    }
    assert found == wanted


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"C": 12}, "stride of the copy engine: expected a multiple of 16 bytes below 2**40, got 24"),
        ({"stride": 9, "H": 40, "W": 40}, "pixel stride of the copy engine: expected 1 to 8, got 9"),
        ({"padding": (130, 1)}, "corner of the copy engine: expected -128 to 127, got -130"),
        ({"padding": ((1, 200), (1, 1))}, "corner of the copy engine: expected -128 to 127, got 198"),
        ({"R": 1, "S": 5, "dilation": (1, 70), "W": 300}, "filter taps: expected at most 255 pixels apart, got 280"),
        ({"layout": "NCHW"}, "layout: expected NHWC, got NCHW"),
        ({"dtype": "float32"}, "dtype: expected float16 or bfloat16, got float32"),
        ({"C": 96, "groups": 3, "K": 48}, "C/groups=32: expected a multiple of 64"),
        ({"C": 48, "groups": 3, "K": 36, "direction": "wgrad"}, "K/groups=12: expected a multiple of 8"),
        (
            {"direction": "dgrad", "stride": 3, "H": 20, "W": 20},
            "stride: expected at most 4 passes in dgrad, one to each component, got 9 for 3x3",
        ),
    ],
)
def test_what_the_copy_engine_cannot_do_is_said(fields: dict[str, Any], reason: str) -> None:
    layer, params = layer_of(**fields), {"BM": 64, "BN": 64, "STAGES": 4, "SPLIT": 1}
    reasons = HOPPER.why_not(layer, DEVICE, params)
    assert any(reason in each for each in reasons), reasons


def test_it_is_for_one_capability() -> None:
    for capability in (75, 80, 86, 89, 90, 100, 120):
        params = {"BM": 64, "BN": 64, "STAGES": 4, "SPLIT": 1}
        reasons = HOPPER.why_not(layer_of(), Emulated(capability=capability), params)
        assert bool(reasons) == (capability != CAPABILITY)
    assert HOPPER.why_not(layer_of(), DEVICE, params | {"STAGES": 9})
    assert HOPPER.why_not(layer_of(), DEVICE, params | {"SPLIT": 999})


class FakeDriver:
    """What cuTensorMapEncode* are called with."""

    def __init__(self, status: int = 0) -> None:
        self.calls: list[tuple[str, list[Any]]] = []
        self.status = status

    def __call__(self, function: str) -> Callable[..., int]:
        def call(target: ctypes.c_void_p, *values: Any) -> int:
            assert target.value is not None
            assert target.value % 64 == 0
            ctypes.memset(target.value, 7, module.BYTES)
            self.calls.append((function, [list(v) if hasattr(v, "_length_") else v.value for v in values]))
            return self.status

        return call


def test_maps_are_encoded_as_the_driver_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(module, "_driver", driver)
    layer = layer_of(padding=((1, 0), (2, 1)), stride=(1, 2))
    (unit,) = HOPPER.units(layer, {"BM": 128, "BN": 64, "STAGES": 4, "SPLIT": 1})
    mapped = passing(unit.maps, lambda array: array)
    first = mapped([1024, 2048, "out"])
    again = mapped([1024, 4096, "out"])
    assert first[2] == "out"
    assert first[0] is again[0]  # the same address: encoded once
    assert (first[0].nbytes, first[0].size) == (128, 1)  # what CuPy passes by value
    assert [name for name, _ in driver.calls] == ["cuTensorMapEncodeIm2col"] + 2 * ["cuTensorMapEncodeTiled"]
    # 16-bit integers, rank, address, extents, strides, corners (W, H), channels, pixels, steps, then: not
    # interleaved, swizzled by 128 bytes, promoted to 128 bytes in the L2, zeros outside
    pixels = [1, 4, 1024, [64, 8, 9, 2], [128, 1024, 9216], [-2, -1], [0, -2], 64, 128, [1, 2, 1, 1], 0, 3, 2, 0]
    assert (layer.P, layer.Q) == (8, 5)
    assert driver.calls[0][1] == pixels
    assert driver.calls[1][1] == [1, 3, 2048, [64, 9, 64], [128, 1152], [64, 1, 64], [1, 1, 1], 0, 3, 2, 0]


def test_a_driver_without_maps_or_that_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor_map = pixel_map(layer_of(), passes(layer_of())[0], 64)
    monkeypatch.setattr(module, "_driver", FakeDriver(status=1))
    with pytest.raises(TensorMapError, match="CUresult 1"):
        tensor_map.encode(16)
    monkeypatch.undo()

    def missing(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    module._driver.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    with pytest.raises(TensorMapError, match=r"libcuda\.so\.1"):
        tensor_map.encode(16)


def test_the_producer_leaves_what_the_consumers_ask_for() -> None:
    """A block starts with as many registers as its launch bounds allow; those given away must be enough."""
    for tile in TILES:
        start = register_cap(tile.threads, tile.blocks)
        asked = WARPGROUP * (PRODUCER_REGISTERS + tile.CONSUMERS * tile.consumer_registers)
        assert PRODUCER_REGISTERS < start < tile.consumer_registers
        assert asked <= start * tile.threads
        rows = tile.BM if tile.ALTERNATE else tile.BM // tile.CONSUMERS
        assert tile.consumer_registers >= rows // 64 * tile.BN // 2 + 24  # the sums fit


# ---- the units

WORDS = Unit(
    "test",
    "hopper/hopper.cuh",
    edge("one"),
    grid=(1, 1, 1),
    threads=256,
    blocks=1,
    shared=70 << 10,
    capability=CAPABILITY,
)


def launch(
    body: str, *arrays: Any, maps: tuple[TensorMap | None, ...] = (), schedule: int = 2, before: str = ""
) -> None:
    """Run a kernel with this body on a block of 256 threads: one warpgroup multiplies, one brings."""
    kinds = ["const TensorMap" if m else "float*" for m in (*maps, *[None] * (len(arrays) - len(maps)))]
    parameters = ", ".join(f"{kind} p{i}" for i, kind in enumerate(kinds))
    shared = "struct Shared { alignas(1024) char a[32768], b[32768]; Barrier full, empty; };"
    unit = replace(WORDS, maps=maps)
    text = (
        f"{unit.text}\n{before}{shared}\n"
        f'extern "C" __global__ void test({parameters}) {{\nconst int t = threadIdx.x;\n'
        f"SHARED_DYNAMIC(Shared, s);\n{body}\n}}\n"
    )
    launcher(replace(unit, shared=(64 << 10) + 1024), ("-O1",), schedule, text)(*arrays)


READY = """
    if (t == 0) { init_barrier(s.full, 1); init_barrier(s.empty, 4); fence_barriers(); }
    __syncthreads();
"""


def unswizzled(raw: Any) -> Any:
    """Lines of 128 bytes as they were before the swizzle of their sixteen-byte pieces."""
    pieces = raw.reshape(-1, 8, 16)
    lines = np.arange(len(pieces))[:, None]
    return pieces[lines, np.arange(8) ^ lines % 8].reshape(len(pieces), 128)


@needs_compiler
@pytest.mark.parametrize(("dtype", "kind"), [(np.float16, "float16"), (np.float32, "tf32"), (np.float32, "float32")])
def test_im2col_copies(dtype: Any, kind: str) -> None:
    """Pixels of a strided, padded, dilated walk, against NumPy's padding; as tf32, float32 is rounded."""
    generator = np.random.default_rng(1)
    x = generator.standard_normal((2, 7, 6, 40)).astype(dtype)
    name, line = np.dtype(dtype).name, 128 // np.dtype(dtype).itemsize
    layer = layer_of(C=40, H=7, W=6, K=8, stride=(2, 1), padding=((1, 2), (2, 0)), dilation=(1, 2), dtype=name)
    tensor_map = pixel_map(layer, passes(layer)[0], 64, kind)
    first, channel, tap = 5, 8, (2, 4)
    n, p, q = np.unravel_index(first, (layer.N, layer.P, layer.Q))
    body = f"""{READY}
        if (t == 128) {{
            arrive_expecting(s.full, 64 * 128);
            fetch_pixels(s.a, p0, s.full, {channel}, {q - 2}, {p * 2 - 1}, {n}, {tap[1]}, {tap[0]});
        }}
        await(s.full, 0);
        for (int i = t; i < 2048; i += 256) p1[i] = reinterpret_cast<float*>(s.a)[i];
    """
    padded = np.zeros((2, 7 + 20, 6 + 20, 40 + 80), dtype)
    padded[:, 10:17, 10:16, :40] = x
    wanted = np.zeros((64, line), dtype)
    for i in range(64):
        if first + i < layer.N * layer.P * layer.Q:
            n, p, q = np.unravel_index(first + i, (layer.N, layer.P, layer.Q))
            wanted[i] = padded[n, 10 + p * 2 - 1 + tap[0], 10 + q - 2 + tap[1], channel : channel + line]
    if kind == "tf32":
        wanted = ((wanted.view(np.uint32) + 0x1000) & 0xFFFFE000).view(np.float32)
    for schedule in (0, 2, 15):
        raw = np.zeros(2048, "f")
        launch(body, x, raw, maps=(tensor_map,), schedule=schedule)
        np.testing.assert_array_equal(unswizzled(raw.view(np.uint8)).view(dtype).reshape(64, line), wanted)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "dtype", "across"),
    [
        ("half_t", np.float16, (0, 0)),
        ("half_t", np.float16, (1, 1)),
        ("bfloat16_t", bfloat16, (0, 1)),
        ("bfloat16_t", bfloat16, (1, 0)),
        ("float", np.float32, (0, 0)),
    ],
)
@pytest.mark.parametrize("columns", [64, 128, 256])
def test_products_of_a_warpgroup(name: str, dtype: Any, across: tuple[int, int], columns: int) -> None:
    """Operands brought by copies, lines along the depth or across it, against a matrix product in integers."""
    line = 128 // np.dtype(dtype).itemsize
    generator = np.random.default_rng(2)
    a, b = (generator.integers(-8, 8, (extent, line)) for extent in (64, columns))
    given = [
        np.ascontiguousarray((m.T if turned else m).astype(dtype)) for m, turned in zip((a, b), across, strict=True)
    ]
    kind = "tf32" if name == "float" else "float16"
    maps = tuple(
        TensorMap(kind, (*array.shape[::-1], 1), (array.strides[0], array.nbytes), (line, min(len(array), 256), 1))
        for array in given
    )
    boxes = "\n".join(
        f"for (int i = 0; i < {extent if turned else line}; i += {line}) "
        f"fetch_box(s.{which} + i * 128, p{which == 'b':d}, s.full, {'i' if turned else 0}, 0, 0);"
        for which, extent, turned in zip("ab", (64, columns), across, strict=True)
    )
    depth = 32 // np.dtype(dtype).itemsize
    steps = [f"further(k * {'128' if turned else f'int(sizeof({name}))'})" for turned in across]
    begins = [
        f"matrix_at(s.{which}, {line * 128 if turned else 16})" for which, turned in zip("ab", across, strict=True)
    ]
    body = f"""{READY}
        if (t == 128) {{
            arrive_expecting(s.full, {128 * (64 + columns)});
            {boxes}
        }}
        if (t >= 128) return;
        float d[{columns // 2}];
        for (int i = 0; i < {columns // 2}; i++) d[i] = 1;
        await(s.full, 0);
        fence_products();
        for (int k = 0; k < {line}; k += {depth})
            multiply_async<{across[0]}, {across[1]}>({name}{{}}, d, {begins[0]} + {steps[0]}, {begins[1]} + {steps[1]});
        commit_products();
        wait_products<0>();
        for (int i = 0; i < {columns // 2}; i++)
            p2[(t / 32 * 16 + i / 2 % 2 * 8 + t % 32 / 4) * {columns} + i / 4 * 8 + t % 4 * 2 + i % 2] = d[i];
    """
    for schedule in (0, 2, 15):
        out = np.zeros((64, columns), "f")
        launch(body, *given, out, maps=maps, schedule=schedule)
        np.testing.assert_array_equal(out, a @ b.T + 1)


@needs_compiler
@pytest.mark.parametrize("columns", [64, 128])
@pytest.mark.parametrize("across", [0, 1])
def test_products_of_rows_in_registers(across: int, columns: int) -> None:
    """Columns in lines of 64 bytes along the depth, or of 128 across it; what was in the sums before does not count."""
    generator = np.random.default_rng(3)
    a, b = (generator.integers(-8, 8, (extent, 32)) for extent in (64, columns))
    given = np.ascontiguousarray((b.T if across else b).astype(bfloat16))
    box = (64, 32, 1) if across else (32, columns, 1)
    tensor_map = TensorMap("bfloat16", (*given.shape[::-1], 1), (given.strides[0], given.nbytes), box)
    body = f"""{READY}
        if (t == 128) {{
            arrive_expecting(s.full, {64 * columns});
            for (int i = 0; i < {columns}; i += {64 if across else columns})
                fetch_box(s.b + i * 64, p0, s.full, i, 0, 0);
        }}
        if (t >= 128) return;
        unsigned held[2][4];
        for (int i = 0; i < 8; i++) {{
            const float* pair = p1 + (t / 32 * 16 + i % 2 * 8 + t % 32 / 4) * 32 + i / 2 * 8 + t % 4 * 2;
            held[i / 4][i % 4] = to_bfloat16_pair(pair[0], pair[1]);
        }}
        float d[{columns // 2}];
        for (int i = 0; i < {columns // 2}; i++) d[i] = 1;
        await(s.full, 0);
        fence_products();
        const Word b = matrix_at<{128 if across else 64}>(s.b, {4096 if across else 16});
        multiply_held<{across}, true>(bfloat16_t{{}}, d, held[0], b);
        multiply_held<{across}, false>(bfloat16_t{{}}, d, held[1], b + further({16 * 128 if across else 32}));
        commit_products();
        wait_products<0>();
        for (int i = 0; i < {columns // 2}; i++)
            p2[(t / 32 * 16 + i / 2 % 2 * 8 + t % 32 / 4) * {columns} + i / 4 * 8 + t % 4 * 2 + i % 2] = d[i];
    """
    for schedule in (0, 2, 15):
        out = np.zeros((64, columns), "f")
        launch(body, given, a.astype("f"), out, maps=(tensor_map,), schedule=schedule)
        np.testing.assert_array_equal(out, a @ b.T)


BRING = "arrive_expecting(s.full, 8192); fetch_box(%s, p0, s.full, 0, 0, 0);"


@needs_compiler
@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        (READY + "if (t == 0) {" + BRING % "s.a" + "}", "copies of the copy engine under way"),
        (READY + "if (t == 0) {" + BRING % "s.a + 128" + "} await(s.full, 0);", "not a multiple of 1024"),
        (READY + "if (t == 0) {" + BRING % "s.b + 31744" + "} await(s.full, 0);", "a tile beyond shared memory"),
        (READY.replace("fence_barriers();", "") + "if (t == 0) {" + BRING % "s.a" + "}", "was not fenced"),
        (READY + "if (t == 0) fetch_pixels(s.a, p0, s.full, 0, 0, 0, 0, 0, 0);", "a map of the other kind"),
        (READY + "await(s.full, 0);", "waits for what nothing will bring about"),
        (READY + "if (t == 0) arrive_expecting(s.full, 4); await(s.full, 0);", "waits for what nothing"),
        (READY + "if (t == 0) { arrive_expecting(s.full, 4); arrive(s.full); }", "more arrivals than it counts"),
        ("await(s.full, 0);", "used before it is initialised"),
        (READY + "float d[32] = {}; if (t < 128) multiply_async<0, 0>(half_t{}, d, 0, 0);", "without a fence"),
        (
            READY + "float d[32] = {}; if (t < 128) { fence_products(); multiply_async<0, 0>(half_t{}, d, "
            "matrix_at(s.a, 16), matrix_at(s.b, 16)); commit_products(); }",
            "before its matrix products were done",
        ),
        (
            READY + "float d[32] = {}; if (t < 128) { fence_products(); multiply_async<0, 0>(half_t{}, d, "
            "matrix_at(s.a + t / 32 * 1024, 16), matrix_at(s.b, 16)); commit_products(); wait_products<0>(); }",
            "ask for different matrix products",
        ),
        (
            READY + "float d[32] = {}; if (t < 128) { fence_products(); multiply_async<0, 0>(half_t{}, d, "
            "1, 1); commit_products(); wait_products<0>(); }",
            "not swizzled",
        ),
    ],
)
def test_it_complains(body: str, complaint: str) -> None:
    tensor_map = TensorMap("float16", (64, 64, 1), (128, 8192), (64, 64, 1))
    with pytest.raises(EmulationError, match=complaint):
        launch(body, np.zeros((64, 64), np.float16), maps=(tensor_map,), schedule=0)


# ---- the kernel, and what it must not lack

DEEP = layer_of(C=72, K=72)  # 18 slices of the depth, two tiles to some blocks: every stage goes round
PLANTED = {
    "no wait for the copies": ("await(ring.full[turn.stage], turn.parity);", ";"),
    "no wait for a free stage": ("await(ring.empty[turn.stage], turn.parity ^ 1);", ";"),
    "a stage returned while products read it": (
        "arrive(ring.empty[used]);\n        used",
        "arrive(ring.empty[turn.stage]);\n        used",
    ),
    "the parity never changes": ("parity ^= 1;", ";"),
    "the producer begins in the wrong phase": ("turn.parity ^ 1);", "turn.parity);"),
    "no wait for the products before a stage returns": ("wait_products<1>();", ";"),
    "no wait for the last products": ("wait_products<0>();", ";"),
    "no commit": ("commit_products();\n        wait", "wait"),
    "no fence before the products": ("fence_products();\n        multiply", "multiply"),
    "too few bytes announced": ("sizeof(Stage));\n", "sizeof(Stage) / 2);\n"),
    "the barriers are not made known": ("        fence_barriers();\n", ""),
    "the barriers are used before they are initialised": (
        "__syncthreads();\n    if (threadIdx.x >=",
        ";\n    if (threadIdx.x >=",
    ),
    "another swizzle": ("swizzled = Word(LINE_BYTES / line) << 62", "swizzled = Word(2) << 62"),
    "a wrong distance of atoms": ("atom = 8 * line >> 4", "atom = 8 * line >> 3"),
    "a wrong step along the depth": ("further(depth * (B_ACROSS", "further(2 * depth * (B_ACROSS"),
}
OUT_OF_TURN = {
    "a warpgroup begins before its turn": (
        "await(ring.multiplied[(tile - 1) % TOGETHER], (tile - 1) / TOGETHER & 1);",
        ";",
    ),
    "the wrong warpgroup goes first": ("tile % TOGETHER != warpgroup", "tile % TOGETHER == warpgroup"),
    "stages of the others are not left out": ("turn.skip(at.last() - at.first());", ";"),
    "nobody says that the tile is multiplied": ("arrive(ring.multiplied[warpgroup]);", ";"),
}


PARAMS = {"BM": 64, "BN": 64, "STAGES": 4, "SPLIT": 1}
ALTERNATING = {"BM": 64, "BN": 256, "STAGES": 5, "SPLIT": 4}  # three tiles to a block, its warpgroups in turn


@needs_compiler
@pytest.mark.parametrize("params", [PARAMS, ALTERNATING], ids=["together", "alternating"])
def test_the_kernel_is_right_on_every_schedule(params: dict[str, int]) -> None:
    for schedule in SCHEDULES:
        check(Emulated(capability=CAPABILITY, schedule=schedule), HOPPER, DEEP, params)


@needs_compiler
@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_caught(fault: str) -> None:
    assert caught(PLANTED[fault], HOPPER, DEEP, PARAMS)


@needs_compiler
@pytest.mark.parametrize("fault", OUT_OF_TURN)
def test_warpgroups_out_of_turn_are_caught(fault: str) -> None:
    assert caught(OUT_OF_TURN[fault], HOPPER, DEEP, ALTERNATING)


@needs_compiler
@pytest.mark.parametrize("fault", ["no wait for the copies", "no wait for the products before a stage returns"])
def test_thread_sanitizer_names_the_race(fault: str) -> None:
    with pytest.raises(EmulationError, match="data race"):
        check(Planted(fault=PLANTED[fault], sanitizer="thread"), HOPPER, DEEP, PARAMS)


@needs_compiler
@pytest.mark.stress
@pytest.mark.parametrize("tile", TILES, ids=lambda t: f"{t.BM}x{t.BN}x{t.STAGES}")
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_tile(direction: str, tile: Any) -> None:
    """With the depth in one part and in three."""
    layer = layer_of(C=136, K=136, stride=(1, 2), direction=direction)
    for split in (1, 3):
        params = {"BM": tile.BM, "BN": tile.BN, "STAGES": tile.STAGES, "SPLIT": split}
        assert not HOPPER.why_not(layer, DEVICE, params)
        check(DEVICE, HOPPER, layer, params)


def test_work_is_the_tiles_of_the_output() -> None:
    """No tile is launched that would be empty."""
    for direction in DIRECTIONS:
        layer = layer_of(C=72, K=136, direction=direction, groups=1)
        for params in HOPPER.candidates(layer, DEVICE):
            covered = sum(unit.grid[0] for unit in HOPPER.units(layer, params) if unit.persistent) // int(
                params["SPLIT"]
            )
            least = math.prod(layer.output_shape) / (int(params["BM"]) * int(params["BN"]))
            assert least <= covered <= 4 * least + 9 * len(pass_axes(layer, 0))
