"""Adversarial pairs: overrated answers meet better ones, and are labelled anew."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from rlhf_lightning.data.demo.annotators import PANEL
from rlhf_lightning.data.demo.gold import gold_scores
from rlhf_lightning.data.demo.questions import DOMAINS
from rlhf_lightning.data.demo.source import DemoSource
from rlhf_lightning.data.records import Text
from rlhf_lightning.preferences.annotators import LengthRule, Panel, RuleAnnotator, SimulatedPerson
from rlhf_lightning.preferences.budget import BudgetHparams
from rlhf_lightning.preferences.candidates import Decoding, Sampling
from rlhf_lightning.preferences.collection import Lab, LabHparams
from rlhf_lightning.preferences.pairing import WorstSamples
from rlhf_lightning.preferences.records import Candidate, Pair, write_records, write_rows

QUESTION = next(
    record.prompt
    for record in DemoSource(seed=1).records("prompts", "train")
    if record.domain == DOMAINS[0]
)


def answer(text: str, prompt: Text = "p") -> Candidate:
    return Candidate.make(prompt, text, model="policy", settings={}, seed=1, domain="sums")


def texts(pairs: Sequence[Pair]) -> list[set[str]]:
    return [{pair.first, pair.second} for pair in pairs]


def collected(folder: Path, prompt: Text, answers: Sequence[str], rejected: Sequence[int]) -> Path:
    """Write what a collection leaves: the first answer was preferred to each rejected one."""
    candidates = [answer(text, prompt) for text in answers]
    pairs = [Pair.make(prompt, answers[0], answers[i], domain="sums") for i in rejected]

    def said(text: str) -> object:
        return text if isinstance(prompt, str) else [{"role": "assistant", "content": text}]

    (folder / "data").mkdir(parents=True)
    write_records(folder / "candidates.jsonl", candidates)
    write_records(folder / "pairs.jsonl", pairs)
    rows = [
        {"pair_id": p.pair_id, "chosen": said(p.first), "rejected": said(p.second)} for p in pairs
    ]
    write_rows(folder / "data" / "train.jsonl", rows)
    return folder


@pytest.mark.parametrize("prompt", ["p", ({"role": "user", "content": "p"},)])
def test_a_collection_is_read_and_scored_answer_by_answer(tmp_path: Path, prompt: Text) -> None:
    run = collected(tmp_path, prompt, ["good", "a very long answer", "short", "new"], [1, 2])
    asked: list[tuple[Text, str]] = []

    def length(answers: Sequence[tuple[Text, str]]) -> list[float | None]:
        asked.extend(answers)
        return [float(len(text)) if len(text) < 30 else None for _, text in answers]

    pairs, overrated = WorstSamples(run, length, num_pairs=5).pairs(seed=1)
    assert sorted(text for _, text in asked) == ["a very long answer", "good", "short"]
    assert overrated == 2
    assert texts(pairs) == [{"a very long answer", "new"}, {"short", "new"}]


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    def nobody() -> None:
        raise AssertionError("no policy is asked for adversarial pairs")

    return Lab(
        folder=tmp_path / "again",
        sampling=Sampling({"policy": nobody}, [Decoding()], 1, 8, 64, 8, 1),  # type: ignore[dict-item]
        annotators=[RuleAnnotator([LengthRule(6)], name="length")],
        people=Panel([SimulatedPerson(p, gold_scores, seed=1) for p in PANEL], seed=1),
        budget=BudgetHparams(automatic_share=0.0, validation_share=0.0),
        hparams=LabHparams(),
        worst=WorstSamples(
            collected(tmp_path / "run", QUESTION, ["good", "bad", "i do not know ."], [1]),
            lambda answers: [float(text == "bad") for _, text in answers],
            num_pairs=5,
        ),
    )


def test_the_lab_labels_adversarial_pairs_like_any_other(lab: Lab) -> None:
    lab.folder.mkdir()
    collection = lab.run([])
    (verdict,) = collection.train
    assert {verdict.pair.first, verdict.pair.second} == {"bad", "i do not know ."}
    assert verdict.by_people  # the budget sends them all of it
    assert not collection.validation
    assert json.loads((lab.folder / "labels.jsonl").read_text().splitlines()[0])
