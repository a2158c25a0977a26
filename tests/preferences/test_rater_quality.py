"""Dawid and Skene: a step by hand, annotators whose quality is known, and what EM must keep."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_lightning.preferences.agreement import (
    RaterModel,
    Votes,
    dawid_skene,
    make_votes,
)

ACCURACIES = {"ada": 0.95, "bob": 0.85, "eve": 0.7, "mal": 0.35}


def likely_choices(model: RaterModel, *, at_least: float = 0.5) -> np.ndarray:
    return np.where(model.posterior.max(1) > at_least, model.posterior.argmax(1), -1)


def simulated(num_items: int, seed: int, share: float = 1.0) -> tuple[Votes, np.ndarray]:
    rng = np.random.default_rng(seed)
    truth = (rng.random(num_items) < 0.6).astype(int)
    votes = []
    for name, accuracy in ACCURACIES.items():
        right = rng.random(num_items) < accuracy
        asked = rng.random(num_items) < share
        votes += [
            (i, name, int(truth[i] if right[i] else 1 - truth[i]))
            for i in range(num_items)
            if asked[i]
        ]
    table = make_votes(votes, ("first", "second"))
    return table, truth[list(table.items)]


def test_the_first_step_by_hand() -> None:
    # Items: (A A B), (B B B). Vote shares: item 1 is A with 2/3, item 2 with 0.
    # Prior of A: (2/3 + 0) / 2 = 1/3. Rater 1 says A on item 1, B on item 2: where A is true it
    # said A always; where B is true (1/3 of item 1, all of item 2) it
    # said A with (1/3) / (4/3) = 1/4.
    votes = make_votes(
        [(0, "r1", 0), (0, "r2", 0), (0, "r3", 1), (1, "r1", 1), (1, "r2", 1), (1, "r3", 1)],
        ("A", "B"),
    )
    model = dawid_skene(votes, smoothing=0.0, max_iterations=1)
    assert model.prior.tolist() == pytest.approx([1 / 3, 2 / 3])
    assert model.confusion[0].ravel().tolist() == pytest.approx([1, 0, 1 / 4, 3 / 4])
    assert model.confusion[2].ravel().tolist() == pytest.approx([0, 1, 0, 1])
    # Item 1: A gives 1/3 * 1 * 1 * 1, B gives 2/3 * 1/4 * 1/4 * 1; item 2: A gives 0.
    assert model.posterior[0, 0] == pytest.approx((1 / 3) / (1 / 3 + 1 / 24))
    assert model.posterior[1, 0] == pytest.approx(0.0, abs=1e-12)
    assert model.accuracy["r1"] == pytest.approx(1 / 3 + 2 / 3 * 3 / 4)


def test_the_quality_of_annotators_is_found_without_the_truth() -> None:
    votes, truth = simulated(4000, seed=1)
    model = dawid_skene(votes)
    for name, accuracy in ACCURACIES.items():
        assert model.accuracy[name] == pytest.approx(accuracy, abs=0.03)
    found = likely_choices(model)
    by_count = (votes.counts[:, 1] > votes.counts[:, 0]).astype(int)
    assert (found == truth).mean() > 0.95
    # Four votes, one of them worse than chance: counting cannot do as well.
    assert (found == truth).mean() > (by_count == truth).mean() + 0.03
