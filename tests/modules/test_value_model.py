"""How often the value model is trained, and which parts of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional.advantages import compute_gae
from rlhf_lightning.functional.masked import masked_whiten
from rlhf_lightning.modules.optimization import parameter_group
from rlhf_lightning.rollout.estimators import GAE
from tests.builders.library_runs import assert_same_weights
from tests.builders.stages import built, fit, ppo_hparams, tiny_module
from tests.modules.test_ppo_resume import KilledError, run
from tests.modules.test_ppo_training import logged_by

MLP = ("*.mlp.*", "head.*")
SAO = {
    "surrogate": "masked_ratio",
    "ratio_base": "sampler",
    "cliprange_high": 2.0,
    "rollout_lag": 1,
    "num_ppo_epochs": 1,
    "num_value_epochs": 2,
    "value_trainable": MLP,
    "gae_lambda_value": 1.0,
    "gae_length_alpha": 0.5,
    "critic_warmup_iterations": 1,
}
pytestmark = pytest.mark.filterwarnings("ignore::rlhf_lightning.hparams.UnusualHparamWarning")


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def test_the_value_model_takes_its_further_passes_alone_and_before_the_policy() -> None:
    module = tiny_module(ppo=ppo_hparams(num_ppo_epochs=1, num_value_epochs=3, num_minibatches=2))
    logged, moved = logged_by(module), []

    def record(optimizer: Any) -> None:
        models = (module.policy, module.value)
        moved.append([any(p.grad is not None for p in model.parameters()) for model in models])

    module.on_before_optimizer_step = record
    before = weights(built(module).policy)
    fit(module, 1)
    assert moved == [[False, True]] * 4 + [[True, True]] * 2
    assert any(not torch.equal(before[name], p) for name, p in module.policy.named_parameters())
    with_policy = [s for s in module.steps if "ppo/policy_loss" in s]
    assert [("ppo/policy_loss" in s, "ppo/value_loss" in s) for s in module.steps] == (
        [(False, True)] * 4 + [(True, True)] * 2
    )
    # The mean norm is of the steps that had a gradient.
    norms = [s["ppo/policy_grad_norm"] for s in with_policy]
    assert logged[0]["ppo/policy_grad_norm"] == pytest.approx(sum(norms) / 2)
    assert logged[0]["ppo/num_updates"] == 6
    assert all("ppo/policy_grad_norm" not in s for s in module.steps[:4])


def test_a_policy_that_has_moved_too_far_ends_its_passes_after_those_of_the_value_model() -> None:
    ppo = ppo_hparams(
        learning_rate=0.05, num_ppo_epochs=2, num_value_epochs=4, target_approx_kl=1e-4
    )
    module = tiny_module(ppo=ppo)
    fit(module, 1)
    assert ["ppo/value_loss" in s for s in module.steps] == [True, True, True, False]
    assert module.num_optimizer_steps == 3


@pytest.mark.parametrize("model_type", ["gpt2", "llama"])
def test_what_no_pattern_matches_is_neither_trained_nor_in_the_optimizer(model_type: str) -> None:
    module = tiny_module(model_type, ppo=ppo_hparams(value_trainable=MLP))
    before = weights(built(module).value)
    named = dict(module.value.named_parameters())
    trained = {name for name in named if ".mlp." in name or name.startswith("head.")}
    assert 0 < len(trained) < len(named)
    assert {name for name, p in named.items() if p.requires_grad} == trained
    group = parameter_group(module.value, "value", 1e-3)
    assert {id(p) for p in group["params"]} == {id(named[name]) for name in trained}
    the_trainer = fit(module, 2)
    (optimizer,) = the_trainer.optimizers
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in module.value.named_parameters():
        assert (id(parameter) in held) == (name in trained), name
        assert torch.equal(parameter, before[name]) == (name not in trained), name
        assert parameter.grad is None or name in trained
    # They stay in checkpoints: the value model is whole there.
    assert {f"value.{name}" for name in named} <= set(module.state_dict())


def test_lambda_by_length_counts_the_stop_token_and_is_of_the_advantages_alone() -> None:
    lengths, alpha = [6, 3, 4, 1], 0.5
    mask = torch.arange(6) < torch.tensor(lengths)[:, None]
    generator = torch.Generator().manual_seed(1)
    rewards, values = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
    # 1 - 1 / (alpha length), the stop token included, or 0
    own = torch.tensor([2 / 3, 1 / 3, 1 / 2, 0.0], dtype=torch.float64)
    wanted = compute_gae(rewards, values, mask, gamma=1.0, gae_lambda=own).advantages
    for value_lambda, of_values in ((None, 0.9), (1.0, 1.0)):
        found, returns = GAE(1.0, 0.9, value_lambda, alpha)(rewards, values, mask, torch.arange(4))
        torch.testing.assert_close(found, masked_whiten(wanted, mask), rtol=1e-5, atol=1e-6)
        targets = compute_gae(rewards, values, mask, gamma=1.0, gae_lambda=of_values).returns
        torch.testing.assert_close(returns, targets, rtol=1e-5, atol=0)


def test_a_pattern_that_matches_nothing_is_an_error_that_shows_names() -> None:
    module = tiny_module(ppo=ppo_hparams(value_trainable=["*.mlp.*", "*.experts.*"]))
    with pytest.raises(ValueError, match=r"'\*\.experts\.\*' matches no parameter .* like trunk"):
        built(module)


@pytest.mark.thorough
def test_a_killed_run_of_sao_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    _, whole, seen = run(tmp_path / "whole", **SAO)
    assert whole.algorithm.num_value_epochs == 2
    with pytest.raises(KilledError):
        run(tmp_path / "killed", die_at=3, **SAO)
    _, resumed, rest = run(tmp_path / "killed", resume=True, **SAO)
    assert len(rest) < len(seen)
    assert_same_weights(resumed, whole)
