"""The verb `autoconv layers`."""

from __future__ import annotations

from pathlib import Path

import click

from autoconv import networks
from autoconv.cli.options import OK
from autoconv.networks.yaml_writer import text_of


@click.command()
@click.argument("net", metavar="NET")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Where to. [default: standard output]",
)
def layers(net: str, output: Path | None) -> int:
    """Write the layers of a network as a layer list in YAML, which tune, bench and compare read.

    Of an ONNX file come the convolutions and fully connected layers, with what can be fused into them.
    """
    text = text_of(networks.load(net))
    if output is None:
        click.echo(text, nl=False)
    else:
        output.write_text(text, encoding="utf-8")
    return OK
