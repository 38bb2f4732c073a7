"""Layer lists: the networks that come with autoconv, and every way a file can be wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from autoconv import networks
from autoconv.errors import ConfigError
from autoconv.layer import ConvLayer

SUITES = {"mixed27"}  # layers of many networks: no paper states their sum
MACS = {
    "alexnet": 665_784_864,
    "alexnet-onecolumn": 1_076_634_144,
    "vgg16": 15_346_630_656,
    "resnet50": 3_855_925_248,
    "resnet50-v1.5": 4_087_136_256,
    "googlenet": 1_581_647_872,
    "mobilenet-v2": 299_494_272,
    "overfeat": 5_229_715_968,
    "resnet120": 418_761_728,
    "cifar10": 12_288_000,
}
CONVOLUTIONS = {
    "alexnet": 5,
    "alexnet-onecolumn": 5,
    "vgg16": 13,
    "resnet50": 53,
    "resnet50-v1.5": 53,
    "googlenet": 57,
    "mobilenet-v2": 52,
    "overfeat": 6,
    "resnet120": 15,
    "cifar10": 3,
}
CONV = "{name: conv, C: 8, H: 9, K: 4, R: 3}"


def products(name: str) -> list[tuple[int, int, int]]:
    """Each layer as im2col's matrix product [MxK]x[KxN], as (M, K, N)."""
    layers = [named.layer for named in networks.load(name).layers]
    return [(x.K, x.C // x.groups * x.R * x.S, x.P * x.Q) for x in layers]


@pytest.mark.parametrize("name", sorted({*networks.names()} - SUITES))
def test_multiply_adds_and_convolutions_are_those_of_the_paper(name: str) -> None:
    net = networks.load(name)
    assert net.macs == MACS[name]
    assert sum(named.repeat for named in net.layers) == CONVOLUTIONS[name]
    assert net.source


@pytest.mark.parametrize("name", ["alexnet", "vgg16", "googlenet", "overfeat", "cifar10", "resnet50", "mobilenet-v2"])
def test_every_input_has_the_channels_of_an_output_before_it(name: str) -> None:
    layers = [named.layer for named in networks.load(name).layers]
    outputs = {3}
    for i, layer in enumerate(layers):
        if name == "googlenet" and i > 3 and i % 6 == 3:  # a module's output is that of its four branches together
            outputs.add(sum(layers[i - 6 + branch].K for branch in (0, 2, 4, 5)))
        assert layer.C in outputs, layer
        outputs.add(layer.K)


def test_overfeat_is_the_accurate_model() -> None:
    assert products("overfeat") == [
        (96, 147, 108 * 108),
        (256, 4704, 30 * 30),
        (512, 2304, 225),
        (512, 4608, 225),
        (1024, 4608, 225),
        (1024, 9216, 225),
    ]


def test_small_residual_network_has_the_products_it_is_known_for() -> None:
    found = products("resnet120")
    assert found[0] == (64, 147, 3600)
    assert found[-1] == (256, 2304, 64)
    assert max(found, key=lambda mkn: mkn[1] / mkn[2]) == found[-1]


def test_cifar_has_32_filters_of_5x5_at_16x16() -> None:
    layer = networks.load("cifar10").find("conv2").layer
    assert (layer.H, layer.W, layer.K, layer.R, layer.S) == (16, 16, 32, 5, 5)


def read(tmp_path: Path, text: str | bytes) -> networks.Network:
    path = tmp_path / "net.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return networks.load(path)


def test_defaults_repeats_and_batches(tmp_path: Path) -> None:
    net = read(
        tmp_path,
        "name: Small\nsource: here\nbatch: [1, 8, 1]\n"
        "defaults: {bias: true, activation: relu, padding: same}\nlayers:\n"
        "  - {name: a, C: 3, H: 8, W: 10, K: 4, R: 3}\n"
        "  - {name: b, C: 4, H: 8, K: 4, R: 1, S: 3, padding: [[0, 1], [2, 3]], activation: none, repeat: 2}\n",
    )
    assert (net.name, net.source, net.batches) == ("Small", "here", (1, 8))
    a, b = net.layers
    assert a.layer == ConvLayer(N=1, C=3, H=8, W=10, K=4, R=3, S=3, padding=1, bias=True, activation="relu")
    assert b.layer == ConvLayer(N=1, C=4, H=8, W=8, K=4, R=1, S=3, padding=((0, 1), (2, 3)), bias=True)
    assert (a.line, b.line, a.repeat, b.repeat) == (6, 7, 1, 2)
    assert net.macs == a.layer.macs + 2 * b.layer.macs
    assert net.find("b") is b


def test_a_gradient_has_no_epilogue_and_the_batch_asked_for(tmp_path: Path) -> None:
    text = "defaults: {bias: true, activation: relu}\nlayers: [{name: a, C: 3, H: 8, K: 4, R: 3}]"
    (named,) = read(tmp_path, text).layers
    assert named.at(8, "wgrad") == ConvLayer(N=8, C=3, H=8, W=8, K=4, R=3, S=3, direction="wgrad")
    assert named.at(2) == named.layer.replace(N=2)


def test_the_epilogue_ends_a_transposed_convolution_and_no_gradient_of_it(tmp_path: Path) -> None:
    text = "layers: [{name: up, C: 3, H: 8, K: 4, R: 2, stride: 2, bias: true, direction: dgrad}]"
    (named,) = read(tmp_path, text).layers
    assert named.transposed
    assert [named.at(2, way).bias for way in ("fwd", "dgrad", "wgrad")] == [False, True, False]


def test_what_a_layer_states_of_its_own_takes_the_place_of_what_holds_for_the_network(tmp_path: Path) -> None:
    net = read(
        tmp_path,
        "batch: [1, 8]\nlayers:\n"
        "  - {name: plain, C: 3, H: 8, K: 4, R: 3}\n"
        "  - {name: own, C: 3, H: 8, K: 4, R: 3, batch: [4, 8], direction: [wgrad, dgrad]}\n",
    )
    plain, own = net.layers
    assert not own.transposed
    assert [net.stated(plain, 3), net.stated(plain, 8, "dgrad")] == [(3, "fwd"), (8, "dgrad")]
    assert net.stated(own, 1) == (4, "wgrad")
    assert net.stated(own, 8, "dgrad") == (8, "dgrad")
    assert net.stated(own, 3, "wgrad") == (3, "wgrad"), "a batch size that is asked for, and not the network's"


def test_name_is_the_files_unless_given(tmp_path: Path) -> None:
    assert read(tmp_path, f"layers: [{CONV}]").name == "net"


def test_a_name_finds_what_is_shipped_and_a_file_here_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vgg16").mkdir()
    assert networks.load("vgg16").name == "VGG-16"
    (tmp_path / "alexnet").write_text(f"layers: [{CONV}]")
    assert networks.load("alexnet").layers[0].name == "conv"


BAD = {
    "empty": ("", r"net.yaml: expected a mapping with 'layers', got an empty file"),
    "only comments": ("# nothing\n", r"net.yaml: expected a mapping with 'layers', got an empty file"),
    "not UTF-8": (b"layers:\n - \xff\n", r"net.yaml:2: expected UTF-8 text, got the byte 0xff"),
    "UTF-16": ("layers: []".encode("utf-16"), r"net.yaml:1: expected UTF-8 text"),
    "not YAML": ("layers: [\n", r"net.yaml:\d: not YAML: "),
    "control character": ("name: x\nlayers: \x01", r"net.yaml:2: not YAML: character"),
    "two documents": ("layers: []\n---\nlayers: []\n", r"net.yaml:2: not YAML: "),
    "a list": ("- 1\n", r"net.yaml:1: a network: expected a mapping .*, got a list"),
    "text": ("hello\n", r"net.yaml:1: a network: .* got 'hello'"),
    "no layers": ("name: x\n", r"net.yaml:1: a network: the key 'layers' is missing"),
    "empty layers": ("layers: []\n", r"net.yaml:1: layers: expected a list of at least one, got an empty one"),
    "layers a mapping": ("layers: {a: 1}\n", r"net.yaml:1: layers: expected a list, got a mapping"),
    "layers nothing": ("layers:\n", r"net.yaml:1: layers: expected a list, got nothing"),
    "layer a word": ("layers:\n - conv\n", r"net.yaml:2: a layer: expected a mapping .*, got 'conv'"),
    "unknown key": ("batchs: 1\n", r"net.yaml:1: unknown key 'batchs': did you mean 'batch'\?"),
    "unknown default": ("defaults:\n  pading: 1\n", r"net.yaml:2: unknown key 'pading': did you mean 'padding'\?"),
    "name as default": ("defaults: {name: x}\nlayers: []", r"net.yaml:1: unknown key 'name'"),
    "unknown layer key": (
        "layers:\n - {name: c1, C: 8, H: 9, K: 4, R: 3,\n    strides: 2}",
        r"net.yaml:3: layer 'c1': unknown key 'strides': did you mean 'stride'\?",
    ),
    "lower case": ("layers: [{name: c1, c: 8}]", r"layer 'c1': unknown key 'c': did you mean 'C'\?"),
    "batch in a layer": ("layers: [{name: c1, N: 8}]", r"layer 'c1': unknown key 'N': the batch size is"),
    "direction as default": ("defaults: {direction: fwd}", r"unknown key 'direction': the direction is a layer's own"),
    "unknown direction": (
        "layers:\n - {name: c1,\n    direction: [fwd, bwd]}",
        r"net.yaml:3: layer 'c1': direction='bwd': expected one of fwd, dgrad, wgrad",
    ),
    "zero batch of a layer": ("layers: [{name: c1, batch: 0}]", r"layer 'c1': batch=0: expected an integer from 1"),
    "duplicate key": (
        "layers:\n - name: c1\n   C: 8\n   C: 9\n",
        r"net.yaml:4: layer 'c1': 'C' is given twice, first on line 3",
    ),
    "duplicate top key": ("name: a\nname: b\n", r"net.yaml:2: 'name' is given twice, first on line 1"),
    "duplicate layer": (
        f"layers:\n - {CONV}\n - {CONV}\n",
        r"net.yaml:3: layer 'conv': the name is already used on line 2",
    ),
    "key a list": ("[1]: 2\n", r"net.yaml:1: a key of a network: expected text, got a list"),
    "no name": ("layers: [{C: 8}]", r"net.yaml:1: a layer: the key 'name' is missing"),
    "name a list": ("layers: [{name: [a]}]", r"net.yaml:1: name: expected text, got a list"),
    "name with escape": ('layers: [{name: "\\e[31m"}]', r"name='\\x1b\[31m': expected 1 to 200 printable characters"),
    "missing": (
        "layers: [{name: c1, C: 8, K: 3}]",
        r"net.yaml:1: layer 'c1': the keys C, H, K, R are required: H, R missing",
    ),
    "zero batch": (f"batch: 0\nlayers: [{CONV}]", r"net.yaml:1: batch=0: expected an integer from 1 to 2147483647"),
    "boolean batch": (f"batch: [1, true]\nlayers: [{CONV}]", r"net.yaml:1: batch=True: expected an integer"),
    "batch a mapping": (
        f"batch: {{a: 1}}\nlayers: [{CONV}]",
        r"net.yaml:1: batch: expected a number, .* got a mapping",
    ),
    "recursive alias": (f"layers: [{CONV}]\nbatch: &a [*a]", r"net.yaml:2: batch: expected a number, .* got a list"),
    "tag": (
        "name: x\nlayers: [{name: c1, C: !!python/name:os.system x, H: 1, K: 1, R: 1}]",
        r"C: expected a number, .* got 'x'",
    ),
    "wrong tag": (
        "layers: [{name: c1, C: !!int x, H: 1, K: 1, R: 1}]",
        r"layer 'c1': C='x': expected a value of the type its tag names, int",
    ),
    "huge escape": ('name: x\nsource: "\\UFFFFFFFF"\n', r"net.yaml:2: not YAML: the number in an escape"),
    "escape beyond Unicode": ('name: "\\U00110000"\n', r"net.yaml:1: not YAML: the number in an escape"),
    "huge version": (
        f"%YAML 1.{'9' * 5000}\n---\nlayers: []\n",
        r"net.yaml:1: not YAML: the number in an escape or a version",
    ),
    "half a character": (
        f'name: "\\uD800"\nlayers: [{CONV}]',
        r"net.yaml:1: name='\\ud800': expected 1 to 200 printable",
    ),
    "deep": ("[" * 20000, r"net.yaml:1: not a layer list: nested too deeply"),
    "large": ("#" * (1 << 19), r"net.yaml: expected a layer list of at most 256 KiB"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_file_gives_one_line_with_its_place(case: str, tmp_path: Path) -> None:
    text, message = BAD[case]
    with pytest.raises(ConfigError, match=message) as caught:
        read(tmp_path, text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "line", "message"),
    [
        ("K: 0", 3, "K=0: expected 1 to"),
        ("K: -4", 3, "K=-4: expected 1 to"),
        ("K: true", 3, "K=True: expected an integer, got a truth value"),
        ("K: no", 3, "K='no': expected an integer"),
        ("K: on", 3, "K='on': expected an integer"),
        ("K: 1:30", 3, "K='1:30': expected an integer"),
        ("K: 3_3", 3, "K='3_3': expected an integer"),
        ("K: 010", 3, "K='010': expected an integer"),
        ("K: 1.5", 3, "K='1.5': expected an integer"),
        ("K: 2020-01-01", 3, "K='2020-01-01': expected an integer"),
        ("K: 99999999999999999999", 3, "K='99999999999999999999': expected an integer"),
        ("K:", 3, "K=None: expected an integer"),
        ("K: [4, 4]", 3, "expected an integer, got list"),
        ("K: {a: 1}", 3, "K: expected a number, a word or a pair, got a mapping"),
        ("stride: 0", 3, "stride=0: expected 1 to"),
        ("stride: [1, 2, 3]", 3, "stride="),
        ("stride: [1, 2, 3, 4, 5]", 3, "stride: expected a number, a word or a pair, got a list"),
        ("padding: [[[1]]]", 3, "padding: expected a number, a word or a pair, got a list"),
        ("padding: -1", 3, "padding=-1: expected 0 to"),
        ("padding: full", 3, "padding='full': expected one of 'same', 'valid'"),
        ("groups: 3", 3, "groups=3: it must divide C=8"),
        ("dtype: int4", 3, "dtype='int4': expected one of float32"),
        ("dtype: 32", 3, "dtype="),
        ("layout: CHWN", 3, "layout='CHWN': expected one of 'NCHW', 'NHWC'"),
        ("bias: yes", 3, "bias='yes': expected True"),
        ("bias: !!bool yes", 3, "bias='yes': expected a value of the type its tag names, bool"),
        ("activation: !!null relu", 3, "activation='relu': expected a value of the type its tag names, null"),
        ("K: !!int 1_0", 3, "K='1_0': expected a value of the type its tag names, int"),
        ("activation: swish", 3, "activation='swish': expected one of"),
        ("dtype: uint8, direction: [fwd, wgrad]", 3, "direction='wgrad': dtype='uint8': expected direction='fwd'"),
        ("repeat: 0", 3, "repeat=0: expected an integer from 1 to 2147483647"),
        ("repeat: true", 3, "repeat=True: expected an integer"),
        ("dilation: 9", 2, "R=3 with dilation 9 spans 19, more than the padded H of 9"),
        (f"dtype: {'x' * 300}", 3, "dtype: expected at most 200 characters, got 300"),
    ],
)
def test_a_bad_value_names_file_line_and_layer(entry: str, line: int, message: str, tmp_path: Path) -> None:
    base = "C: 8, H: 9, R: 3" + ("" if entry.startswith("K") else ", K: 4")
    with pytest.raises(ConfigError) as caught:
        read(tmp_path, f"layers:\n - {{name: c1, {base},\n    {entry}}}\n")
    assert str(caught.value).startswith(f"{tmp_path / 'net.yaml'}:{line}: layer 'c1': ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_bad_default_is_reported_on_its_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r":1: layer 'conv': stride=0"):
        read(tmp_path, f"defaults: {{stride: 0}}\nlayers:\n - {CONV}\n")


def test_an_alias_bomb_is_refused_at_once(tmp_path: Path) -> None:
    bomb = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}, *a{i - 1}]\n" for i in range(1, 60))
    with pytest.raises(ConfigError, match="unknown key 'a0'"):
        read(tmp_path, bomb)
    nested = "[" * 60 + "x, x" + "]" * 60
    with pytest.raises(ConfigError, match="stride: expected a number"):
        read(tmp_path, f"defaults: {{stride: &a [{nested}, {nested}]}}\nlayers: [{CONV}]")


def test_missing_file_lists_the_known_names() -> None:
    with pytest.raises(ConfigError, match=r"alexnet3: no such file, .* Expected one of alexnet, .*vgg16"):
        networks.load("alexnet3")


def test_a_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="expected a YAML file, got a directory"):
        networks.load(tmp_path)


def test_a_path_with_a_null_byte_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        networks.load("a\0b")


@pytest.mark.parametrize("name", ["x" * 5000, "x" * 300 + ".yaml"])
def test_a_path_that_is_too_long_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read: File name too long"):
        networks.load(name)


@pytest.mark.parametrize("given", [3, None, b"alexnet"])
def test_what_is_no_path_is_named(given: Any) -> None:
    with pytest.raises(ConfigError, match=f"path_or_name={given!r}: expected a network's name or a path"):
        networks.load(given)


def test_unknown_layer_name_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"AlexNet has no layer 'conv9': did you mean 'conv\d'"):
        networks.load("alexnet").find("conv9")
