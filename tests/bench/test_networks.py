"""Whole networks in other processes: their runtimes, the race, and what is kept of it."""

from __future__ import annotations

import errno
import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click import ClickException
from click.testing import CliRunner

onnx = pytest.importorskip("onnx", reason="NOT CHECKED: onnx is not installed")

from autoconv.bench import results  # noqa: E402
from autoconv.bench.networks import models, process  # noqa: E402
from autoconv.bench.networks import race as networks_race  # noqa: E402
from autoconv.bench.networks.race import NetworkRace, keep, race_network  # noqa: E402
from autoconv.bench.networks.runtimes import OURS, RUNTIMES, Loaded, Runtime  # noqa: E402
from autoconv.bench.networks.torch_module import torch_module  # noqa: E402
from autoconv.cli.main import cli  # noqa: E402
from autoconv.cli.networks.run import _installed  # noqa: E402
from autoconv.cli.options import FAILED  # noqa: E402
from autoconv.cpu import pool  # noqa: E402
from autoconv.cpu.device import CPU  # noqa: E402
from autoconv.errors import ConfigError, PlanError  # noqa: E402
from autoconv.networks.onnx_reader.reader import translated  # noqa: E402
from autoconv.networks.operators import TensorType  # noqa: E402
from autoconv.networks.reference import evaluate  # noqa: E402

kernels = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")
IMAGE = TensorType((2, 3, 12, 12))


def small(nodes_taken: int | None = None) -> Any:
    """A network of any batch with what the nine have: batch normalisation, pooling, concatenation, reshaping."""
    rng = np.random.default_rng(0)
    node = onnx.helper.make_node
    weights = {
        "w": rng.standard_normal((8, 3, 3, 3)) / 5,
        "v": rng.standard_normal((8, 1, 3, 3)) / 3,
        "m": rng.standard_normal((10, 16 * 6 * 6)) / 24,
        "up": rng.standard_normal((16, 4, 2, 2)) / 8,
    }
    weights |= {name: 1 + rng.standard_normal(8) / 10 for name in ("scale", "mean", "variance", "shift")}
    constants = {name: value.astype(np.float32) for name, value in weights.items()}
    constants["flat"] = np.array([1, 16 * 6 * 6], np.int64)
    nodes = [
        node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
        node("BatchNormalization", ["a", "scale", "shift", "mean", "variance"], ["b"]),
        node("Relu", ["b"], ["c"]),
        node("Conv", ["c", "v"], ["d"], group=8, pads=[1, 1, 1, 1]),
        node("Sigmoid", ["d"], ["e"]),
        node("Mul", ["d", "e"], ["f"]),
        node("BatchNormalization", ["c", "scale", "shift", "mean", "variance"], ["g"]),
        node("Concat", ["f", "g"], ["h"], axis=1),
        node("AveragePool", ["h"], ["i"], kernel_shape=[3, 3], strides=[2, 2], pads=[1, 1, 1, 1]),
        node("MaxPool", ["h"], ["j"], kernel_shape=[3, 3], strides=[2, 2], ceil_mode=1),
        node("Add", ["i", "j"], ["k"]),
        node("ConvTranspose", ["k", "up"], ["image"], strides=[2, 2]),
        node("Reshape", ["k", "flat"], ["l"]),
        node("Gemm", ["l", "m"], ["n"], transB=1),
        node("Softmax", ["n"], ["scores"], axis=1),
    ]
    names = ["scores", "image"] if nodes_taken is None else [nodes[nodes_taken - 1].output[0]]
    made = onnx.helper.make_graph(
        nodes[:nodes_taken],
        "small",
        [onnx.helper.make_tensor_value_info("x", 1, (1, 3, 12, 12))],
        [onnx.helper.make_tensor_value_info(name, 1, (1, *[None] * 3)) for name in names],
        [onnx.numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return models.opened(onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=9))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "small.onnx"
    path.write_bytes(small().SerializeToString())
    return path


def image(batch: int) -> dict[str, np.ndarray]:
    return {"x": np.random.default_rng(1).standard_normal((batch, *IMAGE.shape[1:])).astype(np.float32)}


@pytest.mark.parametrize("name", [OURS, *RUNTIMES])
def test_every_runtime_gives_the_right_answer(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    runtime = process.AUTOCONV if name == OURS else RUNTIMES[name]
    if missing := [] if name == OURS else runtime.missing():
        pytest.skip(f"NOT CHECKED: {', '.join(missing)} not installed")
    if name == "torch_compiled":
        pytest.skip("NOT CHECKED: compiling takes too long here; the race compares its answers")
    nodes = 3 if name == "ncnn" else None  # whose converter crashes on the whole of it
    inputs, network = image(2), models.fixed(small(nodes), 2)
    want = evaluate(translated(network, "small"), inputs).values()
    model = tmp_path / "model.onnx"
    model.write_bytes(network.SerializeToString())
    loaded = runtime.load(model, inputs, CPU.current(1))
    for _ in range(2):
        found = loaded.read(loaded.run())
        for got, right in zip(found, want, strict=True):
            np.testing.assert_allclose(got, right, atol=1e-4)
    assert capfd.readouterr().out == ""


@pytest.mark.parametrize("attributes", [{}, {"ceil_mode": 1}, {"count_include_pad": 1}], ids=str)
def test_pytorch_averages_windows_padded_on_one_side(attributes: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")
    pool = onnx.helper.make_node(
        "AveragePool", ["x"], ["y"], kernel_shape=[3, 2], strides=[2, 3], pads=[0, 0, 1, 1], **attributes
    )
    x = np.random.default_rng(2).standard_normal((2, 3, 7, 7)).astype(np.float32)
    info = onnx.helper.make_tensor_value_info
    made = onnx.helper.make_graph([pool], "pool", [info("x", 1, x.shape)], [info("y", 1, (2, 3, None, None))])
    graph = translated(onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 19)]), "pool")
    (found,) = torch_module(graph)(torch.from_numpy(x))
    np.testing.assert_allclose(found, evaluate(graph, {"x": x})["y"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("operator", "inputs"), [("Max", ["zero", "x"]), ("Max", ["x", "zero"]), ("Min", ["zero", "x"])]
)
def test_pytorch_clamps_at_a_number_on_either_side(operator: str, inputs: list[str]) -> None:
    torch = pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")
    node, info = onnx.helper.make_node(operator, inputs, ["y"]), onnx.helper.make_tensor_value_info
    zero = onnx.numpy_helper.from_array(np.float32(0), "zero")
    made = onnx.helper.make_graph([node], "clamp", [info("x", 1, (2, 3))], [info("y", 1, (2, 3))], [zero])
    graph = translated(onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 19)]), "clamp")
    x = np.random.default_rng(3).standard_normal((2, 3)).astype(np.float32)
    (found,) = torch_module(graph)(torch.from_numpy(x))
    np.testing.assert_array_equal(found, evaluate(graph, {"x": x})["y"])


def test_ncnn_takes_one_input(tmp_path: Path) -> None:
    if missing := RUNTIMES["ncnn"].missing():
        pytest.skip(f"NOT CHECKED: {', '.join(missing)} not installed")
    with pytest.raises(PlanError, match="networks of one input, got 2"):
        RUNTIMES["ncnn"].load(tmp_path / "model.onnx", {"x": image(1)["x"], "y": image(1)["x"]}, CPU.current(1))


@kernels
def test_the_command_races_in_other_processes(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOCONV_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "results"
    command = ["run", str(path), "--batch", "2", "--threads", "1", "--repeat", "1"]
    if RUNTIMES["onnxruntime"].missing():
        refused = CliRunner().invoke(cli, [*command, "--against", "onnxruntime"])
        assert "not installed, onnxruntime: onnxruntime" in refused.output
        return
    race = ["--against", "onnxruntime", "--rounds", "6", "-o", str(folder), "--json"]
    done = CliRunner().invoke(cli, [*command, *race], standalone_mode=False)
    assert done.exception is None
    (row,) = json.loads((folder / "networks.json").read_text(encoding="utf-8"))["networks"]
    assert row == json.loads(done.stdout)["race"]
    assert (row["network"], row["batch"], row["threads"], row["best"]) == ("small", 2, 1, "onnxruntime")
    assert row["errors"]["onnxruntime"] < 1e-5
    assert set(row["foreign"]) <= {"image"}  # so small a transposed convolution that NumPy is as good
    assert row["arena_bytes"] > 0
    assert {name: len(samples) for name, samples in row["seconds"].items()} == {OURS: 6, "onnxruntime": 6}


class Contestant:
    """Stands for a process: answers, and how each fails."""

    def __init__(self, name: str, device: CPU) -> None:
        self.name, self.count = name, 0

    def load(self, model: Path, folder: Path) -> tuple[list[np.ndarray], dict[str, Any]]:
        assert onnx.load(model).graph.input[0].type.tensor_type.shape.dim[0].dim_value == 2
        if self.name == "openvino":
            raise PlanError("it cannot")
        wrong = 0.5 if self.name == "torch" else 1e-6 * (self.name == "mnn")
        second = np.array([np.nan if self.name == "torch_cl" else 1.0])
        return [np.array([1.0 + wrong, 2.0]), second], {
            "seconds": 0.5,
            "memory": 7,
            **({"arena_bytes": 3} if self.name == OURS else {}),
        }

    def sample(self) -> float:
        self.count += 1
        if self.name == "ncnn" and self.count == 3:
            raise PlanError("it fell over")
        return 2.0 if self.name == OURS else 3.0

    def close(self) -> None:
        pass


def test_who_fails_is_named_and_the_others_go_on(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(networks_race, "RuntimeProcess", Contestant)
    found = race_network(path, {"x": IMAGE}, 2, CPU.current(1), [*RUNTIMES], 6)
    assert found.failures == {
        "openvino": "it cannot",
        "torch": "its answer differs from that of autoconv by 2.5e-01 of the largest value",
        "torch_cl": "its answer differs from that of autoconv by nan of the largest value",
        "ncnn": "it fell over",
    }
    assert set(found.times) == {OURS, "onnxruntime", "torch_compiled", "mnn"}
    assert found.errors["mnn"] == pytest.approx(5e-7)
    assert found.best != OURS
    row = found.to_json()
    assert row["ratios"]["mnn"] == {"median": 1.5, "low": 1.5, "high": 1.5}
    assert row["arena_bytes"] == 3
    assert set(row["runtimes"]) == set(RUNTIMES)


def test_without_ours_nothing_is_raced(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Failing(Contestant):
        def load(self, model: Path, folder: Path) -> Any:
            asked.append(self.name)
            raise PlanError("it does not fit")

    monkeypatch.setattr(networks_race, "RuntimeProcess", Failing)
    with pytest.raises(PlanError, match="small: autoconv: it does not fit"):
        race_network(path, {"x": IMAGE}, 2, CPU.current(1), ["mnn"], 6)
    assert asked == [OURS]


@kernels
def test_a_race_that_ours_does_not_finish_is_not_kept(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Failing(Contestant):
        def sample(self) -> float:
            if self.name == OURS:
                raise PlanError("it fell over")
            return super().sample()

    monkeypatch.setattr(networks_race, "RuntimeProcess", Failing)
    monkeypatch.setattr(Runtime, "missing", lambda self: [])
    monkeypatch.setattr(Runtime, "version", "1.0")
    arguments = ["run", str(path), "--batch", "2", "--threads", "1", "--repeat", "1", "--against", "mnn"]
    done = CliRunner().invoke(cli, [*arguments, "--rounds", "6", "-o", str(tmp_path / "kept")], standalone_mode=False)
    assert done.exception is None
    assert done.return_value == FAILED
    assert "error: autoconv: it fell over" in done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "mnn" in line]
    assert "None" not in line
    assert "-" in line.split()
    assert not (tmp_path / "kept" / "networks.json").exists()


@kernels
def test_a_race_that_cannot_be_kept_is_shown(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(place: Path, content: str | bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(place))

    monkeypatch.setattr(results, "write_whole", write)
    monkeypatch.setattr(networks_race, "RuntimeProcess", Contestant)
    monkeypatch.setattr(Runtime, "missing", lambda self: [])
    monkeypatch.setattr(Runtime, "version", "1.0")
    arguments = ["run", str(path), "--batch", "2", "--threads", "1", "--repeat", "1", "--against", "mnn"]
    folder = tmp_path / "kept"
    done = CliRunner().invoke(cli, [*arguments, "--rounds", "6", "-o", str(folder)], standalone_mode=False)
    assert done.exception is None
    assert done.return_value == FAILED
    assert any(line.split()[:1] == ["mnn"] for line in done.stdout.splitlines())
    assert f"error: {folder / 'networks.json'}: No space left on device" in done.stderr


@kernels
def test_a_file_that_could_not_keep_a_race_is_refused_before_it_and_costs_no_table_after_it(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, raced = tmp_path / "kept", list[str]()

    class Spoiling(Contestant):
        def sample(self) -> float:
            raced.append(self.name)
            (folder / "networks.json").write_text("[" * 100_000, encoding="utf-8")
            return super().sample()

    monkeypatch.setattr(networks_race, "RuntimeProcess", Spoiling)
    monkeypatch.setattr(Runtime, "missing", lambda self: [])
    monkeypatch.setattr(Runtime, "version", "1.0")
    arguments = ["run", str(path), "--batch", "2", "--threads", "1", "--repeat", "1", "--against", "mnn"]
    arguments += ["--rounds", "6", "-o", str(folder)]
    done = CliRunner().invoke(cli, arguments, standalone_mode=False)
    assert done.return_value == FAILED
    assert any(line.split()[:1] == ["mnn"] for line in done.stdout.splitlines())
    assert f"error: {folder / 'networks.json'}: expected races of networks: " in done.stderr
    raced.clear()
    for strange in ("[" * 100_000, '{"networks": [{"network": "a", "batch": "1"}]}'):
        (folder / "networks.json").write_text(strange, encoding="utf-8")
        refused = CliRunner().invoke(cli, arguments, standalone_mode=False)
        assert isinstance(refused.exception, ConfigError)
        assert not raced


@kernels
def test_a_network_without_steps_and_inputs_of_any_name_are_run_and_raced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOCONV_CACHE_DIR", str(tmp_path / "cache"))
    value = [onnx.helper.make_tensor_value_info(name, 1, (1, 2)) for name in ("file", "self", "y", "z")]
    copies = [onnx.helper.make_node("Identity", [x], [y]) for x, y in (("file", "y"), ("self", "z"))]
    nothing = onnx.helper.make_graph(copies, "n", value[:2], value[2:])
    opset = [onnx.helper.make_opsetid("", 17)]
    (tmp_path / "n.onnx").write_bytes(
        onnx.helper.make_model(nothing, opset_imports=opset, ir_version=9).SerializeToString()
    )
    command = ["run", str(tmp_path / "n.onnx"), "--threads", "1", "--repeat", "1"]
    done = CliRunner().invoke(cli, [*command, "--alone"], standalone_mode=False)
    assert (done.exception, done.return_value) == (None, 0)
    if not RUNTIMES["onnxruntime"].missing():
        race = ["--against", "onnxruntime", "--rounds", "6", "--json"]
        done = CliRunner().invoke(cli, [*command, *race], standalone_mode=False)
        assert done.exception is None
        assert json.loads(done.stdout)["race"]["errors"] == {"onnxruntime": 0.0}


@pytest.mark.parametrize("lacking", ["clear_refs", "malloc_trim"])
def test_memory_is_told_where_the_system_tells_it(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(place: Path, *_: Any, **__: Any) -> None:
        assert place == Path("/proc/self/clear_refs")
        if lacking == "clear_refs":
            raise PermissionError(errno.EACCES, "Permission denied", str(place))

    monkeypatch.setattr(Path, "write_text", write)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "VmRSS: 100 kB\nVmHWM: 300 kB\n")
    library = SimpleNamespace() if lacking == "malloc_trim" else SimpleNamespace(malloc_trim=lambda keep: 1)
    monkeypatch.setattr(process.ctypes, "CDLL", lambda name: library)
    monkeypatch.setattr(process, "AUTOCONV", SimpleNamespace(load=lambda *_: Loaded(lambda: [np.ones(1)], list)))
    np.savez(tmp_path / "inputs.npz", np.array(["x"]), np.ones(1))
    told: list[dict[str, Any]] = []
    process._Answers()(CPU.current(1), {"load": OURS, "model": "m", "folder": str(tmp_path)}, told.append)
    assert told[0].get("memory", "") == (None if lacking == "clear_refs" else 200 << 10), told


@pytest.mark.parametrize("compiled", [False, True])
def test_what_compiles_does_so_while_it_loads(compiled: bool, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")
    runs = []
    monkeypatch.setattr(torch, "compile", lambda module: lambda *given: runs.append(given) or module(*given))
    path.write_bytes(models.fixed(small(3), 2).SerializeToString())
    loaded = RUNTIMES["torch_compiled" if compiled else "torch"].load(path, image(2), CPU.current(1))
    assert len(runs) == compiled
    assert len(loaded.read(loaded.run())) == 1


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runtime, "missing", lambda self: [self.packages[0]])
    for wanted, told in (
        ("mnn,ncnn", "not installed, mnn: MNN; ncnn: ncnn"),
        ("all", "onnxruntime: onnxruntime; openvino"),
    ):
        refused = CliRunner().invoke(cli, ["run", "net.onnx", "--against", wanted])
        assert refused.exit_code == 2
        assert told in refused.output
    monkeypatch.setattr(Runtime, "missing", lambda self: [] if self.name == "mnn" else [self.packages[0]])
    assert _installed(("all",)) == ("mnn",)


def test_a_race_is_kept_in_the_place_of_an_older_one(tmp_path: Path) -> None:
    device = CPU.current(1)
    for name, batch, rounds in (("b", 1, 6), ("a", 8, 6), ("a", 1, 6), ("a", 8, 9)):
        keep(NetworkRace(name, batch, device, rounds, {OURS: [1.0]}), tmp_path)
    rows = json.loads((tmp_path / "networks.json").read_text(encoding="utf-8"))["networks"]
    assert [(row["network"], row["batch"], row["rounds"]) for row in rows] == [("a", 1, 6), ("a", 8, 9), ("b", 1, 6)]
    (tmp_path / "networks.json").write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"networks\.json: expected races of networks"):
        keep(NetworkRace("a", 1, device, 6, {OURS: [1.0]}), tmp_path)


def test_only_an_onnx_file_is_raced_and_only_a_race_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Runtime, "missing", lambda self: [])
    for arguments, message in (
        (["net.autoconv", "--against", "all"], "--against: expected an ONNX file, got net.autoconv"),
        (["net.onnx", "-o", str(tmp_path)], "--output: expected --against as well"),
        (["net.onnx", "--rounds", "9"], "--rounds: expected --against as well"),
        (["net.onnx", "--against", "caffe"], "expected some of onnxruntime,openvino"),
    ):
        refused = CliRunner().invoke(cli, ["run", *arguments])
        assert refused.exit_code == 2
        assert message in refused.output


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet"])
def test_the_nine_take_any_batch(name: str) -> None:
    graph = translated(models.network(name), name, batch=3)
    assert {t.shape for t in graph.inputs.values()} == {(3, 3, 224, 224)}
    assert {graph.types[value].shape[:2] for value in graph.outputs.values()} == {(3, 1000)}


def test_without_torchvision_its_networks_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch", reason="NOT CHECKED: torch is not installed")
    monkeypatch.setitem(sys.modules, "torchvision", None)
    done = CliRunner().invoke(models.main, [str(tmp_path), "resnet18"])
    assert done.exit_code == 1
    assert done.output.startswith("Error: network 'resnet18' takes the package torchvision, of the release that goes")
    assert "pip install torchvision" in done.output


def test_another_network_is_refused() -> None:
    with pytest.raises(ValueError, match="network 'lenet': expected one of bvlc_alexnet"):
        models.network("lenet")


@pytest.mark.parametrize("name", ["resnet", "resnet19"])  # a module of torchvision's, and nothing
def test_another_model_is_refused(name: str) -> None:
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError) as failure:  # of another release than PyTorch's it has no operators
        pytest.skip(f"NOT CHECKED: {failure}")
    with pytest.raises(ClickException, match=f"network '{name}': did you mean 'resnet[0-9]+'[?] Expected one "):
        models.pytorch_model(name)
