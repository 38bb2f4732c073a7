"""The asynchronous units of Hopper on the emulator, and what they complain of; how their tensor maps are encoded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from layers import edge, hopper_layer
from ml_dtypes import bfloat16
from simt.emulator import MISSING, EmulationError, launcher

from autoconv.cuda.codegen import tensor_map as module
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.codegen.tensor_map import TensorMap, TensorMapError, passing
from autoconv.cuda.hopper.hopper import CAPABILITY, Hopper, passes, pixel_map

needs_compiler = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")


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
    layer = hopper_layer(padding=((1, 0), (2, 1)), stride=(1, 2))
    (unit,) = Hopper().units(layer, {"BM": 128, "BN": 64, "STAGES": 4, "SPLIT": 1})
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
    tensor_map = pixel_map(hopper_layer(), passes(hopper_layer())[0], 64)
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
    layer = hopper_layer(C=40, H=7, W=6, K=8, stride=(2, 1), padding=((1, 2), (2, 0)), dilation=(1, 2), dtype=name)
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
