"""Settings for all tests."""

from __future__ import annotations

import dataclasses
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import vectors
from commands import NET
from hypothesis import HealthCheck, settings

from autoconv import cpu, forget_plans, registry
from autoconv.common import machine_code
from autoconv.cpu.device import CPU
from autoconv.cpu.machine import measure, pace, recorded
from autoconv.cpu.machine.model import Machine
from autoconv.records.cache import TuningCache
from autoconv.tuning.search import search

# The same examples on every run: a failure must not depend on the day. The stress tests draw more.
settings.register_profile(
    "full", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], database=None
)
settings.register_profile("everyday", settings.get_profile("full"), max_examples=12)

HERE = Path(__file__).parent
KERNELS, MEASURE = machine_code.folder(), measure.measure  # as they are without any fixture

# Of how many cases of each test of a file (or of one test) the everyday suite takes one, so that it ends within three
# minutes on two cores; of every test at least one. Which one is drawn from its name: the same on every day, and no
# pattern of the parameters. `--full` takes all.
THINNED = {
    "bench/test_bench.py::test_a_suite_against_fake_baselines": 3,
    "cli/test_cli.py::test_a_stream_that_is_closed_is_no_error": 3,
    "core/test_capabilities.py::test_a_generated_kernel_runs_every_kind_of_layer": 32,
    "core/test_capabilities.py::test_a_sample_of_what_is_declared_on_cuda_runs": 6,
    "core/test_capabilities.py::test_what_is_declared_runs": 4,
    "core/test_capabilities.py::test_what_is_not_declared_is_refused_with_a_reason": 3,
    "core/test_functional.py": 34,
    "core/test_quantized.py::test_filters_of_either_type_and_any_zero_point": 4,
    "core/test_reference.py::test_forward_is_scipys_correlation": 4,
    "core/test_registry.py": 8,
    "core/test_registry.py::test_contract": 35,
    "core/test_verification.py::test_the_oracle_is_accepted_and_any_wrong_element_of_it_is_not": 3,
    "core/test_winograd_math.py::test_exact_for_every_pair_of_unit_vectors": 4,
    "core/test_worker.py": 4,
    "cpu/test_cpu_direct.py": 36,
    "cpu/test_denormals.py::test_families_count_denormals_as_0_or_keep_them": 12,
    "cpu/test_depthwise.py": 72,
    "cpu/test_depthwise_wgrad.py": 3,
    "cpu/test_epilogues.py::test_every_family_ends_a_transposed_convolution": 26,
    "cpu/test_epilogues.py::test_every_family_reads_the_slopes_of_its_channels": 3,
    "cpu/test_epilogues.py::test_every_family_stores_with_every_activation": 40,
    "cpu/test_epilogues.py::test_every_kind_of_transposed_convolution_has_a_kernel_that_ends_it": 5,
    "cpu/test_epilogues.py::test_nan_stays_nan": 3,
    "cpu/test_epilogues.py::test_slopes_of_a_transposed_convolution": 6,
    "cpu/test_epilogues.py::test_transposed_convolutions_of_other_types": 12,
    "cpu/test_estimates.py::test_nothing_else_is_asked_of_the_processor": 2,
    "cpu/test_estimates.py::test_on_a_machine_twice_as_fast_everything_takes_half_the_time": 3,
    "cpu/test_fft.py": 40,
    "cpu/test_fft_matrix.py": 72,
    "cpu/test_fused.py::test_one_kernel_computes_what_the_layers_do": 12,
    "cpu/test_gemm.py": 180,
    "cpu/test_gemm.py::test_sums_of_a_block_that_lacks_filters_have_room": 2,
    "cpu/test_gemm_packed.py": 24,
    "cpu/test_gemm_polyphase.py": 24,
    "cpu/test_gemm_strassen.py::test_kinds_of_layers": 54,
    "cpu/test_gemm_strassen.py::test_parts_of_everything": 3,
    "cpu/test_int8.py::test_every_way_gives_what_the_definition_says": 160,
    "cpu/test_int8.py::test_numpy_gives_what_the_definition_says": 16,
    "cpu/test_int8_depthwise.py::test_every_way_gives_what_the_definition_says": 100,
    "cpu/test_int8_depthwise.py::test_several_filters_of_a_channel": 3,
    "cpu/test_many_threads.py": 20,
    "cpu/test_many_threads.py::test_the_longest_thread_has_little_more_than_its_share": 70,
    "cpu/test_matrix.py": 12,
    "cpu/test_matrix.py::test_a_strided_gradient_by_polyphase_components": 3,
    "cpu/test_matrix.py::test_epilogues": 14,
    "cpu/test_matrix.py::test_forward": 270,
    "cpu/test_matrix.py::test_gradient_of_the_filters": 60,
    "cpu/test_matrix.py::test_gradient_of_the_input": 60,
    "cpu/test_matrix.py::test_strips_of_a_gradient_are_added": 15,
    "cpu/test_matrix.py::test_three_products_of_float32_keep_their_bound": 15,
    "cpu/test_matrix.py::test_what_is_not_finite_stays_so_and_spoils_nothing_else": 10,
    "cpu/test_matrix_dot.py": 8,
    "cpu/test_matrix_dot.py::test_epilogues": 8,
    "cpu/test_matrix_dot.py::test_layers": 20,
    "cpu/test_numpy.py": 48,
    "cpu/test_operators.py": 6,
    "cpu/test_polyphase.py": 8,
    "cpu/test_winograd.py": 36,
    "cpu/test_winograd.py::test_transforms_as_code_are_the_matrices": 3,
    "cpu/test_winograd_compact.py::test_edges_on_every_instruction_set": 8,
    "cpu/test_winograd_matrix.py": 48,
    "cpu/test_winograd_wgrad.py": 36,
    "cuda/test_cuda_device.py::test_contract": 3,
    "cuda/test_cuda_direct.py": 12,
    "cuda/test_cuda_operators.py::test_operators_agree_with_numpy": 8,
    "cuda/test_cudnn.py": 12,
    "cuda/test_cudnn_graph.py": 12,
    "cuda/test_emulator.py": 16,
    "cuda/test_fill.py": 4,
    "cuda/test_gate.py": 24,
    "cuda/test_hopper.py": 10,
    "cuda/test_hopper_pointwise.py": 6,
    "cuda/test_hopper_split.py": 16,
    "cuda/test_hopper_units.py": 8,
    "cuda/test_kernels.py": 96,
    "cuda/test_mutants.py": 3,
    "cuda/test_planted.py": 9,
    "cuda/test_split_k.py": 6,
    "cuda/test_tensor_wgrad.py": 6,
    "cuda/test_winograd_tensor.py": 6,
    "cuda/test_winograd_tensor.py::test_every_schedule_is_right": 16,
    "cuda/test_winograd_tensor.py::test_its_error_is_that_of_the_transforms": 5,
    "cuda/test_winograd_filters.py::test_every_schedule_is_right": 16,
    "cuda/test_winograd_filters.py::test_its_error_is_that_of_the_transforms": 3,
    "networks/test_batch_split.py::test_parts_agree_with_float64": 3,
    "networks/test_layers.py::test_a_bad_file_gives_one_line_with_its_place": 3,
    "networks/test_onnx_nodes.py": 10,
    "networks/test_onnx_reader.py::test_the_networks_that_come_with_onnx_answer_what_is_stored": 25,
    "networks/test_passes.py::test_every_pass_keeps_the_answer_of_a_network": 7,
    "networks/test_quantized_networks.py::test_the_tests_of_the_standard": 2,
    "networks/test_quantized_nodes.py::test_the_reference_of_the_standard": 3,
    "pytorch/test_conv2d.py::test_answers_and_gradients_are_those_of_pytorch": 5,
    "pytorch/test_quantized_conv2d.py": 4,
    "pytorch/test_reader.py::test_a_model_and_its_graph_agree_in_float64": 8,
}

# Tests that take seconds by the case, as they compile many kernels or run a whole command; the everyday suite has
# cheaper ones of the same modules.
FULL_ONLY = {
    "bench/test_report.py::test_a_browser_shows_every_figure_in_light_and_dark_wide_and_narrow",
    "bench/test_report.py::test_pictures_are_written_in_light_and_dark_and_what_is_missing_is_named",
    "bench/test_strategies.py::test_the_command_compares_strategies",
    "cli/test_cli.py::test_a_candidate_that_crashes_is_a_reason_and_not_the_end",
    "cli/test_cli.py::test_a_reader_that_goes_away_is_no_error",
    "cli/test_cli.py::test_piped_output_has_no_colours_and_cuts_nothing",
    "cpu/test_cpu_direct.py::test_gradients_of_enormous_strides_are_left_to_others",
    "cpu/test_cpu_direct.py::test_sums_go_over_channels_whose_filters_fit_the_first_cache",
    "cpu/test_depthwise.py::test_stores_past_the_caches",
    "cpu/test_depthwise.py::test_types_and_epilogues",
    "cpu/test_depthwise_wgrad.py::test_types_and_several_blocks",
    "cpu/test_fft_matrix.py::test_sizes_of_tiles",
    "cpu/test_gemm.py::test_every_remainder",
    "cpu/test_gemm.py::test_sums_in_parts",
    "cpu/test_gemm.py::test_types_epilogues_groups_and_gradients",
    "cpu/test_gemm_packed.py::test_every_remainder",
    "cpu/test_gemm_packed.py::test_parts_of_everything",
    "cpu/test_gemm_packed.py::test_types_epilogues_groups_strides_and_gradients",
    "cpu/test_gemm_strassen.py::test_every_remainder",
    "cpu/test_matrix.py::test_strips_and_blocks_of_channels",
    "core/test_planner_faults.py::test_faulty_candidates_never_win_and_are_not_tried_again",
    "core/test_search.py::test_a_search_in_a_worker_is_the_same",
    "cuda/test_gpu_bench.py::test_a_fault_of_one_kernel_is_a_line_and_the_rest_goes_on",
    "cuda/test_gpu_bench.py::test_a_lost_device_ends_its_process_and_not_the_run",
    "cuda/test_gpu_bench.py::test_a_tuning_worker_that_loses_the_device_is_replaced",
    "cuda/test_gpu_bench.py::test_an_interrupted_run_goes_on_where_its_lines_end",
    "cuda/test_gpu_bench.py::test_the_command",
    "cuda/test_gpu_faults.py::test_a_candidate_without_room_is_left_out_and_the_tuning_goes_on",
    "cuda/test_gpu_networks.py::test_a_network_of_everything_agrees_with_the_cpu",
    "cuda/test_hopper.py::test_the_kernel_is_right_on_every_schedule",
    "cuda/test_hopper.py::test_thread_sanitizer_names_the_race",
    "cuda/test_kernels.py::test_an_infinite_filter_stays_in_its_channel",
    "networks/test_collect.py::test_a_variable_collects_for_the_whole_process",
    "pytorch/test_optimize.py::test_efficientnet",
}

# A search that plans as always but times few candidates: how well it ends is the business of its own tests.
SHORT_SEARCH = {"SEEDS": 3, "BLOCK": 2, "MOST": 4, "MOST_EXACT": 3, "STEPS": 1}

FEW_FAMILIES = ("direct", "gemm", "numpy")

# Nothing of theirs is worth emulating, or it runs in processes of its own, which are not emulated.
NO_KERNELS = (
    "test_cpu_device.py",
    "test_estimates.py",
    "test_machine.py",
    "test_machine_measure.py",
    "test_machine_probes.py",
    "test_machine_recorded.py",
    "test_neon.py",
    "test_pace.py",
    "test_permission.py",
    "test_transform_rows.py",
)

collect_ignore = ["bochs.py"]  # no tests, and what it imports is only there for --avx512


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test has a cache of its own and no plans in memory; kernels once compiled are shared, as they are exact."""
    monkeypatch.setenv("AUTOCONV_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(recorded, "_in_force", {})
    forget_plans()
    yield
    forget_plans()


@pytest.fixture(autouse=True)
def short_search(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.path.name != "test_search.py":
        for name, number in SHORT_SEARCH.items():
            monkeypatch.setattr(search, name, number)


@pytest.fixture(autouse=True)
def any_machine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed of this machine is not awaited, and nothing empties its caches or wakes its unit; but to test that."""
    if request.path.name == "test_machine_measure.py":
        monkeypatch.setattr(measure, "measure", MEASURE)
    else:
        monkeypatch.setattr(CPU, "get_ready_for", lambda *args: None)
        monkeypatch.setattr(CPU, "_elsewhere", 8)
        monkeypatch.setattr(CPU, "pace", lambda self: 1.0)
        monkeypatch.setattr(pace, "WAKING", 0.0)


@contextmanager
def _families(monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[None]:
    """A CPU of these families alone."""
    monkeypatch.setattr(cpu, "FAMILIES", names)
    registry._table.cache_clear()
    yield
    registry._table.cache_clear()


@pytest.fixture
def few_families(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU of few families: of what a plan takes, most is to list the grids of all and to estimate them."""
    with _families(monkeypatch, *FEW_FAMILIES):
        yield


@pytest.fixture
def numpy_alone(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU of NumPy's family alone, which compiles nothing."""
    with _families(monkeypatch, "numpy"):
        yield


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numpy_alone: None) -> Path:
    """For the command: a folder with a small network, an empty cache, and nothing that compiles."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("autoconv.cli.records.TuningCache", partial(TuningCache, system=None))  # nothing comes along
    (tmp_path / "tiny.yaml").write_text(NET)
    return tmp_path


def _as_on_record(instruction_set: str, threads: int, matrix_unit: str | None = None, *, thorough: bool) -> Machine:
    return dataclasses.replace(vectors.modelled(instruction_set, threads), thorough=thorough)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="every case: the everyday suite takes a sample of some files")
    parser.addoption("--avx512", action="store_true", help="of CPU kernels those of AVX-512 alone, emulated by Bochs")


def pytest_configure(config: pytest.Config) -> None:
    settings.load_profile("full" if config.getoption("full") else "everyday")
    # Of what is done outside of single tests, while they are collected, say, the user's own records know nothing.
    folder, session = tempfile.TemporaryDirectory(prefix="autoconv-tests-"), pytest.MonkeyPatch()
    session.setenv("AUTOCONV_CACHE_DIR", folder.name)
    session.setenv("AUTOCONV_KERNEL_DIR", str(KERNELS))
    # A model on record stands for this machine: what is collected, and what is chosen, is the same everywhere.
    session.setattr(measure, "measure", _as_on_record)
    config.add_cleanup(folder.cleanup)
    config.add_cleanup(session.undo)
    if not config.getoption("avx512"):
        return
    try:
        import bochs
    except ImportError as error:
        raise pytest.UsageError(f"--avx512: {error}; pip install -e '.[bochs]'") from None
    processor, patch = bochs.Processor(), pytest.MonkeyPatch()
    bochs.install(patch, processor)
    patch.setattr(vectors, "INSTRUCTION_SETS", ("avx512",))
    # To measure the machine that is emulated takes minutes, and says nothing of any.
    patch.setattr(recorded, "_measured", lambda key, isa, threads, *_, **__: vectors.modelled(isa, threads))
    config.add_cleanup(processor.close)
    config.add_cleanup(patch.undo)


@pytest.hookimpl(trylast=True)  # of what is asked for by marks and words
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("avx512"):
        items[:] = [item for item in items if item.path.name not in NO_KERNELS]
    if not config.getoption("full"):
        kept = _everyday(items)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]
    if config.getoption("avx512"):
        import bochs

        for item in items:
            if item.name == bochs.WRONG_THERE:
                item.add_marker(pytest.mark.xfail(reason="so does the emulator, not the kernel"))


def _everyday(items: list[pytest.Item]) -> set[pytest.Item]:
    """What the everyday suite runs: one in so many of the cases that a parametrised test has, and at least one."""
    cases: dict[tuple[str, str], list[pytest.Item]] = {}
    for item in items:
        path = item.path.relative_to(HERE).as_posix() if item.path.is_relative_to(HERE) else ""
        test = f"{path}::{getattr(item, 'originalname', '')}"
        if test not in FULL_ONLY:
            cases.setdefault((test, item.nodeid.partition("[")[0]), []).append(item)
    kept: set[pytest.Item] = set()
    for (test, _), found in cases.items():
        of = THINNED.get(test, THINNED.get(test.partition("::")[0], 1))
        kept.update(sorted(found, key=lambda item: zlib.crc32(item.name.encode()))[: max(1, len(found) // of)])
    return kept
