"""`Network`: the convolutions of one network, by name."""

from __future__ import annotations

from dataclasses import dataclass

from autoconv.common.text import nearest
from autoconv.errors import ConfigError
from autoconv.layer import ConvLayer


@dataclass(frozen=True)
class NamedLayer:
    """A layer of a network.

    Parameters
    ----------
    name : str
        Its own within the network.
    layer : ConvLayer
        The forward layer, for one image of the network.
    repeat : int
        How many equal ones the network has.
    line : int
        Where it stands in its file, from 1.
    batches : tuple of int
        Its own batch sizes to tune for; empty where the network's are meant.
    directions : tuple of str
        Its own directions to tune; empty where "fwd" is meant.
    rows : bool
        Whether more images are more rows of a product, which are pixels of one image: those of a fully connected layer.
    """

    name: str
    layer: ConvLayer
    repeat: int
    line: int
    batches: tuple[int, ...] = ()
    directions: tuple[str, ...] = ()
    rows: bool = False

    @property
    def transposed(self) -> bool:
        """Whether it is a transposed convolution: a layer whose own direction is "dgrad" alone."""
        return self.directions == ("dgrad",)

    def at(self, batch: int = 1, direction: str = "fwd") -> ConvLayer:
        """The layer for a batch and a direction.

        A gradient has no fused epilogue. Of a transposed convolution the epilogue ends "dgrad", and no other.

        Parameters
        ----------
        batch : int
        direction : "fwd", "dgrad" or "wgrad"

        Returns
        -------
        ConvLayer

        Raises
        ------
        LayerError
            When the batch is not an integer from 1, or the direction is none of "fwd", "dgrad" and "wgrad".
        """
        ends = direction == ("dgrad" if self.transposed else "fwd")
        epilogue = {} if ends else {"bias": False, "residual": False, "activation": None}
        found = self.layer.replace(N=batch, direction=direction, **epilogue)
        if self.rows:
            return found.replace(N=1, W=self.layer.W * batch)
        return found if self.layer.N == 1 else found.replace(N=self.layer.N * batch)


@dataclass(frozen=True)
class Network:
    """The convolutions of one network, in order.

    Parameters
    ----------
    name : str
    source : str
        The paper or code they were taken from; empty where it is not known.
    layers : tuple of NamedLayer
    batches : tuple of int
        Batch sizes to tune for, where the user names none.

    Examples
    --------
    >>> from autoconv.networks import load
    >>> alexnet = load("alexnet")
    >>> alexnet.name, len(alexnet.layers), alexnet.macs
    ('AlexNet', 5, 665784864)
    >>> alexnet.find("conv1").at(batch=8, direction="wgrad").output_shape
    (96, 3, 11, 11)
    """

    name: str
    source: str
    layers: tuple[NamedLayer, ...]
    batches: tuple[int, ...] = (1,)

    @property
    def macs(self) -> int:
        """Multiply-adds of all convolutions for one image, repeats counted."""
        return sum(named.layer.macs * named.repeat for named in self.layers)

    def stated(self, named: NamedLayer, batch: int, direction: str = "fwd") -> tuple[int, str]:
        """The batch size and the direction that count for a layer, where every layer is taken once.

        What is asked of all layers, but where the layer states its own: those take the place of the network's batch
        sizes and of "fwd". Of several the first is taken, unless what is asked is among them.

        Parameters
        ----------
        named : NamedLayer
            One of its layers.
        batch : int
        direction : "fwd", "dgrad" or "wgrad"

        Returns
        -------
        batch : int
        direction : "fwd", "dgrad" or "wgrad"
        """
        sizes, ways = (named.batches or (batch,)), (named.directions or (direction,))
        if batch not in self.batches or batch in sizes:
            sizes = (batch,)
        if direction != "fwd" or direction in ways:
            ways = (direction,)
        return sizes[0], ways[0]

    def find(self, name: str) -> NamedLayer:
        """The layer of a name.

        Parameters
        ----------
        name : str

        Returns
        -------
        NamedLayer

        Raises
        ------
        ConfigError
            When the network has none of that name; the message names the nearest, and all there are.
        """
        for named in self.layers:
            if named.name == name:
                return named
        raise ConfigError(f"{self.name} has no layer {name!r}: {nearest(name, [n.name for n in self.layers])}")
