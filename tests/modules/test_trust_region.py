"""Trust regions by mask in the policy's loss, and the base of its ratio."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional.losses import PolicyLoss
from rlhf_lightning.models.forward import response_statistics
from rlhf_lightning.modules.metrics import trust_region_metrics, trust_region_sums
from tests.builders.models import PAD
from tests.builders.stages import (
    STOPS,
    OtherSampler,
    after_some_training,
    built,
    policy_loss_and_gradient,
    prompts,
    rollout_of,
    without_trainer,
)
from tests.modules.test_off_policy import Silent, module_of, prompts_of

pytestmark = pytest.mark.filterwarnings("ignore::rlhf_lightning.hparams.UnusualHparamWarning")
REGIONS: dict[str, dict[str, Any]] = {
    "masked_ratio": {"cliprange": 0.08, "cliprange_high": 0.12},
    "masked_probability": {"cliprange": 0.008, "cliprange_high": 0.004},
}


def formula(module: Any, rollout: Any, base: Tensor) -> tuple[Tensor, Tensor]:
    """Return the loss, one token after the other, and the tokens that are kept."""
    algorithm, mask = module.algorithm, rollout.response_mask
    new = response_statistics(module.policy, rollout, temperature=0.9).logprobs
    low, high = algorithm.cliprange, algorithm.cliprange_high
    terms, kept = [], torch.zeros_like(mask)
    for row, column in mask.nonzero().tolist():
        p, q = new[row, column].exp(), base[row, column].exp()
        moved = p / q - 1 if algorithm.surrogate == "masked_ratio" else p - q
        if -low <= moved <= high:
            kept[row, column] = True
            weight = (p / q).detach()
            terms.append(-weight * rollout.advantages[row, column] * new[row, column])
    return torch.stack(terms).sum() / mask.sum(), kept


@pytest.mark.parametrize(
    ("stage", "surrogate", "ratio_base"),
    [
        ("ppo", "masked_ratio", "old"),
        ("ppo", "masked_probability", "sampler"),
        ("grpo", "masked_ratio", "sampler"),
        ("grpo", "masked_probability", "old"),
    ],
)
def test_the_gradient_is_that_of_the_kept_tokens_whatever_the_micro_batches(
    stage, surrogate, ratio_base
):
    region = {"surrogate": surrogate, **REGIONS[surrogate], "ratio_base": ratio_base}
    module = built(
        module_of(stage, generator=OtherSampler(STOPS, PAD, gap=0.2), kl_coef=0.0, **region)
    )
    rollout = after_some_training(rollout_of(module, prompts_of(stage)))
    base = rollout.logprobs if ratio_base == "old" else rollout.sampler_logprobs
    module.zero_grad()
    expected, kept = formula(module, rollout, base)
    share = float(kept.sum() / rollout.response_mask.sum())
    assert 0.2 < share < 0.9
    expected.backward()
    wanted = torch.cat([p.grad.flatten() for p in module.policy.parameters()])
    assert wanted.abs().max() > 1e-2
    of_size = {}
    for size in (None, 3):
        _, gradient, of_size[size] = policy_loss_and_gradient(
            module, rollout, micro_batch_size=size
        )
        torch.testing.assert_close(gradient, wanted, rtol=0, atol=2e-6)
        assert of_size[size][f"{stage}/clipfrac"] == pytest.approx(1 - share, abs=1e-6)
    assert of_size[None] == pytest.approx(of_size[3], abs=1e-6)
    # The mutation: divided by the tokens that are kept.
    assert (gradient / share - wanted).abs().max() > 1e-3


@pytest.mark.parametrize("stage", ["ppo", "grpo"])
def test_the_sampler_as_base_needs_its_log_probabilities(stage):
    generator = Silent(STOPS, PAD)
    module = built(module_of(stage, generator=generator, ratio_base="sampler"))
    with pytest.raises(ValueError, match=rf"module.{stage}.ratio_base=sampler needs .*Silent"):
        rollout_of(module, prompts_of(stage))
    generator.value = torch.nan
    with pytest.raises(RuntimeError, match=r"of Silent.* not finite.*use ratio_base=old"):
        rollout_of(module, prompts_of(stage))


@pytest.mark.parametrize("surrogate", ["ppo", *REGIONS])
def test_an_iteration_logs_its_trust_region_if_tokens_can_be_left_out(surrogate):
    module = without_trainer(
        module_of(
            "ppo",
            generator=OtherSampler(STOPS, PAD),
            surrogate=surrogate,
            ratio_base="sampler",
            **REGIONS.get(surrogate, {}),
        )
    )
    module.training_step(prompts(), 0)
    logged, names = module.logged[0], ("kept_fraction", "mean_ratio", "effective_sample_size")
    if surrogate == "ppo":
        assert not [name for name in names if f"ppo/{name}" in logged]
        return
    kept = logged["ppo/kept_fraction"]
    assert 0.1 < kept < 0.95
    assert kept == pytest.approx(1 - float(logged["ppo/clipfrac"]), abs=0.02)
    assert 0 < logged["ppo/effective_sample_size"] <= kept


def test_the_figures_of_a_trust_region_are_those_of_its_tokens_however_they_are_cut():
    class Half:
        def __call__(self, *_: Any, **__: Any) -> PolicyLoss:
            raise NotImplementedError

        def kept(self, logprobs: Tensor, base_logprobs: Tensor, mask: Tensor) -> Tensor:
            return mask & (logprobs > base_logprobs)

    ratio = torch.tensor([[2.0, 0.5, 4.0, 9.0], [0.25, 1.5, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1, 0], [1, 1, 0, 0]]).bool()
    parts = [
        trust_region_sums(Half(), ratio[r].log(), torch.zeros(1, 4), mask[r])
        for r in (slice(0, 1), slice(1, 2))
    ]
    totals = {name: parts[0][name] + parts[1][name] for name in parts[0]}
    found = trust_region_metrics(totals, "ppo")
    assert found["ppo/kept_fraction"] == pytest.approx(3 / 5)
    assert found["ppo/mean_ratio"] == pytest.approx((2 + 0.5 + 4 + 0.25 + 1.5) / 5)
    kept = [2, 4, 1.5]
    wanted = sum(kept) ** 2 / (5 * sum(w * w for w in kept))
    assert found["ppo/effective_sample_size"] == pytest.approx(wanted)
    assert trust_region_metrics({}, "ppo") == {}
