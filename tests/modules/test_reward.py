from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import logsigmoid
from torch.utils.data import DataLoader

from rlhf_lightning.batches import PreferenceBatch
from rlhf_lightning.functional.preference_losses import pairwise_reward_loss
from rlhf_lightning.functional.statistics import wilson_interval
from rlhf_lightning.models.forward import sequence_scores
from rlhf_lightning.modules import reward
from tests.builders.models import EOS
from tests.builders.stages import (
    assert_two_ranks_step_as_one,
    preference_batch,
    tiny_reward,
    trainer,
    untaken_step,
    without_trainer,
)


def swapped(batch: PreferenceBatch) -> PreferenceBatch:
    return replace(
        batch,
        chosen_input_ids=batch.rejected_input_ids,
        chosen_attention_mask=batch.rejected_attention_mask,
        chosen_length=batch.rejected_length,
        rejected_input_ids=batch.chosen_input_ids,
        rejected_attention_mask=batch.chosen_attention_mask,
        rejected_length=batch.chosen_length,
    )


def test_a_zero_head_has_a_loss_of_log_2_and_no_right_pair():
    module = without_trainer(tiny_reward(init_std=0.0))
    measures, gradient = untaken_step(module, preference_batch())
    assert measures["reward/loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert measures["reward/accuracy"] == 0
    assert measures["reward/margin"] == 0
    assert gradient.abs().max() > 1e-3, "the head must be able to start"


def test_swapping_the_sides_maps_the_loss_of_d_to_the_loss_of_minus_d():
    module = without_trainer(tiny_reward(center_coef=0.0))
    batch = preference_batch()
    with torch.no_grad():
        chosen, rejected = module.scores(batch)
    d = chosen - rejected
    there, gradient = untaken_step(module, batch)
    back, opposite = untaken_step(module, swapped(batch))
    assert there["reward/loss"] == pytest.approx(float(-logsigmoid(d).mean()), abs=1e-5)
    assert back["reward/loss"] == pytest.approx(float(-logsigmoid(-d).mean()), abs=1e-5)
    assert there["reward/accuracy"] == pytest.approx(float((d > 0).float().mean()), abs=1e-6)
    assert there["reward/accuracy"] + back["reward/accuracy"] == pytest.approx(1)
    assert there["reward/margin"] == pytest.approx(-back["reward/margin"], abs=1e-6)
    assert not torch.allclose(gradient, opposite)


def test_margin_smoothing_and_centring_enter_the_loss_as_written():
    batch, how = preference_batch(margin=0.7), {"label_smoothing": 0.1, "center_coef": 0.05}
    for use_margin, margin in ((True, batch.margin), (False, None)):
        module = without_trainer(tiny_reward(use_margin=use_margin, **how))
        with torch.no_grad():
            expected = pairwise_reward_loss(*module.scores(batch), margin=margin, **how).loss
        measures, _ = untaken_step(module, batch)
        assert measures["reward/loss"] == pytest.approx(float(expected), abs=1e-5)


def test_the_gradient_does_not_depend_on_micro_batches_or_padding():
    margin = torch.linspace(0, 3, 8)
    whole = without_trainer(tiny_reward())
    loss, expected = untaken_step(whole, replace(preference_batch(), margin=margin))
    assert expected.abs().max() > 1e-2
    split = without_trainer(tiny_reward(micro_batch_size=3))
    measures, got = untaken_step(
        split, replace(preference_batch(width=40, fill=EOS), margin=margin)
    )
    for name in ("reward/loss", "reward/accuracy", "reward/margin"):
        assert measures[name] == pytest.approx(loss[name], abs=1e-5)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def all_pairs(*, known: bool) -> PreferenceBatch:
    """Return the 28 comparisons of 8 answers, with or without the answers' numbers."""
    answers = preference_batch()
    pairs = [(i, j) for i in range(8) for j in range(i)]
    chosen, rejected = (torch.tensor(side) for side in zip(*pairs, strict=True))
    ids, mask = answers.chosen_input_ids, answers.chosen_attention_mask
    batch = replace(
        answers[chosen],
        rejected_input_ids=ids[rejected],
        rejected_attention_mask=mask[rejected],
        rejected_length=answers.chosen_length[rejected],
        row_ids=torch.arange(len(pairs)),
    )
    return replace(batch, answer_ids=tuple(pairs)) if known else batch


@pytest.mark.parametrize("micro_batch_size", [None, 5])
def test_an_answer_of_many_pairs_is_read_once_and_its_gradient_is_the_sum(
    monkeypatch, micro_batch_size
):
    rows_read = []

    def counted(model, ids, mask, **kwargs):
        rows_read.append(len(ids))
        return sequence_scores(model, ids, mask, **kwargs)

    monkeypatch.setattr(reward, "sequence_scores", counted)
    found = {}
    for known in (False, True):
        rows_read.clear()
        module = without_trainer(tiny_reward(micro_batch_size=micro_batch_size))
        found[known] = (*untaken_step(module, all_pairs(known=known)), sum(rows_read))
    (apart, gradient, read_apart), (together, same, read_together) = found[False], found[True]
    assert read_apart == 56
    assert read_together == 8 if micro_batch_size is None else 8 < read_together < 56
    for name in ("reward/loss", "reward/accuracy", "reward/margin"):
        assert together[name] == pytest.approx(apart[name], abs=1e-5)
    assert gradient.abs().max() > 1e-2
    torch.testing.assert_close(same, gradient, rtol=1e-4, atol=1e-5)


def test_two_ranks_take_the_same_steps_as_one(monkeypatch):
    measures = ("reward/loss", "reward/accuracy", "reward/margin", "reward/grad_norm")
    assert_two_ranks_step_as_one(
        monkeypatch,
        lambda: without_trainer(tiny_reward(micro_batch_size=2)),
        [preference_batch(seed=seed) for seed in range(3)],
        measures,
    )


def test_it_learns_pairs_and_validates_by_the_pair():
    module = tiny_reward(learning_rate=3e-3)
    the_trainer = trainer(val_check_interval=20)
    train = DataLoader([preference_batch() for _ in range(20)], batch_size=None)
    held_out = [preference_batch(seed=5)[:1], preference_batch(seed=5)[1:]]
    the_trainer.fit(module, train, DataLoader(held_out, batch_size=None))
    metrics = {name: float(value) for name, value in the_trainer.callback_metrics.items()}
    assert the_trainer.global_step == 20
    assert metrics["reward/accuracy"] == 1
    assert metrics["reward/loss"] < 0.2
    whole = preference_batch(seed=5)
    with torch.no_grad():
        chosen, rejected = module.scores(whole)
    right = int((chosen > rejected).sum())
    low, high = wilson_interval(right, 8, confidence=0.95)
    longer = whole.chosen_length - whole.rejected_length
    expected = {
        "val/accuracy": right / 8,
        "val/accuracy_low": low,
        "val/accuracy_high": high,
        "val/margin": float((chosen - rejected).mean()),
        "val/loss": float(-logsigmoid(chosen - rejected).mean()),
        "val/longer_wins_accuracy": float((longer > 0).sum() + 0.5 * (longer == 0).sum()) / 8,
    }
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, abs=1e-5), name
    assert 0 <= metrics["val/calibration_error"] <= 1


def validated(module, batch: PreferenceBatch) -> dict[str, float]:
    loader = DataLoader([batch], batch_size=None)
    (metrics,) = trainer().validate(module, loader, verbose=False)
    return metrics


def test_a_model_that_scores_all_alike_has_only_ties_and_is_not_calibrated_wrongly():
    metrics = validated(tiny_reward(init_std=0.0), preference_batch())
    assert metrics["val/accuracy"] == 0
    assert metrics["val/calibration_error"] == pytest.approx(0, abs=1e-6)
    assert metrics["val/loss"] == pytest.approx(math.log(2), abs=1e-6)


def test_a_model_is_held_against_the_longer_one_wins_on_the_same_pairs():
    batch = preference_batch()
    longer = batch.chosen_length.clone()
    longer[0] += 1  # of the one pair that lengths tell apart, the preferred response
    few = replace(batch, chosen_length=longer, rejected_length=batch.chosen_length)
    half = 0.5 * (len(batch) - 1)
    assert validated(tiny_reward(), few)["val/longer_wins_accuracy"] == (1 + half) / len(batch)


def test_held_out_pairs_of_one_prompt_do_not_narrow_the_interval():
    module, batch = tiny_reward(), PreferenceBatch.cat([preference_batch()] * 5)
    module.configure_model()
    won = torch.tensor([1.0] * 6 + [-1.0] * 2).repeat(5)
    module.scores = lambda _: (won, torch.zeros(40))
    metrics = validated(module, batch)
    assert metrics["val/accuracy"] == 0.75
    low, high = wilson_interval(6, 8, confidence=0.95)
    assert metrics["val/accuracy_low"] < low < high < metrics["val/accuracy_high"]


def calibration_error(difference: torch.Tensor) -> float:
    """Ten bins over both orders of each pair, |mean probability - share right| by their size."""
    probability = torch.cat([difference, -difference]).sigmoid()
    right = torch.cat([torch.ones_like(difference), torch.zeros_like(difference)])
    bins = (probability * 10).long().clamp(max=9)
    total = 0.0
    for number in bins.unique():
        inside = bins == number
        gap = probability[inside].mean() - right[inside].mean()
        total += float(gap.abs() * inside.float().mean())
    return total


@pytest.mark.parametrize("broken", [1, 8])
def test_a_held_out_pair_that_is_not_finite_is_not_left_out_of_the_loss(broken):
    module, batch = tiny_reward(), preference_batch()
    module.configure_model()
    with torch.no_grad():
        chosen, rejected = module.scores(batch)
    chosen[:broken] = math.nan
    module.scores = lambda _: (chosen, rejected)
    metrics = validated(module, batch)
    assert math.isnan(metrics["val/loss"])
    assert math.isnan(metrics["val/margin"])
    assert metrics["val/accuracy"] == float((chosen > rejected).sum()) / 8
    error = calibration_error((chosen - rejected)[broken:]) if broken < 8 else math.nan
    assert metrics["val/calibration_error"] == pytest.approx(error, abs=1e-5, nan_ok=True)


def test_calibration_counts_both_orders_of_each_pair():
    module = tiny_reward()
    batch = preference_batch()
    there, back = validated(module, batch), validated(module, swapped(batch))
    assert there["val/accuracy"] + back["val/accuracy"] == pytest.approx(1)
    assert there["val/margin"] == pytest.approx(-back["val/margin"], abs=1e-6)
    with torch.no_grad():
        chosen, rejected = module.scores(batch)
    for metrics, difference in ((there, chosen - rejected), (back, rejected - chosen)):
        expected = calibration_error(difference)
        assert expected > 0.05
        assert metrics["val/calibration_error"] == pytest.approx(expected, abs=1e-5)


def test_pairs_of_which_the_model_is_certain_share_the_last_bin():
    module, won = tiny_reward(), torch.tensor([2.5] * 4 + [20.0] * 3 + [-20.0])
    module.configure_model()
    module.scores = lambda _: (won, torch.zeros(8))
    error = validated(module, preference_batch())["val/calibration_error"]
    assert error == pytest.approx(calibration_error(won), abs=1e-5)
