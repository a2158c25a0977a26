"""The rewards, pairs and table of the study `doctor`; its runs need a real model."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from benchmarks.studies.doctor import pairs, rewards, table
from benchmarks.studies.doctor.run import STUDY
from rlhf_lightning.doctor.catalog import DETECTORS


def test_the_judge_of_form_pays_for_items_and_length_alone():
    short, items, long = rewards.likes_lists(["p"] * 3, ["a", "- a\n- b\n3. c", "a " * 80])
    assert short == pytest.approx(1 / 40)
    assert items == pytest.approx(1.5 + 6 / 40)
    assert long == 1.0


@pytest.fixture
def reviews(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "data" / "sentence_polarity"
    folder.mkdir(parents=True)
    for name, word in (("pos", "good"), ("neg", "bad")):
        start = ("the", "an old", "one", "some")
        lines = [f"{start[i % 4]} film {i} {'x ' * (i % 7)}is {word} {i}" for i in range(120)]
        (folder / f"{name}.txt").write_text("\n".join(lines), encoding="utf-8")
    harmless = folder.parent / "hh_harmless"
    harmless.mkdir()
    turns = "\n\nHuman: how ?\n\nAssistant: {}"
    rows = [{side: turns.format(side) for side in ("chosen", "rejected")}, {"chosen": "no turns"}]
    with gzip.open(harmless / "pairs.jsonl.gz", "wt", encoding="utf-8") as file:
        file.write("".join(json.dumps({"rejected": "", **row}) + "\n" for row in rows))
    monkeypatch.setenv("RLHF_DATA", str(folder.parent))
    return folder.parent


def test_sick_pairs_are_wrong_in_one_way_each(reviews):
    longer = pairs.length_pairs("train")
    assert longer
    assert all(len(p["chosen"].split()) > len(p["rejected"].split()) for p in longer)
    right, flipped = (pairs.domain_pairs("train", flip=flip) for flip in (None, "article"))
    assert len(right) == len(flipped) > 20
    assert all(" good " in pair["chosen"] and " bad " in pair["rejected"] for pair in right)
    for pair in flipped:
        wrong = pair["domain"] == "article"
        assert pair["chosen"].split()[0].lower() in pairs.ARTICLES or not wrong
        assert (" bad " in pair["chosen"]) is wrong
    assert {pair["domain"] for pair in flipped} == {"article", "other"}
    assert [sorted(one) for one in pairs.harmless()] == [["chosen", "rejected"]]
    held_out = {p["prompt"] for p in pairs.openings("validation")}
    assert held_out
    assert not held_out & {p["prompt"] for p in pairs.openings("train")}


def row(iteration: int, kl: float, **more: float) -> dict[str, float]:
    return {
        "iteration": iteration,
        "rollout/kl_per_token": kl,
        "rollout/score": iteration / 10,
        **{f"val/{k}": v for k, v in more.items()},
    }


def test_what_is_due_are_detectors_and_rows_of_the_study_and_halves_part_them():
    runs = [name for name in STUDY.rows if name.startswith(("healthy", "sick"))]
    assert {name for name in runs if name.startswith("sick")} == table.DUE.keys()
    assert all(DETECTORS.keys() >= set(due) for due in table.DUE.values())
    assert len(runs) == 16
    first, second = (table.half(dict.fromkeys(runs), number) for number in (1, 2))
    assert first.keys() | second.keys() == set(runs)
    assert not first.keys() & second.keys()
    assert sum(name in table.DUE for name in first) == 4
