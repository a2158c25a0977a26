"""PandaLM and UKPConvArg1: rows by hand, and what is true of the real files where they are there.

The real files are looked for in RLHF_DATA, or in `shared/data` beside the repository.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from statsmodels.stats import inter_rater

from benchmarks.public_sets import (
    REPEATED,
    SAME,
    read_arguments,
    read_pandalm,
)
from rlhf_lightning.preferences.agreement import aggregate, fleiss_kappa
from rlhf_lightning.preferences.reliability import people_figures, verdicts_agree

BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"
DATA = Path(os.environ.get("RLHF_DATA", BESIDE))


def row(first: object, second: object, *votes: int, given: str = "") -> dict:
    annotators = {f"annotator{n}": vote for n, vote in enumerate(votes, start=1)}
    texts = {"instruction": "Add.", "input": given, "response1": first, "response2": second}
    return {"idx": 0, "motivation_app": "sums", "cmp_key": "opt_llama", **texts, **annotators}


def write(path: Path, *rows: dict) -> Path:
    path.write_text(json.dumps(list(rows)))
    return path


def test_rows_of_pandalm_become_pairs_and_labels(tmp_path: Path) -> None:
    path = write(
        tmp_path / "pandalm.json",
        row("4", "5", 1, 1, 0, given="2 + 2"),
        row(True, "False", 2, 2, 2),
        row("same", " same ", 0, 0, 0),
        row("4", "5", 2, 2, 2, given="2 + 2"),
    )
    found = read_pandalm(path)
    assert [(p.prompt, p.first, p.second) for p in found.pairs] == [
        ("Add.\n\n2 + 2", "4", "5"),
        ("Add.", "True", "False"),
    ]
    assert (found.pairs[0].first_source, found.pairs[0].second_source) == ("opt", "llama")
    assert [x.choice for x in found.labels] == ["first", "first", "tie"] + ["second"] * 3
    assert [x.annotator for x in found.labels[:3]] == ["annotator1", "annotator2", "annotator3"]
    assert found.left_out == {SAME: 1, REPEATED: 1}
    assert found.row_counts == ((2, 0, 1), (0, 3, 0), (0, 0, 3), (0, 3, 0))


def real(name: str) -> Path:
    path = DATA / name
    if not path.exists():
        pytest.skip(f"the data set is not in {path}: set RLHF_DATA to the folder above it")
    return path


def test_people_of_pandalm_agree_as_an_independent_implementation_says() -> None:
    found = read_pandalm(real("pandalm/testset-v1.json"))
    rows = np.array(found.row_counts)
    assert rows.shape == (999, 3)
    assert (rows.sum(1) == 3).all()
    assert fleiss_kappa(rows) == pytest.approx(inter_rater.fleiss_kappa(rows), rel=1e-10)
    figures = people_figures(found.labels)
    assert figures is not None
    assert 0.85 < figures["fleiss_kappa"] < 0.88
    assert figures["ceiling"] is not None
    assert (
        figures["ceiling"]["lowest"] < figures["ceiling"]["single"] < figures["ceiling"]["highest"]
    )


def test_people_differ_more_about_arguments_and_our_majority_is_near_the_sets_own() -> None:
    found = read_arguments(real("ukpconvarg1"))
    rows = np.array(found.row_counts)
    assert len(rows) == 6447
    five = rows[rows.sum(1) == 5]
    assert len(five) > 6000
    assert fleiss_kappa(five) == pytest.approx(inter_rater.fleiss_kappa(five), rel=1e-10)
    assert 0.2 < fleiss_kappa(rows) < 0.4
    for method, least in (("majority", 0.97), ("dawid_skene", 0.95)):
        verdicts = aggregate(found.pairs, found.labels, people=(), method=method)
        assert verdicts_agree(verdicts, found.verdicts).value > least
