"""The lab from prompts to records, with a tiny policy and simulated people."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_lightning.data.demo.annotators import PANEL
from rlhf_lightning.data.demo.gold import gold_scores
from rlhf_lightning.data.demo.source import DemoSource
from rlhf_lightning.data.sources.base import PreferenceFolder
from rlhf_lightning.models.factory import frozen, load_policy
from rlhf_lightning.preferences.annotators import (
    LengthRule,
    Panel,
    RepetitionRule,
    RuleAnnotator,
    SimulatedPerson,
)
from rlhf_lightning.preferences.budget import BudgetHparams
from rlhf_lightning.preferences.candidates import Decoding, LoadedPolicy, Sampling
from rlhf_lightning.preferences.collection import Lab, LabHparams
from rlhf_lightning.preferences.judge import JudgeAnnotator
from rlhf_lightning.preferences.records import Candidate, Label, Pair, read_records
from rlhf_lightning.preferences.reliability import describe, flat_metrics, write_collection
from rlhf_lightning.text.tokenizers import load_tokenizer
from tests.builders.chat_server import prefers_longer, serving

PROMPTS = DemoSource(seed=1).records("prompts", "train")[:30]
BUDGET = BudgetHparams(
    automatic_share=0.6, validation_share=0.2, seconds_per_label=36.0, hourly_wage=20.0
)


@pytest.fixture(scope="module")
def policy(start: Path) -> LoadedPolicy:
    tokenizer = load_tokenizer(start)
    return LoadedPolicy(frozen(load_policy(start)), tokenizer, [tokenizer.eos_token_id])


@pytest.fixture
def lab(policy: LoadedPolicy, tmp_path: Path) -> Lab:
    sampling = Sampling(
        policies={"sft": lambda: policy},
        decodings=[Decoding(temperature=1.0, top_p=0.9), Decoding()],
        num_samples=2,
        max_new_tokens=8,
        max_prompt_length=64,
        batch_size=8,
        seed=1,
    )
    people = [SimulatedPerson(person, gold_scores, seed=1) for person in PANEL]
    return Lab(
        folder=tmp_path,
        sampling=sampling,
        annotators=[
            RuleAnnotator([LengthRule(6)], name="length"),
            RuleAnnotator([RepetitionRule(), LengthRule(5, 0.1)], name="repeats"),
        ],
        people=Panel(people, seed=1),
        budget=BUDGET,
        hparams=LabHparams(num_pairs=50, keep_unfinished=True),
    )


def rows(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_from_prompts_to_records_and_their_reliability(lab: Lab, tmp_path: Path) -> None:
    collection = lab.run(PROMPTS)
    routing = collection.routing
    total = sum(len(part) for part in (routing.automatic, routing.people, routing.validation))
    assert total == 50
    assert 10 <= len(routing.validation) <= 11
    # People and their number: one for training pairs, three for held-out ones.
    names = {person.name for person in PANEL}
    asked = Counter(x.pair_id for x in collection.labels if x.annotator in names)
    assert {asked[p.pair_id] for p in routing.validation} == {3}
    assert {asked[p.pair_id] for p in routing.people} == {1}
    assert not any(asked[p.pair_id] for p in routing.automatic)
    assert collection.after.labels == 3 * len(routing.validation) + len(routing.people)
    assert collection.before.hours > collection.after.hours > 0

    figures = write_collection(tmp_path / "data", collection, lab.hparams, gold=gold_scores)
    train, held_out = rows(tmp_path / "data/train.jsonl"), rows(tmp_path / "data/validation.jsonl")
    assert not {r["prompt"] for r in train} & {r["prompt"] for r in held_out}
    assert {r["labelled_by"] for r in held_out} == {"people"}
    assert {r["labelled_by"] for r in train} == {"people", "automatic"}
    assert all(0 <= r["margin"] <= 1 for r in train)
    assert {r["chosen_source"].split()[0] for r in train} == {"sft"}
    metrics = flat_metrics(figures)
    assert metrics["collect/num_pairs"] == total
    assert 0.5 <= metrics["val/label_ceiling"] <= 1.0
    assert 0.0 <= metrics["collect/gold_train"] <= 1.0
    assert [a["name"] for a in figures["annotators"]] == ["length", "repeats"]
    for annotator in figures["annotators"]:  # of all pairs, beside people on the held-out ones
        assert annotator["labels"] == total
        assert 0 < annotator["agrees"]["num"] <= len(routing.validation)

    source = PreferenceFolder(tmp_path / "data")
    assert len(source.records("preferences", "train")) == len(train)
    assert len(source.records("preferences", "validation")) == len(held_out)
    assert source.label_ceiling() == metrics["val/label_ceiling"]


def test_what_is_on_disk_is_not_done_again(lab: Lab, tmp_path: Path) -> None:
    first = lab.run(PROMPTS)
    written = {p.name: p.read_bytes() for p in tmp_path.glob("*.jsonl")}

    def never(*_):
        raise AssertionError("it was done again")

    for annotator in lab.annotators:
        annotator.score = never
    second = replace(lab, sampling=replace(lab.sampling, policies={"sft": never})).run(PROMPTS)
    assert second == first
    assert {p.name: p.read_bytes() for p in tmp_path.glob("*.jsonl")} == written
    assert len(list(read_records(Candidate, tmp_path / "candidates.jsonl"))) > 60
    assert len(list(read_records(Pair, tmp_path / "pairs.jsonl"))) >= 40
    labels = list(read_records(Label, tmp_path / "labels.jsonl"))
    assert len({(x.pair_id, x.annotator) for x in labels}) == len(labels)


def test_a_judge_alone_labels_validation_too_and_nothing_is_said_of_people(lab: Lab) -> None:
    with serving(prefers_longer) as server:
        judge = JudgeAnnotator(model="judge", base_url=server.url, api_key_env=None)
        collection = replace(lab, annotators=[judge], people=None).run(PROMPTS)
    assert {label.annotator for label in collection.labels} == {"judge"}
    assert not collection.people
    assert not collection.routing.people
    for verdict in (*collection.train, *collection.validation):
        first, second = len(verdict.pair.first), len(verdict.pair.second)
        assert verdict.choice == (
            "first" if first > second else "second" if second > first else None
        )
    assert any(verdict.choice for verdict in collection.validation)
    figures = describe(collection)
    flat = flat_metrics(figures)
    assert flat["collect/judge_replies"] == 2 * len(collection.labels)
    assert flat["collect/judge_unreadable"] == 0
    assert figures["people"] is None
    assert figures["pairs"]["people"] == 0
    assert figures["records"]["validation"]["kept"] > 0
    assert collection.after.labels == 0


def test_near_duplicates_of_held_out_prompts_are_not_trained_on_but_replaced(lab: Lab) -> None:
    with pytest.warns(UserWarning, match="near_duplicate"):
        strict = replace(lab.hparams, near_duplicate=0.2, near_duplicate_n=1, num_pairs=15)
    collection = replace(lab, hparams=strict).run(PROMPTS)
    assert collection.near_duplicates > 0
    routing = collection.routing
    assert len(routing.automatic + routing.people + routing.validation) == 15
    assert len(routing.validation) == 3
    held_out = [str(p.prompt).split() for p in collection.routing.validation]
    for verdict in collection.train:
        words = set(str(verdict.pair.prompt).split())
        for other in held_out:
            assert len(words & set(other)) < 0.2 * len(words | set(other))


def test_one_question_about_different_documents_is_no_near_duplicate(lab: Lab) -> None:
    asked = [{"role": "user", "content": "What does it say of the sea and of the land ?"}]
    texts = ("the tide turns at noon today", "a dune moves with every wind")
    pairs = [Pair.make(asked, "a", "b", columns={"documents": text * 3}) for text in texts]
    assert lab._without_duplicates(pairs, {pairs[0].pair_id}) == (pairs, 0)
    again = [Pair.make(asked, text, "b") for text in texts]
    other = Pair.make([*asked, *asked], "a", "b")
    assert lab._without_duplicates([*again, other], {other.pair_id}) == ([other], 1)
