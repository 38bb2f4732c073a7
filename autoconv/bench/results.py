"""The result of `autoconv bench` as plain JSON, in a file that the same command goes on with."""

from __future__ import annotations

import hashlib
import json
import re
import warnings
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autoconv import __version__
from autoconv.bench.baselines import ALL_BASELINES
from autoconv.bench.statistics import Ratio, interval, ratios
from autoconv.bench.suites import CLASSES, OURS, Row, Suite, class_of
from autoconv.common.candidate import Candidate
from autoconv.common.text import one_line
from autoconv.errors import ConfigError
from autoconv.paths import write_whole
from autoconv.registry import by_name

DIGITS = 5  # of a time: its last one is far below the noise
_NAME = re.compile(r"[\w.-]+")  # of a layer, as it can stand in the name of a file
LONGEST = 100  # characters there of all layers together


def header(suite: Suite) -> dict[str, Any]:
    """What a result is of: the same for all of its layers."""
    setting = suite.setting
    return {
        "suite": suite.name,
        "batch": suite.batch,
        "direction": setting.direction,
        "device": {"name": setting.device.name, "key": setting.device.key, "versions": setting.device.versions},
        "threads": setting.device.threads,
        **({} if setting.dtype == "float32" else {"dtype": setting.dtype}),
        "baselines": {name: ALL_BASELINES[name].version for name in setting.baselines},
        "restrictions": dict(setting.restrictions),
        "exact": setting.exact,
        "weights": "constant" if setting.constant else "varying",
        "fresh": setting.fresh,
        "rounds": setting.rounds,
    }


def to_json(suite: Suite) -> dict[str, Any]:
    """All of it in plain JSON types; seconds of every contestant in every round."""
    names = ("best", *suite.setting.baselines)

    def plain(ratio: Ratio | None) -> dict[str, float] | None:
        return None if ratio is None else asdict(ratio)

    def means(of: str | None = None) -> dict[str, Any]:
        found = {name: (suite.mean(name, of), len(suite.counted(name, of))) for name in names}
        return {name: mean and {**(plain(mean) or {}), "layers": count} for name, (mean, count) in found.items()}

    return {
        **header(suite),
        "autoconv": __version__,
        "date": datetime.now(UTC).date().isoformat(),
        "incomplete": suite.incomplete,
        "notes": suite.remarks,
        "layers": [
            {
                "name": row.name,
                "layer": row.layer.key(),
                "repeat": row.repeat,
                "class": class_of(row.layer),
                "candidate": row.candidate,
                "version": row.version,
                "best": row.best,
                "ratios": {name: plain(interval(rounds) if (rounds := row.against(name)) else None) for name in names},
                "seconds": rounded(row.times),
                "bound": row.bound and float(f"{row.bound:.{DIGITS}g}"),
                "recorded": row.recorded and float(f"{row.recorded:.{DIGITS}g}"),
                "busy": round(row.busy, 3),
                "slow": row.slow,
                "errors": {name: float(f"{error:.2g}") for name, error in row.errors.items()},
                "unable": row.unable,
                "failures": row.failures,
            }
            for row in suite.rows
        ],
        "means": means(),
        "class_means": {of: means(of) for of in CLASSES if any(class_of(row.layer) == of for row in suite.rows)},
        "network": {
            what: {who: plain(interval(ratios(found, times[OURS]))) for who, found in times.items() if who != OURS}
            for what, times in suite.compared.items()
        },
        "in_sequence": rounded(suite.whole),
        "sequence_over": {what: round(ratio, 3) for what, ratio in suite.waiting.items()},
        "shares": {name: round(share, 3) for name, share in suite.shares.items()},
    }


def rounded(times: dict[str, list[float]]) -> dict[str, list[float]]:
    """Seconds to a few digits."""
    return {name: [float(f"{seconds:.{DIGITS}g}") for seconds in samples] for name, samples in times.items()}


def title(name: str) -> str:
    """What the names of files begin with that hold results of a suite."""
    return "-".join("".join(letter if letter.isalnum() else " " for letter in name.lower()).split())


def file_name(suite: Suite) -> str:
    """Of a result in a folder: the suite, the batch, and what of the setting is not at its default."""
    setting = suite.setting
    told = [
        setting.direction if setting.direction != "fwd" else "",
        setting.dtype if setting.dtype != "float32" else "",
        "exact" if setting.exact else "",
        "" if setting.constant else "varying",
        "fresh" if setting.fresh else "",
        _some(suite.names),
    ]
    parts = [title(suite.name), f"batch{suite.batch}", f"threads{setting.device.threads}", *filter(None, told)]
    return "-".join(parts) + ".json"


def _some(names: tuple[str, ...]) -> str:
    """What tells a result of some layers from that of others: their names, or a digest of long or strange ones."""
    told = "+".join(names)
    if len(told) <= LONGEST and all(_NAME.fullmatch(name) for name in names):
        return told
    return f"{len(names)}layers-{hashlib.sha256(json.dumps(names).encode()).hexdigest()[:12]}"


def keep(suite: Suite, folder: Path, jobs: list[Row]) -> None:
    """Write the result, in the place of an older one, with what that had of layers whose turn is yet to come.

    A disk that is full does not end the run: a warning says so, and `unkept`, unless a later call succeeds.
    """
    rows = [row for row in jobs if row.times or any(row is done for done in suite.rows)]
    try:
        write(folder / file_name(suite), to_json(replace(suite, rows=rows)))
    except OSError as error:
        warnings.warn(f"the results of {suite.name} are not kept: {one_line(error)}", stacklevel=2)
        suite.unkept = True
    else:
        suite.unkept = False


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a result, in the place of an older one, in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, _text(result))


def _text(result: dict[str, Any]) -> str:
    """One line for every layer, and for everything else."""

    def line(value: Any) -> str:
        if isinstance(value, list) and value and isinstance(value[0], dict):
            return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
        return json.dumps(value)

    return "{\n " + ",\n ".join(f"{json.dumps(name)}: {line(value)}" for name, value in result.items()) + "\n}\n"


def restore(suite: Suite, jobs: list[Row], folder: Path) -> None:
    """Fill the rows of layers, and the runs in sequence, that an earlier run of the same command has measured.

    Layers are measured anew whose candidate was that of other code.

    Raises
    ------
    ConfigError
        When the file is no such result, or is one of another setting.
    """
    path = folder / file_name(suite)
    if not path.exists():
        return
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        layers = {layer["name"]: layer for layer in stored["layers"]}
        for name, expected in header(suite).items():
            if stored[name] != expected:
                raise ConfigError(f"{path}: {name}: expected {expected!r} as in this run, got {stored[name]!r}")
        versions = {name: algorithm.version for name, algorithm in by_name(suite.setting.device).items()}
        for row in jobs:
            layer = layers.get(row.name)
            if layer and (version := layer.get("version")) is not None:
                layer = layer if versions.get(Candidate.parse(layer["candidate"]).algorithm) == version else None
            if layer and layer["layer"] == row.layer.key() and not layer["failures"]:
                row.candidate, row.times = layer["candidate"], layer["seconds"]
                row.unable, row.errors, row.busy = layer["unable"], layer["errors"], layer["busy"]
                row.slow = layer.get("slow", 0)
                row.recorded, row.version = layer.get("recorded"), layer.get("version")
        suite.whole, suite.shares = stored["in_sequence"], stored["shares"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"{path}: expected a result of `autoconv bench`, got {error!r}") from None
