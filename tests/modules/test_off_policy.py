"""The correction for tokens that another distribution sampled, in PPO and GRPO."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf_lightning.batches import Generation, PromptBatch, RolloutBatch
from rlhf_lightning.doctor.detectors import Detectors
from rlhf_lightning.doctor.spec import ALARM
from rlhf_lightning.doctor.thresholds import DoctorThresholds
from rlhf_lightning.functional.kl import MAX_LOG_RATIO
from rlhf_lightning.models.forward import response_statistics
from rlhf_lightning.modules import on_policy
from rlhf_lightning.rollout.generators.base import CachedGenerator
from tests.builders.models import PAD, flat_parameters
from tests.builders.stages import (
    STOPS,
    OtherSampler,
    after_some_training,
    built,
    counts_of,
    group_prompts,
    grpo_hparams,
    policy_loss_and_gradient,
    ppo_hparams,
    prompts,
    rollout_of,
    tiny_grpo,
    tiny_module,
    without_trainer,
)

CORRECTIONS: dict[str, dict[str, Any]] = {
    "truncated": {"off_policy": "truncated", "off_policy_cap": 1.2},
    "masked": {"off_policy": "masked", "off_policy_low": 0.4, "off_policy_high": 3.0},
}
pytestmark = pytest.mark.filterwarnings("ignore::rlhf_lightning.hparams.UnusualHparamWarning")


def module_of(stage: str, *, generator: Any = None, **hparams: Any) -> Any:
    parts = {} if generator is None else {"generator": generator}
    if stage == "ppo":
        return tiny_module(ppo=ppo_hparams(**hparams), **parts)
    return tiny_grpo(grpo=grpo_hparams(num_epochs=2, **hparams), **parts)


def prompts_of(stage: str, iteration: int = 0) -> PromptBatch:
    return prompts(iteration) if stage == "ppo" else group_prompts(iteration)


def trained(stage: str, **options: Any) -> Any:
    """Return a module after two iterations without a Trainer, with what it logged."""
    module = without_trainer(module_of(stage, **options))
    for iteration in range(2):
        module.training_step(prompts_of(stage, iteration), iteration)
    return module


class Silent(CachedGenerator):
    """Gives no log-probabilities, or some that are no numbers."""

    value: float | None = None

    def __call__(self, *arguments: Any, **options: Any) -> Generation:
        found = super().__call__(*arguments, **options)
        if self.value is None:
            return replace(found, logprobs=None)
        filled = torch.full_like(found.response_mask, self.value, dtype=torch.float32)
        return replace(found, logprobs=filled)


class Broken(Silent):
    value = torch.nan


def numbers(module: Any) -> list[dict[str, float]]:
    volatile = ("time/", "throughput/", "rollout/sampler_", "rollout/effective_sample_size")
    return [{k: v for k, v in row.items() if not k.startswith(volatile)} for row in module.logged]


def test_without_a_correction_the_samplers_log_probabilities_change_no_bit():
    stage = "grpo"
    with_them, far_off = trained(stage), trained(stage, generator=OtherSampler(STOPS, PAD))
    without = trained(stage, generator=Silent(STOPS, PAD))
    assert with_them.rollouts[0].sampler_logprobs is not None
    assert without.rollouts[0].sampler_logprobs is None
    assert far_off.logged[0]["rollout/sampler_gap"] > 0.2
    for other in (with_them, far_off):
        assert torch.equal(flat_parameters(other), flat_parameters(without))
        assert numbers(other) == numbers(without)
    assert not [name for name in without.logged[0] if name.startswith("rollout/sampler")]


@pytest.mark.parametrize(("stage", "surrogate"), [("ppo", "ppo"), ("grpo", "cispo")])
@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_gradient_is_that_of_each_token_times_its_weight(stage, correction, surrogate):
    hparams = CORRECTIONS[correction]
    module = built(module_of(stage, surrogate=surrogate, kl_coef=0.0, **hparams))
    plain = built(module_of(stage, surrogate=surrogate, kl_coef=0.0))
    module.generator = OtherSampler(STOPS, PAD)
    rollout = after_some_training(rollout_of(module, prompts_of(stage)))
    old, sampler, mask = rollout.logprobs, rollout.sampler_logprobs, rollout.response_mask
    ratio = torch.where(mask, (old - sampler).exp(), 0)
    if correction == "truncated":
        weights = torch.where(ratio > 1.2, 1.2, ratio)
        assert 0.1 < (ratio > 1.2).sum() / mask.sum() < 0.9
    else:
        of_rows = torch.where(mask, old - sampler, 0).sum(-1).exp()
        kept = (of_rows >= 0.4) & (of_rows <= 3.0)
        assert 0.2 < kept.float().mean() < 0.9
        weights = (of_rows * kept).unsqueeze(-1).expand(mask.shape)
    weighed = replace(rollout, advantages=rollout.advantages * weights)
    expected = policy_loss_and_gradient(plain, weighed)
    got = policy_loss_and_gradient(module, rollout, micro_batch_size=3)
    assert expected[1].abs().max() > 1e-2
    assert got[0] == pytest.approx(expected[0], abs=1e-6)
    torch.testing.assert_close(got[1], expected[1], rtol=0, atol=1e-5)
    without = policy_loss_and_gradient(plain, rollout)
    assert (without[1] - got[1]).abs().max() > 1e-3


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_the_value_model_learns_from_every_token_alike(correction):
    def gradient(**hparams: Any) -> torch.Tensor:
        module = built(module_of("ppo", **hparams))
        module.generator = OtherSampler(STOPS, PAD)
        rollout = after_some_training(rollout_of(module))
        loss, _ = module.value_loss(rollout, counts_of(rollout))
        loss.backward()
        return torch.cat([p.grad.flatten() for p in module.value.parameters()])

    plain = gradient()
    assert plain.abs().max() > 1e-2
    assert torch.equal(plain, gradient(**CORRECTIONS[correction]))


@pytest.mark.parametrize("stage", ["ppo", "grpo"])
def test_a_correction_without_the_samplers_log_probabilities_is_an_error(stage):
    module = built(module_of(stage, generator=Silent(STOPS, PAD), off_policy="truncated"))
    with pytest.raises(ValueError, match=rf"module.{stage}.off_policy=truncated needs .*Silent "):
        rollout_of(module, prompts_of(stage))


def test_log_probabilities_that_are_no_numbers_end_a_run_that_weighs_by_them():
    with pytest.raises(RuntimeError, match=r"log-probabilities of Broken.*off_policy=truncated"):
        trained("grpo", generator=Broken(STOPS, PAD), off_policy="truncated")


def test_log_probabilities_that_are_no_numbers_are_counted_where_only_metrics_read_them():
    module = trained("grpo", generator=Broken(STOPS, PAD), off_policy="none")
    assert all(row["grpo/num_updates"] > 0 for row in module.logged)
    assert all(row["rollout/sampler_non_finite"] > 0 for row in module.logged)
    assert all(row["rollout/sampler_gap"] == MAX_LOG_RATIO for row in module.logged)


def test_a_weight_that_has_a_graph_is_another_gradient(monkeypatch):
    # The mutation: the policy in training in place of the old one, with its graph.
    module = built(module_of("grpo", kl_coef=0.0, off_policy="truncated", off_policy_cap=1.2))
    module.generator = OtherSampler(STOPS, PAD)
    rollout = rollout_of(module, group_prompts())
    loss, expected, _ = policy_loss_and_gradient(module, rollout)
    kept: list[torch.Tensor] = []

    def forward_and_keep(*arguments: Any, **options: Any) -> Any:
        result = response_statistics(*arguments, **options)
        kept.append(result.logprobs)
        return result

    def with_a_graph(batch: RolloutBatch, algorithm: Any) -> torch.Tensor:
        ratio = (kept[-1] - batch.sampler_logprobs).exp().clamp(max=algorithm.off_policy_cap)
        return batch.advantages * torch.where(batch.response_mask, ratio, 0)

    monkeypatch.setattr(on_policy, "response_statistics", forward_and_keep)
    monkeypatch.setattr(on_policy, "corrected_advantages", with_a_graph)
    same_loss, other, _ = policy_loss_and_gradient(module, rollout)
    assert same_loss == pytest.approx(loss, abs=1e-6)
    assert (other - expected).abs().max() > 1e-2


class Stale(CachedGenerator):
    """An engine that keeps the weights of its first call."""

    first: Any = None

    def __call__(self, model: Any, *arguments: Any, **options: Any) -> Generation:
        if self.first is None:
            self.first = copy.deepcopy(model)
        return super().__call__(self.first, *arguments, **options)


def gaps_and_alerts(generator: Any, iterations: int = 4) -> tuple[list[float], list[Any]]:
    module = without_trainer(module_of("ppo", generator=generator))
    detectors = Detectors(DoctorThresholds(), iterations)
    alerts = []
    for iteration in range(iterations):
        module.training_step(prompts(iteration), iteration)
        values = {name.partition("/")[2]: v for name, v in module.logged[-1].items()}
        alerts += detectors.observe(iteration + 1, values)
    found = [x for x in alerts if x.detector == "engine_weights"]
    return [row["rollout/sampler_gap"] for row in module.logged], found


def test_the_detector_notices_an_engine_that_keeps_its_first_weights_and_no_healthy_one():
    gaps, alerts = gaps_and_alerts(CachedGenerator(STOPS, PAD))
    assert max(gaps) < 1e-5, "nothing but rounding"
    assert alerts == []
    gaps, alerts = gaps_and_alerts(Stale(STOPS, PAD))
    assert gaps[0] < 1e-5, "before the first update they are the same"
    assert gaps == sorted(gaps)
    assert gaps[-1] > 0.2
    assert alerts[-1].after == ALARM
    assert "The engine samples with other weights" in alerts[0].describe()
