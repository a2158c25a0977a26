"""Losses of GRPO, GSPO, CISPO, RLOO and DPO next to those of TRL 1.16, on given log-probabilities.

TRL's own `_compute_loss` runs, on an object that has its settings and no model: the
log-probabilities are given.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("trl", reason="TRL is in the extra `dev`", exc_type=ImportError)

from trl import DPOTrainer, GRPOTrainer, RLOOTrainer

from rlhf_lightning.functional.losses import (
    loss_divisor,
    policy_kl_loss,
    ppo_policy_loss,
)
from rlhf_lightning.functional.preference_losses import dpo_loss
from rlhf_lightning.functional.surrogates import SURROGATES
from tests.parity.test_trl_dpo import trl_self

pytestmark = pytest.mark.timeout(120)
SAME = {"rtol": 1e-4, "atol": 1e-7}
BETA = 0.04
MAX_LENGTH = 9
MASK = torch.arange(6) < torch.tensor([6, 2, 1, 4, 3, 5])[:, None]
SCORES = torch.tensor([1.3, -0.4, 0.2, -1.1, 0.6, -0.7])
LOSSES = [
    ("grpo", "ppo", "sequence"),
    ("dapo", "ppo", "token"),
    ("bnpo", "ppo", "token"),
    ("dr_grpo", "ppo", "constant"),
    ("gspo", "gspo", "sequence"),
    ("cispo", "cispo", "token"),
]


def logprobs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    new = -2 * torch.rand(MASK.shape, generator=generator) - 0.2
    old, ref = (new + 0.3 * torch.randn(MASK.shape, generator=generator) for _ in range(2))
    return new.requires_grad_(), old, ref


def trl_on(new: Tensor, **settings: Any) -> Any:
    return trl_self(
        _get_per_token_logps_and_entropies=lambda *_, **__: (new, torch.zeros_like(new), None),
        epsilon_low=0.2,
        epsilon_high=0.28,
        beta=BETA,
        **settings,
    )


def trl_grpo(new: Tensor, loss_type: str) -> Any:
    is_gspo = loss_type == "gspo"
    return trl_on(
        new,
        loss_type="grpo" if is_gspo else loss_type,
        importance_sampling_level="sequence" if is_gspo else "token",
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        _entropy_bonus_enabled=False,
        current_gradient_accumulation_steps=1,
        max_completion_length=MAX_LENGTH,
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
    )


def trl_inputs(**columns: Any) -> dict[str, Any]:
    ids = torch.zeros(MASK.shape, dtype=torch.long)
    prompt = {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1] + 1}
    return prompt | {
        "completion_ids": ids,
        "completion_mask": MASK.long(),
        "advantages": SCORES,
        **columns,
    }


@pytest.mark.parametrize(("loss_type", "name", "reduction"), LOSSES)
def test_policy_losses_and_gradients_with_k3_in_the_loss_are_those_of_trl(
    loss_type: str, name: str, reduction: Any
):
    new, old, ref = logprobs()
    is_cispo = loss_type == "cispo"
    trainer = trl_grpo(new, loss_type)
    if is_cispo:
        trainer.epsilon_high = 1.28  # the largest weight itself
    inputs = trl_inputs(
        old_per_token_logps=old, ref_per_token_logps=ref, num_items_in_batch=MASK.sum()
    )
    theirs = GRPOTrainer._compute_loss(trainer, None, inputs)
    divisor = loss_divisor(
        MASK,
        reduction=reduction,
        num_tokens=MASK.sum(),
        num_sequences=len(MASK),
        max_length=MAX_LENGTH,
    )
    surrogate = SURROGATES[name](cliprange=1.0 if is_cispo else 0.2, cliprange_high=0.28)
    ours = surrogate(new, old, SCORES[:, None].expand(MASK.shape), MASK, num_tokens=divisor)
    assert ours.clipfrac > 0
    kl = policy_kl_loss(new, ref, MASK, estimator="k3", num_tokens=divisor)
    check_same(ours.loss + BETA * kl, theirs, [new])


def test_k3_pulls_a_policy_far_from_its_reference_back_as_trl_does():
    _, old, ref = logprobs()
    ours, theirs = ((ref - 4).requires_grad_() for _ in range(2))  # 55 times less likely
    for _ in range(5):
        trainer = trl_grpo(theirs, "bnpo")
        inputs = trl_inputs(old_per_token_logps=old, ref_per_token_logps=ref)
        inputs["advantages"] = torch.zeros_like(SCORES)
        GRPOTrainer._compute_loss(trainer, None, inputs).backward()
        kl = policy_kl_loss(ours, ref, MASK, estimator="k3", num_tokens=MASK.sum())
        (BETA * kl).backward()
        for policy in (ours, theirs):
            with torch.no_grad():
                policy -= 5.0 * policy.grad
            policy.grad = None
    assert (ours - ref)[MASK].max() > -3  # it has moved
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def test_rloo_is_that_of_trl_before_the_first_step_and_clips_tokens_where_trl_clips_responses():
    def both(old: Tensor) -> tuple[Tensor, Tensor]:
        old_sums = torch.where(MASK, old, 0).sum(-1)
        theirs = RLOOTrainer._compute_loss(trl_on(new), None, trl_inputs(old_logps=old_sums))
        advantages = SCORES[:, None].expand(MASK.shape)
        ours = ppo_policy_loss(
            new,
            old,
            advantages,
            MASK,
            cliprange=0.2,
            cliprange_high=0.28,
            dual_clip=None,
            num_tokens=len(MASK),
        )
        gradients = [torch.autograd.grad(loss, new)[0] for loss in (ours.loss, theirs)]
        return gradients[0], gradients[1]

    new, old, _ = logprobs()
    torch.testing.assert_close(*both(new.detach()), **SAME)
    ours, theirs = both(old)
    assert (ours - theirs).norm() > 0.1 * theirs.norm()


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_dpo_losses_and_gradients_are_those_of_trl(kind: Any):
    new, _, ref = logprobs()
    completion = torch.cat([torch.zeros(len(MASK), 1, dtype=torch.bool), MASK], dim=1).long()
    outputs = [torch.where(MASK, part, 0) for part in (new, ref)]
    trainer = trl_on(
        new,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        label_smoothing=0.0,
        use_weighting=False,
    )
    sums = [part.sum(-1) for part in outputs]
    lengths = MASK.sum(-1)
    inputs = {
        "input_ids": torch.zeros_like(completion),
        "attention_mask": torch.ones_like(completion),
        "completion_mask": completion,
        "ref_chosen_logps": sums[1][:3],
        "ref_rejected_logps": sums[1][3:],
    }

    def model(**_: Any) -> Any:
        unused = torch.zeros(MASK.shape)
        return SimpleNamespace(
            log_probs=outputs[0], entropy=unused, mean_logits=unused, is_top1=unused.bool()
        )

    theirs = DPOTrainer._compute_loss(trainer, model, inputs, return_outputs=False)
    if kind == "ipo":  # TRL's means over tokens are the arguments of ours
        sums = [part / lengths for part in sums]
    ours = dpo_loss(
        sums[0][:3],
        sums[0][3:],
        sums[1][:3],
        sums[1][3:],
        beta=BETA,
        label_smoothing=0.0,
        kind=kind,
        num_pairs=None,
    )
    check_same(ours.loss, theirs, [new])


def check_same(ours: Tensor, theirs: Tensor, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(ours, theirs, **SAME)
    mine, others = (torch.autograd.grad(loss, leaves, retain_graph=True) for loss in (ours, theirs))
    torch.testing.assert_close(mine, others, **SAME)
    assert all(gradient.abs().sum() > 0 for gradient in others)
