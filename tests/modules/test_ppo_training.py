"""PPOModule in a real Trainer: how often it steps, what it changes, what it logs."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlhf_lightning.functional.kl import adapted_kl_coef
from rlhf_lightning.hparams import SamplingHparams
from rlhf_lightning.modules.metrics import rollout_metrics
from rlhf_lightning.modules.optimization import Schedule
from rlhf_lightning.modules.ppo import PPOModule
from rlhf_lightning.rollout.scorers.base import (
    FunctionScorer,
    RewardModelScorer,
    Scores,
    WeightedScorer,
)
from tests.builders.models import tiny_policy, tiny_scalar_model
from tests.builders.stages import (
    RecordedPPO,
    TokenScorer,
    built,
    counts_of,
    fit,
    ppo_hparams,
    prompts,
    rollout_of,
    some_score,
    tiny_module,
)


def test_every_rollout_takes_epochs_times_minibatches_steps():
    ppo = ppo_hparams(num_ppo_epochs=3, num_minibatches=2, micro_batch_size=3)
    module = tiny_module(ppo=ppo)
    trainer = fit(module, 2)
    assert module.num_optimizer_steps == trainer.global_step == 2 * 3 * 2
    assert len(module.rollouts) == 2


def copies(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def test_only_policy_and_value_model_change_and_only_they_are_in_checkpoints():
    reward_model = tiny_scalar_model("llama", seed=3)
    module = built(tiny_module(scorer=RewardModelScorer(lambda: reward_model)))
    frozen = (module.reference, reward_model)
    before = [copies(model) for model in (*frozen, module.policy, module.value)]
    fit(module, 2)
    after = [copies(model) for model in (*frozen, module.policy, module.value)]
    for old, new in zip(before[:2], after[:2], strict=True):
        assert all(torch.equal(old[name], new[name]) for name in old)
    for old, new in zip(before[2:], after[2:], strict=True):
        assert not all(torch.equal(old[name], new[name]) for name in old)
    for model in frozen:
        assert not model.training
        assert all(p.grad is None and not p.requires_grad for p in model.parameters())
    assert {name.split(".")[0] for name in module.state_dict()} == {"policy", "value"}
    assert {id(p) for p in module.parameters()} == {
        id(p) for model in (module.policy, module.value) for p in model.parameters()
    }


def test_the_norms_of_policy_and_value_gradient_are_clipped_each_on_its_own():
    module = tiny_module(ppo=ppo_hparams(max_grad_norm=1e-3))
    norms: list[tuple[float, float]] = []

    def norm(model: torch.nn.Module) -> float:
        return float(torch.cat([p.grad.flatten() for p in model.parameters()]).norm())

    module.on_before_optimizer_step = lambda optimizer: norms.append(
        (norm(module.policy), norm(module.value))
    )
    fit(module, 1)
    assert len(norms) == 2
    for policy, value in norms:
        assert policy == pytest.approx(1e-3, rel=1e-2)
        assert value == pytest.approx(1e-3, rel=1e-2)
    assert all(step["ppo/policy_grad_norm"] > 1e-2 for step in module.steps)


def test_too_much_kl_stops_the_updates_before_the_step_and_counts_in_approx_kl():
    ppo = ppo_hparams(learning_rate=0.05, num_ppo_epochs=4, target_approx_kl=0.1)
    stopped, free = tiny_module(ppo=ppo), tiny_module(ppo=replace(ppo, target_approx_kl=None))
    logged, logged_free = logged_by(stopped), logged_by(free)
    fit(stopped, 1)
    fit(free, 1)
    first, second, *_ = free.steps
    assert second["ppo/approx_kl"] > 0.1
    for name in ("ppo/approx_kl", "ppo/clipfrac"):
        assert logged[0][name] == pytest.approx((first[name] + second[name]) / 2)
    assert logged[0]["ppo/policy_loss"] == pytest.approx(first["ppo/policy_loss"])
    assert logged[0]["ppo/num_updates"] == stopped.num_optimizer_steps == 1
    assert all(p.grad is None or (p.grad == 0).all() for p in stopped.parameters())
    assert logged_free[0]["ppo/num_updates"] == 4


def test_the_learning_rate_falls_once_an_iteration_and_follows_the_controls():
    module = tiny_module(ppo=ppo_hparams(num_minibatches=4), schedule=Schedule("linear"))
    rates: list[tuple[float, ...]] = []

    def record(optimizer: torch.optim.Optimizer) -> None:
        rates.append(tuple(group["lr"] for group in optimizer.param_groups))
        if len(module.rollouts) == 2:
            module.controls.learning_rate_factor = 0.5

    module.on_before_optimizer_step = record
    fit(module, 4)
    by_iteration = [rates[i * 8 : (i + 1) * 8] for i in range(4)]
    for number, (same, factor) in enumerate(
        zip(by_iteration, [1.0, 0.75, 0.5 * 0.5, 0.25 * 0.5], strict=True)
    ):
        assert set(same) == {same[0]}, number
        assert same[0] == pytest.approx((1e-3 * factor, 3e-3 * factor))


def logged_by(module: RecordedPPO) -> list[dict[str, float]]:
    logged: list[dict[str, float]] = []
    original = module.log_dict

    def log_dict(values: dict[str, float], **options: object) -> None:
        logged.append(dict(values))
        original(values, **options)

    module.log_dict = log_dict
    return logged


def test_the_kl_controller_follows_the_kl_per_response():
    module = tiny_module(ppo=ppo_hparams(kl_target=0.3, kl_horizon=40, num_ppo_epochs=4))
    logged = logged_by(module)
    fit(module, 4)
    coef = 0.05
    for values, rollout in zip(logged, module.rollouts, strict=True):
        assert values["ppo/kl_coef"] == pytest.approx(coef, rel=1e-6)
        mask = rollout.response_mask
        kl = torch.where(mask, rollout.logprobs - rollout.ref_logprobs, 0).sum(-1)
        assert values["rollout/kl_per_response"] == pytest.approx(float(kl.mean()), abs=1e-5)
        per_token = float(kl.sum() / mask.sum())
        assert values["rollout/kl_per_token"] == pytest.approx(per_token, abs=1e-6)
        coef = adapted_kl_coef(coef, float(kl.mean()), target=0.3, horizon=40, num_episodes=16)
    assert abs(values["rollout/kl_per_response"] / 0.3 - 1) < 0.2, "not clipped the last time"
    assert module.controls.kl_coef == pytest.approx(coef, rel=1e-6)
    assert len({values["ppo/kl_coef"] for values in logged}) == 4


def test_the_loss_is_the_policy_loss_and_vf_coef_times_the_value_loss():
    module = built(tiny_module(ppo=ppo_hparams(vf_coef=0.15)))
    rollout = rollout_of(module)
    terms = [term(rollout, counts_of(rollout)) for term in module.loss_terms(0, 0)]
    loss = sum(term for term, _ in terms)
    names = ("ppo/policy_loss", "ppo/value_loss")
    measured = {name: value for _, measures in terms for name, value in measures.items()}
    parts = {name: measured[name].item() for name in names}
    assert parts["ppo/value_loss"] > 0.1
    expected = parts["ppo/policy_loss"] + 0.15 * parts["ppo/value_loss"]
    assert loss.item() == pytest.approx(expected, abs=1e-6)


def test_changed_controls_take_effect_at_the_next_rollout():
    module = built(tiny_module())
    plain = rollout_of(module)
    module.controls.kl_coef = 3.0
    module.controls.domain_weights = {"maths": 0.5}
    own = module.scorer  # of whole numbers now
    module.scorer = lambda answers: own(answers)._replace(total=answers.response_mask.sum(1))
    module.reference.load_state_dict(tiny_policy(seed=7).state_dict())
    heavy = rollout_of(module, prompts(domains=["maths"] * 8 + [""] * 8))
    assert torch.equal(plain.response_tensors, heavy.response_tensors)
    kl = torch.where(heavy.response_mask, heavy.logprobs - heavy.ref_logprobs, 0).sum(-1)
    scores = heavy.scores * torch.tensor([0.5] * 8 + [1.0] * 8)
    expected = scores.clamp(-5, 5) - (heavy.finish_reason == 1).float() - 3.0 * kl
    torch.testing.assert_close(heavy.rewards.sum(-1), expected, rtol=1e-5, atol=1e-4)
    module.controls.temperature = 0.1
    assert not torch.equal(rollout_of(module).response_tensors, plain.response_tensors)


def test_every_measure_is_logged_each_iteration_and_means_what_it_says():
    module = tiny_module()
    logged = logged_by(module)
    trainer = fit(module, 2)
    assert set(trainer.callback_metrics) == set(logged[0]) == set(logged[1])
    for values, rollout in zip(logged, module.rollouts, strict=True):
        assert all(math.isfinite(value) for value in values.values())
        mask = rollout.response_mask
        assert values["rollout/score"] == pytest.approx(rollout.scores.mean().item(), abs=1e-5)
        std = rollout.scores.std(unbiased=False).item()
        assert values["rollout/score_std"] == pytest.approx(std, rel=1e-4)
        assert values["rollout/response_length"] == pytest.approx(mask.sum() / 16)
        gap = (rollout.logprobs - rollout.sampler_logprobs).abs()[mask]
        assert values["rollout/sampler_gap"] == pytest.approx(gap.mean().item(), rel=1e-3)
        assert values["rollout/sampler_gap_max"] == pytest.approx(gap.max().item(), rel=1e-3)
        assert values["rollout/effective_sample_size"] == pytest.approx(1, abs=1e-6)
        finished = (rollout.finish_reason == 0).float().mean()
        assert values["rollout/eos_fraction"] == pytest.approx(finished)
        assert 0 < finished < 1
        assert values["ppo/entropy"] == pytest.approx(rollout.entropy[mask].mean().item(), abs=1e-5)
    last = [step["ppo/approx_kl"] for step in module.steps[-2:]]
    assert logged[-1]["ppo/approx_kl"] == pytest.approx(sum(last) / 2)


EDGES = {
    "every answer is one token": {"sampling": SamplingHparams(max_new_tokens=1)},
    "no answer stops": {"stops": ()},
    "every answer stops at once": {"stops": tuple(range(48))},
    "all scores are equal": {"score": lambda ids, finished: 0.7},
    "scores are huge": {"score": lambda ids, finished: 1e6 * some_score(ids, finished)},
    "one row": {"rows": 1},
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", EDGES)
def test_edge_cases_train_with_finite_measures_and_weights(name):
    edge = dict(EDGES[name])
    scorer = TokenScorer(edge.get("score", some_score))
    sampling = edge.get("sampling", SamplingHparams(max_new_tokens=9, temperature=0.9))
    module = tiny_module(scorer=scorer, sampling=sampling)
    module.generator.stop_ids = edge.get("stops", module.generator.stop_ids)
    logged = logged_by(module)
    fit(module, [prompts(i, rows=edge.get("rows", 16)) for i in range(2)])
    assert len(logged) == 2
    for values in logged:
        values.pop("ppo/explained_variance", None)  # NaN where all returns are equal
        assert all(math.isfinite(value) for value in values.values()), values
    assert all(torch.isfinite(p).all() for p in module.parameters())
    if name == "no answer stops":
        assert logged[0]["rollout/eos_fraction"] == 0
    if name == "all scores are equal":
        assert logged[0]["rollout/score_std"] == pytest.approx(0, abs=1e-6)
        assert (logged[0]["ppo/skipped_steps"], logged[0]["ppo/num_updates"]) == (0, 2)
    if name == "every answer stops at once":
        assert logged[0]["rollout/response_length"] == 1


def test_several_components_of_the_score_are_logged_by_name():
    module = built(tiny_module())
    rollout = rollout_of(module)
    assert not any("score_tokens" in name for name in rollout_metrics(rollout, "ppo"))
    two = {"style": torch.full((16,), 2.0), "std": torch.full((16,), -1.0)}
    measures = rollout_metrics(replace(rollout, score_components=two), "ppo")
    assert measures["rollout/score/style"] == 2.0
    assert measures["rollout/score/std"] == -1.0
    spread = float(rollout.scores.std(correction=0))
    assert measures["rollout/score_std"] == pytest.approx(spread, rel=1e-4), "of the total"


def test_the_share_of_scores_at_the_clip_is_logged():
    scores = itertools.cycle([7.0] * 12 + [1.0] * 4)
    trainer = fit(tiny_module(scorer=TokenScorer(lambda *_: next(scores))), 2)
    assert float(trainer.callback_metrics["rollout/clipped"]) == 0.75


def test_scores_of_a_function_are_not_clipped_unless_it_is_asked_for():
    function = FunctionScorer(lambda completions: [10.0 + row for row, _ in enumerate(completions)])
    model = TokenScorer(some_score)

    class SaysSoOnceBuilt(TokenScorer):
        normalized = False

        def build(self, base: Any = None) -> list[torch.nn.Module]:
            self.normalized = True
            return []

    for scorer, asked, clip in (
        (function, "auto", None),
        (model, "auto", 5),
        (model, None, None),
        (SaysSoOnceBuilt(some_score), "auto", 5),
        (WeightedScorer({"model": model, "function": function}), "auto", None),
        (WeightedScorer({"model": model, "two": SaysSoOnceBuilt(some_score)}), "auto", 5),
        (WeightedScorer({"model": model}, weights={"model": 10.0}), "auto", None),
        (WeightedScorer({"model": model}, weights={"model": -0.5}), "auto", 5),
    ):
        module = built(tiny_module(scorer=scorer, ppo=ppo_hparams(score_clip=asked)))
        assert module.score_clip == clip
    rollout = rollout_of(built(tiny_module(scorer=function)))
    assert rollout.rewards.sum(1).max() > 20


class OwnLoss(PPOModule):
    """The loss of PPO with a function's word on what is returned."""

    answer = staticmethod(lambda loss, measures: (loss, measures))

    def policy_loss(self, micro_batch, counts):
        return self.answer(*super().policy_loss(micro_batch, counts))


def with_answer(answer, **hparams) -> OwnLoss:
    module = tiny_module(cls=OwnLoss, ppo=ppo_hparams(**hparams))
    module.answer = answer
    return module


def test_a_target_without_the_kl_that_it_bounds_is_an_error():
    module = with_answer(lambda loss, _: (loss, {"ppo/policy_loss": loss}), target_approx_kl=0.1)
    with pytest.raises(
        ValueError, match=r"target_approx_kl=0\.1 .*OwnLoss\.policy_loss .*approx_kl"
    ):
        fit(module, 1)


def test_a_target_waits_for_the_first_step_of_the_policy():
    module = tiny_module(ppo=ppo_hparams(target_approx_kl=0.1, critic_warmup_iterations=1))
    assert fit(module, 2).callback_metrics["ppo/approx_kl"] is not None
    assert module.num_optimizer_steps > 2


def test_a_warmup_that_leaves_the_policy_no_iteration_is_refused():
    module = tiny_module(ppo=ppo_hparams(critic_warmup_iterations=2))
    with pytest.raises(ValueError, match=r"critic_warmup_iterations=2 leaves none of 2"):
        fit(module, 2)


@pytest.mark.parametrize(
    "answer",
    [
        lambda loss, measures: loss,
        lambda loss, measures: (loss, loss),
        lambda loss, measures: (loss, {"mine/x": 1.0}),
        lambda loss, measures: (loss, {"mine/x": loss.expand(2)}),
        lambda loss, measures: (loss.detach(), measures),
    ],
)
def test_a_loss_of_one_s_own_that_is_no_loss_with_measures_is_named(answer):
    with pytest.raises(TypeError, match=r"OwnLoss\.policy_loss returned .*\(loss, {name"):
        fit(with_answer(answer), 1)


@pytest.mark.parametrize(
    ("name", "found", "said"),
    [
        ("estimator", (torch.zeros(2, 2), None), r"return \(advantages, returns\)"),
        ("scorer", [1.0], r"return Scores\(total"),
        ("scorer", Scores(torch.zeros(16, 1), {}), r"total .*one score a row, of shape \[16\]"),
        ("scorer", Scores(torch.zeros(16), {"a": [1.0]}), r"a of \[1.0\]: return a tensor"),
        ("surrogate", torch.zeros(()), r"return PolicyLoss\(loss"),
    ],
)
def test_a_part_of_one_s_own_that_returns_something_else_is_named(name, found, said):
    methods = {"scale_free": False, "build": lambda *_: None, "__call__": lambda *_, **__: found}
    with pytest.raises((TypeError, ValueError), match=f"Own returned .*{said}"):
        fit(tiny_module(**{name: type("Own", (), methods)()}), 1)
    with pytest.raises(RuntimeError, match=r"call RecordedPPO\.configure_model\(\) first"):
        tiny_module().collect_rollout(prompts(), 0)
    with pytest.raises(TypeError, match="has no attribute scale_free"):
        tiny_module(estimator=len)


def test_an_optimizer_s_own_learning_rate_that_is_not_taken_is_warned_of(caplog):
    def own(groups):
        return torch.optim.AdamW(groups, lr=0.01)

    fit(tiny_module(optimizer=own), 1)
    warned = [r.getMessage() for r in caplog.records if "lr=0.01" in r.getMessage()]
    assert len(warned) == 1
    assert "0.001, 0.003" in warned[0]
    caplog.clear()
    fit(tiny_module(optimizer=own, ppo=ppo_hparams(learning_rate=0.01)), 1)
    fit(tiny_module(optimizer=lambda groups: torch.optim.SGD(groups, momentum=0.9)), 1)
    assert "learning rate" not in caplog.text
