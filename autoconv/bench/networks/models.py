"""The networks that are raced, as ONNX files of any batch, with weights drawn at random.

Nine come with the package onnx, four are PyTorch's (three of torchvision's, and a U-Net). Run as a program, with
`python -m autoconv.bench.networks.models FOLDER [NAME...]`, it writes them into a folder.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import numpy as np

from autoconv.common.text import nearest, one_line
from autoconv.paths import write_whole

LIGHT = (
    "bvlc_alexnet",
    "densenet121",
    "inception_v1",
    "inception_v2",
    "resnet50",
    "shufflenet",
    "squeezenet",
    "vgg19",
    "zfnet512",
)
TORCHVISION = ("resnet18", "mobilenet_v2", "efficientnet_b0")
NAMES = (*LIGHT, *TORCHVISION, "unet")
BATCH = "N"  # what the models call their batch


def light_folder() -> Path:
    """Where the package onnx keeps its nine networks, and what each answers."""
    import onnx

    return Path(onnx.__file__).parent / "backend" / "test" / "data" / "light"


def light(name: str) -> Any:
    """One of the nine networks as it comes: every weight of an array is the same constant."""
    import onnx

    return onnx.load(light_folder() / f"light_{name}.onnx")


def randomised(network: Any) -> Any:
    """The network with weights drawn at random: filters scaled by their fan-in, batch normalisation near identity."""
    import onnx
    from onnx import numpy_helper

    rng = np.random.default_rng(0)
    takers: dict[str, tuple[Any, int]] = {}
    for taker in network.graph.node:
        for place, name in enumerate(taker.input):
            takers.setdefault(name, (taker, place))
    shapes = {tensor.name: numpy_helper.to_array(tensor) for tensor in network.graph.initializer}
    found = onnx.ModelProto()
    found.CopyFrom(network)
    del found.graph.node[:]
    for maker in network.graph.node:
        if maker.op_type != "ConstantOfShape":
            found.graph.node.append(maker)
            continue
        shape, name = tuple(map(int, shapes[maker.input[0]])), maker.output[0]
        value = _drawn(rng, shape, *takers[name], takers) if name in takers else np.zeros(shape)
        found.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    return found


def _drawn(
    rng: np.random.Generator, shape: tuple[int, ...], taker: Any, place: int, takers: Mapping[str, tuple[Any, int]]
) -> np.ndarray:
    while taker.op_type == "Unsqueeze":
        taker, place = takers[taker.output[0]]
    if taker.op_type in ("Conv", "Gemm") and place == 1:
        return rng.standard_normal(shape) * float(np.sqrt(2 / np.prod(shape[1:])))
    middle = float((taker.op_type, place) in (("BatchNormalization", 1), ("BatchNormalization", 4), ("Mul", 1)))
    if middle and place == 1 and takers[taker.output[0]][0].op_type in ("Sum", "Concat"):
        middle = 0.25  # else every residual sum would double the variance, and softmax see one number alone
    return 0.1 * rng.standard_normal(shape) + middle


def opened(network: Any) -> Any:
    """The network of one image as one of any batch.

    Inputs and outputs get an open first dimension, and what is reshaped to one image keeps as many as there are.
    """
    import onnx
    from onnx import numpy_helper

    found = onnx.ModelProto()
    found.CopyFrom(network)
    graph = found.graph
    used = {name for node in graph.node for name in node.input}
    kept = {tensor.name: tensor for tensor in graph.initializer if tensor.name in used}
    computed = {name for node in graph.node for name in node.output}
    for node in graph.node:
        if node.op_type != "Reshape" or node.input[0] not in computed or node.input[1] not in kept:
            continue
        shape = numpy_helper.to_array(kept[node.input[1]])
        if shape[0] == 1 and -1 not in shape:
            name = f"{node.input[1]}.opened"
            kept[name] = numpy_helper.from_array(np.concatenate([[-1], shape[1:]]).astype(np.int64), name)
            node.input[1] = name
        elif shape[0] == 1:  # (1, -1): zero stands for what the input has
            name = f"{node.input[1]}.opened"
            kept[name] = numpy_helper.from_array(np.concatenate([[0], shape[1:]]).astype(np.int64), name)
            node.input[1] = name
    inputs = [value for value in graph.input if value.name not in kept and value.name in used]
    for value in (*inputs, *graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = BATCH
    for field, content in (("initializer", kept.values()), ("input", inputs), ("value_info", ())):
        graph.ClearField(field)
        getattr(graph, field).extend(content)
    found.ir_version = max(found.ir_version, 4)  # from which on constants need not be inputs
    return found


def pytorch_model(name: str) -> tuple[Any, int]:
    """A model of PyTorch's with weights drawn at random, and the extent of its images.

    Parameters
    ----------
    name : str
        A model of torchvision's, or "unet".

    Returns
    -------
    torch.nn.Module
    int

    Raises
    ------
    ClickException
        When torchvision is not installed, does not go with PyTorch, or has no such model.
    """
    import torch

    torch.manual_seed(0)
    if name == "unet":
        model, size = unet(), 256
    else:
        try:
            import torchvision
        except (ImportError, RuntimeError) as error:  # of another release than PyTorch's it has no operators
            raise click.ClickException(
                f"network {name!r} takes the package torchvision, of the release that goes with torch "
                f"{torch.__version__}: pip install torchvision ({one_line(error)})"
            ) from None

        if name not in (known := torchvision.models.list_models(torchvision.models)):
            raise click.ClickException(f"network {name!r}: {nearest(name, ['unet', *known])}")
        model, size = getattr(torchvision.models, name)(weights=None), 224
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.ConvTranspose2d | torch.nn.Linear):
            torch.nn.init.kaiming_normal_(module.weight)
        elif isinstance(module, torch.nn.BatchNorm2d):
            for array, middle in ((module.weight, 1.0), (module.running_var, 1.0), (module.bias, 0.0)):
                torch.nn.init.normal_(array, middle, 0.1)
    return model, size


def pytorch_images(batch: int, size: int) -> Any:
    """Random images for such a model."""
    import torch

    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))


def exported(name: str) -> Any:
    """A network of PyTorch's as ONNX, for one image; as `pytorch_model` makes it."""
    import onnx
    import torch

    model, size = pytorch_model(name)
    target = io.BytesIO()
    torch.onnx.export(
        model.eval(), (torch.zeros(1, 3, size, size),), target, dynamo=False, opset_version=17, input_names=["image"]
    )
    return onnx.load_model_from_string(target.getvalue())


def unet(width: int = 32, depth: int = 4) -> Any:
    """A U-Net with padding and batch normalisation (Ronneberger, Fischer and Brox, 2015), of half its channels."""
    from torch import cat, nn

    def block(before: int, after: int) -> Any:
        layers: list[Any] = []
        for channels in (before, after):
            layers += [nn.Conv2d(channels, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        return nn.Sequential(*layers)

    widths = [width << n for n in range(depth + 1)]

    class UNet(nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.ModuleList(map(block, [3, *widths], widths))
            self.up = nn.ModuleList(nn.ConvTranspose2d(2 * n, n, 2, 2) for n in reversed(widths[:-1]))
            self.joined = nn.ModuleList(block(2 * n, n) for n in reversed(widths[:-1]))
            self.pool, self.last = nn.MaxPool2d(2), nn.Conv2d(width, 2, 1)

        def forward(self, x: Any) -> Any:
            passed = []
            for level, down in enumerate(self.down):
                x = down(self.pool(x) if level else x)
                passed.append(x)
            for up, joined, before in zip(self.up, self.joined, reversed(passed[:-1]), strict=True):
                x = joined(cat([before, up(x)], 1))
            return self.last(x)

    return UNet()


def network(name: str) -> Any:
    """One of `NAMES`, of any batch.

    Parameters
    ----------
    name : str

    Returns
    -------
    onnx.ModelProto

    Raises
    ------
    ValueError
        For another name.
    """
    if name not in NAMES:
        raise ValueError(f"network {name!r}: expected one of {', '.join(NAMES)}")
    return opened(randomised(light(name)) if name in LIGHT else exported(name))


def fixed(model: Any, batch: int) -> Any:
    """The model with a batch in the place of every first dimension that its inputs leave open.

    Parameters
    ----------
    model : onnx.ModelProto
    batch : int

    Returns
    -------
    onnx.ModelProto
    """
    import onnx

    found = onnx.ModelProto()
    found.CopyFrom(model)
    for value in found.graph.input:
        dims = value.type.tensor_type.shape.dim
        if dims and not dims[0].HasField("dim_value"):
            dims[0].dim_value = batch
    for value in found.graph.output:
        value.type.tensor_type.ClearField("shape")
    found.graph.ClearField("value_info")
    return onnx.shape_inference.infer_shapes(found)


@click.command()
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.argument("names", nargs=-1, metavar="[NAME]...", type=click.Choice(NAMES))
def main(folder: Path, names: tuple[str, ...]) -> None:
    """Write networks into a folder, all of them unless some are named."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names or NAMES:
        write_whole(folder / f"{name}.onnx", network(name).SerializeToString())


if __name__ == "__main__":
    main()
