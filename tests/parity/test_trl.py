"""The first 20 losses of SFT and of the reward model, next to those of TRL 1.16.

From one exported folder, the same rows in the same order, AdamW with the same settings, linear
decay, the same clipping, fp32, no dropout. Both sides run as their users run them: TRL's trainers
tokenize text and make their own batches, ours go through a Lightning Trainer.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn.functional import softplus
from transformers import get_linear_schedule_with_warmup

from rlhf_lightning.models.factory import load_policy, load_scalar_model
from rlhf_lightning.models.forward import sequence_scores
from rlhf_lightning.modules.optimization import Schedule
from rlhf_lightning.text.tokenizers import ADDED

pytest.importorskip("trl", reason="TRL is in the extra `dev`", exc_type=ImportError)

from tests.parity.both import (
    MAX_GRAD_NORM,
    STEPS,
    Recorder,
    demonstrations,
    export_policy_folder,
    export_reward_folder,
    largest_relative_difference,
    our_reward,
    our_sft,
    preference_batches,
    preferences,
    sft_batches,
    trl_reward,
    trl_sft,
)

pytestmark = pytest.mark.timeout(120)
SAME = 1e-4
GPT2 = pytest.param("gpt2", marks=pytest.mark.thorough)


def check_steps_are_worth_comparing(recorder: Recorder) -> None:
    assert max(recorder.norms) > MAX_GRAD_NORM, "nothing was clipped: the test shows less"
    tenth = max(recorder.losses) - min(recorder.losses) > 0.1 * recorder.losses[0]
    assert tenth, "the loss hardly moved: the test shows less"


def check_same_weights(ours: torch.nn.Module, theirs: torch.nn.Module, names: dict[str, str]):
    """Every weight of TRL's model is ours: under our name for it, after all the steps."""
    mine = dict(ours.state_dict())
    for name, value in theirs.state_dict().items():
        for old, new in names.items():
            name = name.replace(old, new, 1) if name.startswith(old) else name
        torch.testing.assert_close(mine[name], value, rtol=0, atol=2e-4, msg=name)


@pytest.mark.parametrize("model_type", ["llama", GPT2])
def test_sft_takes_the_same_20_steps_as_trl(model_type, tmp_path):
    folder = export_policy_folder(tmp_path / "sft", model_type)
    rows = demonstrations(STEPS * 8)
    theirs = trl_sft(folder, rows, tmp_path, per_device_train_batch_size=8, num_train_epochs=1)
    module, ours = our_sft(folder, sft_batches(folder, rows, 8))
    check_steps_are_worth_comparing(ours)
    assert largest_relative_difference(ours.losses, theirs.step_losses(1)) < SAME
    check_same_weights(module.policy.model, theirs.model, {})


@pytest.mark.parametrize("model_type", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_sft_in_ragged_micro_batches_is_the_token_mean_of_the_whole_batch_in_both(
    model_type, tmp_path
):
    # TRL 1.16 counts the labels of all micro-batches of a step (num_items_in_batch), as we do. The
    # mean of the micro-batches' means, which older Trainers took, is another number: by how much
    # is asserted, so that a return to it would be noticed on either side.
    folder = export_policy_folder(tmp_path / "sft", model_type)
    rows = demonstrations(STEPS * 8)
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    theirs = trl_sft(folder, rows, tmp_path, num_train_epochs=1, **options)
    batches = sft_batches(folder, rows, 8)
    module, ours = our_sft(folder, batches, micro_batch_size=3)
    assert largest_relative_difference(ours.losses, theirs.step_losses(4)) < SAME
    fresh = load_policy(folder)
    module.policy = fresh
    with torch.no_grad():
        quarters = [batches[0][i : i + 2] for i in range(0, 8, 2)]
        means = [float(module.loss(quarter, quarter.loss_mask.sum())) for quarter in quarters]
    of_means = sum(means) / 4
    assert abs(of_means - ours.losses[0]) / ours.losses[0] > 10 * SAME


@pytest.mark.parametrize("model_type", ["llama", GPT2])
def test_the_reward_model_takes_the_same_20_steps_as_trl(model_type, tmp_path):
    folder = export_reward_folder(tmp_path / "reward", model_type)
    rows = preferences(STEPS * 8)
    theirs = trl_reward(folder, rows, tmp_path, per_device_train_batch_size=8, num_train_epochs=1)
    module, ours = our_reward(folder, preference_batches(folder, rows, 8))
    check_steps_are_worth_comparing(ours)
    assert largest_relative_difference(ours.losses, theirs.step_losses(1)) < SAME
    # The head's bias has no gradient but rounding: differences of scores do not hold it.
    prefix = f"{theirs.model.base_model_prefix}."
    check_same_weights(module.model, theirs.model, {"score.": "head.", prefix: "trunk."})


def test_trl_pads_with_the_token_that_the_export_added_and_reads_the_score_at_eos(tmp_path):
    # The tokenizer pads with EOS. TRL reads a row at its last token that is not the pad token: with
    # the tokenizer of the policy that would be the token before EOS.
    folder = export_reward_folder(tmp_path / "reward", "llama", pad_is_eos=True)
    rows = preferences(STEPS * 8)
    theirs = trl_reward(folder, rows, tmp_path, per_device_train_batch_size=8, num_train_epochs=1)
    assert theirs.processing_class.pad_token == ADDED
    _, ours = our_reward(folder, preference_batches(folder, rows, 8))
    assert largest_relative_difference(ours.losses, theirs.step_losses(1)) < SAME


def test_the_centred_reward_loss_is_trls_but_for_the_bias_that_only_ours_has(tmp_path):
    folder = export_reward_folder(tmp_path / "reward", "llama")
    rows = preferences(STEPS * 8)
    options = {"per_device_train_batch_size": 8, "num_train_epochs": 1}
    theirs = trl_reward(folder, rows, tmp_path, center_rewards_coefficient=0.05, **options)
    batches = preference_batches(folder, rows, 8)
    _, fixed = our_reward(folder, batches, center_coef=0.05, trained_bias=False)
    assert largest_relative_difference(fixed.losses, theirs.step_losses(1)) < SAME
    # Ours may move all scores at once by the head's bias; a sequence classifier has none.
    _, ours = our_reward(folder, batches, center_coef=0.05)
    assert ours.losses[0] == pytest.approx(theirs.step_losses(1)[0], rel=SAME)
    assert 100 * SAME > largest_relative_difference(ours.losses, theirs.step_losses(1)) > SAME


@pytest.mark.slow
def test_even_micro_batches_of_pairs_are_the_same_in_both(tmp_path):
    folder = export_reward_folder(tmp_path / "reward", "llama")
    rows = preferences(STEPS * 8)
    options = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}
    theirs = trl_reward(folder, rows, tmp_path, num_train_epochs=1, **options)
    _, ours = our_reward(folder, preference_batches(folder, rows, 8), micro_batch_size=3)
    assert largest_relative_difference(ours.losses, theirs.step_losses(4)) < SAME


def test_ragged_micro_batches_of_pairs_differ_because_trl_takes_the_mean_of_means(tmp_path):
    # On purpose: every pair of a batch counts the same here, whatever the micro-batches. TRL's
    # RewardTrainer divides by the number of micro-batches, so in an epoch of ten pairs, taken four
    # at a time, a pair of the last micro-batch counts double.
    folder = export_reward_folder(tmp_path / "reward", "llama")
    rows = preferences(10)
    hardest_last = first_losses(folder, rows).argsort().tolist()
    rows = [rows[i] for i in hardest_last]
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 3}
    theirs = trl_reward(folder, rows, tmp_path, num_train_epochs=STEPS, **options)
    (batch,) = preference_batches(folder, rows, 10)
    _, ours = our_reward(folder, [batch] * STEPS, micro_batch_size=4)
    per_pair = first_losses(folder, rows)
    assert ours.losses[0] == pytest.approx(float(per_pair.mean()), rel=SAME)
    of_means = float(torch.stack([part.mean() for part in per_pair.split(4)]).mean())
    first = theirs.step_losses(3)[0]
    assert first == pytest.approx(of_means, rel=SAME)
    assert (first - ours.losses[0]) / ours.losses[0] == pytest.approx(0.187, abs=0.01)


def first_losses(folder: Path, rows: list[dict[str, str]]) -> torch.Tensor:
    """The pairs' losses before the first step."""
    (batch,) = preference_batches(folder, rows, len(rows))
    model = load_scalar_model(folder)
    with torch.no_grad():
        chosen = sequence_scores(model, batch.chosen_input_ids, batch.chosen_attention_mask)
        rejected = sequence_scores(model, batch.rejected_input_ids, batch.rejected_attention_mask)
    return softplus(rejected - chosen)


def test_warm_up_starts_one_step_earlier_here_than_in_trl():
    # On purpose: transformers' first step has a learning rate of 0, which learns nothing.
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    theirs = get_linear_schedule_with_warmup(optimizer, 4, STEPS)
    schedule = Schedule("linear", warmup_fraction=4 / STEPS)
    ours, factors = [], []
    for step in range(STEPS):
        factors.append(optimizer.param_groups[0]["lr"])
        ours.append(schedule.factor(step, STEPS))
        optimizer.step()
        theirs.step()
    assert factors[:5] == pytest.approx([0, 0.25, 0.5, 0.75, 1])
    assert ours[:5] == pytest.approx([0.25, 0.5, 0.75, 1, 1])
    assert ours[4:] == pytest.approx(factors[4:])
