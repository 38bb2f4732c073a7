"""The compile gate: every kernel configuration, built for real architectures and held to its budget.

`cuda_budget.json` says for each kernel how many threads a block has and how many blocks a multiprocessor
is meant to hold: written down with the tile, before compiling. Registers and shared memory have to fit that.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import json
import re
import subprocess
import tempfile
from collections.abc import Hashable, Iterator
from pathlib import Path
from typing import Any

import pytest
from layers import edge
from simt.cases import OURS, pairwise
from simt.emulator import Emulated

from autoconv.algorithm import Algorithm, Candidate
from autoconv.bench.gpu.cases import planned
from autoconv.bench.gpu.networks import OPERATORS, graph_of
from autoconv.cuda.codegen.compiler import CompileError, architecture, nvrtc
from autoconv.cuda.codegen.occupancy import blocks_per_multiprocessor, limits_of, register_cap
from autoconv.cuda.codegen.source import Unit
from autoconv.cuda.common.algorithm import CudaAlgorithm
from autoconv.cuda.gemm.gemm import Gemm
from autoconv.cuda.gemm.tensor import Tensor
from autoconv.cuda.hardware import RATES
from autoconv.cuda.hopper.hopper import CAPABILITY, HopperTile
from autoconv.cuda.hopper.pointwise import HopperBF16x6Pointwise
from autoconv.cuda.hopper.split import TILES as SPLIT_TILES
from autoconv.cuda.hopper.split import HopperBF16x6
from autoconv.layer import DIRECTIONS, DTYPES, LAYOUTS, ConvLayer
from autoconv.networks.run.cuda_steps import CudaStepMaker
from autoconv.networks.run.memory import Views

CAPABILITIES = (75, 80, 86, 89, 90, 100, 120)
# What a kernel may keep in local memory: some take all registers that two blocks to a multiprocessor leave, and load
# a value too many once in a slice. The remedies tried (less read ahead, other options of the compiler) make the loop
# longer by up to a tenth.
LOCAL_BYTES, LOCAL_SHARE = 128, 0.02
BUDGET: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("budget.json").read_text())

LAYERS = {  # of each kind that makes another kernel; real sizes, since they decide what is kept in registers
    "AlexNet 1": {
        "N": 1,
        "C": 3,
        "H": 227,
        "W": 227,
        "K": 96,
        "R": 11,
        "S": 11,
        "stride": 4,
    },  # the product M=96, N=3025, K=363
    "3x3": {"N": 8, "C": 64, "H": 56, "W": 56, "K": 64, "R": 3, "S": 3, "padding": 1},
    "VGG-16 1": {"N": 8, "C": 3, "H": 56, "W": 56, "K": 64, "R": 3, "S": 3, "padding": 1},  # a single slice
    "5x5": {"N": 8, "C": 48, "H": 27, "W": 27, "K": 128, "R": 5, "S": 5, "padding": 2},
    "1x1": {"N": 8, "C": 256, "H": 14, "W": 14, "K": 128, "R": 1, "S": 1},
    "strided": {"N": 8, "C": 64, "H": 56, "W": 56, "K": 128, "R": 3, "S": 3, "stride": 2, "padding": 1},
    "odd dilated": {"N": 3, "C": 35, "H": 29, "W": 31, "K": 27, "R": 3, "S": 3, "padding": 2, "dilation": 2},
    "grouped": {"N": 8, "C": 128, "H": 28, "W": 28, "K": 128, "R": 3, "S": 3, "padding": 1, "groups": 4},
    "depthwise 31x31": {"N": 8, "C": 64, "H": 31, "W": 31, "K": 64, "R": 31, "S": 31, "padding": 15, "groups": 64},
    "depthwise": {"N": 8, "C": 96, "H": 56, "W": 56, "K": 96, "R": 3, "S": 3, "padding": 1, "groups": 96},
}
EPILOGUE = {"bias": True, "residual": True, "activation": "relu"}


def layers() -> Iterator[ConvLayer]:
    for fields in LAYERS.values():
        for direction in DIRECTIONS:
            for layout in LAYOUTS:
                for dtype in DTYPES:
                    epilogue = EPILOGUE if direction == "fwd" else {}
                    yield ConvLayer(**fields, direction=direction, layout=layout, dtype=dtype, **epilogue)


def configurations(algorithm: Algorithm) -> list[tuple[ConvLayer, Candidate]]:
    """Every candidate of every kind of layer that some GPU can run, and what the emulator's cases plan."""
    device = Emulated(capability=90)
    found = [(layer, candidate) for layer in layers() for candidate in algorithm.all(layer, device)]
    found += [(layer, Candidate(algorithm.name, tuple(params.items()))) for layer, params, _ in planned(algorithm)]
    return [(layer, one) for layer, one in found if not algorithm.why_not(layer, device, one.params)]


def tile(candidate: Candidate) -> Candidate:
    """A candidate without what its kernels' registers and shared memory do not depend on."""
    areas = {"direct.tiled": {"BK"}, "direct.tensor.bf16x6.wgrad": {"TP", "TQ"}}  # of shared memory there is a limit
    without = {"SPLIT", "IMAGES"} | areas.get(candidate.algorithm, set())
    kept = tuple((name, value) for name, value in candidate.items if name not in without)
    return Candidate(candidate.algorithm, kept)


def divided(candidate: Candidate) -> bool:
    """Whether its kernel sums parts of the depth, too."""
    return candidate.params.get("SPLIT", 1) > 1


def budget_name(layer: ConvLayer, candidate: Candidate, unit: Unit) -> str:
    wide = "/float64" if layer.dtype == "float64" else ""
    return f"{tile(candidate)}/{unit.function}{wide}"


@functools.lru_cache(maxsize=4)  # kernels of one text are asked for one after the other
def built(text: str, capability: int) -> tuple[str, bytes]:
    """The compiler's log, and the cubin."""
    options = ("--ptxas-options=-v", "--ptxas-options=--warn-on-spills")
    cubin, log = nvrtc().compile(text, architecture(capability), options)
    return log, cubin


def compiled(unit: Unit, capability: int) -> dict[str, int]:
    """What the compiler made of a kernel: registers, local and shared memory."""
    log, _ = built(unit.text, capability)
    assert "C7510" not in log, "matrix instructions are serialised"
    assert "C7508" not in log, "setmaxnreg is ignored"
    part = log.split(f"Compiling entry function '{unit.function}'")[1].split("Compiling entry function")[0]
    spills = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
    registers, shared = re.search(r"Used (\d+) registers", part), re.search(r"(\d+) bytes smem", part)
    assert spills is not None, log
    assert registers is not None, log
    facts = {"local": sum(map(int, spills.groups())), "registers": int(registers[1])}
    facts["shared"] = (int(shared[1]) if shared else 0) + unit.dynamic
    return facts


def machine_code(unit: Unit, capability: int) -> str:
    """A kernel as the disassembler shows it."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(built(unit.text, capability)[1])
        file.flush()
        text = subprocess.run([disassembler(), file.name], capture_output=True, text=True, check=True).stdout
    return text.split(f".text.{unit.function}:")[1].split(".section")[0]


def instructions(unit: Unit, capability: int) -> set[str]:
    """The machine instructions of a kernel."""
    code = machine_code(unit, capability)
    return set(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z0-9]+)", code, re.MULTILINE))


def loops(unit: Unit, capability: int) -> list[tuple[list[str], bool]]:
    """The instructions of a kernel's loops, less those that never happen (`@!PT`); and whether no loop is in it."""
    body: list[str] = []
    labels: dict[str, int] = {}
    found_loops: list[tuple[list[str], bool]] = []
    ended = 0  # where the last loop does
    for line in machine_code(unit, capability).splitlines():
        if label := re.match(r"(\.L_\w+):", line):
            labels[label[1]] = len(body)
        elif found := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(?!@!PT)(?:@!?\w+\s+)?([A-Z0-9]+)(.*)", line):
            body.append(found[1])
            back = labels.get(target[1]) if (target := re.search(r"\((\.L_\w+)\)", found[2])) else None
            if found[1] == "BRA" and back is not None:
                found_loops.append((body[back:], back >= ended))
                ended = len(body)
    return found_loops


def main_loop(unit: Unit, capability: int) -> list[str]:
    """The longest of those that have none in them."""
    return max((loop for loop, innermost in loops(unit, capability) if innermost), key=len, default=[])


def local_share(unit: Unit, capability: int) -> float:
    """Of the loops with none inside: the largest share of instructions that load from local memory or store there."""
    innermost = [loop for loop, inside in loops(unit, capability) if inside]
    return max(((loop.count("LDL") + loop.count("STL")) / len(loop) for loop in innermost), default=0.0)


def disassembler() -> Path:
    found = importlib.util.find_spec("nvidia.cu13")
    for root in (found.submodule_search_locations or ()) if found else ():
        if (Path(root) / "bin" / "nvdisasm").exists():
            return Path(root) / "bin" / "nvdisasm"
    pytest.skip("NOT CHECKED: nvidia-cuda-nvdisasm is not installed; CI installs it")


def hold(algorithm: Algorithm, layer: ConvLayer, candidate: Candidate, capability: int) -> None:
    assert isinstance(algorithm, CudaAlgorithm)
    for unit in algorithm.units(layer, candidate.params):
        name = budget_name(layer, candidate, unit)
        where = f"{name} for {layer} on sm_{capability}"
        assert name in BUDGET, f"{name} has no budget: write down what it is meant to take"
        budget = BUDGET[name]
        assert (unit.threads, unit.blocks) == (budget["threads"], budget["blocks"]), where
        limits = limits_of(capability)
        blocks = min(budget["blocks"], limits.threads // unit.threads)
        facts = compiled(unit, capability)
        assert facts["local"] <= LOCAL_BYTES, f"{where}: {facts['local']} bytes in local memory"
        slowed = local_share(unit, capability) if facts["local"] else 0.0
        assert slowed <= LOCAL_SHARE, f"{where}: {slowed:.1%} of a loop's instructions are for local memory"
        expected = set(budget.get("instructions", ()))
        cap = register_cap(unit.threads, budget["blocks"])
        assert facts["registers"] <= cap, where
        if "USETMAXREG" in expected:  # a block starts with as many as its warpgroups then share out, or waits for ever
            assert facts["registers"] == cap, f"{where}: {facts['registers']} registers, {cap} are shared out"
        assert facts["shared"] == unit.shared, f"{where}: {facts['shared']} bytes of shared memory, not {unit.shared}"
        assert unit.shared <= budget["shared"], where
        occupancy = blocks_per_multiprocessor(capability, unit.threads, facts["registers"], facts["shared"])
        by_shared = limits.shared // (unit.shared + limits.reserved) if unit.shared else blocks
        assert occupancy >= min(blocks, by_shared), f"{where}: {occupancy} blocks, {blocks} intended"
        if not all(dict(unit.constants).get(f"TAPS_{letter}", 1) for letter in "HW"):
            expected -= {"HGMMA", "UTMALDG"}  # a pass that no tap meets multiplies nothing
        if capability < 80:
            expected -= {"LDGSTS"}  # copies are synchronous there
        missing = expected - (instructions(unit, capability) if expected else set())  # the disassembler takes its time
        assert not missing, f"{where}: no {missing}"


@pytest.fixture(autouse=True)
def _compiler() -> None:
    try:
        nvrtc()
    except CompileError as error:
        pytest.skip(f"NOT CHECKED: {error}; CI installs nvidia-cuda-nvrtc")
    disassembler()


@pytest.mark.parametrize("algorithm", OURS, ids=lambda a: a.name)
def test_a_sample_of_configurations_keeps_its_budget(algorithm: Algorithm) -> None:
    """One layer to each configuration, its depth whole and divided, on each architecture in turn."""
    seen: set[tuple[str, bool]] = set()
    for layer, candidate in configurations(algorithm):
        assert isinstance(algorithm, CudaAlgorithm)
        units = algorithm.units(layer, candidate.params)
        if not units:
            continue
        kind = budget_name(layer, candidate, units[-1]), divided(candidate)
        if kind in seen:
            continue
        able = [c for c in CAPABILITIES if not algorithm.why_not(layer, Emulated(capability=c), candidate.params)]
        hold(algorithm, layer, candidate, able[len(seen) % len(able)])
        seen.add(kind)
    assert seen


def meeting(case: tuple[ConvLayer, Candidate]) -> tuple[Hashable, ...]:
    """What a configuration is made of: a kind of layer, a direction, a dtype, a layout, a tile, and a whole depth."""
    layer, candidate = case
    kind = layer.N, layer.C, layer.H, layer.K, layer.R, layer.stride, layer.groups
    return kind, layer.direction, layer.dtype, layer.layout, tile(candidate), divided(candidate)


@pytest.mark.stress
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("algorithm", OURS, ids=lambda a: a.name)
def test_every_configuration_keeps_its_budget(algorithm: Algorithm, capability: int) -> None:
    """On every architecture each tile meets each kind of layer, direction, dtype and layout, and they each other.

    Which of the others are there as well differs from one architecture to the next; all of their combinations on
    all of them are 38,000 kernels.
    """
    device = Emulated(capability=capability)
    able = [one for one in configurations(algorithm) if not algorithm.why_not(one[0], device, one[1].params)]
    for layer, candidate in pairwise(able, meeting, seed=capability):
        hold(algorithm, layer, candidate, capability)


@pytest.mark.parametrize(("name", "direction"), [("gemm", "fwd"), ("gemm", "wgrad"), ("gemm.tensor", "dgrad")])
def test_positions_beyond_32_bits_compile(name: str, direction: str) -> None:
    algorithm = next(a for a in OURS if a.name == name)
    dtype, layout = ("float32", "NCHW") if name == "gemm" else ("float16", "NHWC")
    layer = ConvLayer(**LAYERS["3x3"] | {"N": 1 << 13}, direction=direction, dtype=dtype, layout=layout)
    assert isinstance(algorithm, CudaAlgorithm)
    unit = algorithm.units(layer, next(iter(algorithm.candidates(layer, Emulated(capability=90)))))[0]
    assert compiled(unit, 90)["registers"] <= register_cap(unit.threads, unit.blocks)


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("name", ["gemm", "gemm.tensor", "gemm.tensor.tf32"])
def test_results_go_out_in_vectors(name: str, direction: str) -> None:
    """Sixteen bytes at once wherever so many neighbours are always together, and one value where they are not."""
    algorithm = next(a for a in OURS if a.name == name)
    assert isinstance(algorithm, CudaAlgorithm)
    device, tried = Emulated(capability=80), 0
    for kind, layout in itertools.product(("3x3", "AlexNet 1"), LAYOUTS):
        fields = LAYERS[kind] | (EPILOGUE if direction == "fwd" else {})
        dtype = "float16" if name == "gemm.tensor" else "float32"
        layer = ConvLayer(**fields, direction=direction, layout=layout, dtype=dtype)
        line = layer.output_shape[3] if layout == "NHWC" else layer.output_shape[2] * layer.output_shape[3]
        if direction == "wgrad":
            line = layer.C * layer.R * layer.S
        able = [c for c in algorithm.all(layer, device) if not algorithm.why_not(layer, device, c.params)]
        for unit in algorithm.units(layer, able[0].params) if able else ():
            stores = set(re.findall(r"STG\.E(?:\.\w+)*", machine_code(unit, 80)))
            assert stores == {"STG.E" if line % 4 else "STG.E.128"}
            tried += 1
    assert tried


LOOPS = [
    (name, direction)
    for name, budget in BUDGET.items()
    for direction in budget.get("loop", {}).get("least", {})
]  # fmt: skip


@pytest.mark.parametrize(("name", "direction"), LOOPS)
def test_main_loops_spend_their_issue_slots_on_products(name: str, direction: str) -> None:
    """On 3x3 filters, as large a share as the budget says; what it aims at stands beside it, and may be more.

    The model that estimates go by knows how many instructions there are.
    """
    budget = BUDGET[name]["loop"]
    algorithm = next(a for a in OURS if a.name == name.partition("[")[0])
    assert isinstance(algorithm, CudaAlgorithm)
    layout, dtype = ("NHWC", budget["dtype"]) if budget["counted"] == "HMMA" else ("NCHW", budget["dtype"])
    layer = ConvLayer(**LAYERS["3x3"], direction=direction, layout=layout, dtype=dtype)
    params = Candidate.parse(name.partition("/")[0]).params | {"SPLIT": 1}
    loop = main_loop(algorithm.units(layer, params)[0], budget["capability"])
    share = loop.count(budget["counted"]) / len(loop)
    assert budget["least"][direction] <= share < budget["least"][direction] + 0.02, f"{share:.3f}: mend the budget"
    assert isinstance(algorithm, Gemm | Tensor)
    assert algorithm.slice_slots(layer, params) == pytest.approx(len(loop), rel=0.06)
    if budget["counted"] == "HMMA":  # fed by matrices of eight rows, but where the depth lies across words of 32 bits
        transposed = layer.itemsize == 4 and {"fwd": 0, "dgrad": 1, "wgrad": 2}[direction]
        assert (loop.count("LDS") > 0) == (transposed > 0)
        assert (loop.count("LDSM") > 0) == (transposed < 2)


@pytest.mark.parametrize(("direction", "most"), [("fwd", 0.55), ("dgrad", 0.55), ("wgrad", 0.75)])
@pytest.mark.parametrize("tile", SPLIT_TILES[:3], ids=lambda tile: f"{tile.BM}x{tile.BN}")
def test_loops_of_products_in_parts_leave_the_tensor_cores_busy(tile: HopperTile, direction: str, most: float) -> None:
    """What splits rows and adds sums takes so much of the products' clocks, at most, and is what the model says."""
    layer = ConvLayer(**(LAYERS["3x3"] | {"C": 128, "K": 128}), direction=direction, layout="NHWC")
    hold_loop_of_parts(HopperBF16x6(), layer, tile, most)


@pytest.mark.parametrize("direction", HopperBF16x6Pointwise.directions)
@pytest.mark.parametrize("tile", SPLIT_TILES[:4], ids=lambda tile: f"{tile.BM}x{tile.BN}")
def test_loops_across_pixels_leave_the_tensor_cores_busy(tile: HopperTile, direction: str) -> None:
    """Lanes read numbers one by one, as in wgrad, and store four at a time."""
    layer = ConvLayer(**LAYERS["1x1"], direction=direction)
    product = hold_loop_of_parts(HopperBF16x6Pointwise(), layer, tile, 0.8)
    assert set(re.findall(r"(?:STG|LDG)\.E(?:\.\w+)*", machine_code(product, CAPABILITY))) == {"STG.E.128"}


def hold_loop_of_parts(algorithm: HopperBF16x6, layer: ConvLayer, tile: HopperTile, most: float) -> Unit:
    params = {"BM": tile.BM, "BN": tile.BN, "STAGES": tile.STAGES, "SPLIT": 1}
    product = algorithm.units(layer, params)[0]
    loop = min((one for one, _ in loops(product, CAPABILITY) if "HGMMA" in one), key=len)  # a slice, not a tile
    assert loop.count("HGMMA") == algorithm.products * 2 * tile.BM // 64 // tile.CONSUMERS
    slots = algorithm.slice_slots(layer, tile) / 4  # of a scheduler
    assert slots / tile.CONSUMERS == pytest.approx(len(loop), rel=0.06)
    clocks = algorithm.products * tile.BM * tile.BN * 32 / RATES[CAPABILITY][2]
    assert slots <= most * clocks
    return product


def test_every_budget_is_of_a_kernel() -> None:
    names = {
        budget_name(layer, candidate, unit)
        for algorithm in OURS
        if isinstance(algorithm, CudaAlgorithm)
        for layer, candidate in configurations(algorithm)
        for unit in algorithm.units(layer, candidate.params)
    }
    assert names == set(BUDGET)


@pytest.mark.parametrize("name", OPERATORS)
def test_kernels_between_layers_keep_their_registers(name: str) -> None:
    """Each on one of the architectures, in turn."""
    capability = CAPABILITIES[list(OPERATORS).index(name) % len(CAPABILITIES)]
    graph = graph_of(name)
    step = CudaStepMaker(graph, Views(graph), Emulated(capability=capability)).step(graph.nodes["y"])
    units = [call.program for call in step.calls if isinstance(call.program, Unit)]
    assert units or name == "product of matrices"  # which cuBLAS computes
    for unit in units:
        facts = compiled(unit, capability)
        assert facts["registers"] <= register_cap(unit.threads, unit.blocks)
        assert (facts["local"], facts["shared"]) == (0, unit.shared)


def test_a_kernel_that_spills_is_caught() -> None:
    """The gate can fail: a tile forced to too few registers."""
    algorithm = next(a for a in OURS if a.name == "gemm")
    assert isinstance(algorithm, CudaAlgorithm)
    layer = edge("plain")
    params = next(iter(algorithm.candidates(layer, Emulated())))
    unit = algorithm.units(layer, params)[0]
    unit = dataclasses.replace(unit, constants=(*dict(unit.constants, PRODUCT_BLOCKS=4).items(),))
    assert compiled(unit, 80)["local"] > LOCAL_BYTES
    assert local_share(unit, 80) > LOCAL_SHARE
