"""Networks from files: those that come with autoconv, by name, and the user's own."""

from __future__ import annotations

from pathlib import Path

from autoconv.common.text import nearest, reason
from autoconv.errors import ConfigError
from autoconv.networks import onnx_reader, yaml_reader
from autoconv.networks.layer_list import layer_list
from autoconv.networks.layers import Network
from autoconv.networks.passes import optimized
from autoconv.paths import shipped


def names() -> list[str]:
    """Names of the networks that come with autoconv.

    Returns
    -------
    list of str
        What `load` takes in place of a path, in alphabetical order.
    """
    return sorted(path.stem for path in shipped("configs").glob("*.yaml"))


def load(path_or_name: str | Path, batch: int | None = None) -> Network:
    """Read the layers of a network from a YAML or ONNX file, or of one that comes with autoconv.

    Of an ONNX file (its name ends in `.onnx`; the extra `onnx` reads it) come the convolutions and fully connected
    layers, with what can be fused into them. A YAML file is a mapping with the keys

    - `layers`: a list of mappings, each with a `name` of its own and the arguments of `ConvLayer`, but for `N`.
      `W` is `H` and `S` is `R` unless given; `repeat` counts how many equal ones the network has; `batch` and
      `direction` (one, or a list) say what this layer is tuned for, where that is not what the others are;
    - `name` (the file's, unless given), `source` (the paper), `batch` (a number or a list of them; 1 unless given);
    - `defaults`: arguments of `ConvLayer` for all layers that do not give their own.

    Only decimal integers are numbers, and only `true` and `false` are truth values.

    Parameters
    ----------
    path_or_name : str or Path
        A file, or one of `names()`; where there are both, the file is read.
    batch : int, optional
        For how many images to read an ONNX file, where that leaves it open; for 1 unless given. What is fused into its
        layers may depend on it.

    Returns
    -------
    Network
        Every layer checked, for one image; an ONNX file's batch is that of its inputs, or `batch` where that is open.

    Raises
    ------
    ConfigError
        When there is no such file or network, the file cannot be read, or it is not such a mapping or model; the
        message names file, line and layer, or node. And when `batch` is no integer of at least 1.

    Examples
    --------
    >>> [named.name for named in load("cifar10").layers]
    ['conv1', 'conv2', 'conv3']
    """
    if not isinstance(path_or_name, str | Path):
        raise ConfigError(f"path_or_name={path_or_name!r}: expected a network's name or a path, as str or Path")
    if batch is not None and (type(batch) is not int or batch < 1):
        raise ConfigError(f"batch={batch!r}: expected an integer of at least 1")
    path = Path(path_or_name)
    if path.suffix == ".onnx":
        found = layer_list(optimized(onnx_reader.read(path, batch or 1)), batch or 1)
        if not found.layers:
            raise ConfigError(
                f"{found.source or found.name}: expected convolutions or fully connected layers, got none"
            )
        return found
    own = shipped("configs") / f"{path_or_name}.yaml"
    try:
        if path.name == str(path_or_name) and not path.is_file() and own.is_file():
            path = own
        with path.open("rb") as file:
            data = file.read(yaml_reader.LARGEST_FILE + 1)
    except (FileNotFoundError, NotADirectoryError):
        bare = path.name == str(path_or_name) and path.suffix not in (".yaml", ".yml")
        expected = nearest(path.name, names()) if bare else f"expected one of {', '.join(names())}"
        nothing = "no such file, and no network of that name comes with autoconv"
        raise ConfigError(f"{path}: {nothing}: {expected}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path}: expected a YAML file, got a directory") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null byte
        raise ConfigError(f"{path}: cannot be read: {reason(error)}") from None
    return yaml_reader.network(data, str(path), path.stem)


def refuse_layer_list(path: str | Path) -> None:
    """Refuse what only `load` here reads, where a network is wanted that can run.

    Parameters
    ----------
    path : str or Path

    Raises
    ------
    ConfigError
        When its name is that of a YAML file, or of a network that comes along.
    """
    named = str(path) in names() and not Path(path).exists()
    if named or Path(path).suffix in (".yaml", ".yml"):
        expected = "expected an ONNX file, or one that CompiledNetwork.save wrote"
        raise ConfigError(f"{path}: a list of layers, which does not run: {expected}")
