"""PolicyGradientModule: advantages, loss and gradient by objective, and what a step 0 holds."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import cycle
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lightning.batches import RolloutBatch
from rlhf_lightning.functional.surrogates import ClippedRatio
from rlhf_lightning.models.forward import response_statistics
from rlhf_lightning.rollout.estimators import Returns
from tests.builders.models import flat_gradients
from tests.builders.stages import (
    GROUP,
    ROWS,
    TokenScorer,
    after_some_training,
    built,
    counts_of,
    fit,
    group_prompts,
    grpo_hparams,
    policy_loss_and_gradient,
    prompts,
    rollout_of,
    some_score,
    tiny_grpo,
)

pytestmark = pytest.mark.filterwarnings("ignore::rlhf_lightning.hparams.UnusualHparamWarning")
OBJECTIVES: dict[str, dict[str, Any]] = {
    "grpo": {},
    "rloo": {"baseline": "leave_one_out", "scale": "none"},
    "dr_grpo": {"scale": "none"},
    "reinforce_pp": {"baseline": "none", "scale": "global_std"},
    "reinforce_pp_baseline": {"baseline": "mean", "scale": "global_std"},
}
SURROGATES = ("ppo", "gspo", "cispo")
REDUCTIONS = ("token", "sequence", "constant")


def other_reference(**hparams: Any) -> Any:
    """Return a module whose policy has moved from its reference, so that there is a KL."""
    module = built(tiny_grpo(grpo=grpo_hparams(**hparams)))
    with torch.no_grad():
        for index, parameter in enumerate(module.policy.parameters()):
            generator = torch.Generator().manual_seed(index)
            parameter.add_(0.02 * torch.randn(parameter.shape, generator=generator))
    return module


# -- advantages -------------------------------------------------------------------------------


def by_hand(name: str, rollout: RolloutBatch, adjusted: Tensor, kl_coef: float) -> Tensor:
    """Return the advantages, one row and token after the other, from scores and KL."""
    mask = rollout.response_mask
    kl = rollout.logprobs - rollout.ref_logprobs
    lengths = mask.sum(-1).tolist()
    rewards = [
        [-kl_coef * float(kl[i, t]) + (float(adjusted[i]) if t == n - 1 else 0) for t in range(n)]
        for i, n in enumerate(lengths)
    ]
    found = torch.zeros(mask.shape)
    for i, n in enumerate(lengths):
        group = [sum(rewards[j]) for j in range(ROWS) if j // GROUP == i // GROUP]
        own = sum(rewards[i])
        for t in range(n):
            found[i, t] = {
                "grpo": (own - sum(group) / GROUP) / (torch.tensor(group).std() + 1e-4),
                "rloo": own - (sum(group) - own) / (GROUP - 1),
                "dr_grpo": own - sum(group) / GROUP,
                "reinforce_pp": sum(rewards[i][t:]),
                "reinforce_pp_baseline": own - sum(group) / GROUP,
            }[name]
    if name.startswith("reinforce_pp"):
        actions = found[mask]
        found = torch.where(mask, (found - actions.mean()) / actions.std(unbiased=False), 0)
    return found


def adjusted_scores(rollout: RolloutBatch) -> Tensor:
    return rollout.scores.clamp(-5, 5) - 1.0 * (rollout.finish_reason == 1)


@pytest.mark.parametrize(
    ("name", "kl_in"), zip(OBJECTIVES, cycle(("reward", "loss")), strict=False)
)
def test_advantages_are_those_of_the_formula_from_scores_and_kl(name, kl_in):
    module = other_reference(kl_in=kl_in, kl_coef=0.5, **OBJECTIVES[name])
    rollout = rollout_of(module, group_prompts())
    adjusted = adjusted_scores(rollout)
    assert rollout.values is rollout.returns is None
    in_reward, without = (by_hand(name, rollout, adjusted, kl_coef) for kl_coef in (0.5, 0.0))
    assert (in_reward - without).abs().max() > 0.05
    expected = in_reward if kl_in == "reward" else without
    torch.testing.assert_close(rollout.advantages, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hparams", [{}, OBJECTIVES["rloo"]], ids=["grpo", "rloo"])
def test_a_group_of_equal_scores_gets_a_gradient_of_exactly_0(hparams):
    equal = {0, 1, 2, 3, 8, 9, 10, 11}
    calls = iter(range(ROWS))
    scorer = TokenScorer(
        lambda ids, finished: 0.7 if next(calls) in equal else some_score(ids, finished)
    )
    hparams = grpo_hparams(kl_coef=0.0, missing_eos_penalty=0.0, **hparams)
    module = built(tiny_grpo(grpo=hparams, scorer=scorer))
    rollout = rollout_of(module, group_prompts())
    rows = torch.tensor(sorted(equal))
    assert (rollout.advantages[rows] == 0).all()
    _, gradient, _ = policy_loss_and_gradient(module, rollout[rows])
    assert (gradient == 0).all()
    others = torch.tensor([i for i in range(ROWS) if i not in equal])
    _, gradient, _ = policy_loss_and_gradient(module, rollout[others])
    assert gradient.abs().max() > 1e-2


def test_an_overlong_buffer_takes_up_to_1_of_the_scores_of_the_longest():
    plain, module = (
        built(tiny_grpo(grpo=grpo_hparams(scale="none", kl_coef=0.0, overlong_buffer=buffer)))
        for buffer in (None, 8)
    )
    before, rollout = (rollout_of(m, group_prompts()) for m in (plain, module))
    lengths = rollout.response_mask.sum(-1)
    # max_new_tokens is 9: nothing for 1 token, then an eighth more a token.
    taken = (before.rewards - rollout.rewards).sum(-1)
    expected = torch.tensor([max(0, int(n) - 1) / 8 for n in lengths])
    assert {0.0, 1.0} < set(expected.tolist())
    torch.testing.assert_close(taken, expected, rtol=0, atol=1e-6)
    assert torch.equal(before.scores, rollout.scores)
    with pytest.raises(ValueError, match=r"GRPOHparams\.overlong_buffer=10 .*max_new_tokens=9"):
        tiny_grpo(grpo=grpo_hparams(overlong_buffer=10))


def test_the_responses_of_a_group_differ_and_do_not_depend_on_how_prompts_are_shared():
    module = built(tiny_grpo())
    rollout = rollout_of(module, group_prompts())
    for group in rollout.response_tensors.view(ROWS // GROUP, GROUP, -1):
        assert len({tuple(row) for row in group.tolist()}) == GROUP
    for ranks in (2, 4):
        share = ROWS // ranks
        for rank in range(ranks):
            rows = slice(rank * share, (rank + 1) * share)
            part = rollout_of(module, group_prompts()[rows])
            width = part.response_mask.shape[1]
            assert torch.equal(part.response_mask, rollout.response_mask[rows, :width])
            assert torch.equal(part.response_tensors, rollout.response_tensors[rows, :width])


# -- the loss ---------------------------------------------------------------------------------


def hparams_of(surrogate: str, reduction: str, **changes: Any) -> dict[str, Any]:
    ranges = {"gspo": {"cliprange": 0.02}, "cispo": {"cliprange_high": 0.1}}
    return {
        "surrogate": surrogate,
        "loss_reduction": reduction,
        "kl_coef": 0.3,
        "entropy_coef": 0.01,
        **ranges.get(surrogate, {}),
        **changes,
    }


def moved_rollout(module: Any) -> RolloutBatch:
    return after_some_training(rollout_of(module, group_prompts()))


def formula(module: Any, rollout: RolloutBatch) -> Tensor:
    """Return the loss of a whole batch, one row and token after the other."""
    algorithm = module.algorithm
    new = response_statistics(module.policy, rollout, temperature=0.9)
    low = 1 - algorithm.cliprange
    high = 1 + (algorithm.cliprange_high or algorithm.cliprange)
    rows = []
    for i, n in enumerate(rollout.response_mask.sum(-1).tolist()):
        logprobs, old = new.logprobs[i, :n], rollout.logprobs[i, :n]
        ratio = (logprobs - old).exp()
        if algorithm.surrogate == "gspo":
            ratio = (logprobs - old).mean().exp().expand(n)
        advantages = rollout.advantages[i, :n]
        if algorithm.surrogate == "cispo":
            surrogate = advantages * ratio.clamp(low, high).detach() * logprobs
        else:
            surrogate = torch.minimum(advantages * ratio, advantages * ratio.clamp(low, high))
        k2 = (logprobs - rollout.ref_logprobs[i, :n]) ** 2 / 2
        rows.append(-surrogate + 0.3 * k2 - 0.01 * new.entropy[i, :n])
    if algorithm.loss_reduction == "token":
        return torch.cat(rows).mean()
    if algorithm.loss_reduction == "sequence":
        return torch.stack([row.mean() for row in rows]).mean()
    return torch.stack([row.sum() / 9 for row in rows]).mean()  # max_new_tokens


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("surrogate", SURROGATES)
def test_loss_and_gradient_are_the_formula_whatever_the_micro_batches(surrogate, reduction):
    module = other_reference(**hparams_of(surrogate, reduction))
    rollout = moved_rollout(module)
    expected = formula(module, rollout)
    module.zero_grad()
    expected.backward()
    wanted = flat_gradients(module.policy)
    assert wanted.abs().max() > 1e-2
    measured = {}
    for size in (None, 3):
        loss, gradient, measured[size] = policy_loss_and_gradient(
            module, rollout, micro_batch_size=size
        )
        assert loss == pytest.approx(float(expected), abs=1e-6)
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=2e-6)
        for name, value in measured[None].items():
            assert measured[size][name] == pytest.approx(value, abs=1e-6), name
    assert measured[None]["grpo/clipfrac"] > 0.1
    # The mutation: each micro-batch divided by its own tokens and responses.
    module.zero_grad()
    for rows in torch.arange(ROWS).split(4):
        part = rollout[rows]
        loss, _ = module.policy_loss(part, counts_of(part))
        (loss / 4).backward()
    differs = (flat_gradients(module.policy) - wanted).norm() / wanted.norm()
    assert differs > 0.02 if reduction == "token" else differs < 1e-5


def test_measures_under_a_constant_divisor_are_means_over_tokens():
    module = other_reference(**hparams_of("ppo", "token"))
    rollout = moved_rollout(module)
    _, _, by_token = policy_loss_and_gradient(module, rollout)
    constant = other_reference(**hparams_of("ppo", "constant"))
    _, _, measured = policy_loss_and_gradient(constant, rollout)
    for name in ("clipfrac", "approx_kl"):
        assert by_token[f"grpo/{name}"] > 1e-3
        assert measured[f"grpo/{name}"] == pytest.approx(by_token[f"grpo/{name}"], rel=1e-5)
    assert measured["grpo/policy_loss"] != pytest.approx(by_token["grpo/policy_loss"], rel=0.01)


@pytest.mark.parametrize(("surrogate", "reduction"), zip(SURROGATES, REDUCTIONS, strict=True))
def test_the_ratio_starts_at_1_and_the_kl_at_0(surrogate, reduction):
    hparams = grpo_hparams(
        **hparams_of(surrogate, reduction), num_minibatches=2, num_epochs=2, micro_batch_size=3
    )
    module = tiny_grpo(grpo=hparams)
    fit(module, [group_prompts()])
    (rollout,), (first, second, *_) = module.rollouts, module.steps
    assert torch.equal(rollout.logprobs, rollout.ref_logprobs)
    assert first["grpo/approx_kl"] == first["grpo/clipfrac"] == 0
    assert second["grpo/approx_kl"] > 0
    assert module.num_optimizer_steps == 4
    assert not any("value" in name or "explained" in name for name in [*first, *second])


def test_every_minibatch_holds_whole_groups_and_every_group_once_a_pass():
    module = tiny_grpo(grpo=grpo_hparams(num_minibatches=2, num_epochs=3))
    fit(module, [group_prompts()])
    passes = [module.minibatches[i : i + 2] for i in (0, 2, 4)]
    assert len({tuple(one.group_ids.tolist()) for one, _ in passes}) > 1
    for both in passes:
        for minibatch in both:
            assert minibatch.group_ids.bincount().max() == GROUP
            assert minibatch.group_ids.bincount().sum() == len(minibatch) == ROWS // 2
            assert len(minibatch.group_ids.unique()) == 2
        assert sorted(torch.cat([m.row_ids for m in both]).tolist()) == [*range(ROWS)]


def test_groups_of_one_row_are_refused_unless_nothing_is_compared():
    with pytest.raises(ValueError, match=r"baseline=mean compares .* PromptDataModule\(num_gen"):
        fit(tiny_grpo(), [prompts()])
    module = tiny_grpo(grpo=grpo_hparams(**OBJECTIVES["reinforce_pp"]))
    fit(module, [prompts()])
    assert module.num_optimizer_steps == 1


@dataclass(frozen=True)
class Weighed:
    """A surrogate with a parameter that no other has."""

    factor: float

    def __call__(self, logprobs, old_logprobs, advantages, mask, *, num_tokens):
        found = ClippedRatio(cliprange=0.2)(
            logprobs, old_logprobs, self.factor * advantages, mask, num_tokens=num_tokens
        )
        assert found.loss.isfinite()
        return found


def test_a_surrogate_and_an_estimator_of_one_s_own_take_the_place_of_those_by_name():
    batch = [group_prompts()]
    own = {"surrogate": Weighed(2.0), "estimator": Returns(whiten=True)}
    whitened = {"baseline": "none", "scale": "global_std"}
    found = []
    for parts in (own, {"grpo": grpo_hparams(**whitened)}):
        module = tiny_grpo(**parts)
        fit(module, batch)
        assert float(module.rollouts[0].advantages.sum().abs()) < 1e-3
        found.append(module.steps[0]["grpo/policy_loss"])
    assert found[0] == pytest.approx(2 * found[1], abs=1e-6)
