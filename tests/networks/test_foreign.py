"""Operators that are not known here: run elsewhere, and said so."""

from __future__ import annotations

import base64
import dataclasses
import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx")

import onnx
from damaged import header_of
from onnx import helper
from onnx_models import model, model_like, node

import autoconv
from autoconv.cpu.device import CPU
from autoconv.errors import ArrayError, ConfigError
from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.networks.onnx_reader import translated
from autoconv.networks.operators import Foreign, ForeignOnnx
from autoconv.networks.operators import foreign as operator
from autoconv.networks.reference import evaluate
from autoconv.vendors.onnxruntime import SPINNING

INSTALLED = importlib.util.find_spec("onnxruntime") is not None
BY = "ONNX Runtime" if INSTALLED else "onnx.reference"
X = np.random.default_rng(0).standard_normal((2, 3, 3)).astype(np.float32)

LARGE = np.random.default_rng(1).uniform(0.5, 1, (4000, 1, 3, 3)).astype(np.float32)

CASES: dict[str, tuple[list[Any], dict[str, np.ndarray], Any]] = {
    "a scalar for each": ([node("Det", "x")], {}, np.linalg.det(X)),
    "after ours": ([node("Relu", "x", "r"), node("Det", "r")], {}, np.linalg.det(np.maximum(X, 0))),
    "before ours": ([node("CumSum", "x a", "c"), node("Relu", "c")], {"a": np.int64(1)}, np.maximum(X.cumsum(1), 0)),
    "the second output": (
        [helper.make_node("TopK", ["x", "k"], ["", "y"], axis=2)], {"k": np.array([2])},
        np.argsort(-X, axis=2)[..., :2],
    ),
    "images of three dimensions": (
        [node("Reshape", "x s", "r"), node("ConvTranspose", "r w")],
        {"s": np.array([1, 1, 2, 3, 3]), "w": np.full((1, 1, 1, 1, 1), 2, np.float32)}, 2 * X[None, None],
    ),
    "very many times": (
        [node("Expand", "x s")], {"s": np.array([70000, 1, 1, 1])}, np.broadcast_to(X, (70000, 2, 3, 3)),
    ),
    "large constants are given": (
        [node("Mod", "x w", fmod=1)], {"w": LARGE}, np.fmod(X, LARGE),
    ),
}  # fmt: skip


def network(name: str) -> CompiledNetwork:
    nodes, constants, _ = CASES[name]
    return CompiledNetwork(translated(model(nodes, {"x": list(X.shape)}, constants), "net"), CPU.current(), {})


@pytest.mark.parametrize("name", CASES)
def test_an_unknown_operator_is_run_elsewhere(name: str, tmp_path: Path) -> None:
    net = network(name)
    np.testing.assert_allclose(net.run(X), CASES[name][2], rtol=1e-5, atol=1e-6)
    (found,) = (n.operator for n in net.graph.nodes.values() if isinstance(n.operator, Foreign))
    assert found.by == BY
    assert f"{found.kind} " in net.explain()
    assert net.explain().count(BY) == 1
    net.save(tmp_path / "net.autoconv")
    np.testing.assert_array_equal(autoconv.load(tmp_path / "net.autoconv").run(X), net.run(X))


def test_a_scalar_is_given_as_one(capfd: pytest.CaptureFixture[str]) -> None:
    made = model([node("ReduceMean", "x", "m", keepdims=0), node("Floor", "m")], {"x": [2, 3, 3]})
    assert CompiledNetwork(translated(made, "net"), CPU.current(), {}).run(X) == np.floor(X.mean())
    assert capfd.readouterr().err == ""  # where ONNX Runtime would say that shapes are others


def test_what_another_library_does_not_take_is_told_by_the_node() -> None:
    places = np.array([0, 2, 1])
    made = model_like([node("Gather", "x i", axis=1)], {"x": X, "i": places}, {})
    net = CompiledNetwork(translated(made, "net"), CPU.current(), {})
    np.testing.assert_array_equal(net.run(X, places), X[:, places])
    with pytest.raises(
        ArrayError, match=rf"^net: node 'y' \(Gather\): {BY} did not compute it from these inputs: ."
    ) as e:
        net.run(X, places + 1)
    assert "\n" not in str(e.value)


def missing(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(operator.importlib.util, "find_spec", lambda name: None if name in packages else find(name))


def test_without_onnx_runtime_the_reference_runs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    missing(monkeypatch, "onnxruntime")
    net = network("a scalar for each")
    assert "onnx.reference" in net.explain()
    np.testing.assert_allclose(net.run(X), np.linalg.det(X), rtol=1e-5)
    missing(monkeypatch, "onnxruntime", "onnx")
    with pytest.raises(ConfigError, match="Det: no kernel here: expected onnxruntime or onnx to be installed"):
        network("a scalar for each")


def test_what_onnx_runtime_does_not_know_the_reference_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(operator.importlib.util, "find_spec", lambda name: find("numpy"))  # as if all were installed
    monkeypatch.setattr(operator, "_session", lambda model, threads: None)
    net = network("a scalar for each")
    assert "onnx.reference" in net.explain()
    np.testing.assert_allclose(net.run(X), np.linalg.det(X), rtol=1e-5)
    missing(monkeypatch, "onnx")
    with pytest.raises(ConfigError, match="got ONNX Runtime alone, which does not run it"):
        network("a scalar for each")


def test_constants_alone_are_computed_when_the_file_is_read() -> None:
    nodes = [node("Det", "k", "d"), node("Mul", "x d")]
    graph = translated(model(nodes, {"x": [2, 3, 3]}, {"k": 2 * np.eye(3, dtype=np.float32)}), "net")
    assert not any(isinstance(n.operator, Foreign) for n in graph.nodes.values())
    np.testing.assert_allclose(CompiledNetwork(graph, CPU.current(), {}).run(X), 8 * X, rtol=1e-6)


def test_small_constants_meet_large_ones() -> None:
    """Of which the former are within the model of the node, in float32."""
    nodes = [node("Greater", "w k", "b"), node("Where", "b w k", "c"), node("Sum", "x c")]
    graph = translated(model(nodes, {"x": [1, 3, 3]}, {"w": LARGE, "k": np.float32(0.7)}), "net")
    assert not any(isinstance(n.operator, Foreign) for n in graph.nodes.values())
    expected = X[0] + np.maximum(LARGE, np.float32(0.7))
    np.testing.assert_allclose(CompiledNetwork(graph, CPU.current(), {}).run(X[:1]), expected, rtol=1e-6)
    nodes = [node("CumSum", "x a", "c"), node("Greater", "c k", "b"), node("Where", "b c k")]
    graph = translated(model(nodes, {"x": [2, 3, 3]}, {"a": np.int64(1), "k": np.float32(0.7)}), "net")
    np.testing.assert_allclose(evaluate(graph, {"x": X})["y"], np.maximum(X.cumsum(1), np.float32(0.7)), rtol=1e-6)


@pytest.mark.parametrize("many", [1, 30_000])  # of which the constant is given to what casts it, and not within it
@pytest.mark.parametrize(
    ("kind", "saturate", "expected"),
    [
        ("FLOAT8E4M3FN", {}, [448, -448, 16]),
        ("FLOAT8E4M3FN", {"saturate": 0}, [np.nan, np.nan, 16]),
        ("FLOAT8E5M2", {}, [1024, -57344, 16]),
        ("FLOAT8E5M2", {"saturate": 0}, [1024, -np.inf, 16]),
    ],
)
def test_constants_become_eight_bits_as_onnx_says(
    kind: str, saturate: dict[str, int], expected: list[float], many: int
) -> None:
    nodes = [
        node("Cast", "k", "c", to=getattr(onnx.TensorProto, kind), **saturate),
        *(node("Cast", "c", "d", to=1), node("Add", "x d")),
    ]
    made = model(nodes, {"x": [1]}, {"k": np.tile(np.float32([1000, -1e6, 16.4]), many)}, opset=19)
    found = evaluate(translated(made, "net"), {"x": np.zeros(1)})["y"]
    np.testing.assert_array_equal(found, np.tile(expected, many))


def test_random_numbers_for_an_input_are_made_in_every_run() -> None:
    net = CompiledNetwork(
        translated(model([node("RandomNormalLike", "x")], {"x": [2, 3, 3]}), "net"), CPU.current(), {}
    )
    assert not np.array_equal(net.run(X), net.run(X))


@pytest.mark.parametrize("kind", ["RuntimeException", "Fail"])
def test_what_onnx_runtime_refuses_the_reference_runs(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="NOT CHECKED: onnxruntime is not installed")
    refusal = getattr(importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state"), kind)

    def session(*_: Any, **__: Any) -> Any:
        raise refusal("Exception during initialization")

    monkeypatch.setattr(operator, "_session", operator._session.__wrapped__)  # which remembers no other's
    monkeypatch.setattr(onnxruntime, "InferenceSession", session)
    assert "onnx.reference" in network("a scalar for each").explain()


@pytest.mark.parametrize("threads", [1, 2])
def test_onnx_runtime_has_no_more_threads_than_the_device(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    onnxruntime = pytest.importorskip("onnxruntime", reason="NOT CHECKED: onnxruntime is not installed")
    session, made = onnxruntime.InferenceSession, []

    def noted(model: bytes, options: Any, **rest: Any) -> Any:
        made.append(options.intra_op_num_threads)
        assert options.get_session_config_entry(SPINNING) == "0"  # its threads leave the cores to ours
        return session(model, options, **rest)

    monkeypatch.setattr(operator, "_session", operator._session.__wrapped__)  # which remembers no other's
    monkeypatch.setattr(onnxruntime, "InferenceSession", noted)
    nodes = [helper.make_node("TopK", ["x", "k"], ["v", "i"], axis=2), node("Cast", "i", "f", to=1), node("Add", "v f")]
    graph = translated(model(nodes, {"x": list(X.shape)}, {"k": np.array([2])}), "net")
    net = CompiledNetwork(graph, dataclasses.replace(CPU.current(), threads=threads), {})
    assert made[-1] == max(made) == threads
    places = np.argsort(-X, axis=2)[..., :2]
    np.testing.assert_allclose(net.run(X), np.take_along_axis(X, places, 2) + places, rtol=1e-6)


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (
            node("GatherElements", "k far"),
            r"node 'y' \(GatherElements\): no kernel here, and what else runs it fails: ",
        ),
        (node("RandomNormal", "", shape=[2]), r"node 'y' \(RandomNormal\): expected no random numbers"),
        (node("RandomUniform", "", shape=[2], seed=1.0), r"\(RandomUniform\): expected no random numbers"),
        (node("RandomNormalLike", "k"), r"\(RandomNormalLike\): expected no random numbers"),
        (node("RandomUniformLike", "k"), r"\(RandomUniformLike\): expected no random numbers"),
        (node("Bernoulli", "k"), r"\(Bernoulli\): expected no random numbers"),
        (node("Multinomial", "k"), r"\(Multinomial\): expected no random numbers"),
        (node("NonZero", "x"), r"node 'y' \(NonZero\): no kernel here, and the shape of its output 0 is not known"),
        (node("TopK", "x x", "y z"), r"node 'y' \(TopK\): no kernel here, and ONNX does not take it: "),
        (helper.make_node("Det", ["x"], ["y"], domain="com.example"), r"no such operator here of the domain"),
        (
            helper.make_node("If", ["x"], ["y"], then_branch=onnx.GraphProto(), else_branch=onnx.GraphProto()),
            r"node 'y' \(If\): no such operator here",
        ),
    ],
)
def test_what_nobody_can_run_is_named(made: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        translated(
            model([made], {"x": [2, 3, 3]}, {"k": np.ones((1, 2), np.float32), "far": np.array([[9]])}), "net.onnx"
        )
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("location", ["k.bin", "../folder/k.bin"])
def test_a_saved_model_reads_no_files(location: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From wherever it comes, it could else show the world what lies beside the process that runs it."""
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    Path("k.bin").write_bytes(X[0].tobytes())
    elsewhere = onnx.TensorProto(name="k", data_type=1, dims=[3, 3], data_location=onnx.TensorProto.EXTERNAL)
    elsewhere.external_data.add(key="location", value=location)
    nodes = [node("MatMul", "i0 k", "m"), node("Det", "m", "o0")]
    made = model(nodes, {"i0": list(X.shape)}, {}, outputs=["o0"])
    made.graph.output[0].type.tensor_type.CopyFrom(onnx.helper.make_tensor_type_proto(1, [2]).tensor_type)
    made.graph.initializer.append(elsewhere)
    network("a scalar for each").save("net.autoconv")
    with header_of(Path("net.autoconv")) as header:
        header["nodes"][0][2]["model"] = base64.b64encode(made.SerializeToString()).decode()
    with pytest.raises(ConfigError, match=r"node 'y', Det of .*: expected an ONNX model of this node: "):
        autoconv.load("net.autoconv")


def of_another() -> str:
    """The model of another node."""
    (found,) = (n.operator for n in network("the second output").graph.nodes.values())
    assert isinstance(found, ForeignOnnx)
    return found.model


@pytest.mark.parametrize("packages", [["onnxruntime"], []])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": base64.b64encode(b"junk").decode()}, "expected an ONNX model of this node: "),
        ({"model": ""}, "expected a model of these inputs, got one of none"),
        ({"model": 3}, r"\(ForeignOnnx\): model=3: expected str"),
        ({"model": of_another}, r"which gives int64 \(2, 3, 2\), got 0: float32 \(2,\)"),
        ({"output": 1}, r"expected an output of its model, which gives float32 \(2,\), got 1: float32 \(2,\)"),
        ({"output": "0"}, r"\(ForeignOnnx\): output='0': expected int"),
        ({"takes": []}, "expected none"),
        ({"shape": [200_000_000_000]}, r"got 0: float32 \(200000000000,\)"),
        ({"shape": ["two"]}, r"shape=\('two',\): expected tuple\[int, \.\.\.\]"),
        ({"dtype": "float64"}, r"got 0: float64 \(2,\)"),
        ({"dtype": "object"}, r"got 0: object \(2,\)"),
    ],
)
def test_a_damaged_node_is_refused_when_the_file_is_read(
    change: dict[str, Any], message: str, packages: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "net.autoconv"
    network("a scalar for each").save(path)
    with header_of(path) as header:
        header["nodes"][0][2] |= {name: value() if callable(value) else value for name, value in change.items()}
    missing(monkeypatch, *packages)
    with pytest.raises(ConfigError, match=message) as caught:
        autoconv.load(path)
    assert "\n" not in str(caught.value)
