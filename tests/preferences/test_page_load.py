"""Many raters at once lose no label, never exceed the ratings, and do not wait."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.preferences.page_load import run_load


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_400_labels_by_4_raters_at_once_are_all_kept(tmp_path: Path):
    load = run_load(tmp_path, num_pairs=200, ratings_per_pair=2, num_raters=4)
    assert (load.labels, load.lost, load.unasked, load.most) == (400, 0, 0, 2)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_20000_labels_by_8_raters_at_once_are_all_kept_and_answered_within_50_ms(tmp_path: Path):
    load = run_load(tmp_path, num_pairs=5000, ratings_per_pair=4, num_raters=8)
    assert (load.labels, load.lost, load.unasked, load.most) == (20_000, 0, 0, 4)
    assert load.answered_median < 50
