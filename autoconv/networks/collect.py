"""`collect`: the layers that a program really uses and has no record for, as a layer list to tune."""

from __future__ import annotations

import atexit
import itertools
import multiprocessing
import os
import threading
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from autoconv.common.forks import renew_in_children
from autoconv.common.text import reason
from autoconv.errors import CacheWarning, ConfigError
from autoconv.layer import ConvLayer
from autoconv.networks import yaml_reader
from autoconv.networks.layers import NamedLayer, Network
from autoconv.networks.yaml_writer import text_of
from autoconv.paths import temporary_folder, write_whole
from autoconv.plans import Plan
from autoconv.records.files import file_name
from autoconv.tuning import planner

VARIABLE = "AUTOCONV_COLLECT"
SOURCE = "layers that a program used and had no record for"


@contextmanager
def collect(path: str | Path) -> Iterator[None]:
    """Write the layers that are planned meanwhile, and of which there is no record, as a layer list.

    These are the layers whose plans came from estimates, or had candidates timed for them: what `plan`, `conv2d`,
    its gradients, and networks ask for, in this process. `autoconv tune` takes the list. A candidate that the caller
    names needs no record.

    Parameters
    ----------
    path : str or Path
        Of the YAML file, written when the block ends. A list that is there already stays as it is, but for comments,
        and gets what it does not have; where there is nothing new, nothing is written.

    Yields
    ------
    None

    Raises
    ------
    ConfigError
        For what is no path, when there is no such folder, when the file cannot be written, and when it is there and is
        no layer list. After a block that raised, a `CacheWarning` says so instead.

    Examples
    --------
    >>> import autoconv, numpy as np, tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> x, w = np.ones((8, 2, 5, 5), np.float32), np.ones((3, 2, 3, 3), np.float32)
    >>> with autoconv.collect(folder.name + "/untuned.yaml"):
    ...     y = autoconv.conv2d(x, w, mode="heuristic")
    >>> (found,) = autoconv.networks.load(folder.name + "/untuned.yaml").layers
    >>> found.batches, found.directions, found.layer.w_shape
    ((8,), ('fwd',), (3, 2, 3, 3))
    >>> folder.cleanup()
    """
    collection = Collection(path)
    collection.check()
    planner.watch(collection.note)
    try:
        yield
    except BaseException:  # which the caller is to see, whatever becomes of the file
        planner.unwatch(collection.note)
        collection.write_or_warn()
        raise
    planner.unwatch(collection.note)
    collection.write()


class Collection:
    """Layers to be tuned, each with its batch and direction, and the file they go to.

    Parameters
    ----------
    path : str or Path
    """

    def __init__(self, path: str | Path) -> None:
        if not isinstance(path, str | Path):
            raise ConfigError(f"path={path!r}: expected a path, as str or Path")
        try:
            self.path = Path(path).absolute()
        except OSError as error:
            expected = "expected a path from the root, as the working directory is gone"
            raise ConfigError(f"{path}: {expected}: {reason(error)}") from None
        self._given = path
        self._layers: dict[ConvLayer, None] = {}  # in the order in which they were asked for
        self._lock = threading.Lock()
        renew_in_children(self, "_lock")

    def check(self) -> None:
        """Refuse a place that could not be written to, before anything is lost."""
        if not self.path.parent.is_dir():
            raise ConfigError(f"{self._given}: there is no folder {self.path.parent}")
        _listed(self._there())

    def note(self, made: Plan) -> None:
        """Remember the layer of a plan, if no record sufficed for it."""
        if made.source == "heuristic" or made.timed:
            with self._lock:
                if not self._layers:
                    self.check()  # here, of the collection of a whole process
                self._layers[made.layer] = None

    def write(self) -> None:
        """Add to the file what was noted; others may do so at the same time."""
        from filelock import FileLock  # slow to import

        with self._lock:
            if not self._layers:
                return
            try:
                with FileLock(temporary_folder() / file_name(str(self.path), ".lock")):
                    net = self._there()
                    known = _listed(net)
                    if longer := self._fitting(net, [layer for layer in self._layers if layer not in known]):
                        write_whole(self.path, text_of(longer))
            except (OSError, NotImplementedError) as error:  # the latter: no locks among the temporary files
                raise ConfigError(f"{self._given}: cannot be written: {reason(error)}") from None

    def write_or_warn(self) -> None:
        """Write where an error would hide another, or reach nobody."""
        try:
            self.write()
        except ConfigError as error:
            warnings.warn(str(error), CacheWarning, stacklevel=2)

    def _there(self) -> Network:
        """The list of the file; one without layers, if there is no file."""
        try:
            with self.path.open("rb") as file:
                data = file.read(yaml_reader.LARGEST_FILE + 1)
        except FileNotFoundError:
            return Network(self.path.stem, SOURCE, ())
        except (OSError, ValueError) as error:  # ValueError: a name with a null byte
            raise ConfigError(f"{self._given}: cannot be read: {reason(error)}") from None
        return yaml_reader.network(data, str(self._given), self.path.stem)

    def _fitting(self, net: Network, new: list[ConvLayer]) -> Network | None:
        """The list with as many new layers, from the first, as a file may hold; None if with none.

        A warning says how many it may not hold.
        """
        kept, longer = new, extended(net, new)
        while kept and len(text_of(longer).encode()) > yaml_reader.LARGEST_FILE:
            kept = kept[: len(kept) * 9 // 10]
            longer = extended(net, kept)
        if len(kept) < len(new):
            left = f"{len(new) - len(kept)} of {len(new)} layers are left out"
            warnings.warn(f"{self._given}: {left}, as a layer list may have no more", CacheWarning, stacklevel=2)
        return longer if kept else None


def _listed(net: Network) -> set[ConvLayer]:
    """What a list has to tune: each of its layers at its batch sizes and in its directions."""
    return {
        named.at(size, way)
        for named in net.layers
        for size in named.batches or net.batches
        for way in named.directions or ("fwd",)
    }


def extended(net: Network, layers: Iterable[ConvLayer]) -> Network:
    """A network with these layers behind its own, each with its own batch sizes and directions, and a new name.

    Parameters
    ----------
    net : Network
    layers : iterable of ConvLayer
        What it does not have yet.

    Returns
    -------
    Network
    """
    alike: dict[tuple[ConvLayer, bool], dict[str, list[int]]] = {}
    for layer in dict.fromkeys(layers):
        ends = layer.direction == "dgrad" and layer.has_epilogue  # of a transposed convolution: an entry of its own
        ways = alike.setdefault((layer.replace(N=1, direction="fwd"), ends), {})
        ways.setdefault(layer.direction, []).append(layer.N)
    found, taken = [*net.layers], {named.name for named in net.layers}
    names = (text for place in itertools.count(1) if (text := f"layer{place}") not in taken)
    for (layer, _), ways in alike.items():
        groups: dict[tuple[int, ...], list[str]] = {}
        for way, sizes in ways.items():
            groups.setdefault(tuple(sorted(sizes)), []).append(way)
        for batches, directions in groups.items():
            found.append(NamedLayer(next(names), layer, 1, len(found) + 1, batches, tuple(directions)))
    return replace(net, layers=tuple(found))


class _OfProcess(Collection):
    """What a whole process collects, and every process that it starts."""

    def note(self, made: Plan) -> None:
        """Remember a layer; in a process that another one started by `multiprocessing`, write it at once.

        Such a process ends without what is registered for the exit, or by SIGTERM, as those of a `Pool` do.
        """
        before = len(self._layers)
        super().note(made)
        if len(self._layers) > before and multiprocessing.parent_process() is not None:
            self.write_or_warn()


def _collect_all(path: str) -> None:
    """Collect until the process ends. Nobody asked for it here: what stands in the way is a warning."""
    try:
        collection = _OfProcess(path)
    except ConfigError as error:
        warnings.warn(f"{VARIABLE}: {error}", CacheWarning, stacklevel=2)
        return
    planner.watch(collection.note)
    atexit.register(collection.write_or_warn)


if os.environ.get(VARIABLE):
    _collect_all(os.environ[VARIABLE])
