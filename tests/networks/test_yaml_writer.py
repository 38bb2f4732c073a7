"""Layer lists that were written are read as the same layers."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from click.testing import CliRunner

from autoconv import networks
from autoconv.cli.main import cli
from autoconv.errors import ConfigError
from autoconv.layer import ConvLayer
from autoconv.networks.layers import NamedLayer, Network
from autoconv.networks.yaml_writer import text_of

INT8 = ConvLayer(N=1, C=4, H=3, W=3, K=9, R=1, S=1, dtype="int8", output_dtype="float32")
ODD = Network(
    "no: 1",
    'a "source", of 2012',
    (
        NamedLayer("yes", ConvLayer(N=1, C=4, H=9, W=7, K=6, R=3, S=1, padding=((1, 0), (0, 2)), stride=(2, 1)), 3, 1),
        NamedLayer(
            "007", ConvLayer(N=1, C=4, H=9, W=9, K=4, R=3, S=3, padding=1, dilation=2, groups=4, bias=True), 1, 2
        ),
        NamedLayer("fc", ConvLayer(N=1, C=4, H=1, W=1, K=9, R=1, S=1, layout="NHWC", activation="relu"), 1, 3),
        NamedLayer("half", ConvLayer(N=1, C=4, H=3, W=3, K=9, R=1, S=1, dtype="float16", residual=True), 1, 4),
        NamedLayer("int8", INT8, 1, 5, (2, 3)),
        NamedLayer("int8 sums", INT8.replace(output_dtype="int32"), 1, 6, (), ("fwd",)),
    ),
    (1, 8),
)


@pytest.mark.parametrize("net", [ODD, *map(networks.load, networks.names())], ids=lambda net: net.name)
def test_what_was_written_is_read(net: Network, tmp_path: Path) -> None:
    path = tmp_path / "net.yaml"
    path.write_text(text_of(net), encoding="utf-8")
    found = networks.load(path)
    assert (found.name, found.source, found.batches) == (net.name, net.source, net.batches)
    assert [dataclasses.replace(n, line=0) for n in found.layers] == [
        dataclasses.replace(n, line=0) for n in net.layers
    ]


def test_a_layer_of_another_batch_than_its_network_keeps_that(tmp_path: Path) -> None:
    row = ConvLayer(N=1, C=4, H=1, W=3, K=9, R=1, S=1, layout="NHWC")
    frames = ConvLayer(N=2, C=4, H=3, W=3, K=9, R=1, S=1)
    net = Network("net", "", (NamedLayer("fc", row, 1, 1, rows=True), NamedLayer("frames", frames, 1, 2)), (4,))
    path = tmp_path / "net.yaml"
    path.write_text(text_of(net), encoding="utf-8")
    found = networks.load(path)
    assert found.batches == (4,)
    assert [named.batches for named in found.layers] == [(1,), (8,)]
    assert [named.at(*named.batches) for named in found.layers] == [named.at(4) for named in net.layers]


def test_the_command_writes_a_file_or_standard_output(tmp_path: Path) -> None:
    printed = CliRunner().invoke(cli, ["layers", "alexnet"])
    path = tmp_path / "alexnet.yaml"
    written = CliRunner().invoke(cli, ["layers", "alexnet", "-o", str(path)])
    assert printed.exception is None
    assert written.output == ""
    assert path.read_text(encoding="utf-8") == printed.output
    assert networks.load(path).macs == networks.load("alexnet").macs
    lines = printed.output.splitlines()
    assert lines[-5:][1].startswith("  - {name: conv2, C: 96, H: 27, K: 256, R: 5, padding: 2, groups: 2, bias: true")


def test_a_network_without_layers_has_no_list(tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="NOT CHECKED: onnx is not installed")
    from onnx_models import model, node

    onnx.save(model([node("Relu", "x")], {"x": (1, 2)}), tmp_path / "relu.onnx")
    path = tmp_path / "relu.yaml"
    path.write_text("old")
    for place in ([], ["-o", str(path)]):
        with pytest.raises(ConfigError, match=r"^relu\.onnx: expected convolutions or fully connected"):
            CliRunner().invoke(cli, ["layers", str(tmp_path / "relu.onnx"), *place], catch_exceptions=False)
    assert path.read_text() == "old"
