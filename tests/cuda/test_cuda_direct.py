"""Textures, and the geometry of the tiled and of the images-innermost direct convolution."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from layers import edge, operands
from simt.cases import DEVICE, check, on_device, run
from simt.emulator import MISSING, EmulationError, launcher

from autoconv.bench.gpu.cases import cases
from autoconv.cuda.codegen import tensor_map as module
from autoconv.cuda.codegen.source import TYPES, Unit
from autoconv.cuda.codegen.tensor_map import TEXTURE_ALIGNMENT, TensorMapError, Texture, passing
from autoconv.cuda.direct.chwn import DirectCHWN, _meetings
from autoconv.cuda.direct.direct import Direct
from autoconv.cuda.direct.tiled import SHARED, TILES, DirectTiled, _footprint
from autoconv.cuda.stem.tensor import DirectTensor
from autoconv.layer import DTYPES, LAYOUTS, ConvLayer
from autoconv.tuning.reference import convolve, error, magnitude

TILED, CHWN, TENSOR = DirectTiled(), DirectCHWN(), DirectTensor()
TEXTURED = {"BM": 8, "TQ": 5, "TK": 8, "BK": 4, "INPUT": "texture"}
LAYER = ConvLayer(N=2, C=4, H=9, W=16, K=6, R=3, S=3, padding=((2, 1), (1, 3)))
needs_gxx = pytest.mark.skipif(MISSING, reason="NOT CHECKED: the emulator needs g++")


# ---- textures


def read(array: Any, texture: Texture, at: list[tuple[int, int]]) -> Any:
    """Elements of an array, as a kernel reads them through a texture."""
    kind = TYPES[{2: "float16", 4: "float32", 8: "float64"}[texture.itemsize]]
    fetches = "".join(f"p1[{i}] = Texel<{kind}>::of(texel_bits(p0, {x}, {y}));\n" for i, (x, y) in enumerate(at))
    unit = Unit("test", "common/common.cuh", edge("one"), (1, 1, 1), threads=1, blocks=1, maps=(texture,))
    text = f'{unit.text}\nextern "C" __global__ void test(const Texture p0, {kind}* p1) {{\n{fetches}}}\n'
    out = DEVICE.empty((len(at),), array.dtype)
    launcher(unit, ("-O1",), 0, text)(array, out)
    return out


@needs_gxx
@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_a_texture_has_zeros_beyond_its_borders(dtype: str) -> None:
    array = on_device(DEVICE, np.arange(1, 3 * 16 + 1, dtype=dtype).reshape(3, 16))
    at = list(itertools.product((-20, -1, 0, 7, 15, 16), (-1, 0, 2, 3)))
    wanted = [array[y, x] if 0 <= x < 16 and 0 <= y < 3 else 0 for x, y in at]
    np.testing.assert_array_equal(read(array, Texture(array.itemsize, 16, 3), at), wanted)


@needs_gxx
def test_the_emulator_holds_a_texture_to_its_alignment() -> None:
    array = on_device(DEVICE, np.zeros(1024, "f"))
    with pytest.raises(EmulationError, match="multiple of 512"):
        read(array[64:], Texture(4, 8, 2), [(0, 0)])
    with pytest.raises(EmulationError, match="lines of 28 bytes"):
        read(array, Texture(4, 7, 2), [(0, 0)])


def test_what_texture_units_cannot_do_is_said() -> None:
    assert Texture(4, 8, 65000).faults() == []
    assert Texture(2, 8, 1).faults() == ["lines: expected multiples of 32 bytes in a texture, got 16"]
    assert Texture(4, 16, 65001).faults() == ["height: expected at most 65000 in a texture, got 65001"]
    wide = Texture(8, 131072 + 8, 3).faults()
    assert [fault.split(":")[0] for fault in wide] == ["width"]
    (reason,) = TILED.why_not(LAYER.replace(W=15), DEVICE, TEXTURED)
    assert reason == "lines: expected multiples of 32 bytes in a texture, got 60"
    assert TILED.why_not(LAYER, DEVICE, TEXTURED | {"INPUT": "array"}) == ["INPUT=array: expected texture, or no INPUT"]


class FakeDriver:
    """What cuTexObjectCreate is called with."""

    def __init__(self, status: int = 0) -> None:
        self.calls: list[tuple[bytes, bytes]] = []
        self.status = status

    def __call__(self, function: str) -> Callable[..., int]:
        assert function == "cuTexObjectCreate"

        def call(target: ctypes.c_void_p, resource: Any, sampling: Any, view: None) -> int:
            assert target.value is not None
            ctypes.c_uint64.from_address(target.value).value = 70 + len(self.calls)
            self.calls.append((bytes(resource._obj), bytes(sampling._obj)))
            return self.status

        return call


def test_textures_are_made_as_the_driver_wants_them(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    monkeypatch.setattr(module, "_driver", driver)
    mapped = passing((Texture(2, 48, 5),), lambda array: array)
    first, again = mapped([1024, "out"]), mapped([1024, "out"])
    assert (first[0], again[0], first[1]) == (70, 70, "out")
    for i in range(40):  # none is forgotten: it would be made anew, and none is ever destroyed
        mapped([2048 * i, "out"])
    assert mapped([1024, "out"])[0] == 70
    assert isinstance(first[0], np.uint64)  # what CuPy passes by value
    (resource, sampling), *_ = driver.calls
    # CUDA_RESOURCE_DESC: kind, address, format (unsigned, 16 bits), one channel, width, height, pitch
    assert len(resource) == 144
    assert np.frombuffer(resource[:48], "i4,i4,u8,i4,u4,u8,u8,u8")[0].tolist() == (3, 0, 1024, 2, 1, 48, 5, 96)
    # CUDA_TEXTURE_DESC: borders on all sides, no filter, integers as they are, coordinates in texels, zeros outside
    assert len(sampling) == 104
    assert np.frombuffer(sampling, "i4").tolist() == [3, 3, 3, 0, 1, *[0] * 21]
    monkeypatch.setattr(module, "_driver", FakeDriver(status=1))
    with pytest.raises(TensorMapError, match="CUresult 1"):
        Texture(2, 48, 5).encode(512)


@needs_gxx
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("layout", "direction"), [("NCHW", "fwd"), ("NHWC", "dgrad")])
def test_pixels_come_through_textures(direction: str, layout: str, dtype: str) -> None:
    """Where they begin on a texture's boundary; others go the plain way, where the emulator would complain."""
    layer = LAYER.replace(direction=direction, layout=layout, dtype=dtype, padding=((2, 1), (1, 1)))
    assert not TILED.why_not(layer, DEVICE, TEXTURED)
    given = operands(layer)
    wanted, scale = convolve(layer, *given), magnitude(layer, *given)
    kernel = TILED.build(layer, DEVICE, TEXTURED)
    a, b = (on_device(DEVICE, array) for array in given[:2])
    moved = DEVICE.empty((a.size + 64 // a.itemsize,), a.dtype)[64 // a.itemsize :].reshape(a.shape)
    moved[...] = a
    assert moved.ctypes.data % TEXTURE_ALIGNMENT == 64
    packed = DEVICE.buffer(kernel.packed_bytes)
    kernel.pack(b, packed)
    for x in (a, moved):
        out = DEVICE.empty(layer.output_shape, layer.numpy_dtype)
        kernel.run(x, packed, out, None, None, DEVICE.buffer(0))
        assert error(out, wanted, scale) <= TILED.bound(layer, TEXTURED)


@needs_gxx
def test_the_plain_way_is_not_the_textured_one(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    called: list[str] = []

    def load(device: Any, units: Any) -> list[Callable[..., None]]:
        loaded.extend(unit.function for unit in units)
        return [lambda *_, name=unit.function: called.append(name) for unit in units]

    monkeypatch.setattr(DirectTiled, "load", lambda self, device, units: load(device, units))
    kernel = TILED.build(LAYER, DEVICE, TEXTURED)
    assert loaded == ["tiled_filter", "direct_tiled", "direct_textured"]
    a = DEVICE.empty((1024,), "float32")
    for x in (a, a[16:], a[128:]):
        kernel.run(x, a, a, None, None, a)
    assert called == ["direct_textured", "direct_tiled", "direct_textured"]


# ---- geometry


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("name", ["plain", "strided", "stem", "dilated strided", "one-dimensional", "many images"])
def test_every_output_has_a_place_in_some_block(name: str, tile: Any) -> None:
    layer = edge(name)
    shape = _footprint(layer, tile)
    assert 1 <= shape.images * shape.rows * shape.runs <= tile.runs
    assert shape.pitch >= shape.span_w


@pytest.mark.parametrize("stride", [1, 2, 3, 4])
@pytest.mark.parametrize("extent", [7, 13, 14, 27, 28, 55, 56, 112, 224])
def test_a_warp_reads_from_banks_of_its_own(extent: int, stride: int) -> None:
    """Mostly: two lanes of 32 at most share one, whatever the stride."""
    layer = ConvLayer(N=32, C=8, H=extent * stride, W=extent * stride, K=64, R=3, S=3, padding=1, stride=stride)
    for tile in TILES:
        shape = _footprint(layer, tile)
        begin = [
            image * shape.image + row * shape.pitch + run * tile.TQ
            for image, row, run in itertools.product(*map(range, shape[:3]))
        ][:32]
        assert max(map([place % 32 for place in begin].count, range(32))) <= 2


def _params(tile: Any) -> dict[str, int]:
    return {"BM": tile.BM, "TQ": tile.TQ, "TK": tile.TK, "BK": 1}


def test_few_channels_get_small_tiles_and_large_filters_few_channels() -> None:
    def offered(**fields: Any) -> list[dict[str, Any]]:
        return [dict(params) for params in TILED.candidates(LAYER.replace(**fields), DEVICE)]

    assert {params["BM"] for params in offered(K=2)} == {8}
    assert {params["BM"] for params in offered(K=64)} == {8, 16, 32, 64}
    assert {params["BK"] for params in offered(C=64, R=11, S=11, padding=5)} == {1}
    assert max(params["BK"] for params in offered(C=3)) == 4  # as many as there are, in whole powers of two
    large = LAYER.replace(R=31, S=31, padding=15, K=64)
    (reason,) = TILED.why_not(large, DEVICE, _params(TILES[0]))
    assert "bytes to a block, got" in reason


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_in_shared_memory_lets_as_many_blocks_be_there_as_meant(dtype: str) -> None:
    for layer in (LAYER.replace(C=64, K=64, dtype=dtype), LAYER.replace(C=3, K=96, R=5, S=5, W=32, dtype=dtype)):
        for params in TILED.candidates(layer, DEVICE):
            unit = TILED.units(layer, params)[1]
            assert unit.shared * unit.blocks <= SHARED
            assert params["BK"] == 1 or params["BK"] < 2 * layer.C


@pytest.mark.parametrize("case", list(cases(CHWN))[::5], ids=str)
def test_taps_that_meet_nothing_are_not_counted(case: tuple[ConvLayer, Any, int]) -> None:
    """The estimate's count of products is that of the sum with ones for all numbers."""
    layer = case[0].replace(bias=False, residual=False, activation=None, dtype="float64")
    ones = [np.ones(shape) for shape in layer.input_shapes]
    products = convolve(layer, *ones).sum()
    down, across = _meetings(layer)
    assert products == layer.N * layer.K * layer.C // layer.groups * down * across


# ---- by the definition


@needs_gxx
@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
def test_direct_ends_a_transposed_convolution(layout: str) -> None:
    layer = edge("stride skips pixels", direction="dgrad", layout=layout, bias=True, residual=True, activation="relu")
    check(DEVICE, Direct(), layer, {})


# ---- few channels on tensor cores


@needs_gxx
@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_infinite_pixel_makes_no_other_sum_a_nan(layout: str) -> None:
    """Neither by the zeros behind the last tap nor by those of the channels that there are not."""
    layer = ConvLayer(N=1, C=3, H=6, W=7, K=5, R=3, S=3, padding=1, dtype="float16", layout=layout)
    x, w, *_ = operands(layer)
    w = np.abs(w) + np.float16(0.5)
    x[0, 0, 2, 2] = np.inf
    out = run(DEVICE, TENSOR, layer, next(iter(TENSOR.candidates(layer, DEVICE))), (x, w, None, None))
    wanted = convolve(layer, x, w)
    assert np.isinf(wanted).any()
    np.testing.assert_array_equal(np.isinf(out), np.isinf(wanted))
    assert not np.isnan(out).any()


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"C": 9}, "C=9: expected at most 8"),
        ({"direction": "dgrad"}, "direction: expected fwd, got dgrad"),
        ({"dtype": "float32"}, "dtype: expected float16 or bfloat16, got float32"),
        ({"C": 4, "K": 4, "groups": 2}, "channels: expected dense, got grouped"),
    ],
    ids=str,
)
def test_what_tensor_cores_of_few_channels_do_not_take_is_said(fields: dict[str, Any], reason: str) -> None:
    layer = ConvLayer(**({"N": 1, "C": 3, "H": 6, "W": 7, "K": 5, "R": 3, "S": 3, "dtype": "float16"} | fields))
    assert reason in TENSOR.why_not(layer, DEVICE, {"BM": 64, "BQ": 16, "WARPS": 4})
