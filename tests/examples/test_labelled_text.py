"""Sentences of two labels: disjoint parts, natural token boundaries, pairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.datasets.labelled_text import PARTS, LabelledTextSource

ACTORS = ("anna", "boris", "carla", "dmitri", "elif", "farid", "greta", "hugo", "ines", "jonas")
GOOD = ("a joy to watch", "quietly moving", "bright and sure of itself", "worth every minute")
BAD = ("a chore to sit through", "flat and noisy", "lost in its own plot", "far too long")
ROLES = ("baker", "pilot", "thief", "nurse", "clown")


def sentences(verdicts: tuple[str, ...]) -> list[str]:
    return [
        f"{actor} plays a {role} in a film that is {verdict} from start to end ."
        for actor in ACTORS
        for role in ROLES
        for verdict in verdicts
    ]


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    positive, negative = tmp_path / "good.txt", tmp_path / "bad.txt"
    positive.write_text("\n".join(sentences(GOOD)) + "\n", encoding="utf-8")
    negative.write_text("\n".join(sentences(BAD)) + "\n", encoding="utf-8")
    return positive, negative


def test_parts_are_disjoint_and_hold_every_sentence(files):
    source = LabelledTextSource(*files, seed=3)
    parts = [{*source.sentences(p).positive, *source.sentences(p).negative} for p in PARTS]
    assert all(parts)
    assert sum(map(len, parts)) == len(set.union(*parts)) == 400
    assert set.union(*parts) == {*sentences(GOOD), *sentences(BAD)}


def test_no_record_shows_a_sentence_of_the_classifier(files):
    source = LabelledTextSource(*files)
    kept = {*source.sentences("classifier").positive, *source.sentences("classifier").negative}
    shown = set()
    for split in ("train", "validation"):
        shown |= {r.text for r in source.records("texts", split)}
        shown |= {r.prompt + r.completion for r in source.records("demonstrations", split)}
        for pair in source.records("preferences", split):
            shown |= {pair.prompt + pair.chosen, pair.prompt + pair.rejected}
    assert len(shown) == 400 - len(kept)
    assert not shown & {f"Review: {sentence}" for sentence in kept}


def test_a_demonstration_is_the_sentence_cut_before_a_space(files):
    records = LabelledTextSource(*files, opening_words=5).records("demonstrations", "train")
    known = {*sentences(GOOD), *sentences(BAD)}
    assert records
    for record in records:
        assert not record.prompt.endswith(" ")
        assert record.completion.startswith(" ")
        assert not record.completion.startswith("  ")
        assert (record.prompt + record.completion).removeprefix("Review: ") in known
        assert len(record.prompt.split()) == 6


def test_openings_are_unique_and_held_out_ones_are_new(files):
    source = LabelledTextSource(*files)  # "Review: anna plays a baker in" opens many sentences
    train, held_out = (source.records("prompts", s) for s in ("train", "validation"))
    openings = [r.prompt for r in train]
    assert len(openings) == len(set(openings)) <= len(ACTORS) * len(ROLES)
    assert not set(openings) & {r.prompt for r in held_out}
    assert {str(r.prompt) for r in held_out} <= {
        str(r.prompt) for r in source.records("demonstrations", "validation")
    }


def test_pairs_prefer_positive_sentences_and_held_out_ones_share_none(files):
    source = LabelledTextSource(*files, pairs_per_sentence=2)
    train, held_out = (source.records("preferences", s) for s in ("train", "validation"))
    part = source.sentences("train")
    for record in train:
        assert record.prompt == "Review:"
        assert record.chosen.removeprefix(" ") in part.positive
        assert record.rejected.removeprefix(" ") in part.negative
    assert len({r.chosen for r in held_out}) == len({r.rejected for r in held_out}) == len(held_out)
    number = min(map(len, source.sentences("train")))
    assert len(set(train)) == len(train)
    assert number < len(train) <= 2 * number
