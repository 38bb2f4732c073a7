"""Networks that run: inputs, several threads, and answers as in float64."""

from __future__ import annotations

import copy
import json
import pickle
import signal
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from forked import exit_code, forks
from graphs import agree, compiled, drawn, filters, graph_of, small
from vectors import device_with

import autoconv
from autoconv.algorithm import Array
from autoconv.cli.main import cli
from autoconv.cpu import pool
from autoconv.cpu.device import CPU
from autoconv.cpu.operators import sequence
from autoconv.errors import ArrayError, ConfigError, PlanError
from autoconv.networks.compiled.network import CompiledNetwork
from autoconv.networks.graph import Graph
from autoconv.networks.operators import (
    Conv,
    ConvTranspose,
    Elementwise,
    MatMul,
    Pad,
    Pool,
    Reshape,
    Slice,
    TensorType,
    random_inputs,
)
from autoconv.networks.reference import evaluate
from autoconv.networks.run.instance import Instance
from autoconv.networks.run.planned import Choices
from autoconv.networks.run.runtime import inputs_of

kernels = pytest.mark.skipif(not pool.available(), reason="llvmlite cannot target this processor")


@kernels
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_network_agrees_with_float64(batch: int, threads: int) -> None:
    graph = small(batch)
    net = compiled(graph, CPU.current(threads))
    for seed in range(3):
        agree(net, graph, 1e-5, seed)


@kernels
@pytest.mark.parametrize("in_nhwc", [(), ("y",), ("a", "y")])
def test_slopes_for_every_channel_have_a_kernel(in_nhwc: tuple[str, ...]) -> None:
    graph = Graph("slopes")
    x = graph.add_input("x", TensorType((2, 3, 5, 7)))
    a = graph.add("a", Conv(), x, graph.add_constant("w", filters(6, 3, 1, 1)))
    slopes = graph.add_constant("k", np.linspace(-0.5, 2, 6, dtype=np.float32).reshape(6, 1, 1))
    graph.outputs = {"y": graph.add("y", Elementwise(("prelu", 0, 1)), a, slopes)}
    net = compiled(graph, known=Choices(in_nhwc=frozenset(in_nhwc)))
    assert net.foreign == []
    agree(net, graph, 1e-5)


@kernels
@pytest.mark.parametrize("caches", [None, (1 << 10, 1 << 12, 1 << 14)])  # with the small ones, image by image
def test_a_kernel_of_several_passes_runs_within_the_single_call(caches: tuple[int, int, int] | None) -> None:
    graph = Graph("doubled")
    x = graph.add_input("x", TensorType((3, 8, 6, 5)))
    before = graph.add("before", Elementwise(("neg", 0)), x)
    other = graph.add_input("other", TensorType((3, 4, 12, 10)))
    y = graph.add("up", ConvTranspose(stride=(2, 2), padding=((1, 1), (1, 1))), before,
                  graph.add_constant("w", filters(8, 4, 4, 4)))  # fmt: skip
    y = graph.add("bias", Elementwise(("add", 0, 1)), y, graph.add_constant("b", filters(4, 1, 1)))
    y = graph.add("sum", Elementwise(("add", 0, 1)), y, other)
    graph.outputs = {"y": graph.add("y", Elementwise(("relu", 0)), y)}
    device = device_with(CPU.current().instruction_set, 2, caches)
    net = compiled(graph, device, Choices({"y": "direct.polyphase"}))
    assert net.plans["y"].candidate.algorithm == "direct.polyphase"
    assert str(net.plans["y"].layer).endswith("-bias-residual-relu")
    assert (len(net._running.schedule.steps), net.foreign, net._running.schedule.segments) == (2, [], 1)
    assert len(net._running.schedule.calls) == 1 + 2 * (1 if caches is None else 3)
    agree(net, graph, 1e-5)


@kernels
def test_denormals_are_kept_where_tuning_is_asked_to() -> None:
    assert compiled(small(1)).tune("direct", denormals="keep")._running.schedule.keep_denormals


@kernels
def test_every_step_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    net = compiled(small(1))
    x = drawn(net.graph)
    steps = net.profile(**x, repeat=3)
    assert [step.name for step in steps] == [step.node.name for step in net._running.schedule.steps]
    assert all(step.seconds > 0 for step in steps)
    assert [step.name for step in steps if step.is_layer] == ["a.relu", "b.sum", "c.silu", "up", "scores"]
    settled: list[list[tuple[int, ...]]] = []
    constants: list[int] = []

    def settle(self: CPU, *arrays: Array, **others: Iterable[Array]) -> None:
        settled.append([array.shape for array in arrays])
        constants.append(sum(array.nbytes for array in others["filters"]))

    monkeypatch.setattr(CPU, "settle", settle)
    alone = net.profile(**x, repeat=1, alone=True)
    assert [step.name for step in alone] == [step.name for step in steps]
    for step, (scratch, *shapes) in zip(net._running.schedule.steps, settled, strict=True):
        assert scratch == (max(call.workspace_bytes for call in step.calls),)
        computed = [name for name in step.node.inputs if name not in net.graph.constants]
        assert shapes == [net.graph.types[name].shape for name in (step.node.name, *reversed(computed))]
    assert all(nbytes > 0 for step, nbytes in zip(alone, constants, strict=True) if step.is_layer)
    assert sum(constants) <= net.weight_bytes
    with pytest.raises(ArrayError, match="repeat=0: expected an integer of at least 1"):
        net.profile(**x, repeat=0)


@kernels
@pytest.mark.parametrize("option", [[], ["--json"], ["--tune"], ["--alone"], ["--tolerance", "1e-3"]])
def test_the_command_runs_a_network(option: list[str], tmp_path: Path) -> None:
    path = tmp_path / "net.autoconv"
    net = compiled(graph_of(Elementwise(("relu", 0)), (2, 3)))
    net.save(path)
    ran = CliRunner().invoke(cli, ["run", str(path), "--repeat", "2", *option], standalone_mode=False)
    assert ran.exception is None
    if option == ["--json"]:
        found = json.loads(ran.output)
        assert [step["operator"] for step in found["steps"]] == ["relu"]
        assert found["seconds"] > 0
        assert "seconds_alone" not in found
    else:
        assert "100.0%" in ran.output
        assert ("each measured alone with filters out of cache; the whole takes" in ran.output) == ("--alone" in option)
        assert "0% of the steps' time in convolutions" in ran.output


@kernels
def test_the_command_tunes_in_a_worker_unless_told_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, told = tmp_path / "net.autoconv", list[object]()
    compiled(graph_of(Elementwise(("relu", 0)), (2, 3))).save(path)
    monkeypatch.setattr(CompiledNetwork, "tune", lambda net, **options: told.append(options["isolate"]))
    for option in ([], ["--no-isolate"]):
        ran = CliRunner().invoke(cli, ["run", str(path), "--repeat", "2", "--tune", *option])
        assert ran.exit_code == 0
    assert told == [True, False]
    refused = CliRunner().invoke(cli, ["run", str(path), "--no-isolate"])
    assert refused.exit_code == 2
    assert "--isolate, --no-isolate: expected --tune as well" in refused.output


@kernels
def test_as_many_threads_take_part_in_a_layer_as_when_it_runs_alone() -> None:
    device = CPU.current(2)
    net = compiled(small(1), device)
    layers = {
        s.node.name: s.calls[0].party for s in net._running.schedule.steps if s.node.name in net.plans and s.calls
    }
    assert layers
    assert layers == {name: net.plans[name].kernel.calls()[0].party for name in layers}
    tables = [part._words[1:] for part in net._instances[0]._parts if hasattr(part, "_words")]
    rows = np.concatenate(tables).reshape(-1, sequence.ROW)
    assert list(rows[:, 1]) == [call.party or 2 for call in net._running.schedule.calls]


@kernels
def test_two_threads_run_one_network() -> None:
    graph = small(1)
    net = compiled(graph)
    inputs = [drawn(graph, seed) for seed in range(40)]
    alone = [net.run(**x) for x in inputs]
    with ThreadPoolExecutor(2) as threads:
        together = list(threads.map(lambda x: net.run(**x), inputs))
    for one, other in zip(alone, together, strict=True):
        for name in graph.outputs:
            np.testing.assert_array_equal(one[name], other[name])
    assert len({id(y["up"]) for y in alone}) == 40


@kernels
@forks  # in a child, which an alarm ends where it waits for itself
def test_a_signal_may_run_the_network_that_it_interrupts(monkeypatch: pytest.MonkeyPatch) -> None:
    net = compiled(graph_of(Elementwise(("neg", 0)), (2, 3)))
    x, found = np.ones((2, 3), np.float32), []

    def available(self: Instance) -> bool:
        monkeypatch.undo()
        signal.raise_signal(signal.SIGUSR1)
        return True

    def run() -> int:
        signal.alarm(20)
        signal.signal(signal.SIGUSR1, lambda *_: found.append(net.run(x)))
        monkeypatch.setattr(Instance, "available", available)
        return sum(np.array_equal(y, -x) for y in (net.run(x), *found))

    net.run(x)
    assert exit_code(run) == 2


@kernels
def test_what_a_run_gave_stays_as_it_was() -> None:
    graph = graph_of(Elementwise(("neg", 0)), (2, 3))
    graph.outputs |= {"same": "y", "x": "x0"}
    net = compiled(graph)
    x = np.ones((2, 3), np.float32)
    first = net.run(x)
    net.run(2 * x)
    x[:] = 7
    for name, value in (("y", -1), ("same", -1), ("x", 1)):
        assert (first[name] == value).all()


@kernels
def test_kernels_run_in_one_call() -> None:
    graph = Graph("chain")
    x = graph.add_input("x", TensorType((1, 4, 12, 10)))
    y = graph.add("c", Conv(), x, graph.add_constant("w", filters(5, 4, 3, 3)))
    y = graph.add("p", Pool(reduction="max", window=(2, 2)), y)
    graph.outputs["y"] = graph.add("s", Elementwise(("sigmoid", 0)), y)
    net = compiled(graph).tune("direct")
    assert "3 steps, all by kernels of ours, in 1 call\n" in net.explain()
    agree(net, graph, 1e-5)


@kernels
@pytest.mark.parametrize("value", [5, -3, 2**24 + 1, 2**31 - 1])
def test_whole_numbers_are_padded_with_what_they_are_told(value: int) -> None:
    graph = Graph("padded")
    x = graph.add_input("x", TensorType((3, 5), "int32"))
    graph.outputs["y"] = graph.add("y", Pad((1, 0), (0, 2), value=value), x)
    given = np.arange(-7, 8, dtype=np.int32).reshape(3, 5)
    expected = np.pad(given, ((1, 0), (0, 2)), constant_values=value)
    np.testing.assert_array_equal(CompiledNetwork(graph, CPU.current(), {}).run(given), expected)


@kernels
@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_products_of_whole_numbers_with_a_constant(dtype: str) -> None:
    graph = Graph("products")
    x = graph.add_input("x", TensorType((3, 5), dtype))
    b = np.arange(10, dtype=dtype).reshape(5, 2)
    graph.outputs["y"] = graph.add("y", MatMul(), x, graph.add_constant("b", b))
    given = np.arange(15, dtype=dtype).reshape(3, 5)
    found = CompiledNetwork(graph, CPU.current(), {}).run(given)
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, given @ b)


@kernels
def test_inputs_are_checked() -> None:
    net = compiled(small(1))
    x = np.zeros((1, 4, 12, 10), np.float32)
    with pytest.raises(ArrayError, match="input 'x' is missing: expected float32"):
        net.run()
    with pytest.raises(ArrayError, match="expected inputs x, got 2 arrays"):
        net.run(x, x)
    with pytest.raises(ArrayError, match="input 'z': expected one of x"):
        net.run(x, z=x)
    with pytest.raises(ArrayError, match="input 'x': is given twice"):
        net.run(x, x=x)
    with pytest.raises(ArrayError, match=r"planned for float32 \(1, 4, 12, 10\), got float32 \(2, 4, 12, 10\)"):
        net.run(np.zeros((2, 4, 12, 10), np.float32))
    for other in ("float64", ">f4"):
        with pytest.raises(ArrayError, match=f"got {other}"):
            net.run(x.astype(other))
    transposed = np.ascontiguousarray(x.transpose(0, 1, 3, 2)).transpose(0, 1, 3, 2)
    np.testing.assert_array_equal(net.run(transposed)["up"], net.run(x)["up"])


@pytest.mark.parametrize("name", ["self", "repeat", "alone"])
def test_an_input_may_have_any_name(name: str) -> None:
    graph, x = Graph("net"), np.array([-1.0, 2.0], np.float32)
    graph.outputs["y"] = graph.add("y", Elementwise(("relu", 0)), graph.add_input(name, TensorType((2,))))
    net = compiled(graph)
    np.testing.assert_array_equal(net.run(**{name: x}), [0, 2])
    assert len(net.profile(x, repeat=1)) == 1


@kernels
@pytest.mark.filterwarnings("ignore::PendingDeprecationWarning")  # of NumPy's matrices
def test_inputs_are_plain_arrays_whose_elements_are_aligned() -> None:
    """Whatever their class is, and wherever they lie."""
    graph = Graph("rows")
    rows = graph.add("rows", Reshape((2, 2, 4)), graph.add_input("x", TensorType((4, 4))))
    second = graph.add("second", Slice((1, 0, 0), (1, 2, 4), (1, 1, 1)), rows)
    graph.outputs["y"] = graph.add("y", MatMul(), second, graph.add_constant("w", filters(3, 4, 5)))  # is NumPy's
    net = compiled(graph)
    x = drawn(graph)["x"]
    odd = np.frombuffer(b"." + x.tobytes(), np.float32, offset=1).reshape(x.shape)
    assert not odd.flags.aligned
    for other in (np.asmatrix(x), odd, x.astype(np.float32, order="F")):
        found = inputs_of(graph, net.device, (other,), {})["x"]
        assert type(found) is np.ndarray
        assert found.flags.aligned
        np.testing.assert_array_equal(net.run(other), net.run(x))


@kernels
def test_a_copy_is_the_network_and_a_pickle_there_is_none() -> None:
    net = compiled(small(1))
    assert copy.copy(net) is copy.deepcopy([net])[0] is net
    with pytest.raises(ConfigError, match=r"small: cannot be pickled: save\(path\) keeps it, and autoconv.load reads"):
        pickle.dumps(net)


@kernels
def test_tuning_measures_and_keeps_the_answer() -> None:
    graph = Graph("one")
    x = graph.add_input("x", TensorType((1, 4, 6, 6)))
    graph.outputs["y"] = graph.add("y", Conv(), x, graph.add_constant("w", filters(5, 4, 3, 3)))
    net = compiled(graph)
    assert net.plans["y"].source == "heuristic"
    assert net.tune("direct") is net
    assert net.plans["y"].source == "user"
    agree(net, graph, 1e-5)
    with pytest.raises(PlanError, match="mode="):
        net.tune("sideways")
    agree(net, graph, 1e-5)


@pytest.mark.parametrize("named", ["device", "weights", "again", "memory_limits"])
def test_what_is_no_option_of_a_network_is_refused(named: str) -> None:
    """Where no layer would see it, too."""
    graph = graph_of(MatMul(), (3, 4, 5), (1, 5, 6))
    expected = rf"^{named}='cpu': expected an option of a network: allow_tf32, .*, workspace_limit, memory_limit$"
    with pytest.raises(PlanError, match=expected):
        CompiledNetwork(graph, CPU.current(), {named: "cpu"})
    net = compiled(graph)
    with pytest.raises(PlanError, match=expected):
        net.tune(**{named: "cpu"})
    agree(net, graph, 1e-5)


@kernels
def test_what_has_no_kernel_is_computed_by_numpy_and_said() -> None:
    graph = graph_of(MatMul(), (3, 4, 5), (1, 5, 6))
    y = graph.outputs["y"]
    graph.outputs["z"] = graph.add("z", Elementwise(("relu", 0)), y)
    net = compiled(graph)
    assert "2 steps, 1 of them not by a kernel of ours, in 2 calls" in net.explain()
    assert "NumPy" in net.explain()
    agree(net, graph, 1e-6)


def test_without_a_compiler_everything_is_numpys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "unavailable", lambda: "no compiler")
    graph = small(1)
    net = compiled(graph)
    x = drawn(graph)
    found = net.run(**x)
    for name, expected in evaluate(graph, x).items():
        np.testing.assert_allclose(found[name], expected, atol=1e-5)


def test_networks_are_loaded_from_onnx_files(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx")
    from onnx_models import model, node

    path = tmp_path / "net.onnx"
    onnx.save(model([node("Relu", "x")], {"x": ["N", 3]}), path)
    net = autoconv.load(path, batch=2)
    assert isinstance(net, autoconv.CompiledNetwork)
    np.testing.assert_array_equal(net.run(np.full((2, 3), -1.0, np.float32)), np.zeros((2, 3)))
    assert autoconv.load(path, input_shapes={"x": (4, 5)}).graph.types["y"].shape == (4, 5)
    onnx.save(model([node("Relu", "x")], {"x": [2, 3]}), path)
    with pytest.raises(ConfigError, match=r"batch=5: the file says \(2, 3\) of input 'x'"):
        autoconv.load(path, batch=5)
    onnx.save(model([node("Mul", "x z")], {"x": ["N", 3], "z": [3]}), path)
    assert autoconv.load(path, batch=5).graph.types["y"].shape == (5, 3)
    for batch in (0, "two", True):
        with pytest.raises(ConfigError, match=r"batch=.*: expected an integer of at least 1"):
            autoconv.load(path, batch=batch)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"path=3: expected a file's path, as str or Path"):
        autoconv.load(3)  # type: ignore[arg-type]


def test_random_inputs_are_of_their_types() -> None:
    types = {
        dtype: TensorType((4, 5, 64), dtype) for dtype in ("float32", "bfloat16", "uint8", "int8", "int64", "bool")
    }
    found = random_inputs(types)
    assert {name: TensorType(array.shape, array.dtype.name) for name, array in found.items()} == types
    assert all(float(found[name].astype(np.float32).min()) < -1 for name in ("float32", "bfloat16"))
    assert [(int(found[name].min()), int(found[name].max())) for name in ("uint8", "int8")] == [(0, 255), (-128, 127)]
    assert {*found["int64"].flat} == {0, 1}
    again = random_inputs(types)
    assert all((array == again[name]).all() for name, array in found.items())
    assert random_inputs({"x": TensorType(())})["x"].shape == ()


@kernels
@forks
def test_a_child_forked_while_another_thread_takes_an_instance_can_run() -> None:
    net = compiled(small(1))
    x = drawn(net.graph)
    expected = net.run(**x)
    with net._lock:
        assert exit_code(lambda: sum(np.array_equal(y, expected[name]) for name, y in net.run(**x).items())) == 2
