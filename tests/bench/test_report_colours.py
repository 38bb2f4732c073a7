"""The colours of reports: they can be read, and told apart by anybody."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest

from autoconv.bench.report.style import DARK, FAMILIES, LIGHT, MARKERS, Palette


def linear(colour: str) -> list[float]:
    """Red, green and blue in proportion to light."""
    parts = (int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]


def brightness(colour: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    return sum(weight * c for weight, c in zip((0.2126, 0.7152, 0.0722), linear(colour), strict=True))


def contrast(a: str, b: str) -> float:
    bright, dark = sorted((brightness(a), brightness(b)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def test_colours_can_be_read_and_told_apart_in_both_schemes() -> None:
    for palette in (LIGHT, DARK):
        assert min(contrast(palette.paper, shade) for shade in (palette.ink, palette.muted, palette.accent)) >= 4.5
        assert min(contrast(palette.paper, colour) for colour in palette.families) >= 3
        assert len(set(palette.variables.values())) == len(palette.variables) == 5 + len(FAMILIES) + 1
    assert len(set(MARKERS.values())) == len(MARKERS)


# What people see who lack one kind of cones: Machado, Oliveira and Fernandes, "A Physiologically-based Model for
# Simulation of Color Vision Deficiency", 2009, at full severity. Linear RGB from linear RGB.
BLINDNESS = {
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}
XYZ = ((0.4339, 0.3763, 0.1899), (0.2126, 0.7152, 0.0722), (0.0177, 0.1095, 0.8728))  # relative to white


def lab(colour: str, blindness: str) -> tuple[float, float, float]:
    """Lightness and the two hues of CIELAB, in which equal distances look about equal."""
    rgb = [min(1.0, max(0.0, value)) for value in times_vector(BLINDNESS[blindness], linear(colour))]
    x, y, z = (v ** (1 / 3) if v > 0.008856 else 7.787 * v + 16 / 116 for v in times_vector(XYZ, rgb))
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def times_vector(matrix: Sequence[Sequence[float]], vector: Sequence[float]) -> list[float]:
    return [sum(a * b for a, b in zip(row, vector, strict=True)) for row in matrix]


@pytest.mark.parametrize("blindness", BLINDNESS)
@pytest.mark.parametrize("palette", [LIGHT, DARK], ids=["light", "dark"])
def test_the_colour_blind_tell_families_apart(palette: Palette, blindness: str) -> None:
    seen = [lab(colour, blindness) for colour in (*palette.families, palette.accent)]
    assert min(math.dist(a, b) for a, b in itertools.combinations(seen, 2)) >= 10
