"""The helper's side of `autoconv bench --device cuda`: one item after the other, each answered by a line of JSON."""

from __future__ import annotations

import itertools
import os
import platform
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from autoconv import __version__, registry
from autoconv.algorithm import Algorithm, Array, Candidate, Params
from autoconv.bench.agreement import disagreement, refused
from autoconv.bench.gpu.agenda import RACE
from autoconv.bench.gpu.baselines import BASELINES, Baseline
from autoconv.bench.gpu.cases import cases
from autoconv.bench.gpu.edges import operands
from autoconv.bench.gpu.networks import check_network, check_operator, judged
from autoconv.bench.gpu.sanitized import memcheck
from autoconv.bench.race import interleaved
from autoconv.bench.suites import OURS
from autoconv.common.arrays import host
from autoconv.common.text import one_line
from autoconv.device import Device, Operands
from autoconv.errors import DeviceLostError
from autoconv.layer import DIRECTIONS, DTYPES, LAYOUTS, ConvLayer
from autoconv.plans import Plan
from autoconv.records.cache import TuningCache
from autoconv.records.limits import Limits, ranking
from autoconv.tuning import reference
from autoconv.tuning.lookup import Request, look_up
from autoconv.tuning.planner import plan
from autoconv.tuning.process import Message, serve
from autoconv.tuning.racing import challenge
from autoconv.tuning.verification import Fenced, Verifier, direct

WITH_VENDORS = f"{OURS} with vendors"
TUNING = "tuning"  # folder of the tuning cache
FEW = 4  # candidates of ours that hybrid times
ROUNDS = 15
CALLS = 100  # one after the other, of which the host's time is taken
AGREEMENT = {"float32": 1e-3, "float64": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}  # of the largest value


class Work:
    """What a helper can do, on one device, with one folder for what is measured."""

    def __init__(self, device: Device, folder: Path, baselines: Mapping[str, Baseline] = BASELINES) -> None:
        self.device, self.folder, self.baselines = device, folder, baselines
        self.cache = TuningCache(folder / TUNING, system=None)
        self.algorithms = registry.by_name(device)

    def do(self, item: str) -> dict[str, Any]:
        """One item, by its text."""
        kind, *arguments = item.split("/")
        doing: dict[str, Callable[..., dict[str, Any]]] = {
            "machine": self.machine,
            "warm": self.warm,
            "ceiling": self.ceiling,
            "launch": self.launch,
            "sanitize": self.sanitize,
            "unpooled": self.unpooled,
            "host": self.host,
            "compile": self.compile,
            "network": self.network,
            "operator": self.operator,
            "check": self.check,
            "tune": self.tune,
            "table": self.table,
        }
        return doing[kind](*arguments)

    def machine(self) -> dict[str, Any]:
        """What the figures belong to."""
        device = self.device
        return {
            "name": device.name,
            "key": device.key,
            "facts": device.facts,
            "versions": device.versions,
            "vendors": {a.vendor: a.version for a in registry.algorithms(device) if a.vendor is not None},
            "baselines": {name: baseline.version() for name, baseline in self.baselines.items()},
            "missing": {name: why for name, baseline in self.baselines.items() if (why := baseline.missing())},
            "commit": commit(),
            "autoconv": __version__,
            "python": platform.python_version(),
            "numpy": np.__version__,
        }

    def warm(self) -> dict[str, Any]:
        """CuPy's own kernels, which it compiles at their first use: those that verification will want, now and once."""
        kinds = list(zip(itertools.product(DTYPES, LAYOUTS), itertools.cycle(DIRECTIONS)))
        for (dtype, layout), direction in kinds:
            epilogue: dict[str, Any] = (
                {"bias": True, "residual": True, "activation": "relu"} if direction == "fwd" else {}
            )
            layer = ConvLayer(
                N=2, C=8, H=6, W=6, K=8, R=3, S=3, dtype=dtype, layout=layout, direction=direction, **epilogue
            )
            verifier = Verifier(layer, self.device)
            verifier.check(direct(layer, self.device), verifier.b)
        return {"kinds": len(kinds)}

    def ceiling(self, what: str) -> dict[str, Any]:
        """What the device reaches at most: bytes per second of a copy, operations per second of cuBLAS."""
        device = self.device
        if what != "copy":
            return {"per_second": device.measured_peak(what)}
        nbytes = min(1 << 30, device.facts["memory_bytes"] >> 8)
        given = Operands(device.buffer(nbytes), device.buffer(64), device.buffer(nbytes), None, None, None)

        def copy(o: Operands) -> None:
            o.out[...] = o.a

        stopwatch = device.stopwatch(copy, given)
        return {"per_second": 2 * nbytes / min(stopwatch.cold() for _ in range(5))}

    def _first(self, name: str) -> tuple[Algorithm[Any], int]:
        """An algorithm and its first case that this device can run."""
        algorithm = self.algorithms[name]
        for number, (layer, params, _) in enumerate(cases(algorithm)):
            if not algorithm.why_not(layer, self.device, params):
                return algorithm, number
        raise LookupError(f"no case of {name} can run on {self.device.name}")

    def launch(self, name: str, version: str) -> dict[str, Any]:
        """Whether the kernels of a family load and run at all, and how long the first takes."""
        algorithm, number = self._first(name)
        layer, params, _ = cases(algorithm)[number]
        begin = time.perf_counter()
        algorithm.build(layer, self.device, params)
        built = time.perf_counter() - begin
        return {"build": built} | self.check(name, version, str(number))

    def sanitize(self, name: str, version: str) -> dict[str, Any]:
        """The first case of a family in a process that compute-sanitizer watches."""
        message = {"item": f"unpooled/{name}/{version}", "folder": str(self.folder)}
        return memcheck(self.device, "autoconv.bench.gpu.helper", message)

    def unpooled(self, name: str, version: str) -> dict[str, Any]:
        """The first case, each array by the driver: what a pool hands out lies in what a sanitizer takes for one."""
        if cuda := getattr(self.device.xp, "cuda", None):
            cuda.set_allocator(None)
        return self.launch(name, version)

    def host(self) -> dict[str, Any]:
        """Seconds of host time of a `Plan.run`, and of its kernel's launches alone."""
        device = self.device
        layer = ConvLayer(N=1, C=8, H=8, W=8, K=8, R=3, S=3, padding=1)
        made = plan(layer, "direct", device=device, cache=self.cache, vendors=False)
        algorithm = self.algorithms[made.candidate.algorithm]
        kernel = algorithm.build(layer, device, made.candidate.params)
        a, b, *_ = self._drawn(layer)
        out, workspace = device.empty(layer.output_shape, layer.numpy_dtype), device.buffer(kernel.workspace_bytes)

        def per_call(call: Callable[[], object]) -> float:
            found = []
            for _ in range(5):
                device.synchronize()
                begin = time.perf_counter()
                for _ in range(CALLS):
                    call()
                found.append((time.perf_counter() - begin) / CALLS)
            return min(found)

        run = per_call(lambda: made.run(a, b, out=out))
        alone = per_call(lambda: kernel.run(a, b, out, None, None, workspace))
        return {"run": run, "launches": alone, "above": run - alone}

    def compile(self, name: str, version: str) -> dict[str, Any]:
        """All kernels of a family's cases, side by side."""
        algorithm, device = self.algorithms[name], self.device
        able = [case[:2] for case in cases(algorithm) if not algorithm.why_not(case[0], device, case[1])]

        def prepare(case: tuple[ConvLayer, Params]) -> None:
            device.get_ready_for(case[0], [(algorithm, case[1])])

        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            list(pool.map(prepare, able))
        return {"cases": len(able)}

    def check(self, name: str, version: str, number: str) -> dict[str, Any]:
        """One of the emulator's cases against float64, with fences around everything that is written."""
        algorithm, device = self.algorithms[name], self.device
        layer, params, _ = cases(algorithm)[int(number)]
        found: dict[str, Any] = {"layer": layer.key(), "candidate": str(Candidate(name, tuple(params.items())))}
        if reasons := algorithm.why_not(layer, device, params):
            return found | {"skipped": "; ".join(reasons)}
        given = operands(layer)
        a, b, bias, residual = (None if array is None else self._on_device(array) for array in given)
        kernel = algorithm.build(layer, device, params)
        out = Fenced.allocate(device, layer.output_shape, layer.numpy_dtype)
        workspace, packed = (
            Fenced.allocate(device, (nbytes,), np.dtype(np.uint8))
            for nbytes in (kernel.workspace_bytes, kernel.packed_bytes)
        )
        if kernel.packed_bytes:
            kernel.pack(b, packed.array)
            b = packed.array
        kernel.run(a, b, out.array, bias, residual, workspace.array)
        device.synchronize()
        for what, fenced in (("output", out), ("workspace", workspace), ("packed filters", packed)):
            if not fenced.intact():
                return found | {"failure": f"wrote outside its {what}"}
        error = reference.error(host(out.array), reference.convolve(layer, *given), reference.magnitude(layer, *given))
        return found | judged(error, algorithm.bound(layer, params))

    def network(self, version: str, name: str, batch: str) -> dict[str, Any]:
        """A whole network as a graph, against the CPU's answers."""
        return check_network(name, int(batch), self.device, {"vendors": False, "cache": self.cache})

    def operator(self, version: str, name: str) -> dict[str, Any]:
        """What lies between layers, against float64."""
        return check_operator(name, self.device, {"vendors": False, "cache": self.cache})

    def tune(self, mode: str, key: str) -> dict[str, Any]:
        """Our candidates and those of vendor libraries, timed in one race, which answers with vendors and without."""
        everyone = frozenset(a.vendor for a in self.algorithms.values() if a.vendor is not None and a.installed())
        request = Request(ConvLayer.parse(key), self.device, self.cache, Limits(vendors=everyone), RACE, True, None)
        entrants = self._entrants(request, mode)
        known = challenge(request, entrants)
        ranked = ranking(known.facts, request.limits, request.layer.bytes)
        ours = [c for c in known.facts if self.algorithms[c.algorithm].vendor is None]
        return {
            "candidate": next((str(c) for c in ranked if self.algorithms[c.algorithm].vendor is None), None),
            "with vendors": str(ranked[0]) if ranked else None,
            "entrants": len(entrants),
            "timings": {str(c): facts.time for c, facts in known.facts.items() if facts.failure is None},
            "predicted": {
                str(c): self.algorithms[c.algorithm].estimate(request.layer, self.device, c.params) for c in ours
            },
            "failures": {str(c): facts.failure for c, facts in known.facts.items() if facts.failure is not None},
        }

    def _entrants(self, request: Request, mode: str) -> list[Candidate]:
        """All, as a record to be shipped wants it; or for "hybrid" few of ours, and one of each algorithm of vendors.

        In bfloat16 what was fast in float16 is, the instructions being as fast: only those few are timed, where known.
        """
        offered = request.candidate_set.worth_timing(request.limits if mode == "hybrid" else None)
        if request.layer.dtype == "bfloat16":
            twin = replace(request, layer=request.layer.replace(dtype="float16"))
            timed = ranking(look_up(twin).facts, request.limits, request.layer.bytes)
            if seeds := [candidate for candidate in timed if candidate in offered]:
                return self._few(seeds)
        return self._few(offered) if mode == "hybrid" else offered

    def _few(self, ranked: Sequence[Candidate]) -> list[Candidate]:
        theirs: dict[str, Candidate] = {}  # the first of each: their libraries rank them, and some take seconds or hang
        for candidate in ranked:
            if self.algorithms[candidate.algorithm].vendor is not None:
                theirs.setdefault(candidate.algorithm, candidate)
        ours = [candidate for candidate in ranked if self.algorithms[candidate.algorithm].vendor is None]
        return [*ours[:FEW], *theirs.values()]

    def table(self, mode: str, key: str) -> dict[str, Any]:
        """Ours, vendors off and on, against the baselines: seconds of interleaved rounds."""
        layer, device = ConvLayer.parse(key), self.device
        a, b, *_ = self._drawn(layer)
        samples: dict[str, Callable[[], float]] = {}
        answers: dict[str, Array] = {}
        found: dict[str, Any] = {"candidates": {}, "failures": {}}
        for name, vendors in ((OURS, False), (WITH_VENDORS, True)):
            made = plan(layer, "heuristic", device=device, cache=self.cache, vendors=vendors)
            if str(made.candidate) in found["candidates"].values():
                continue
            found["candidates"][name] = str(made.candidate)
            out = device.empty(layer.output_shape, layer.numpy_dtype)
            given = Operands(a, b, out, None, None, None)
            samples[name] = device.stopwatch(_runner(made), given).cold
            answers[name] = made.run(a, b)
        for name, baseline in self.baselines.items():
            if missing := baseline.missing():
                found["failures"][name] = missing
                continue
            try:
                samples[name], answers[name] = baseline.prepare(layer, device, a, b)
            except Exception as failure:  # whatever a baseline does, ours are measured
                found["failures"][name] = one_line(failure, 300)
        want = host(answers[OURS])
        for name, answer in answers.items():
            if why := refused(disagreement(host(answer), want), AGREEMENT[layer.dtype]):
                found["failures"][name] = why
                del samples[name]
        return found | {"times": interleaved(samples, ROUNDS)}

    def _on_device(self, array: Any) -> Array:
        copy = self.device.empty(array.shape, array.dtype)
        copy[...] = self.device.xp.asarray(array)
        return copy

    def _drawn(self, layer: ConvLayer) -> tuple[Array, ...]:
        generator = np.random.default_rng(0)
        a, b = (generator.standard_normal(shape, np.float32) for shape in layer.input_shapes)
        return tuple(self._on_device(array.astype(layer.numpy_dtype)) for array in (a, b))


def _runner(made: Plan) -> Callable[[Operands], None]:
    def run(o: Operands) -> None:
        made.run(o.a, o.b, out=o.out)

    return run


def commit() -> str:
    """Of the checkout that runs, with a plus where it was changed; "unknown" outside of one."""
    folder = Path(__file__).parent

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", folder, *arguments], capture_output=True, text=True, check=False)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        found = git("rev-parse", "--short=12", "HEAD")
        return f"{found}{'+' if git('status', '--porcelain', '-uno') else ''}" if found else "unknown"
    except OSError:
        return "unknown"


def main() -> None:
    """Answer requests until the input ends; end at once when the device is lost."""
    work: Work | None = None

    def handle(device: Device, request: Message, answer: Callable[[Message], None]) -> None:
        nonlocal work
        try:
            with device.selected():
                work = work or Work(device, Path(request["folder"]))
                found = work.do(request["item"])
        except Exception as failure:  # one item's failure is its result
            found = {"failure": f"{type(failure).__name__}: {' '.join(str(failure).split())}"[:500]}
            lost = device.lost()
            answer(found | ({"lost": lost} if lost else {}))
            if lost:
                raise DeviceLostError(lost) from failure
        else:
            answer(found)

    serve(handle)


if __name__ == "__main__":
    main()
