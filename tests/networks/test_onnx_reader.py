"""ONNX files: the nine networks that come with the package, and every way a file can be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

onnx = pytest.importorskip("onnx")

from onnx import TensorProto, helper  # noqa: E402
from onnx_models import LIGHT, model, node, stored_output  # noqa: E402

import autoconv  # noqa: E402
from autoconv import networks  # noqa: E402
from autoconv.bench.networks.models import LIGHT as NINE  # noqa: E402
from autoconv.bench.networks.models import light  # noqa: E402
from autoconv.errors import ConfigError  # noqa: E402
from autoconv.networks.layer_list import layer_of  # noqa: E402
from autoconv.networks.onnx_reader import read, translated  # noqa: E402
from autoconv.networks.operators import Conv, MatMul  # noqa: E402
from autoconv.networks.passes import optimized  # noqa: E402
from autoconv.networks.reference import evaluate  # noqa: E402
from autoconv.networks.yaml_writer import text_of  # noqa: E402

CONVOLUTIONS = {
    "bvlc_alexnet": 5, "densenet121": 121, "inception_v1": 57, "inception_v2": 69, "resnet50": 53, "shufflenet": 49,
    "squeezenet": 26, "vgg19": 16, "zfnet512": 5,
}  # fmt: skip
RELU = [node("Relu", "x")]
REFERRING = node("LeakyRelu", "x", alpha=0.1)
REFERRING.attribute[0].ClearField("f")
REFERRING.attribute[0].ref_attr_name = "slope"
ONES = {count: np.ones(count, np.float32) for count in (1, 3)}
STATISTICS = ("scale", "bias", "mean", "variance")
OP_OF_BYTES = onnx.NodeProto.FromString(node("Relu", "x").SerializeToString().replace(b"Relu", b"Rel\xff"))


@pytest.mark.parametrize("name", NINE)
def test_the_networks_that_come_with_onnx_answer_what_is_stored(name: str) -> None:
    graph = optimized(read(LIGHT / f"light_{name}.onnx"))
    operators = [n.operator for n in graph.nodes.values()]
    assert sum(isinstance(operator, Conv) for operator in operators) == CONVOLUTIONS[name]
    assert all(operator.bias for operator in operators if isinstance(operator, MatMul))
    (x,) = graph.inputs
    expected = stored_output(name)
    (found,) = evaluate(graph, {x: np.ones(graph.inputs[x].shape)}).values()
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def test_a_network_has_fewer_nodes_after_the_passes() -> None:
    graph = translated(light("squeezenet"), "squeezenet")
    assert (len(graph.nodes), len(optimized(graph).nodes)) == (93, 41)
    assert graph.inputs == {"data_0": graph.types["data_0"]}


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (model(RELU, {"x": ["N", 3]}), r"input 'x': dimension 0 is 'N': expected a number: give batch="),
        (model(RELU, {"x": [2, "width"]}), r"input 'x': dimension 1 is 'width': expected a number: give input_shapes="),
        (model(RELU, {"x": [2, 3]}, opset=6), "opset 6: expected 7 or newer"),
        (model([node("Frob", "x")], {"x": [2, 2]}), r"node 'y' \(Frob\): no such operator here: expected one of"),
        (model([node("Relu", "z")], {"x": [2]}), r"node 'y' \(Relu\): its input 'z' is computed by no node"),
        (model([node("Relu", "")], {"x": [2]}), r"node 'y' \(Relu\): inputs: expected 1, got 0"),
        (model([node("Add", "x b", "a"), node("Relu", "a", "b")], {"x": [2]}, outputs=["b"]), "need each other: "),
        (model(RELU, {"x": [2]}, outputs=["z"]), "output 'z' is computed by no node"),
        (model([*RELU, node("Neg", "x")], {"x": [2]}), "'y' is already computed"),
        (model([node("Add", "x c")], {"x": [2, 3]}, {"c": np.ones((4,), np.float32)}), "shapes do not broadcast"),
        (model([node("Reshape", "x x")], {"x": [2, 3]}), "shape: expected a constant, as shapes are static"),
        (model([node("Reshape", "x c")], {"x": [2, 3]}, {"c": np.array([4, -1])}), "does not divide"),
        (
            model([node("Conv", "x w")], {"x": [1, 3, 4, 4]}, {"w": np.ones((2, 4, 3, 3), np.float32)}),
            r"node 'y', Conv of float32 \(1, 3, 4, 4\), .*: expected filters of C/groups = 3/1 channels",
        ),
        (
            model([node("Conv", "x w")], {"x": [1, 3, 4, 4]}, {"w": np.ones((2, 3, 5, 5), np.float32)}),
            "node 'y', Conv .*the output is empty",
        ),
        (
            model([node("ConstantOfShape", "c", "b"), node("Add", "x b")], {"x": [2]}, {"c": np.array([1 << 30, 9])}),
            r"node 'b' \(ConstantOfShape\): expected at most 2047 MiB of constants",
        ),
        (model([node("MaxPool", "x", kernel_shape=[9, 9])], {"x": [1, 1, 4, 4]}), "a window of 9 is larger"),
        (
            model([node("Resize", "x - c", axes=[7])], {"x": [1, 1, 4, 4]}, {"c": np.ones(1, np.float32)}),
            r"axes=\(7,\): expected different ones from -4 to 3",
        ),
        (model([node("Split", "x", axis=1, num_outputs=1 << 40)], {"x": [1, 4]}), "num_outputs=1[0-9]*: expected 1"),
        (model([OP_OF_BYTES], {"x": [2]}), "no such operator here: expected one of"),
        (model([REFERRING], {"x": [2]}), r"node 'y' \(LeakyRelu\): .*attribute"),
        (model([node("Gather", "x c")], {"x": [2, 3]}, {"c": np.int64(2)}), "indices: expected them within 2"),
        (
            model([node("Gather", "k c", "g"), node("Add", "x g")], {"x": [1]},
                  {"k": np.ones((1, 1 << 20), np.float32), "c": np.zeros(1 << 20, np.int64)}),
            r"node 'g' \(Gather\): expected at most 2047 MiB of constants in all",
        ),
        (
            model([node("Conv", "x w")], {"x": [1, 3, 4, 4]}, {"w": np.ones((2, 3, 3, 3), np.uint8)},
                  dtype=TensorProto.UINT8),
            "node 'y', Conv of uint8 .*: expected images of float32, float64, float16, bfloat16, got uint8",
        ),
        (
            model([node("Dropout", "x", "y m")], {"x": [2]}, outputs=["m"]),
            r"output 'm' is an output that node 'y' \(Dropout\) does not give here",
        ),
        (
            model([node("Dropout", "x", "d m"), node("Where", "m x d")], {"x": [2]}),
            r"node 'y' \(Where\): its input 'm' is an output that node 'd' \(Dropout\) does not give here",
        ),
        (
            model([node("Pad", "x c", mode="edge")], {"x": [1, 8]}, {"c": np.array([0, 0, 0, 1 << 45])}),
            r"node 'y' \(Pad\): pads: expected at most 16777216 places of axis 1 in mode 'edge', got 35184372088840",
        ),
        (model([node("MatMul", "x c")], {"x": [2, 2]}, {"c": np.ones((2, 2))}), "of one type, got float32 and float64"),
        *(
            (model([node(*made)], {"x": [2]}, dtype=TensorProto.BOOL), rf"node 'y', {kind} of bool .*: expected {what}")
            for made, kind, what in (
                (("Neg", "x"), "neg", "arrays of numbers"), (("Sub", "x x"), "sub", "arrays of numbers"),
                (("Sigmoid", "x"), "sigmoid", "arrays of numbers"), (("Softmax", "x"), "Softmax", "an array of floats"),
            )
        ),
        (model([node("MaxPool", "x")], {"x": [1, 1, 4, 4]}), "the attribute 'kernel_shape' is missing"),
        (model([node("Add", "x c c")], {"x": [1]}, {"c": ONES[1]}), r"node 'y' \(Add\): inputs: expected 2, got 3"),
        (model([node("Clip", "x c c c")], {"x": [1]}, {"c": np.float32(1)}), "inputs: expected 1 to 3, got 4"),
        (model([node("Sum", "")], {"x": [1]}), r"node 'y' \(Sum\): inputs: expected at least 1, got 0"),
        (
            model([node("Split", "x", "y z")], {"x": [5]}, opset=13),
            r"node 'y' \(Split\): expected an extent that 2 divides, as no split is given, got 5",
        ),
        (model([node("Gelu", "x", approximate="f")], {"x": [1]}, opset=20), "approximate='f': expected one of none"),
        (
            model([node("Resize", "x - - c", keep_aspect_ratio_policy="f")], {"x": [1]}, {"c": ONES[1]}, opset=18),
            "keep_aspect_ratio_policy='f': expected one of stretch, not_larger, not_smaller",
        ),
        (
            model([node("Conv", "x w b")], {"x": [1, 3, 4, 4]}, {"w": np.ones((1, 3, 3, 3), np.float32), "b": ONES[3]}),
            r"node 'y' \(Conv\): expected a bias for each of the channels of \(1, 1, 2, 2\), got float32 \(3,\)",
        ),
        (
            model([node("ConvTranspose", "x w b")], {"x": [1, 3, 4, 4]},
                  {"w": np.ones((3, 8, 3, 3), np.float32), "b": ONES[1]}),
            r"\(ConvTranspose\): expected a bias for each of the channels of \(1, 8, 6, 6\), got float32 \(1,\)",
        ),
        (
            model([node("Gemm", "x w c")], {"x": [1, 4]}, {"w": np.ones((4, 3), np.float32), "c": np.ones((5, 3))}),
            r"node 'y' \(Gemm\): C: expected a shape that broadcasts to \(1, 3\), got float64 \(5, 3\)",
        ),
        (
            model([node("PRelu", "x c")], {"x": [1, 4]}, {"c": np.ones((5, 4), np.float32)}),
            r"node 'y' \(PRelu\): slope: expected a shape that broadcasts to \(1, 4\), got float32 \(5, 4\)",
        ),
        *[
            (
                model([node("BatchNormalization", "x s b m v")], {"x": [2, 3]},
                      {name[0]: ONES[1 if name == wrong else 3] for name in STATISTICS}),
                rf"node 'y' \(BatchNormalization\): expected a {wrong} for each of the channels of \(2, 3\)",
            )
            for wrong in STATISTICS
        ],
        *[
            (
                model([node("BatchNormalization", "x c c c c", "y m v a b")], {"x": [2, 3]}, {"c": ONES[3]}, opset=n),
                r"node 'y' \(BatchNormalization\): expected the one output of inference, got the 5 of training",
            )
            for n in (7, 9, 13)
        ],
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(made: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        translated(made, "net.onnx")
    assert str(caught.value).startswith("net.onnx: ")
    assert "\n" not in str(caught.value)


def test_shapes_that_the_file_leaves_open_are_given() -> None:
    made = model(RELU, {"x": ["N", 3, "H"]})
    assert translated(made, "net", input_shapes={"x": (2, 3, 4)}).types["y"].shape == (2, 3, 4)
    assert translated(model(RELU, {"x": ["N", 3]}), "net", batch=5).types["y"].shape == (5, 3)
    with pytest.raises(ConfigError, match="input_shapes: 'z': expected one of the inputs x"):
        translated(made, "net", input_shapes={"z": (2, 3, 4)})
    with pytest.raises(ConfigError, match="input 'x': input_shapes="):
        translated(made, "net", input_shapes={"x": (2, 3, 0)})
    with pytest.raises(ConfigError, match="input 'x': input_shapes=5: expected a shape"):
        translated(made, "net", input_shapes={"x": 5})
    with pytest.raises(ConfigError, match=r"net: input_shapes=\[\(2, 3\)\]: expected a mapping of names to shapes"):
        translated(made, "net", input_shapes=[(2, 3)])


def test_the_layers_of_a_file_are_a_list(tmp_path: Path) -> None:
    onnx.save(light("squeezenet"), tmp_path / "squeezenet.onnx")
    net = networks.load(tmp_path / "squeezenet.onnx")
    assert (net.name, net.batches, sum(named.repeat for named in net.layers)) == ("squeezenet", (1,), 26)
    assert str(net.layers[0].layer) == "fwd-float32-NCHW-N1-C3-H224-W224-K64-R3-S3-stride2x2-bias-relu"
    filters = {"w": np.ones((5, 8), np.float32), "k": np.ones((8, 8, 2, 2), np.float32)}
    nodes = [node("ConvTranspose", "x k", "t", strides=[2, 2]), node("GlobalMaxPool", "t", "p"),
             node("Flatten", "p", "f"), node("Gemm", "f w", "y", transB=1)]  # fmt: skip
    onnx.save(model(nodes, {"x": ["N", 8, 4, 4]}, filters), tmp_path / "net.onnx")
    assert {named.name: str(named.layer) for named in networks.load(tmp_path / "net.onnx").layers} == {
        "t": "fwd-float32-NCHW-N1-C8-H8-W8-K8-R2-S2-stride2x2",
        "y": "fwd-float32-NHWC-N1-C8-H1-W1-K5-R1-S1",
    }


@pytest.mark.parametrize(("images", "batch", "size"), [("N", None, 1), ("N", 8, 8), (4, None, 4), (4, 8, 4)])
def test_the_layers_of_a_list_are_those_that_the_network_runs(
    images: int | str, batch: int | None, size: int, tmp_path: Path
) -> None:
    filters = {"k": np.ones((8, 3, 3, 3), np.float32), "w": np.ones((5, 8), np.float32)}
    nodes = [node("Conv", "x k", "c"), node("GlobalMaxPool", "c", "p"), node("Flatten", "p", "f"),
             node("Gemm", "f w", "y", transB=1)]  # fmt: skip
    path = tmp_path / "net.onnx"
    onnx.save(model(nodes, {"x": [images, 3, 6, 6]}, filters), path)
    net = networks.load(path, batch)
    graph = optimized(read(path, size))
    assert net.batches == (size,)
    assert [named.at(size) for named in net.layers] == [
        layer for found in graph.nodes.values() if (layer := layer_of(graph, found)) is not None
    ]
    assert str(net.find("y").at(16)) == "fwd-float32-NHWC-N1-C8-H1-W16-K5-R1-S1"
    assert str(net.find("c").at(16)) == "fwd-float32-NCHW-N16-C3-H6-W6-K8-R3-S3"


def test_a_file_without_layers_is_no_layer_list(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    onnx.save(model(RELU, {"x": [2]}), path)
    with pytest.raises(ConfigError, match=r"net.onnx: expected convolutions or fully connected layers, got none"):
        networks.load(path)


def test_a_layer_of_other_images_stays_whole_and_names_are_those_that_a_list_takes(tmp_path: Path) -> None:
    values = {"k": np.ones((8, 3, 3, 3), np.float32), "v": np.ones((2, 4, 1, 1), np.float32),
              "w": np.ones((5, 512), np.float32)}  # fmt: skip
    long, odd = "n" * 300, "b\x1b"
    nodes = [node("Conv", "x k", f"{long}1"), node("Conv", "z v", odd), node("Flatten", "t", "f", axis=2),
             node("Gemm", "f w", f"{long}2", transB=1)]  # fmt: skip
    inputs = {"x": ["N", 3, 6, 6], "t": [1, 77, 512], "z": [3, 4, 2, 2]}
    onnx.save(model(nodes, inputs, values, (f"{long}1", odd, f"{long}2")), tmp_path / f"{'m' * 220}.onnx")
    net = networks.load(tmp_path / f"{'m' * 220}.onnx", batch=4)
    assert {named.name: str(named.at(*(named.batches or net.batches))) for named in net.layers} == {
        "n" * 200: "fwd-float32-NCHW-N4-C3-H6-W6-K8-R3-S3",
        "b_": "fwd-float32-NCHW-N3-C4-H2-W2-K2-R1-S1",
        "n" * 198 + ".2": "fwd-float32-NHWC-N1-C512-H1-W77-K5-R1-S1",
    }
    (tmp_path / "list.yaml").write_text(text_of(net))
    again = networks.load(tmp_path / "list.yaml")
    assert [(a.name, a.batches, a.layer) for a in again.layers] == [(b.name, b.batches, b.layer) for b in net.layers]


@pytest.mark.parametrize("batch", [0, True, "8", 1.0])
def test_a_batch_that_is_none_is_refused(batch: Any) -> None:
    with pytest.raises(ConfigError, match=f"batch={batch!r}: expected an integer of at least 1"):
        networks.load("alexnet", batch)


def test_nodes_may_stand_in_any_order() -> None:
    graph = translated(model([node("Neg", "a"), node("Relu", "x", "a")], {"x": [2]}), "net")
    assert list(graph.nodes) == ["a", "y"]


def test_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "net.onnx"
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read(path)
    for load in (networks.load, autoconv.load):
        with pytest.raises(ConfigError, match=r"cannot be read: .*embedded null"):
            load("a\0.onnx")
    for data in (b"", b"no model", b"\x08"):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match=r"net\.onnx: not an ONNX file"):
            read(path)
    whole = model(RELU, {"x": [2, 3]}).SerializeToString()
    for cut in range(0, len(whole), 7):
        path.write_bytes(whole[:cut])
        with pytest.raises(ConfigError):
            read(path)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"location": "../secret"}, "expected a file within"),
        ({"location": "/etc/hostname"}, "expected a file within"),
        ({"location": "link"}, "expected a file within"),
        ({"location": ""}, "expected a file within"),
        ({"location": "weights"}, "no such file"),
        ({"location": "w" * 300}, "'w{300}' cannot be read: File name too long"),
        ({"location": "circle"}, "circle.*(cannot be read: Symlink loop|no such file)"),
        ({"location": "short"}, "1 to 25 of .*short, which has 9"),
        ({"location": "short", "offset": "one"}, "expected offset and length as numbers"),
    ],
)
def test_external_data_lies_in_the_folder_of_the_model(tmp_path: Path, fields: dict[str, str], message: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "short").write_bytes(bytes(9))
    (tmp_path / "secret").write_bytes(bytes(100))
    (folder / "link").symlink_to(tmp_path / "secret")
    (folder / "circle").symlink_to(folder / "circle")
    made = model([node("Add", "x c")], {"x": [2, 3]})
    tensor = TensorProto(name="c", data_type=TensorProto.FLOAT, dims=[2, 3], data_location=TensorProto.EXTERNAL)
    for key, value in ({"offset": "1", "length": "24"} | fields).items():
        tensor.external_data.add(key=key, value=value)
    made.graph.initializer.append(tensor)
    (folder / "net.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(ConfigError, match=message):
        read(folder / "net.onnx")


def test_external_data_is_read(tmp_path: Path) -> None:
    value = np.arange(6, dtype=np.float32).reshape(2, 3)
    made = model([node("Add", "x c")], {"x": [2, 3]}, {"c": value})
    onnx.save(made, tmp_path / "net.onnx", save_as_external_data=True, location="weights", size_threshold=0)
    assert (tmp_path / "weights").is_file()
    np.testing.assert_array_equal(read(tmp_path / "net.onnx").constants["c"], value)


@pytest.mark.parametrize("kind", ["STRING", "COMPLEX64"])
def test_types_that_are_no_real_numbers_are_refused(kind: str) -> None:
    elements, value = getattr(TensorProto, kind), np.array(["a", "b"] if kind == "STRING" else [1, 2j])
    made = model(RELU, {"x": [2]})
    made.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", elements, [2]))
    with pytest.raises(ConfigError, match=r"net: input 'x': expected an array of real numbers, got (object|complex64)"):
        translated(made, "net")
    tensor = helper.make_tensor("c", elements, [2], [text.encode() for text in value] if kind == "STRING" else value)
    made = model([node("Add", "x c")], {"x": [2]})
    made.graph.initializer.append(tensor)
    with pytest.raises(ConfigError, match=r"net: constant 'c': expected real numbers, got (object|complex64)"):
        translated(made, "net")
    constant = node("Constant", "", "c", value=tensor)
    with pytest.raises(ConfigError, match=r"node 'c' \(Constant\): expected a dense array of numbers"):
        translated(model([constant, node("Add", "x c")], {"x": [2]}), "net")
    tensor.dims[0] = 1
    del tensor.string_data[1:], tensor.float_data[2:]
    filled = node("ConstantOfShape", "n", "c", value=tensor)
    with pytest.raises(ConfigError, match=r"node 'c' \(ConstantOfShape\): value: expected real numbers, got"):
        translated(model([filled], {}, {"n": np.array([3])}, ["c"]), "net")


def test_constants_that_contradict_themselves_or_are_sparse_are_refused() -> None:
    made = model([node("Add", "x c")], {"x": [2, 3]}, {"c": np.ones((2, 3), np.float32)})
    made.graph.initializer[0].dims[0] = 5
    with pytest.raises(ConfigError, match="net: constant 'c': ") as caught:
        translated(made, "net")
    assert "\n" not in str(caught.value)
    made.graph.sparse_initializer.add()
    with pytest.raises(ConfigError, match="net: expected dense constants, got a sparse one"):
        translated(made, "net")


def test_a_second_constant_of_a_name_is_refused() -> None:
    made = model([node("Add", "x c")], {"x": [1]}, {"c": ONES[1]})
    made.graph.initializer.append(made.graph.initializer[0])
    with pytest.raises(ConfigError, match="net: constant 'c': expected a name of its own, got a second one"):
        translated(made, "net")


def test_two_gigabytes_of_constants_are_refused_before_they_are_read(tmp_path: Path) -> None:
    with (tmp_path / "net.onnx").open("wb") as file:
        file.truncate(1 << 31)  # which takes no room on the disk
    with pytest.raises(ConfigError, match=r"net\.onnx: expected at most 2047 MiB, got 2048"):
        read(tmp_path / "net.onnx")
    made = model([node("Add", "x c")], {"x": [2]})
    with (tmp_path / "weights").open("wb") as file:
        file.truncate(1 << 31)
    tensor = TensorProto(name="c", data_type=TensorProto.INT8, dims=[1 << 31], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="weights")
    made.graph.initializer.append(tensor)
    (tmp_path / "net.onnx").write_bytes(made.SerializeToString())
    with pytest.raises(ConfigError, match="external data of 'c': expected at most 2047 MiB of constants in all"):
        read(tmp_path / "net.onnx")


def test_a_node_without_outputs_is_refused() -> None:
    made = model([*RELU, helper.make_node("Relu", ["x"], [])], {"x": [2]})
    with pytest.raises(ConfigError, match=r"net: node 1 \(Relu\): it has no output"):
        translated(made, "net")


def test_types_of_arrays_that_are_no_numbers_are_refused() -> None:
    made = model(RELU, {"x": [2]})
    made.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.UNDEFINED, [2]))
    with pytest.raises(ConfigError, match="input 'x': expected an array of numbers"):
        translated(made, "net")


def test_a_part_of_a_shape_may_be_empty() -> None:
    """As that of an image's batch, where there is but the image: x.view(*x.shape[:-2], -1)."""
    nodes = [
        *(node("Shape", "x", "s"), node("Slice", "s zero last", "batch"), node("Slice", "s last end", "rows")),
        *(node("Concat", "batch rows rest", "shape", axis=0), node("Reshape", "x shape")),
    ]
    constants = {"zero": np.array([0]), "last": np.array([-2]), "end": np.array([-1]), "rest": np.array([-1])}
    graph = translated(model(nodes, {"x": [3, 4]}, constants), "net")
    assert graph.types[graph.outputs["y"]].shape == (3, 4)


def test_scalars_that_constants_make_are_scalars() -> None:
    """As of a shape that PyTorch exports: x.view(x.size(0), 2 * x.size(1), -1)."""
    nodes = [
        node("Shape", "x", "s"), node("Gather", "s zero", "n"), node("Gather", "s one", "c"),
        node("Mul", "c two", "c2"), node("Unsqueeze", "n axes", "nu"), node("Unsqueeze", "c2 axes", "cu"),
        node("Concat", "nu cu rest", "shape", axis=0), node("Reshape", "x shape"),
    ]  # fmt: skip
    constants = {"zero": 0, "one": 1, "two": 2, "axes": [0], "rest": [-1]}
    made = model(nodes, {"x": [2, 4, 6, 6]}, {name: np.array(value) for name, value in constants.items()})
    assert translated(made, "net").types["y"].shape == (2, 8, 18)
    made = model([node("Add", "one two"), node("Relu", "x", "z")], {"x": [2]}, {"one": X1, "two": X1}, ("y", "z"))
    assert translated(made, "net").types["y"].shape == ()


X1 = np.float32(1.5)


@pytest.mark.parametrize(
    ("operator", "names"),
    [
        ("Celu", "alpha"), ("Elu", "alpha"), ("Gemm", "alpha beta"), ("HardSigmoid", "alpha beta"),
        ("LeakyRelu", "alpha"), ("Selu", "alpha gamma"), ("Swish", "alpha"),
    ],
)  # fmt: skip
def test_attributes_that_are_integers_are_numbers(operator: str, names: str) -> None:
    """And no inputs, which integers are in an expression."""
    found = []
    for value in (2, 2.0):
        made = node(operator, "x x x" if operator == "Gemm" else "x", **dict.fromkeys(names.split(), value))
        found.append([n.operator for n in translated(model([made], {"x": [3, 3]}, opset=24), "net").nodes.values()])
    assert found[0] == found[1]


def test_an_output_that_is_left_out_makes_no_input_that_is() -> None:
    nodes = [
        helper.make_node("Clip", ["x", "", "high"], ["b"]),
        helper.make_node("MaxPool", ["b"], ["a", ""], kernel_shape=[2, 2]),
        helper.make_node("Relu", ["a"], ["y"]),
    ]
    made = model(nodes, {"x": [1, 4, 6, 6]}, {"high": np.float32(0.5)})
    assert [n.operator.kind for n in translated(made, "net").nodes.values()][1:2] == ["max_pool"]


def test_text_is_no_type_to_cast_to() -> None:
    made = model([node("Cast", "k", to=8), node("Relu", "x", "z")], {"x": [2]}, {"k": np.float32([1])}, ("y", "z"))
    with pytest.raises(ConfigError, match=r"\(Cast\): to=8: expected the number of a type of real numbers"):
        translated(made, "net")
