"""The world's records: what is held out, how good they are, and what the labels can teach."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from statistics import mean

import pytest

from rlhf_lightning.data.demo.annotators import PANEL, SimulatedAnnotator
from rlhf_lightning.data.demo.gold import gold_parts, gold_scores
from rlhf_lightning.data.demo.grammar import I_DO_NOT_KNOW
from rlhf_lightning.data.demo.questions import DOMAINS, TEMPLATES
from rlhf_lightning.data.demo.source import DemoSource
from rlhf_lightning.data.records import (
    DemonstrationRecord,
    PreferenceRecord,
    PromptRecord,
    TextRecord,
)

SEEDS = (1, 2)
KINDS = {
    "texts": TextRecord,
    "prompts": PromptRecord,
    "demonstrations": DemonstrationRecord,
    "preferences": PreferenceRecord,
}


@cache
def world(seed: int) -> DemoSource:
    return DemoSource(seed, num_texts=3000, num_demonstrations=3000, num_preferences=3000)


def wins(scores: list[float], baseline: list[float]) -> float:
    pairs = zip(scores, baseline, strict=True)
    return mean(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs)


@pytest.mark.thorough
@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_the_same_records_and_another_seed_gives_others(kind: str) -> None:
    for split in ("train", "validation"):
        records = world(1).records(kind, split)
        assert records == replace(world(1)).records(kind, split)
        assert records != world(2).records(kind, split)
        assert {type(record) for record in records} == {KINDS[kind]}
        assert {record.domain for record in records} == set(DOMAINS)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", SEEDS)
def test_held_out_prompts_are_many_unique_and_in_no_training_record(seed: int) -> None:
    held_out = [record.prompt for record in world(seed).records("prompts", "validation")]
    pool = [record.prompt for record in world(seed).records("prompts", "train")]
    assert len(set(held_out)) == len(held_out) >= 450
    assert len(set(pool)) == len(pool) >= 2000
    assert not set(held_out) & set(pool)
    for kind in ("demonstrations", "preferences"):
        assert {r.prompt for r in world(seed).records(kind, "train")} <= set(pool)
        assert {r.prompt for r in world(seed).records(kind, "validation")} <= set(held_out)
    starts = tuple(f"{prompt} " for prompt in held_out)
    texts = [record.text for record in world(seed).records("texts", "train")]
    assert not any(text.startswith(starts) for text in texts)
    held_out_texts = [record.text for record in world(seed).records("texts", "validation")]
    assert all(text.startswith(starts) for text in held_out_texts)


@pytest.mark.parametrize("seed", SEEDS)
def test_held_out_combinations_are_new_but_their_facts_and_templates_are_not(seed: int) -> None:
    train = world(seed).questions("train")
    held_out = world(seed).questions("validation")
    assert not {q.combination for q in train} & {q.combination for q in held_out}
    facts = Counter(fact for question in train for fact in question.facts)
    assert min(facts[fact] for question in held_out for fact in question.facts) >= 8
    templates = {(question.kind, question.template) for question in train}
    assert len(templates) == sum(map(len, TEMPLATES.values()))
    assert {question.kind for question in held_out} == set(TEMPLATES)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", SEEDS)
def test_label_ceiling_and_length_baseline_leave_something_to_learn(seed: int) -> None:
    pairs = world(seed).records("preferences", "validation")
    ceiling = world(seed).label_ceiling()
    assert 0.88 <= ceiling <= 0.95
    gold = [
        [gold_parts(pair.prompt, side, True).total for side in (pair.chosen, pair.rejected)]
        for pair in pairs
    ]
    assert mean(chosen > rejected for chosen, rejected in gold) == pytest.approx(ceiling, abs=0.02)
    assert all(chosen != rejected for chosen, rejected in gold)
    gaps = [len(pair.chosen.split()) - len(pair.rejected.split()) for pair in pairs]
    assert 0.55 <= wins([float(gap) for gap in gaps], [0.0] * len(gaps)) <= 0.65
    assert 0.55 <= mean(gap > 0 for gap in gaps if gap) <= 0.65


@pytest.mark.parametrize("seed", SEEDS)
def test_i_do_not_know_is_always_there_and_loses_to_ordinary_answers(seed: int) -> None:
    records = world(seed).records("demonstrations", "train")
    prompts = [record.prompt for record in records]
    ordinary = gold_scores(prompts, [r.completion for r in records], [True] * len(records))
    unknown = gold_scores(prompts, [I_DO_NOT_KNOW] * len(records), [True] * len(records))
    assert wins(unknown, ordinary) < 0.3
    assert sum(gold_parts(r.prompt, r.completion, True).unknown for r in records) > 50


def test_half_of_the_training_pairs_differ_in_nothing_but_their_core() -> None:
    source = replace(world(1), contrast_fraction=1.0)
    for pair in source.records("preferences", "train")[:500]:
        chosen, rejected = (gold_parts(pair.prompt, s, True) for s in (pair.chosen, pair.rejected))
        assert chosen.correct != rejected.correct
        assert (chosen.polite, chosen.rude, chosen.filler) == (
            rejected.polite,
            rejected.rude,
            rejected.filler,
        )
    natural = replace(world(1), contrast_fraction=0.0)
    assert natural.records("preferences", "validation") == source.records(
        "preferences", "validation"
    )


def test_annotators_prefer_gold_and_length_and_the_careful_one_is_the_surest() -> None:
    plain = SimulatedAnnotator("plain", temperature=0.5, length_bias=0.1)
    assert plain.prefers_first(0.0, 0) == 0.5
    assert plain.prefers_first(0.5, 0) == pytest.approx(0.7310585786300049, rel=1e-12)
    assert plain.prefers_first(0.0, 5) == pytest.approx(0.7310585786300049, rel=1e-12)
    assert plain.prefers_first(0.5, -5) == 0.5
    assert plain.prefers_first(-0.5, 2) == pytest.approx(1.0 - plain.prefers_first(0.5, -2))
    careful, usual, hasty = (annotator.prefers_first(1.0, 0) for annotator in PANEL)
    assert careful > usual > hasty > 0.5
