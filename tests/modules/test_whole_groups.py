"""A loss that compares the responses to a prompt gets all of them in each micro-batch, or none."""

from __future__ import annotations

import math
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_lightning.batches import RolloutBatch
from rlhf_lightning.models.forward import (
    group_micro_batches,
    micro_batches,
    response_statistics,
)
from rlhf_lightning.modules.grpo import PolicyGradientModule
from tests.builders.models import flat_gradients
from tests.builders.stages import (
    GROUP,
    ROWS,
    Recorded,
    built,
    counts_of,
    fit,
    group_prompts,
    grpo_hparams,
    rollout_of,
    tiny_grpo,
)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/online_dpo.py"
OnlineDPO: Any = runpy.run_path(str(EXAMPLE))["OnlineDPOModule"]


class Seen(Recorded, OnlineDPO):
    """The example, and what its steps measure."""


class Undeclared(PolicyGradientModule):
    """Pairs neighbours, as the rows of a minibatch stand."""

    def policy_loss(self, micro_batch: RolloutBatch, counts: Any) -> Any:
        temperature = self.controls.temperature
        new = response_statistics(self.policy, micro_batch, temperature=temperature).logprobs
        gain = new.sum(-1).view(-1, 2)
        loss = (gain[:, 0] - gain[:, 1]).sum() / counts.num_sequences
        return loss, {"grpo/policy_loss": loss}


def gradient(module: Any, rollout: RolloutBatch, size: int | None) -> tuple[float, Any]:
    module.algorithm = replace(module.algorithm, micro_batch_size=size)
    module.zero_grad()
    total = 0.0
    whole = rollout.group_size if module.whole_groups_in_micro_batches else 1
    for rows in group_micro_batches(rollout.attention_mask, whole, size):
        loss, _ = module.policy_loss(rollout[rows], counts_of(rollout))
        loss.backward()
        total += float(loss.detach())
    return total, flat_gradients(module.policy)


@pytest.mark.parametrize("unscored", [(), (0, 1, 2, 5)], ids=["all", "some"])
def test_online_dpo_is_its_formula_whatever_the_micro_batches(unscored):
    module = built(tiny_grpo(cls=OnlineDPO, grpo=grpo_hparams(kl_coef=0.3)))
    rollout = rollout_of(module, group_prompts())
    scored = torch.tensor([row not in unscored for row in range(ROWS)])
    rollout = replace(rollout, scored=scored)
    with torch.no_grad():
        for parameter in module.policy.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))
    temperature = module.controls.temperature
    new = response_statistics(module.policy, rollout, temperature=temperature).logprobs
    rewards, losses = rollout.rewards.sum(1).tolist(), []
    for start in range(0, ROWS, GROUP):
        rows = [row for row in range(start, start + GROUP) if row not in unscored]
        best = max(rows, key=lambda row: (rewards[row], -row))
        worst = min(rows, key=lambda row: (rewards[row], row))
        if best != worst:
            gains = [sum(new[row] - rollout.ref_logprobs[row]) for row in (best, worst)]
            losses.append(-torch.nn.functional.logsigmoid(0.3 * (gains[0] - gains[1])))
    assert len(losses) > 1
    expected = sum(losses) * GROUP / ROWS
    module.zero_grad()
    expected.backward()
    wanted = flat_gradients(module.policy)
    for size in (None, 2 * GROUP, GROUP, 3):
        loss, found = gradient(module, rollout, size)
        assert loss == pytest.approx(float(expected.detach()), rel=1e-5)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-6)
    # Cut by length, the rows of a prompt are in several micro-batches.
    torn = micro_batches(rollout.attention_mask, GROUP)
    assert any(len(rollout[rows].group_ids.unique()) > 1 for rows in torn)
    with pytest.raises(ValueError, match=r"not whole groups of 4: set whole_groups_in_micro_b"):
        module.policy_loss(rollout[torn[0]], counts_of(rollout))


def test_it_learns_what_is_preferred_and_measures_how_far_it_went():
    grpo = grpo_hparams(num_epochs=4, micro_batch_size=5, target_approx_kl=100.0)
    module = tiny_grpo(cls=Seen, grpo=grpo)
    fit(module, [group_prompts()])
    moved = [step["grpo/approx_kl"] for step in module.steps]
    assert moved[0] == pytest.approx(0, abs=1e-6)
    assert all(later > 1e-5 for later in moved[1:])
    losses = [step["grpo/policy_loss"] for step in module.steps]
    assert losses[0] == pytest.approx(math.log(2))
    assert losses == sorted(losses, reverse=True)


def test_a_loss_that_compares_rows_without_saying_so_is_refused():
    told = r"Undeclared\.policy_loss .* 4 responses, .*whole_groups_in_micro_batches"
    with pytest.raises(ValueError, match=told):
        fit(tiny_grpo(cls=Undeclared, grpo=grpo_hparams(micro_batch_size=3)), [group_prompts()])
