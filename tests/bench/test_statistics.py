"""Medians with their intervals, and geometric means, on made-up samples."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest

from autoconv.bench.statistics import Ratio, geometric_mean, interval, ratios


@pytest.mark.parametrize(
    ("count", "ranks"),
    [(5, (1, 5)), (6, (1, 6)), (8, (1, 8)), (9, (2, 8)), (11, (2, 10)), (12, (3, 10)), (25, (8, 18))],
)
def test_an_interval_lies_between_the_order_statistics_of_the_tables(count: int, ranks: tuple[int, int]) -> None:
    """The ranks that textbooks tabulate for a 95 % interval of the median."""
    samples = [float(place) for place in range(1, count + 1)]
    found = interval(samples[::-1])
    assert (found.low, found.high) == ranks
    assert found.median == statistics.median(samples)


def test_an_interval_holds_the_true_median_nineteen_times_in_twenty() -> None:
    generator = np.random.default_rng(0)
    found = [interval(list(generator.standard_normal(9))) for _ in range(4000)]
    held = sum(ratio.low <= 0 <= ratio.high for ratio in found) / len(found)
    assert 0.95 <= held <= 0.97  # 96.1 % for nine samples


def test_a_loss_is_sure_only_when_all_of_the_interval_is_one() -> None:
    assert Ratio(0.9, 0.8, 0.96).behind
    assert not Ratio(0.9, 0.8, 0.97).behind


def test_a_ratio_reads_as_median_and_interval() -> None:
    assert str(Ratio(0.9, 0.8, 0.967)) == "0.90 [0.80 0.97]"


def test_a_drift_that_slows_a_whole_round_leaves_the_ratios_alone() -> None:
    drift = [1.0, 2.0, 5.0, 1.5, 3.0, 1.0]
    assert ratios([2e-3 * d for d in drift], [1e-3 * d for d in drift]) == pytest.approx([2.0] * 6)


def test_a_mean_is_the_geometric_one_of_the_layers_medians() -> None:
    layers = [[4.0, 4.0, 4.0, 4.0, 5.0, 3.0], [1.0] * 6]
    mean = geometric_mean(layers)
    assert mean is not None
    assert mean.median == pytest.approx(2.0)
    assert math.sqrt(3) < mean.low <= 2.0 <= mean.high < math.sqrt(5)
    assert geometric_mean(layers) == mean  # the bootstrap has a seed


def test_there_is_no_mean_where_a_layer_has_no_ratios() -> None:
    assert geometric_mean([]) is None
    assert geometric_mean([[1.0] * 6, None]) is None
