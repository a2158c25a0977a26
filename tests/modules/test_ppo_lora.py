"""PPO on adapters: policy, value and reward model share one frozen base."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.adapter_files import save_adapter
from rlhf_lightning.models.factory import load_scalar_model
from rlhf_lightning.models.ppo_models import ADAPTER, ppo_models
from rlhf_lightning.modules.ppo import PPOModule
from rlhf_lightning.rollout.scorers.base import WeightedScorer
from rlhf_lightning.rollout.scorers.reward_models import RewardAdapterScorer
from tests.builders.library_runs import assert_same_rollouts, assert_same_weights
from tests.builders.models import tiny_policy, tiny_tokenizer
from tests.builders.stages import (
    built,
    fit,
    ppo_hparams,
    rollout_of,
    tiny_module,
)
from tests.modules.test_ppo_resume import KilledError, run


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An SFT policy with its tokenizer, and a reward model that was trained as an adapter on it."""
    root = tmp_path_factory.mktemp("artifacts")
    tiny_policy("llama", seed=3).model.save_pretrained(root / "sft")
    tiny_tokenizer().save_pretrained(root / "sft")
    save_reward(root / "sft", root / "reward")
    return root


def save_reward(sft: Path, folder: Path, *, seed: int = 0, base_fingerprint: str = "") -> None:
    reward = load_scalar_model(sft, head="reward", lora=LoraHparams(r=4, alpha=8), seed=2)
    with torch.no_grad():
        for index, parameter in enumerate(reward.parameters(), start=1000 * seed):
            generator = torch.Generator().manual_seed(index)
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    state = reward.state_dict()
    save_adapter(reward, folder / ADAPTER, state, base=str(sft), base_fingerprint=base_fingerprint)


def parts(artifacts: Path, precision: str = "32-true", **options: Any) -> dict[str, Any]:
    lora = LoraHparams(r=4, alpha=8, base_precision=precision)
    options = {"lora": lora, "precision": precision} | options
    return {
        "models": partial(ppo_models, artifacts / "sft", artifacts / "reward", **options),
        "scorer": RewardAdapterScorer(artifacts / "reward"),
    }


@pytest.mark.parametrize(("precision", "checkpointing"), [("32-true", False), ("bf16-mixed", True)])
def test_the_ratio_starts_at_1_the_kl_at_0_and_the_base_never_moves(
    artifacts, precision, checkpointing
):
    hparams = ppo_hparams(num_minibatches=2, micro_batch_size=3)
    module = tiny_module(
        ppo=hparams, **parts(artifacts, precision, activation_checkpointing=checkpointing)
    )
    built(module)
    own = {id(p) for model in (module.policy, module.value) for p in model.parameters()}
    frozen = {
        name: p.detach().clone()
        for name, p in module.policy.base.named_parameters()
        if id(p) not in own
    }
    before = [p.detach().clone() for p in module.parameters()]
    fit(module, 2, precision=precision)
    first = module.rollouts[0]
    assert torch.equal(first.logprobs, first.ref_logprobs)
    assert module.steps[0]["ppo/approx_kl"] == 0
    assert module.steps[0]["ppo/clipfrac"] == 0
    assert module.steps[1]["ppo/approx_kl"] > 0
    assert not torch.equal(module.rollouts[1].logprobs, module.rollouts[1].ref_logprobs)
    for name, parameter in module.policy.base.named_parameters():
        if name in frozen:
            assert torch.equal(parameter, frozen[name]), name
    moved = [not torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True)]
    assert sum(moved) > 0.9 * len(moved)


def test_the_value_model_starts_as_the_reward_model_and_the_reward_model_stays(artifacts):
    module = built(tiny_module(**parts(artifacts)))
    reward = module.scorer.model
    assert not any(p.requires_grad for p in reward.parameters())
    before = {name: value.clone() for name, value in reward.state_dict().items()}
    for name, value in module.value.state_dict().items():
        assert torch.equal(value, before[name]), name
    fit(module, 2)
    for name, value in reward.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert any(
        not torch.equal(value, before[name]) for name, value in module.value.state_dict().items()
    )


@pytest.fixture(scope="module")
def killed(artifacts: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("killed")
    with pytest.raises(KilledError):
        run(folder, die_at=3, **parts(artifacts))
    return folder


@pytest.mark.thorough
def test_a_killed_and_resumed_run_is_bitwise_the_run_never_killed(artifacts, killed, tmp_path):
    _, whole, _ = run(tmp_path, **parts(artifacts))
    _, module, _ = run(killed, resume=True, **parts(artifacts))
    assert_same_weights(module, whole)
    assert_same_rollouts(module.rollouts, whole.rollouts)


def test_a_run_resumes_with_the_rank_and_scale_of_its_adapters_alone(artifacts, killed):
    for other in (LoraHparams(r=4, alpha=64), LoraHparams(r=8, alpha=8)):
        wanted = rf"lora.r=4 lora.alpha=8 .*run has .*lora.r={other.r} lora.alpha={other.alpha}"
        with pytest.raises(ValueError, match=wanted):
            run(killed, resume=True, **parts(artifacts, lora=other))


def test_a_reward_adapter_without_a_shared_base_is_refused(artifacts):
    scorer = RewardAdapterScorer(artifacts / "reward")
    with pytest.raises(ValueError, match=r"scorer=reward_adapter shares the policy's base"):
        tiny_module(scorer=scorer).configure_model()


def test_two_reward_adapters_on_one_base_score_as_each_does_alone(artifacts, tmp_path):
    save_reward(artifacts / "sft", tmp_path, seed=1)
    sources = {"helpful": artifacts / "reward", "harmless": tmp_path}

    def score_of(scorer: Any) -> Any:
        return rollout_of(built(tiny_module(**parts(artifacts) | {"scorer": scorer})))

    together = score_of(WeightedScorer({k: RewardAdapterScorer(at) for k, at in sources.items()}))
    for name, source in sources.items():
        alone = score_of(RewardAdapterScorer(source))
        assert torch.equal(together.sequences, alone.sequences)
        torch.testing.assert_close(together.score_components[name], alone.scores)
    assert not torch.allclose(*together.score_components.values())


def test_a_reward_adapter_of_another_base_is_refused_in_a_sum_of_rewards_too(artifacts, tmp_path):
    save_reward(artifacts / "sft", tmp_path, base_fingerprint="f" * 64)
    adapter, lora = RewardAdapterScorer(tmp_path), LoraHparams(r=4, alpha=8)
    inner = WeightedScorer({"adapter": adapter})
    for reward in (adapter, [adapter, lambda completions: [0.0] * len(completions)], inner):
        with pytest.raises(ValueError, match=r"was trained on .*sft and not on policy=.*sft"):
            PPOModule.from_pretrained(artifacts / "sft", reward, lora=lora)
