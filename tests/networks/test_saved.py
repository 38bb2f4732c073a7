"""Networks on disk: the same answers in another process, and nothing that a damaged file could do."""

from __future__ import annotations

import functools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from damaged import header_of
from graphs import compiled, drawn, filters, graph_of, small

import autoconv
from autoconv.common.types import DTYPES
from autoconv.cpu import pool
from autoconv.cpu.device import CPU
from autoconv.errors import ConfigError
from autoconv.networks.compiled import saved
from autoconv.networks.graph import Graph
from autoconv.networks.operators import Concat, Conv, Elementwise, Pad, Slice, TensorType
from autoconv.networks.operators.sampling import Sampler
from autoconv.networks.passes import optimized
from autoconv.networks.run.planned import Choices

pytestmark = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")


@functools.cache
def whole() -> bytes:
    """A saved network."""
    with tempfile.TemporaryDirectory() as folder:
        compiled(small(1)).save(Path(folder) / "net.autoconv")
        return (Path(folder) / "net.autoconv").read_bytes()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "net.autoconv").write_bytes(whole())
    return tmp_path / "net.autoconv"


def changed(path: Path, **changes: Any) -> None:
    """The file with another header."""
    with header_of(path) as header:
        header |= changes


def test_a_saved_network_answers_the_same(path: Path) -> None:
    net = compiled(small(1)).tune("direct")
    net.save(path)
    x = drawn(net.graph)
    expected = net.run(**x)
    again = autoconv.load(path, batch=1)
    assert {name: made.candidate for name, made in again.plans.items()} == {
        name: made.candidate for name, made in net.plans.items()
    }
    for name, y in again.run(**x).items():
        np.testing.assert_array_equal(y, expected[name])
    with pytest.raises(ConfigError, match="batch=2: the file says"):
        autoconv.load(path, batch=2)
    with pytest.raises(ConfigError, match="input_shapes: expected None"):
        autoconv.load(path, input_shapes={"x": (2, 4, 12, 10)})


def test_a_saved_network_keeps_its_nodes(tmp_path: Path) -> None:
    """All of them, though passes that ran once more would drop one: a factor of 1 that an earlier one wrote down."""
    graph = Graph("factor")
    x = graph.add_input("x", TensorType((8, 4, 6, 6)))
    a = graph.add(
        "a", Elementwise(("relu", 0)), graph.add("c", Conv(), x, graph.add_constant("w", filters(4, 4, 1, 1)))
    )
    m = graph.add("m", Elementwise(("mul", 0, 1)), a, graph.add_constant("one", np.ones(1, np.float32)))
    graph.outputs["y"] = graph.add("y", Conv(), m, graph.add_constant("v", filters(4, 4, 1, 1)))
    images = dict.fromkeys(optimized(graph).nodes, 1)
    assert set(images) > set(optimized(optimized(graph)).nodes)
    net = compiled(graph, known=Choices(images=images))
    net.save(tmp_path / "net.autoconv")
    again = autoconv.load(tmp_path / "net.autoconv")
    assert again.images == images
    given = drawn(graph)["x"]
    np.testing.assert_array_equal(again.run(given), net.run(given))


@pytest.mark.parametrize("change", ["device", "candidates"])
def test_what_is_not_of_today_is_found_anew(path: Path, change: str) -> None:
    kept = saved.read(path)
    if change == "device":
        changed(path, device="cpu-of-another")
    else:
        changed(path, candidates=dict.fromkeys(kept.choices.candidates, "gone[BM=1]"))
    net, again = compiled(small(1)), autoconv.load(path)
    x = drawn(net.graph)
    for name, y in again.run(**x).items():
        np.testing.assert_array_equal(y, net.run(**x)[name])


def test_a_damaged_file_is_one_line(path: Path) -> None:
    for cut in range(5, len(whole()), max(1, len(whole()) // 23)):
        path.write_bytes(whole()[:cut])
        with pytest.raises(ConfigError, match="not a saved network, or damaged"):
            autoconv.load(path)
    path.write_bytes(whole()[:3])
    with pytest.raises(ConfigError):
        autoconv.load(path)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "int4", "uint4"])
def test_constants_of_a_type_that_is_not_numpys_come_back(dtype: str, tmp_path: Path) -> None:
    graph = Graph("narrow")
    x = graph.add_input("x", TensorType((1, 3), dtype))
    found = np.array([[1, 2, 3], [0, 5, 7]]).astype(dtype)
    graph.outputs["y"] = graph.add("y", Concat(0), x, graph.add_constant("k", found))
    compiled(graph).save(tmp_path / "net.autoconv")
    y = autoconv.load(tmp_path / "net.autoconv").run(found[:1])
    assert y.dtype == dtype
    np.testing.assert_array_equal(y.astype(np.float32), np.concatenate([found[:1], found]).astype(np.float32))


def test_constants_of_bfloat16_come_back(tmp_path: Path) -> None:
    graph = Graph("bfloat16")
    x = graph.add_input("x", TensorType((1, 4, 6, 6), "bfloat16"))
    w = graph.add_constant("w", filters(8, 4, 3, 3).astype(DTYPES["bfloat16"]))
    graph.outputs["y"] = graph.add("y", Conv(padding=((1, 1), (1, 1))), x, w)
    net = compiled(graph)
    net.save(tmp_path / "net.autoconv")
    given = np.ones((1, 4, 6, 6), DTYPES["bfloat16"])
    np.testing.assert_array_equal(autoconv.load(tmp_path / "net.autoconv").run(given), net.run(given))


def test_constants_in_another_order_of_bytes_are_refused(path: Path) -> None:
    with np.load(path) as archive:
        arrays = dict(archive)
    arrays["c0"] = arrays["c0"].astype(">f4")
    with path.open("wb") as file:
        np.savez(file, **arrays)
    with pytest.raises(ConfigError, match="small: constant 'wa': expected numbers"):
        autoconv.load(path)


@pytest.mark.parametrize("flag", [1, 64])
def test_an_archive_that_wants_a_password_is_no_network(path: Path, flag: int) -> None:
    """Which a single wrong bit says; Python's reader of archives has an error of its own for each such bit."""
    data = bytearray(whole())
    data[data.index(b"PK\x01\x02") + 8] |= flag
    path.write_bytes(data)
    with pytest.raises(ConfigError, match="not a saved network, or damaged"):
        autoconv.load(path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 1}, "expected a network of format 2, got 1"),
        ({"nodes": [["y", "Exec", {}, ["x"]]]}, "not a saved network, or damaged: 'Exec'"),
        ({"nodes": [["y", "Reshape", {"shape": [3]}, ["x"]]]}, "expected as many elements"),
        ({"nodes": [["y", "Reshape", {"form": [3]}, ["x"]]]}, "unexpected keyword"),
        ({"nodes": [["y", "Reshape", {"shape": [480]}, ["z"]]]}, "not a saved network, or damaged: 'z'"),
        ({"nodes": [["y", "Elementwise", {"expression": ["system", 0]}, ["x"]]]}, "expected a function of"),
        ({"nodes": [["y", "Elementwise", {"expression": ["add", 0, 1]}, ["x"]]]}, "expected a function of"),
        ({"outputs": {"y": "nowhere"}}, "expected outputs that are computed"),
        ({"inputs": [["x", [1, 4, 12, -10], "float32"]]}, "expected extents of at least 0"),
        *(
            ({"inputs": [["x", [1, 4, 12, 10], dtype]]}, f"input 'x': expected a type of numbers, got {dtype}")
            for dtype in ("object", "V8", "S5", "datetime64", ">f4")
        ),
        ({"inputs": [["x", [1, 4, 12, 400_000_000], "float32"]]}, "array 'x': float32 .* takes 73242.19 MiB, and"),
        ({"inputs": [["x", [400_000_000, 4, 12, 10], "float32"]]}, "array 'x': .* takes 732421.88 MiB, and"),
        (
            {
                "nodes": [["y", "Pad", {"before": [0], "after": [1]}, ["b"]]],
                "inputs": [["b", [3], "float32"]],
                "outputs": {"y": "y"},
                "nhwc": ["y"],
            },
            "nhwc: expected nodes that can be in NHWC, got y",
        ),
        ({"images": {"up": 1}}, "node 'up': cannot be computed for 1 of 1 images"),
        ({"images": {"up": "1"}}, "images: expected numbers of images, got {'up': '1'}"),
        ({"images": [3]}, "not a saved network, or damaged"),
        ({"candidates": 3}, "not a saved network, or damaged"),
        *(
            ({"nodes": [["y", kind, values, ["x"]]], "outputs": {"y": "y"}}, message)
            for kind, values, message in (
                ("Reduce", {"reduction": "sum", "axes": [1, 1]}, r"axes=\(1, 1\): expected different ones"),
                ("Concat", {"axis": -1}, "axis=-1: expected it counted from the front"),
                ("Resize", {"axis": -1, "indices": [[0]], "weights": [[1.0]]}, "axis=-1: expected it counted from the"),
                ("Resize", {"axis": 1, "indices": [[0], [0]], "weights": [[1.0]]}, "expected as many indices and"),
                (
                    "Resize",
                    {"axis": 1, "indices": [[0, 1]], "weights": [[1.0]]},
                    "expected as many indices and weights",
                ),
                ("Resize", {"axis": 1, "indices": [[0, 1], [1]], "weights": [[1.0, 0.0], [1.0]]}, "expected as many"),
                ("Resize", {"axis": 1, "indices": [[]], "weights": [[]]}, "expected as many indices and weights"),
                ("Resize", {"axis": 1, "indices": [[4]], "weights": [[1.0]]}, "indices: expected 0 to 3"),
                ("LRN", {"size": 5, "alpha": 1e300, "beta": 0.75, "bias": 1.0}, r"alpha=1e\+300: expected a number wi"),
                ("LRN", {"size": 5, "alpha": 1.0, "beta": -1e39, "bias": 1.0}, r"beta=-1e\+39: expected a number with"),
                (
                    "Pool",
                    {"reduction": "max", "window": [2, 2], "padding": [[0, 0, 0], [0, 0, 1]]},
                    r"node 'y' \(Pool\): padding=\(\(0, 0, 0\), \(0, 0, 1\)\): expected Sides",
                ),
                ("Pool", {"reduction": "min", "window": [2, 2]}, "reduction='min': expected Literal"),
                (
                    "Pad",
                    {"before": [0, 0, 0, 1e400], "after": [0, 0, 0, 0]},
                    r"before=\(0, 0, 0, inf\): expected tuple",
                ),
                ("Pad", {"before": [0] * 4, "after": [1] * 4, "value": "a"}, "value='a': expected float"),
                ("Reshape", {"shape": [480.0]}, r"shape=\(480.0,\): expected tuple\[int, \.\.\.\]"),
                ("Resize", {"axis": 1, "indices": [[0]], "weights": [[""]]}, r"weights=\(\('',\),\): expected tuple"),
                ("LRN", {"size": True, "alpha": 1, "beta": 1, "bias": 1}, "size=True: expected int"),
                ("Conv", {"activation": 3}, r"activation=3: expected str \| None"),
            )
        ),
    ],
)
def test_what_a_file_says_is_checked(path: Path, changes: dict[str, Any], message: str) -> None:
    changed(path, **changes)
    with pytest.raises(ConfigError, match=message):
        autoconv.load(path)


def test_bytes_are_pooled_in_nhwc_by_numpy(path: Path) -> None:
    """For which there is no kernel, so that no network of ours has such a node."""
    pool = ["y", "Pool", {"reduction": "max", "window": [2, 2], "layout": "NHWC"}, ["x"]]
    changed(path, inputs=[["x", [1, 3, 3, 40], "uint8"]], nodes=[pool], outputs={"y": "y"}, candidates={})
    x = np.random.default_rng(0).integers(0, 255, (1, 3, 3, 40), np.uint8, endpoint=True)
    net = autoconv.load(path)
    assert "NumPy" in net.explain()
    windows = np.lib.stride_tricks.sliding_window_view(x, (2, 2), (1, 2))
    np.testing.assert_array_equal(net.run(x), windows.max((-1, -2)))


@pytest.mark.parametrize("mode", ["linear", "cubic"])
def test_resized_images_are_saved(mode: str, tmp_path: Path) -> None:
    """Whose weights come from coordinates of float32."""
    scale = np.float32(5) / np.float32(9)
    sampler = Sampler(mode=mode, coordinate="half_pixel", antialias=True)
    graph = graph_of(sampler.resize(2, 9, 5, scale), (1, 2, 9, 3))
    net = compiled(graph)
    net.save(tmp_path / "net.autoconv")
    x = drawn(graph)
    np.testing.assert_array_equal(autoconv.load(tmp_path / "net.autoconv").run(**x), net.run(**x))


def test_memory_has_to_hold_one_image_of_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all of what comes and goes; the rest may be computed in parts."""
    graph = graph_of(Pad((0, 0, 0, 0), (0, 0, 32, 32)), (16, 1, 2, 2))
    graph.outputs = {"z": graph.add("z", Slice((0, 0, 0, 0), (16, 1, 3, 1), (1, 1, 1, 1)), "y")}
    image = graph.types["y"].nbytes // 16
    monkeypatch.setattr(CPU, "memory", lambda self: image)
    compiled(graph)
    monkeypatch.setattr(CPU, "memory", lambda self: image - 1)
    with pytest.raises(ConfigError, match=r"test: array 'y': .* takes 4.5 KiB for one image, and .* of memory"):
        compiled(graph)
    monkeypatch.setattr(CPU, "memory", lambda self: 255)
    with pytest.raises(ConfigError, match=r"test: array 'x0': .* takes 256 B, and .* has 255 B of memory"):
        compiled(graph)
    with pytest.raises(ConfigError, match=r"test: array 'x0': .* takes "):  # more bytes than 64 bits can count
        compiled(graph_of(graph.nodes["y"].operator, (2**31, 1, 2**31, 2**31)))


def test_a_saved_network_is_a_file_as_others_are(tmp_path: Path) -> None:
    (tmp_path / "other").touch()
    (tmp_path / "link").symlink_to("target")
    compiled(small(1)).save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "target").stat().st_mode == (tmp_path / "other").stat().st_mode, "who may read it"


def test_a_path_is_one() -> None:
    with pytest.raises(ConfigError, match="path=None: expected a path, as str or Path"):
        compiled(small(1)).save(None)  # type: ignore[arg-type]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    net = compiled(small(1))
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        net.save(tmp_path / "missing" / "net.autoconv")
    with pytest.raises(ConfigError, match="cannot be written: embedded null"):
        net.save(tmp_path / "a\0net")
    assert not [*tmp_path.rglob("*net*")]
