"""Models in PyTorch on autoconv's kernels, against PyTorch's own: answers by `optimize`, and training steps.

Run as a program, with `python -m autoconv.bench.networks.pytorch training resnet18 --batch 8 -o FOLDER`, it adds what
it found to `training.json` or `inference.json` there.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from autoconv.bench.baselines.torch import pin
from autoconv.bench.networks.models import pytorch_model
from autoconv.bench.networks.race import NetworkRace, keep
from autoconv.bench.race import disagreement, race
from autoconv.bench.suites import OURS
from autoconv.common.text import one_line
from autoconv.cpu.device import CPU
from autoconv.networks.run.contest import AGREEMENT
from autoconv.tuning.timing.full_speed import FullSpeed

FILES = {"training": "training.json", "inference": "inference.json"}  # of a folder of results
CLASSES = 1000  # that the models of torchvision tell apart
Runs = dict[str, Callable[[], Any]]


def inference(name: str, batch: int) -> Runs:
    """One answer of a model, by every contestant.

    Parameters
    ----------
    name : str
        As for `pytorch_model`.
    batch : int

    Returns
    -------
    dict of str to callable
        "autoconv", and PyTorch's: "torch", "torch_cl" (channels_last) and "torch_compiled" (with freezing).
    """
    import torch
    import torch._inductor.config

    import autoconv.torch

    torch._inductor.config.freezing = True
    model, size = pytorch_model(name)
    x = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))
    last = x.contiguous(memory_format=torch.channels_last)
    in_last = pytorch_model(name)[0].eval().to(memory_format=torch.channels_last)
    fast = autoconv.torch.optimize(model.eval(), x)
    compiled = torch.compile(pytorch_model(name)[0].eval())
    runs = {OURS: (fast, x), "torch": (model, x), "torch_cl": (in_last, last), "torch_compiled": (compiled, x)}

    def answered(run: Callable[..., Any], x: Any) -> Callable[[], Any]:
        def answer() -> Any:
            with torch.no_grad():  # under inference_mode nothing is frozen
                return run(x)

        return answer

    return {contestant: answered(*run) for contestant, run in runs.items()}


def training(name: str, batch: int) -> Runs:
    """One step of training a model that tells classes apart: forward, backward, and plain SGD.

    Dropout is left out, so that contestants can be compared: it draws numbers.

    Parameters
    ----------
    name, batch
        As for `inference`.

    Returns
    -------
    dict of str to callable
        "autoconv" computes the convolutions and their gradients, PyTorch the rest; "torch" and "torch_cl" are
        PyTorch's own. Each gives what the first step found: its loss.
    """
    import torch

    import autoconv.torch

    runs: Runs = {}
    for contestant in (OURS, "torch", "torch_cl"):
        model, size = pytorch_model(name)
        x = torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(1))
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if contestant == OURS:
            autoconv.torch.replace_convolutions(model, vendors=False)
        if contestant == "torch_cl":
            model, x = model.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
        runs[contestant] = _step(model.train(), x, torch.arange(batch) % CLASSES)
    return runs


def _step(model: Any, x: Any, labels: Any) -> Callable[[], Any]:
    import torch

    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)

    def step() -> Any:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def raced(runs: Runs, name: str, batch: int, device: CPU, rounds: int) -> NetworkRace:
    """A race of contestants, whose first answers are compared with ours.

    Parameters
    ----------
    runs : dict of str to callable
    name : str
    batch : int
    device : CPU
        With the number of threads for all.
    rounds : int

    Returns
    -------
    NetworkRace
    """
    found = NetworkRace(name, batch, device, rounds)
    pin(device.threads)
    answers: dict[str, np.ndarray] = {}
    for contestant, run in runs.items():
        try:
            answers[contestant] = np.array([np.asarray(run()) for _ in range(2)])  # of training, a step further
        except Exception as failure:  # whatever one of them does, the others go on
            found.failures[contestant] = one_line(failure, 200)
    for contestant in [name for name in answers if name != OURS and OURS in answers]:
        error = found.errors[contestant] = disagreement(answers[contestant], answers[OURS])
        if not error <= AGREEMENT:
            found.failures[contestant] = f"its answer differs by {error:.1e} of the largest value"
    full_speed = FullSpeed.of(device)
    found.times = race({name: runs[name] for name in answers if name not in found.failures}, rounds, full_speed.take)
    found.slow = full_speed.slow
    return found


@click.command()
@click.argument("what", type=click.Choice(list(FILES)))
@click.argument("name")
@click.option("--batch", default=1, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="A folder of results to add to.")
def main(what: str, name: str, batch: int, rounds: int, output: Path | None) -> None:
    """Race a model of torchvision's, or "unet"."""
    import torch

    device = CPU.current(torch.get_num_threads())
    found = raced((training if what == "training" else inference)(name, batch), name, batch, device, rounds)
    for contestant, seconds in found.seconds.items():
        ratio = found.against(contestant) if contestant != OURS else None
        click.echo(f"{contestant:<15} {1e3 * seconds:8.1f} ms  {ratio or ''}")
    for contestant, why in found.failures.items():
        click.echo(f"{contestant}: {why}", err=True)
    if output:
        keep(found, output, FILES[what])


if __name__ == "__main__":
    main()
