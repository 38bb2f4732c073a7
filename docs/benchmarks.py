"""The tables of the page "Benchmarks" and of the README, from the results in `docs/results`.

A folder there is a processor, and a file what `autoconv bench -o` wrote (the README there says which were not).
`python docs/benchmarks.py` writes every table after its mark `<!-- results: NAME -->`.
"""

from __future__ import annotations

import json
import re
import statistics
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from autoconv.bench import statistics as figures
from autoconv.bench.baselines import ALL_BASELINES, BASELINES
from autoconv.bench.networks.pytorch import FILES
from autoconv.bench.networks.race import FILE
from autoconv.bench.networks.runtimes import RUNTIMES
from autoconv.bench.suites import CLASSES
from autoconv.common.text import duration

ROOT = Path(__file__).parents[1]
PROCESSORS = {
    "zen3": "Zen 3, AVX2",
    "emerald": "Emerald Rapids, AVX-512",
    "zen5": "Zen 5, AVX-512",
    "xeon": "Xeon, AVX-512",
    "xeon-amx": "Xeon, AMX",
    "zen4": "Zen 4, AVX-512",
}
TILES = ROOT / "docs" / "results" / "xeon-amx" / "mixed-27-batch1-threads2.json"  # whose algorithms are of interest
TYPES = ROOT / "docs" / "results" / "amx" / "types.jsonl"
SUITE = "Mixed-27"
CLOSE = 2e-4  # of the largest value: by what a baseline's answer may differ from ours, which is up to 7e-5 off itself
Result = dict[str, Any]


def results() -> list[tuple[str, Result]]:
    """Every result with its processor: the processors in their order, and the batches in theirs."""
    found = [
        (label, json.loads(path.read_text(encoding="utf-8")))
        for folder, label in PROCESSORS.items()
        for path in sorted((ROOT / "docs" / "results" / folder).glob("*.json"))
        if path.name not in (FILE, *FILES.values())
    ]
    order = list(PROCESSORS.values())
    return sorted(found, key=lambda pair: (order.index(pair[0]), pair[1]["suite"], pair[1]["batch"]))


def against_all(result: Result) -> bool:
    """Whether every baseline took part."""
    return len(result["baselines"]) == len(BASELINES)


def columns(suite: str, some: Callable[[Result], bool], dtype: str = "float32") -> list[tuple[str, Result]]:
    """Some results of one suite in one type; the header names the processor once."""
    found, before = [], ""
    for label, result in results():
        if result["suite"] == suite and result.get("dtype", "float32") == dtype and some(result):
            batch = f"batch {result['batch']}"
            found.append((batch if label == before else f"{label}, {batch}", result))
            before = label
    return found


def races(file: str) -> list[tuple[str, Result]]:
    """Every race of a whole network in such a file with its processor."""
    return [
        (label, race)
        for folder, label in PROCESSORS.items()
        if (path := ROOT / "docs" / "results" / folder / file).is_file()
        for race in json.loads(path.read_text(encoding="utf-8"))["networks"]
    ]


def table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """As Markdown."""
    header = list(header)
    lines = [header, ["---"] * len(header), *map(list, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(ratio: Result | None, of: int | None = None) -> str:
    """A median, in bold where it is surely behind, with the number of layers where some are missing."""
    if not ratio:
        return "-"
    text = f"{ratio['median']:.2f}"
    if ratio.get("high", 1) < figures.BEHIND:
        text = f"**{text}**"
    return text if of in (None, ratio.get("layers", of)) else f"{text} ({ratio['layers']})"


def with_interval(ratio: Result | None) -> str:
    """A median and its 95 % interval."""
    return f"{cell(ratio)} ({ratio['low']:.2f} to {ratio['high']:.2f})" if ratio else "-"


def means(some: Callable[[Result], bool]) -> str:
    """By class, against the fastest baseline of every layer."""
    found = columns(SUITE, some)
    kinds: dict[str, list[Result | None]] = {"all layers": [result["means"]["best"] for _, result in found]}
    kinds |= {name: [result["class_means"][name]["best"] for _, result in found] for name in CLASSES}
    rows = []
    for name, ratios in kinds.items():
        count = max(ratio["layers"] for ratio in ratios if ratio)
        rows.append([f"{name} ({count})", *(cell(ratio, count) for ratio in ratios)])
    rows.append([f"all layers, answers within {CLOSE:.0e} of ours", *(cell(close(result)) for _, result in found)])
    if not all(against_all(result) for _, result in found):
        rows.append(["baselines", *(str(len(result["baselines"])) for _, result in found)])
    return table(["geometric mean of", *(title for title, _ in found)], rows)


def close(result: Result) -> Result | None:
    """All layers, against the fastest baseline whose answer is close to ours; None where rounds were not kept."""
    found = []
    for layer in result["layers"]:
        able = [name for name, error in layer.get("errors", {}).items() if error <= CLOSE]
        if not able:
            return None
        best = min(able, key=lambda name: statistics.median(layer["seconds"][name]))
        found.append(figures.ratios(layer["seconds"][best], layer["seconds"]["autoconv"]))
    mean = figures.geometric_mean(found)
    return mean and {"median": mean.median, "high": mean.high}


def baselines() -> str:
    """All layers, against each baseline."""
    found = columns(SUITE, lambda result: set(result["means"]) > {"best"})
    rows = []
    for name, baseline in BASELINES.items():
        ratios = (cell(result["means"].get(name), len(result["layers"])) for _, result in found)
        rows.append([baseline.label, *ratios])
    return table(["against", *(title for title, _ in found)], rows)


def layers(batch: int) -> str:
    """Every layer of the suite: its time, and the ratio to the fastest of all baselines."""
    found = [
        (label, {layer["name"]: layer for layer in result["layers"]})
        for label, result in results()
        if (result["suite"], result["batch"]) == (SUITE, batch) and against_all(result)
    ]
    titles = [title for label, _ in found for title in (label, "over bound", "best baseline", "ratio")]

    def cells(layer: Result) -> list[str]:
        text = with_interval(layer["ratios"]["best"])
        own, bound = statistics.median(layer["seconds"]["autoconv"]), layer.get("bound")
        return [duration(own), f"{own / bound:.2f}" if bound else "-", layer["best"], text]

    rows = []
    for name in dict.fromkeys(name for _, stored in found for name in stored):
        parts = [cells(stored[name]) if name in stored else ["-"] * 4 for _, stored in found]
        rows.append([name, *(text for part in parts for text in part)])
    return table(["layer", *titles], rows)


def bounds() -> str:
    """By class, over the layers that have a bound, the ratio to the fastest baseline, and what it were at the bound."""
    found = columns(SUITE, against_all)
    rows = []
    for of in (None, *CLASSES):
        cells = []
        for _, result in found:
            able = [layer for layer in result["layers"] if layer["bound"] and of in (None, layer["class"])]
            ratios = [layer["ratios"]["best"]["median"] for layer in able]
            over = [statistics.median(layer["seconds"]["autoconv"]) / layer["bound"] for layer in able]
            reached = statistics.geometric_mean(ratios)
            cells.append(f"{reached:.2f} of {reached * statistics.geometric_mean(over):.2f} ({len(able)})")
        rows.append([of or "all layers", *cells])
    return table(["reached, of what the bound allows", *(title for title, _ in found)], rows)


def networks() -> str:
    """Sums of the layers and runs in sequence, against ONNX Runtime."""
    titles = {"sum": "sum of the layers", "sequence": "in sequence", "exported": "in sequence, chained as exported"}
    rows = []
    for label, result in results():
        if result["network"] and result["batch"] == 1:
            found = (result["network"].get(what, {}).get("onnxruntime") for what in titles)
            rows.append([result["suite"], label, *map(with_interval, found)])
    return table(["network", "processor", *titles.values()], sorted(rows))


def _threads(number: int) -> str:
    return f"{number} thread" + "s" * (number > 1)


def whole(batch: int) -> str:
    """Whole networks against every runtime, the fastest in its own column; and the geometric means of those raced."""
    rows = []
    means: dict[tuple[str, int], dict[str, list[float]]] = {}
    raced = [(label, race) for label, race in races(FILE) if race["batch"] == batch and race["best"]]
    names = [name for name in RUNTIMES if any(name in race["ratios"] for _, race in raced)]
    for label, race in raced:
        ratios, best = race["ratios"], race["best"]
        own = statistics.median(race["seconds"]["autoconv"])
        against = (cell(ratios.get(name)) for name in names)
        place = f"{label}, {_threads(race['threads'])}"
        rows.append([race["network"], place, duration(own), best, with_interval(ratios[best]), *against])
        found = means.setdefault((place, race["threads"]), {"best": []})
        found["best"].append(ratios[best]["median"])
        for name, ratio in ratios.items():
            found.setdefault(name, []).append(ratio["median"])
    for (place, _), found in means.items():
        count = len(found["best"])
        middles = {name: statistics.geometric_mean(values) for name, values in found.items()}
        partial = {name: "" if len(values) == count else f" ({len(values)})" for name, values in found.items()}
        against = (f"{middles[name]:.2f}{partial[name]}" if name in middles else "-" for name in names)
        rows.append([f"geometric mean of {count}", place, "", "", f"{middles['best']:.2f}", *against])
    return table(["network", "processor", "autoconv", "best", "over autoconv", *names], rows)


def pytorch(file: str) -> str:
    """Models in PyTorch against PyTorch's own."""
    found = [(label, race) for label, race in races(file) if race["best"]]
    names = [name for name in RUNTIMES if any(name in race["ratios"] for _, race in found)]
    rows = []
    means: dict[str, list[float]] = {}
    for label, race in found:
        own, best = duration(statistics.median(race["seconds"]["autoconv"])), race["best"]
        against = (cell(race["ratios"].get(name)) for name in names)
        place, ratio = f"{label}, {_threads(race['threads'])}", with_interval(race["ratios"][best])
        rows.append([race["network"], str(race["batch"]), place, own, best, ratio, *against])
        means.setdefault(place, []).append(race["ratios"][best]["median"])
    for place, ratios in means.items():
        mean = f"{statistics.geometric_mean(ratios):.2f}"
        rows.append([f"geometric mean of {len(ratios)}", "", place, "", "", mean, *[""] * len(names)])
    return table(["model", "batch", "processor", "autoconv", "best", "over autoconv", *names], rows)


def narrow(dtype: str) -> str:
    """By class, in a type of 16 bits, against each of PyTorch's ways; one processor has been measured so."""
    ((label, result),) = columns(SUITE, lambda result: True, dtype)
    kinds = {"all layers": result["means"]} | {name: result["class_means"][name] for name in CLASSES}
    names = ["best", *result["baselines"]]
    rows = [
        [f"{name} ({ratios['best']['layers']})", *(cell(ratios[who]) for who in names)]
        for name, ratios in kinds.items()
    ]
    header = [label, "against the best", *(ALL_BASELINES[name].label for name in result["baselines"])]
    return table(header, rows)


def matrix_unit() -> str:
    """What won every layer of the suite on a processor with tiles, by class."""
    layers = json.loads(TILES.read_text(encoding="utf-8"))["layers"]
    rows = []
    for layer in sorted(layers, key=lambda layer: (CLASSES.index(layer["class"]), layer["name"])):
        own = duration(statistics.median(layer["seconds"]["autoconv"]))
        algorithm = layer["candidate"].partition("[")[0]
        rows.append([layer["name"], f"`{algorithm}`", own, layer["best"], with_interval(layer["ratios"]["best"])])
    return table(["layer", "algorithm", "autoconv", "best baseline", "ratio"], rows)


def types() -> str:
    """Layers in other types and directions on another processor with tiles."""
    lines = TYPES.read_text(encoding="utf-8").splitlines()
    rows = []
    for line in map(json.loads, lines):
        own, *others = ({name: statistics.median(times) for name, times in line["times"].items()}).items()
        best, seconds = min(others, key=lambda pair: pair[1])
        what = line["layer"], line["dtype"], line["direction"], str(line["batch"])
        algorithm = line["candidate"].partition("[")[0]
        rows.append([*what, f"`{algorithm}`", duration(own[1]), best, duration(seconds), f"{line['ratio']:.2f}"])
    header = "layer", "type", "direction", "batch", "algorithm", "autoconv", "best", "which takes", "ratio"
    return table(header, rows)


TABLES = {
    "whole-1": lambda: whole(1),
    "whole-8": lambda: whole(8),
    "inference": lambda: pytorch(FILES["inference"]),
    "training": lambda: pytorch(FILES["training"]),
    "means": lambda: means(lambda result: True),
    "means-of-all": lambda: means(against_all),
    "baselines": baselines,
    "bounds": bounds,
    "layers-1": lambda: layers(1),
    "layers-8": lambda: layers(8),
    "layers-32": lambda: layers(32),
    "networks": networks,
    "bfloat16": lambda: narrow("bfloat16"),
    "matrix-unit": matrix_unit,
    "types": types,
}
PAGES = {
    ROOT / "README.md": ["means-of-all"],
    ROOT / "docs" / "pages" / "benchmarks.md": [name for name in TABLES if name != "means-of-all"],
}


def written(path: Path) -> str:
    """A page with today's tables."""
    text = path.read_text(encoding="utf-8")
    for name in PAGES[path]:
        mark = f"<!-- results: {name} -->"
        new = f"{mark}\n{TABLES[name]()}\n"
        text, count = re.subn(rf"{re.escape(mark)}\n(?:\|.*\n)*", lambda _, new=new: new, text)
        if count != 1:
            raise SystemExit(f"{path}: expected the mark {mark} once, got it {count} times")
    return text


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(written(page), encoding="utf-8")
