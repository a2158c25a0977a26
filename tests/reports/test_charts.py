from __future__ import annotations

import math
import xml.etree.ElementTree as ET

import pytest

from rlhf_lightning.reports import charts
from rlhf_lightning.reports.charts import Series, line_chart, points_of


def drawn(svg: str) -> list[list[tuple[float, float]]]:
    lines = [e.get("points") or "" for e in ET.fromstring(svg).iter("polyline")]
    return [[tuple(map(float, p.split(","))) for p in line.split()] for line in lines]  # type: ignore[misc]


def test_a_rising_curve_rises_and_spans_the_width():
    svg = line_chart("score", [Series("score", [(1, 0.0), (2, 1.0), (3, 4.0)])])
    (line,) = drawn(svg)
    assert ">iteration</text>" in svg, "an axis says what it shows"
    xs, ys = zip(*line, strict=True)
    assert xs[0] == charts.LEFT
    assert xs[-1] == charts.WIDTH - charts.RIGHT
    assert xs[1] == pytest.approx((xs[0] + xs[-1]) / 2, abs=0.1)
    assert ys[0] > ys[1] > ys[2], "y grows downwards in SVG"
    assert all(charts.TOP <= y <= charts.HEIGHT - charts.BOTTOM for y in ys)
    assert (ys[1] - ys[2]) / (ys[0] - ys[1]) == pytest.approx(3, rel=0.02)


def test_values_that_are_not_finite_are_gaps():
    points = [(1, 1.0), (2, 2.0), (3, math.nan), (4, 3.0), (5, math.inf), (6, 1.0), (7, 2.0)]
    svg = line_chart("x", [Series("x", points)])
    assert [len(line) for line in drawn(svg)] == [2, 2]
    assert "nan" not in svg
    assert "inf" not in svg
    assert line_chart("x", [Series("x", [(1, math.nan)])]) == ""
    assert line_chart("x", [Series("x", [])]) == ""


def test_no_accuracy_is_drawn_where_nothing_sets_a_pair_s_sides_apart():
    values = [(0.0, 0.0), (0.0, -0.1), (0.6, 0.2)]
    rows = [{"iteration": i, "dpo/accuracy": a, "dpo/margin": m} for i, (a, m) in enumerate(values)]
    assert points_of("dpo/accuracy", rows) == [(1, 0.0), (2, 0.6)]
