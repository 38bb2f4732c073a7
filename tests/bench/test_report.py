"""The report: its arithmetic, its sums, and a page that a real browser shows to everybody's liking."""

from __future__ import annotations

import importlib.util
import itertools
import math
import re
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from browser import MISSING, Browser
from hypothesis import given
from hypothesis import strategies as st
from layers import layers
from made_up import TORCH, WINNER, facts_of, modelled, remember

from autoconv import CPU, ConvLayer, TuningCache, networks, plan
from autoconv.bench.report import layers as report_layers
from autoconv.bench.report import page as pages
from autoconv.bench.report import study as studies
from autoconv.bench.report import tradeoffs
from autoconv.bench.report.counts import (
    gemm_multiply_adds,
    input_over_filters,
    multiply_adds_per_byte,
    padded_input,
    product_extents,
)
from autoconv.bench.report.style import DARK, LIGHT, Pen, plain
from autoconv.cli import main
from autoconv.errors import PlanError
from autoconv.plans import Plan

# The study's arithmetic


def test_a_layer_of_alexnet_in_one_column_has_as_many_operations_as_the_study_says() -> None:
    layer = ConvLayer(N=256, C=96, H=27, W=27, K=256, R=5, S=5, padding=2)
    assert f"{layer.flops / 1e9:.0f}" == "229"


def test_overfeat_has_the_ratios_that_the_study_says() -> None:
    found = [named.layer for named in networks.load("overfeat").layers[1:]]
    assert [f"{multiply_adds_per_byte(layer):.1f}" for layer in found] == ["173.8", "48.5", "50.6", "52.1", "53.3"]
    assert [f"{input_over_filters(layer):.3f}" for layer in found] == ["0.103", "0.063", "0.063", "0.031", "0.031"]


def test_padding_counts_on_all_four_sides() -> None:
    layer = ConvLayer(N=2, C=3, H=5, W=7, K=1, R=3, S=3, padding=((1, 2), (0, 4)))
    assert padded_input(layer) == 2 * 3 * (5 + 3) * (7 + 4)


@given(layer=layers())
def test_the_product_of_im2col_has_the_multiply_adds_of_the_layer(layer: ConvLayer) -> None:
    assert layer.groups * math.prod(product_extents(layer)) == layer.macs
    assert gemm_multiply_adds(layer, CPU.current()) >= layer.macs


def test_whole_tiles_fill_up_what_is_left_over() -> None:
    device = CPU(1, "avx2")  # 8 lanes; the tile with the fewest rows has 8, those of two vectors 16
    whole = ConvLayer(N=1, C=4, H=8, W=12, K=48, R=1, S=1)
    assert gemm_multiply_adds(whole, device) == whole.macs
    one_more = whole.replace(K=49)
    assert gemm_multiply_adds(one_more, device) == 56 * one_more.macs // 49


# What is gathered

NET = """
name: Tiny & <b>bold</b>
source: nobody's
defaults: {bias: true, activation: relu}
layers:
  - {name: stem, C: 3, H: 24, K: 8, R: 5, stride: 2, padding: 2}
  - {name: body, C: 16, H: 12, K: 16, R: 3, padding: 1, repeat: 3}
  - {name: a$long$name/of/channels/each/alone, C: 24, H: 12, K: 24, R: 3, padding: 1, groups: 24}
"""
OPTIONS: dict[str, Any] = {"weights": "constant", "vendors": False}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("net") / "tiny.yaml"
    path.write_text(NET)
    return path


@pytest.fixture(scope="module")
def cache(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TuningCache]:
    found = TuningCache(tmp_path_factory.mktemp("cache"), system=None)
    remember(found, [named.at(1) for named in networks.load(tiny).layers], modelled())
    yield found
    found.close()


@pytest.fixture(scope="module")
def study(tiny: Path, cache: TuningCache) -> studies.Study:
    return studies.gather(networks.load(tiny), 1, "fwd", modelled(), cache, OPTIONS)


def test_the_winners_and_sums_are_those_of_the_plans(study: studies.Study, cache: TuningCache) -> None:
    total = 0.0
    for studied in study.layers:
        chosen = plan(studied.layer, "cached", cache=cache, **OPTIONS)
        assert studied.winner == chosen.candidate
        assert studied.winner.algorithm == WINNER
        assert studied.best == chosen.timings[str(chosen.candidate)]
        total += studied.repeat * studied.best
    assert study.seconds == pytest.approx(total)
    assert (study.missing, study.when[:10]) == ({}, "2026-11-20")


def test_what_is_on_record_is_gathered_without_kernels(
    tiny: Path, cache: TuningCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    def built(made: Plan) -> Any:
        raise AssertionError(f"a kernel for {made.layer}")

    monkeypatch.setattr(Plan, "kernel", property(built))
    assert studies.gather(networks.load(tiny), 1, "fwd", modelled(), cache, OPTIONS).missing == {}


def test_what_is_on_record_without_a_unit_has_its_date_with_it(tiny: Path, tmp_path: Path) -> None:
    without, device = (replace(modelled(), matrix_unit=unit) for unit in (None, "emulated"))
    with closing(TuningCache(tmp_path, system=None)) as kept:
        remember(kept, [named.at(1) for named in networks.load(tiny).layers], without)
        found = studies.gather(networks.load(tiny), 1, "fwd", device, kept, OPTIONS)
    assert (found.missing, found.when[:10]) == ({}, "2026-11-20")


def test_libraries_that_may_not_win_are_there_to_compare_with(study: studies.Study) -> None:
    for studied in study.layers:
        assert TORCH in studied.facts
        assert TORCH not in studied.ranking
        assert studied.under(study.limits) == studied.best


def test_a_tighter_limit_never_takes_less(study: studies.Study) -> None:
    for name, limits in {"workspace_limit": (0, 1 << 12, 1 << 30), "tolerance": (1e-7, 1e-6, 1.0)}.items():
        found = [study.under(**{name: limit}) for limit in limits]
        assert found[-1] == study.seconds
        known = [seconds for seconds in found if seconds is not None]
        assert known == sorted(known, reverse=True)
    assert study.under(tolerance=1e-12) is None


def test_operations_are_those_of_the_candidates_that_were_timed(study: studies.Study) -> None:
    body = next(studied for studied in study.layers if studied.name == "body")
    found = report_layers.operations(body)
    assert found["direct"] == 1
    assert 1 <= found["gemm"] < 1.5
    assert 0.15 < found["winograd"] < 1


@pytest.mark.parametrize("direction", ["dgrad", "wgrad"])
def test_gradients_are_counted_too(direction: str, tmp_path: Path) -> None:
    layer = ConvLayer(N=1, C=16, H=12, W=12, K=24, R=3, S=3, padding=1, direction=direction)
    cache = TuningCache(tmp_path / "records", system=None)
    remember(cache, [layer], modelled())
    found = report_layers.operations(studies.studied("body", 1, layer, modelled(), cache, OPTIONS | {"mode": "cached"}))
    assert found["direct"] == 1
    assert 1 <= found["gemm"] < 1.5
    assert ("winograd" in found) == (direction == "dgrad")


def test_a_network_without_any_record_is_refused(tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"Tiny .* batch 2, fwd: no layer has a record .* stem: nothing recorded"):
        studies.gather(networks.load(tiny), 2, "fwd", CPU.current(), TuningCache(tmp_path, system=None), OPTIONS)


def test_layers_are_studied_at_their_own_batch_size_and_direction(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.yaml").write_text(
        "layers: [{name: up, C: 8, H: 12, K: 8, R: 3, padding: 1, batch: 4, direction: dgrad}]\n"
    )
    net, cache = networks.load(tmp_path / "own.yaml"), TuningCache(tmp_path / "records", system=None)
    layer = net.layers[0].layer.replace(N=4, direction="dgrad")
    remember(cache, [layer], modelled())
    study = studies.gather(net, 1, "fwd", modelled(), cache, OPTIONS)
    assert [studied.layer for studied in study.layers] == [layer]
    monkeypatch.setattr(pages, "charts", lambda study: [])
    told = "<summary>At a batch size or in a direction of its own: 1 layer</summary><ul><li>up: batch 4, dgrad</li>"
    assert told in pages.report(study)


def test_candidates_that_are_made_up_are_of_every_kind() -> None:
    layer = ConvLayer(N=1, C=16, H=12, W=12, K=16, R=3, S=3, padding=1)
    assert {c.algorithm.partition(".")[0] for c in facts_of(layer, CPU.current())} >= {"direct", "winograd", "numpy"}


# What is drawn

drawn = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="NOT CHECKED: no matplotlib")
FIGURES = ["share", "time", "gap", "operations", "shapes", "roofline", "error", "workspace"]


@pytest.fixture(scope="module")
def page(study: studies.Study, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(pages.report(study), encoding="utf-8")
    return path


@drawn
def test_the_page_is_complete_in_itself(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert re.findall(r"<(?:script|link|img|iframe|object|base)\b|\bsrc=|@import|\bon\w+=", text) == []
    assert {url for url in re.findall(r"""(?:href=|url\()["']?([^"')]+)""", text) if not url.startswith("#")} == set()
    names = re.findall(r'\bid="([^"]+)"', text)
    assert len(names) == len(set(names))
    assert set(re.findall(r'href="#([^"]+)"', text)) <= set(names)
    assert "<b>bold" not in text
    assert "Tiny &amp; &lt;b&gt;bold&lt;/b&gt;" in text


@drawn
def test_figures_are_in_the_colours_of_the_page_alone(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    body = text[text.index("<body>") :]
    assert re.findall(r"#[0-9a-f]{6}\b", body) == []


@drawn
def test_long_names_in_the_table_may_break_where_a_part_ends(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "a$long$name/<wbr>of/<wbr>channels/<wbr>each/<wbr>alone" in text
    assert re.search(r"<td>[a-z.]+\[<wbr>\w+=\w+,<wbr>", text)


def test_a_roofline_that_was_measured_on_a_busy_machine_is_remarked_upon() -> None:
    device = modelled()
    assert pages.remarks(device) == []
    (remark,) = pages.remarks(replace(device, model=replace(device.machine, busy=0.123).text))
    assert remark.startswith("Others used 12% of the processor while the peak and the bandwidths were measured")


@drawn
def test_pages_have_a_micro_sign(page: Path) -> None:
    assert re.findall(r"\d us\b", page.read_text(encoding="utf-8")) == []


@drawn
@given(low=st.floats(1e-9, 1e9), factor=st.floats(1.02, 1e12), narrow=st.booleans())
def test_a_logarithmic_axis_has_a_few_ticks_however_much_it_shows(low: float, factor: float, narrow: bool) -> None:
    from matplotlib.figure import Figure

    axes = Figure().subplots()
    axes.set(xscale="log", xlim=(low, low * factor))
    Pen(LIGHT, narrow).ticks(axes.xaxis, plain)
    seen = [place for place in axes.get_xticks() if low <= place <= low * factor]
    assert 3 <= len(seen) <= 7
    assert axes.get_xlim() == pytest.approx((low, low * factor))


def test_names_on_figures_say_nothing_twice() -> None:
    pen = Pen(LIGHT, narrow=False)
    assert report_layers.short("/features/features.2/conv/conv.0/conv.0.2/Clip_output_0 ×2", pen) == (
        "features.2/conv.0.2/Clip ×2"
    )
    assert report_layers.short("conv3", pen) == "conv3"
    assert report_layers.short("a" * 40, Pen(LIGHT, narrow=True)) == "…" + "a" * 19


@pytest.mark.skipif(bool(MISSING), reason=MISSING or "there is one")
@drawn
def test_a_browser_shows_every_figure_in_light_and_dark_wide_and_narrow(page: Path, tmp_path: Path) -> None:
    browser = Browser(tmp_path / "profile")
    try:
        for (scheme, palette), width in itertools.product({"light": LIGHT, "dark": DARK}.items(), (1280, 390)):
            browser.open(page.as_uri(), width, 844, scheme)
            assert browser.value("document.documentElement.scrollWidth") <= width
            assert browser.value("getComputedStyle(document.body).backgroundColor") == rgb(palette.paper)
            assert width < 600 or browser.value(SPARE) >= 0
            shown = browser.value(SHOWN)
            assert [figure["name"] for figure in shown] == FIGURES
            for figure in shown:
                assert figure["visible"] == ["narrow" if width < 600 else "wide"], figure["name"]
                assert figure["inks"] == [rgb(palette.ink)], figure["name"]
                assert figure["height"] > 100
                assert figure["smallest"] >= 11, figure["name"]
                assert figure["outside"] == [], figure["name"]
            loaded = [p["request"]["url"] for method, p in browser.events if method == "Network.requestWillBeSent"]
            assert loaded == [page.as_uri()]
            wrong = ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded")
            assert [p for method, p in browser.events if method in wrong] == []
    finally:
        browser.close()


def rgb(colour: str) -> str:
    return f"rgb({', '.join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))})"


# Pixels that the table leaves free, or below 0 those that have to be scrolled.
SPARE = "(s => s.clientWidth - s.scrollWidth)(document.querySelector('.scroll'))"
# Of every figure: which drawing is shown, the ink of its ticks, its least letters, and texts that stick out of it.
SHOWN = """
[...document.querySelectorAll('figure')].map(figure => {
  const seen = [...figure.querySelectorAll('svg')].filter(s => getComputedStyle(s).display != 'none');
  const [svg] = seen, box = svg.getBoundingClientRect(), scale = box.width / svg.viewBox.baseVal.width;
  const texts = [...svg.querySelectorAll('text')];
  const across = r => r.left < box.left - 2 || r.right > box.right + 2;
  const sticks = r => across(r) || r.top < box.top - 2 || r.bottom > box.bottom + 2;
  return {
    name: figure.previousElementSibling.id,
    visible: seen.map(s => s.getAttribute('class')),
    inks: [...new Set([...svg.querySelectorAll('[id*="xtick_"] text')].map(t => getComputedStyle(t).fill))],
    height: box.height,
    smallest: Math.min(...texts.map(t => scale * parseFloat(getComputedStyle(t).fontSize))),
    outside: texts.filter(t => sticks(t.getBoundingClientRect())).map(t => t.textContent),
  };
})
"""


# The command


@pytest.fixture
def own(cache: TuningCache, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's cache is the one with the records."""
    monkeypatch.setenv("AUTOCONV_CACHE_DIR", str(cache.directory))


@drawn
def test_pictures_are_written_in_light_and_dark_and_what_is_missing_is_named(
    own: None, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only = tradeoffs.charts
    monkeypatch.setattr(report_layers, "charts", lambda study: [])
    monkeypatch.setattr(tradeoffs, "charts", lambda study: only(study)[:1])
    (tmp_path / "more.yaml").write_text(f"{NET}  - {{name: unknown, C: 5, H: 9, K: 7, R: 3}}\n")
    command = ["report", str(tmp_path / "more.yaml"), "--weights", "constant", "--vendors", "none"]
    assert main([*command, "--png", str(tmp_path), "-o", str(tmp_path / "r.html")]) == 1
    found = capsys.readouterr()
    assert "autoconv: warning: unknown is left out: nothing recorded for fwd-float32-NCHW-N1-C5-H9" in found.err
    assert "3 of 4 layers" in found.out
    pictures = sorted(path.name for path in tmp_path.glob("*.png"))
    assert pictures == sorted(f"{name}{end}.png" for name in FIGURES[5:6] for end in ("", "-dark"))
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in tmp_path.glob("*.png"))
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "<dt>layers on record</dt>" in text
    assert "<summary>Not among these figures: 1 layer</summary><ul><li>unknown: nothing recorded" in text


@drawn
@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "expected -o FILE, --png FOLDER or both"),
        (["-o", "none/report.html"], 2, "-o none/report.html: there is no folder none"),
        (["--png", "none/figures"], 2, "--png none/figures: there is no folder none"),
        (["-o", "report.html", "--batch", "3"], 1, "no layer has a record that answers, tune the network first"),
    ],
)
def test_what_cannot_be_drawn_is_one_line_and_no_file(
    own: None,
    arguments: list[str],
    code: int,
    message: str,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(tiny), *arguments]) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert list(tmp_path.iterdir()) == [] or [p.name for p in tmp_path.iterdir()] == ["cache"]


def test_without_matplotlib_the_command_says_what_to_install(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("autoconv.cli.figures.places.importlib.util.find_spec", lambda name: None)
    assert main(["report", str(tiny), "-o", "report.html"]) == 2
    assert "pip install 'autoconv[report]'" in capsys.readouterr().err
