"""Responses without a score (None of a reward function) are not trained on."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from rlhf_lightning.callbacks.run_tables import describe_rollout
from rlhf_lightning.callbacks.wandb_logger import rollout_histograms
from rlhf_lightning.functional.advantages import informative_groups
from rlhf_lightning.modules import on_policy
from rlhf_lightning.modules.metrics import rollout_metrics
from rlhf_lightning.modules.optimization import StepCounts, accumulate_gradients
from rlhf_lightning.rollout.scorers.base import FunctionScorer, WeightedScorer
from tests.builders.models import flat_gradients, flat_parameters
from tests.builders.stages import (
    ROWS,
    after_some_training,
    built,
    fit,
    group_prompts,
    grpo_hparams,
    ppo_hparams,
    prompts,
    rollout_of,
    tiny_grpo,
    tiny_module,
)

# Two rows of the first group, none of the second, all but one of the third, all of the fourth.
APPLIES = [True, False, True, False, *[False] * 4, True, True, False, True, *[True] * 4]


def some_apply(prompts, completions):
    return [
        float(len(text) % 7) + row if applies else None
        for row, (text, applies) in enumerate(zip(completions, APPLIES, strict=True))
    ]


def none_applies(prompts, completions):
    return [None] * len(completions)


GRPO_CHOICES = [
    {"baseline": "mean", "scale": "group_std"},
    {"baseline": "mean", "scale": "none"},
    {"baseline": "leave_one_out", "scale": "none"},
    {"baseline": "none", "scale": "global_std"},
    {"baseline": "mean", "scale": "global_std"},
]


@pytest.mark.parametrize("choice", GRPO_CHOICES)
def test_a_response_without_a_score_is_in_no_group(choice):
    grpo = grpo_hparams(score_clip=None, kl_coef=0.0, missing_eos_penalty=0.0, **choice)
    rollout = rollout_of(
        built(tiny_grpo(grpo=grpo, scorer=FunctionScorer(some_apply))), group_prompts()
    )
    scored = torch.tensor(APPLIES)
    assert torch.equal(rollout.scored, scored)
    assert rollout.scores[~scored].isnan().all()
    assert not rollout.advantages[~scored].any()
    assert not rollout.rewards[~scored].any()
    kept = rollout[scored]
    if choice["scale"] == "global_std":
        assert kept.advantages[kept.response_mask].mean().abs() < 1e-5
        assert kept.advantages[kept.response_mask].std(correction=0) == pytest.approx(1, abs=1e-3)
    else:
        first = kept.scores[:2] - kept.scores[:2].mean()
        scale = {"leave_one_out": 2.0}.get(choice["baseline"], 1.0)
        if choice["scale"] == "group_std":
            scale = 1 / (kept.scores[:2].std() + 1e-4)
        assert kept.advantages[:2, 0].tolist() == pytest.approx((first * scale).tolist(), rel=1e-5)


def gradients(module, rollout, models):
    module.zero_grad()
    counts = StepCounts(rollout.loss_mask.sum(), rollout.scored.sum(), rollout.reward_mask.sum())
    terms = module.loss_terms(0, 0) if hasattr(module, "loss_terms") else [module.policy_loss]
    for term in terms:
        loss, measured = term(rollout, counts)
        loss.backward()
        assert all(value.isfinite().all() for value in measured.values())
    return torch.cat([flat_gradients(model) for model in models(module)])


@pytest.mark.parametrize(
    ("reduction", "surrogate", "critic"),
    [
        ("token", "ppo", True),
        ("sequence", "ppo", False),
        ("constant", "cispo", False),
        ("sequence", "gspo", False),
    ],
)
def test_the_loss_is_that_of_the_scored_responses_alone(reduction, surrogate, critic):
    cliprange = 0.01 if surrogate == "gspo" else 0.2
    common = {
        "loss_reduction": reduction, "surrogate": surrogate, "kl_in": "loss",
        "entropy_coef": 0.01, "cliprange": cliprange,
    }  # fmt: skip
    scorer = FunctionScorer(some_apply)
    if critic:
        module = built(tiny_module(ppo=ppo_hparams(**common), scorer=scorer))
        rollout = rollout_of(module, prompts())
    else:
        module = built(tiny_grpo(grpo=grpo_hparams(**common), scorer=scorer))
        rollout = rollout_of(module, group_prompts())
    rollout = after_some_training(rollout)

    def models(module):
        return [module.policy, module.value] if critic else [module.policy]

    whole = gradients(module, rollout, models)
    alone = gradients(module, rollout[rollout.scored], models)
    assert alone.abs().max() > 1e-4
    torch.testing.assert_close(whole, alone, rtol=1e-4, atol=1e-6)


def test_an_optimizer_step_counts_the_scored_responses_alone(monkeypatch):
    counted = []

    def watched(module, minibatch, parts, terms, counts, models):
        counted.append((minibatch, counts))
        return accumulate_gradients(module, minibatch, parts, terms, counts, models)

    monkeypatch.setattr(on_policy, "accumulate_gradients", watched)
    fit(tiny_grpo(scorer=FunctionScorer(some_apply)), [group_prompts()])
    assert counted
    for minibatch, counts in counted:
        assert counts.num_sequences == minibatch.scored.sum() < len(minibatch)
        assert counts.num_tokens == minibatch.response_mask[minibatch.scored].sum()


def test_metrics_and_samples_are_of_the_scored_responses(tmp_path):
    scorer = WeightedScorer(
        {"some": FunctionScorer(some_apply), "none": FunctionScorer(none_applies)}
    )
    rollout = rollout_of(built(tiny_grpo(scorer=scorer)), group_prompts())
    known = rollout.scores[torch.tensor(APPLIES)]
    measures = rollout_metrics(rollout, "grpo", score_clip=5.0)
    assert measures["rollout/score"] == pytest.approx(known.mean().item())
    assert measures["rollout/score/some"] == pytest.approx(known.mean().item())
    assert "rollout/score/none" not in measures
    assert measures["rollout/score_std"] == pytest.approx(known.std(correction=0).item())
    assert measures["rollout/unscored"] == pytest.approx(1 - sum(APPLIES) / ROWS)
    assert measures["rollout/clipped"] == pytest.approx((known >= 5).float().mean().item())
    samples = describe_rollout(rollout, tiny_grpo().tokenizer, ROWS)
    assert [sample["score"] is not None for sample in samples] == APPLIES
    assert "NaN" not in json.dumps(samples)
    assert rollout_histograms(rollout)["scores"].histogram
    everyone = replace(rollout, scores=torch.ones(ROWS), scored=torch.ones(ROWS, dtype=torch.bool))
    assert "rollout/unscored" not in rollout_metrics(everyone, "grpo")


def test_scores_are_compared_in_a_group_where_they_apply():
    nan, inf = torch.nan, torch.inf
    scores = torch.tensor([1.0, nan, 1.0, nan, nan, nan, 2.0, 3.0, 4.0, nan, inf, inf])
    groups = torch.arange(4).repeat_interleave(3)
    applies = torch.tensor([1, 0, 1, 0, 0, 0, 1, 1, 0, 1, 1, 1], dtype=torch.bool)
    found = informative_groups(scores, groups, applies)
    assert found[::3].tolist() == [False, False, True, True]
    assert informative_groups(scores, groups)[::3].tolist() == [True, True, True, True]


@pytest.mark.parametrize("critic", [False, True])
def test_a_run_in_which_nothing_has_a_score_takes_no_step_and_does_not_end_well(critic):
    scorer = FunctionScorer(none_applies)
    module = tiny_module(scorer=scorer) if critic else tiny_grpo(scorer=scorer)
    fresh = flat_parameters(built(module).policy).clone()
    batches = [prompts(i) if critic else group_prompts(i) for i in range(2)]
    with pytest.raises(RuntimeError, match="no optimizer step was taken in 2 iterations"):
        fit(module, batches)
    assert torch.equal(flat_parameters(module.policy), fresh)


def test_one_batch_without_scores_takes_no_step_and_the_run_goes_on():
    calls = []

    def sometimes(prompts, completions):
        calls.append(1)
        return [None if len(calls) == 1 else float(row) for row, _ in enumerate(completions)]

    module = tiny_module(scorer=FunctionScorer(sometimes))
    trainer = fit(module, 2)
    assert module.num_optimizer_steps == 2
    assert float(trainer.callback_metrics["rollout/score"]) == 7.5
