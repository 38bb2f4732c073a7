"""Models in PyTorch on autoconv's kernels, against PyTorch's own: answers by `optimize`, and training steps.

Run as a program, with `python -m autoconv.bench.networks.pytorch training resnet18 --batch 8 -o FOLDER`, it adds what
it found to `training.json` or `inference.json` there. It takes several models, one after the other; and inference runs
on a GPU, too, with `--device cuda`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import click
import numpy as np

from autoconv.bench.baselines.torch import pin
from autoconv.bench.networks.models import pytorch_images, pytorch_model
from autoconv.bench.networks.race import NetworkRace, keep
from autoconv.bench.race import race
from autoconv.bench.suites import OURS
from autoconv.common.text import duration, one_line, print_table
from autoconv.cpu.device import CPU
from autoconv.device import Device
from autoconv.errors import AutoconvError
from autoconv.networks.run.contest import AGREEMENT
from autoconv.registry import resolve
from autoconv.tuning.choice import TIMING
from autoconv.tuning.timing.full_speed import FullSpeed

FILES = {"training": "training.json", "inference": "inference.json"}  # of a folder of results
CLASSES = 1000  # that the models of torchvision tell apart
Runs = dict[str, Callable[[], Any]]


def inference(name: str, batch: int, budget: float | None = None) -> Runs:
    """One answer of a model, by every contestant.

    Parameters
    ----------
    name : str
        As for `pytorch_model`.
    batch : int
    budget : float, optional
        Seconds of timing for each layer; as many as `autoconv.torch.optimize` takes unless given.

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
    x = pytorch_images(batch, size)
    last = x.contiguous(memory_format=torch.channels_last)
    in_last = pytorch_model(name)[0].eval().to(memory_format=torch.channels_last)
    options: dict[str, Any] = {} if budget is None else {"budget": budget}
    fast = autoconv.torch.optimize(model.eval(), x, **options)
    compiled = torch.compile(pytorch_model(name)[0].eval())
    runs = {OURS: (fast, x), "torch": (model, x), "torch_cl": (in_last, last), "torch_compiled": (compiled, x)}

    def answered(run: Callable[..., Any], x: Any) -> Callable[[], Any]:
        def answer() -> Any:
            with torch.no_grad():  # under inference_mode nothing is frozen
                return run(x)

        return answer

    return {contestant: answered(*run) for contestant, run in runs.items()}


def training(name: str, batch: int, mode: str = "hybrid", channels_last: bool = False) -> Runs:
    """One step of training a model that tells classes apart: forward, backward, and plain SGD.

    Dropout is left out, so that contestants can be compared: it draws numbers.

    Parameters
    ----------
    name, batch
        As for `inference`.
    mode : str
        In which our convolutions are planned.
    channels_last : bool
        Whether the model with our convolutions is in that format, too.

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
        x = pytorch_images(batch, size)
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.0
        if contestant == OURS:
            autoconv.torch.replace_convolutions(model, mode=mode, vendors=False)
        if contestant == "torch_cl" or (contestant == OURS and channels_last):
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
    found.judge(answers, AGREEMENT)
    full_speed = FullSpeed.of(device)
    found.times = race({name: runs[name] for name in answers if name not in found.failures}, rounds, full_speed.take)
    found.slow = full_speed.slow
    return found


@click.command()
@click.argument("what", type=click.Choice(list(FILES)))
@click.argument("names", nargs=-1, required=True, metavar="MODEL...")
@click.option("--device", "device_name", default="cpu", show_default=True, help="Of inference cuda or cuda:N, too.")
@click.option("--batch", default=1, show_default=True)
@click.option("--budget", type=float, metavar="SECONDS", help="Of inference: to time the candidates of each layer in.")
@click.option("--mode", type=click.Choice(TIMING), help="Of training: how ours is planned. [default: hybrid]")
@click.option("--channels-last", is_flag=True, help="Of training: ours in that format, too.")
@click.option("--rounds", default=7, show_default=True)
@click.option("--time-limit", type=float, metavar="SECONDS", help="After which no further model is begun.")
@click.option("-o", "--output", type=click.Path(file_okay=False, path_type=Path), help="A folder of results to add to.")
def main(
    what: str,
    names: tuple[str, ...],
    device_name: str,
    batch: int,
    budget: float | None,
    mode: str | None,
    channels_last: bool,
    rounds: int,
    time_limit: float | None,
    output: Path | None,
) -> None:
    """Race models of torchvision's, or "unet". One that fails does not keep the others from their turns."""
    import torch

    started = time.monotonic()
    if what == "training" and (device_name != "cpu" or budget is not None):
        raise click.UsageError("--device, --budget: expected inference")
    if what != "training" and (mode is not None or channels_last):
        raise click.UsageError("--mode, --channels-last: expected training")
    if output and (mode is not None or channels_last):
        raise click.UsageError("--output: expected neither --mode nor --channels-last, as results do not tell them")
    runs_of: Callable[[str, int], Runs] = partial(inference, budget=budget)
    if what == "training":
        runs_of = partial(training, mode=mode or "hybrid", channels_last=channels_last)
    try:
        device = CPU.current(torch.get_num_threads()) if device_name == "cpu" else resolve(device_name)
    except AutoconvError as failure:
        raise click.ClickException(str(failure)) from None
    races: list[NetworkRace] = []
    failed = False
    for n, name in enumerate(names):
        if time_limit is not None and time.monotonic() - started >= time_limit:
            click.echo(f"the time is up, not begun: {', '.join(names[n:])}", err=True)
            break
        try:
            found = _race(runs_of, name, batch, device, rounds, budget)
            _print(found)
            if output:
                keep(found, output, FILES[what])
        except Exception as failure:  # whatever one of them does, the others go on
            click.echo(f"{name}: {type(failure).__name__}: {one_line(failure, 500)}", err=True)
            failed = True
        else:
            races.append(found)
            failed |= OURS not in found.times
    if len(names) > 1:
        _print_all(f"{what}, batch {batch}", [found for found in races if OURS in found.times])
    if failed:
        raise SystemExit(1)


def _race(
    runs_of: Callable[[str, int], Runs], name: str, batch: int, device: Device, rounds: int, budget: float | None
) -> NetworkRace:
    if not isinstance(device, CPU):
        from autoconv.bench.networks.on_gpu import raced_on_gpu  # which imports what only a GPU needs
        from autoconv.cuda.device import CUDA

        assert isinstance(device, CUDA)
        return raced_on_gpu(name, batch, device, rounds, budget, say=lambda line: click.echo(line, err=True))
    return raced(runs_of(name, batch), name, batch, device, rounds)


def _print(found: NetworkRace) -> None:
    """Who took how long, and who did not take part."""
    click.echo(f"{found.network}, batch {found.batch}")
    for contestant, seconds in found.seconds.items():
        ratio = found.against(contestant) if contestant != OURS else None
        click.echo(f"  {contestant:<15} {duration(seconds):>8}  {ratio or ''}")
    for contestant, why in found.failures.items():
        click.echo(f"{found.network}: {contestant}: {why}", err=True)


def _print_all(title: str, races: Sequence[NetworkRace]) -> None:
    """The times of ours, and how many times as long the others take."""
    others = list(dict.fromkeys(name for found in races for name in found.times if name != OURS))
    rows = [
        [
            found.network,
            duration(found.seconds[OURS]),
            *(str(found.against(name) or "-") for name in others),
            f"{max(found.errors.values(), default=0.0):.1e}",
        ]
        for found in races
    ]
    columns = ["network", f">{OURS}", *(f">vs {name}" for name in others), ">largest difference"]
    print_table(title, columns, rows)


if __name__ == "__main__":
    main()
