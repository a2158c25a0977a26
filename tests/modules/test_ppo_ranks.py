"""Two ranks with half the prompts each do what one rank does with all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_lightning.modules import on_policy
from rlhf_lightning.modules.metrics import RunningMeans
from rlhf_lightning.rollout import estimators
from tests.builders.models import flat_parameters
from tests.builders.ranks import SimulatedRanks
from tests.builders.stages import (
    ROWS,
    average_over_ranks,
    built,
    ppo_hparams,
    prompts,
    tiny_module,
    without_trainer,
)


def train(monkeypatch: pytest.MonkeyPatch, size: int) -> list[Any]:
    ranks = SimulatedRanks(monkeypatch, size)
    average_over_ranks(monkeypatch, size)
    # Micro-batches of 3 rows of one bucket: ranks have different numbers of them.
    hparams = ppo_hparams(num_minibatches=2, micro_batch_size=3, kl_target=2.0, kl_horizon=40)
    # Not inside the ranks: random weights draw from a generator that threads share.
    modules = [without_trainer(tiny_module(ppo=hparams)) for _ in range(size)]
    share = ROWS // size

    def one(rank: int) -> Any:
        for iteration in range(2):
            rows = slice(rank * share, (rank + 1) * share)
            modules[rank].training_step(prompts(iteration)[rows], iteration)
        return modules[rank]

    return ranks.run(one)


def joined(modules: list[Any], iteration: int, name: str) -> torch.Tensor:
    """Return one field of all ranks' rows, padded to one width."""
    parts = [getattr(module.rollouts[iteration], name) for module in modules]
    if parts[0].dim() == 1:
        return torch.cat(parts)
    width = max(part.shape[1] for part in parts)
    return torch.cat([torch.nn.functional.pad(p, (0, width - p.shape[1])) for p in parts])


@pytest.fixture(scope="module")
def one_and_two():
    with pytest.MonkeyPatch.context() as monkeypatch:
        (one,) = train(monkeypatch, 1)
        two = train(monkeypatch, 2)
        return one, two


def test_two_ranks_sample_the_same_tokens_and_whiten_with_the_same_moments(one_and_two):
    one, two = one_and_two
    assert torch.equal(joined(two, 0, "response_tensors"), joined([one], 0, "response_tensors"))
    for iteration in (0, 1):
        for name in ("logprobs", "rewards", "advantages", "returns", "scores"):
            got, wanted = joined(two, iteration, name), joined([one], iteration, name)
            torch.testing.assert_close(got, wanted, rtol=0, atol=2e-5)


def test_two_ranks_take_the_same_steps_as_one(one_and_two):
    one, two = one_and_two
    start = flat_parameters(built(tiny_module()))
    moved = flat_parameters(one) - start
    assert moved.abs().max() > 3e-3
    for rank in two:
        torch.testing.assert_close(flat_parameters(rank) - start, moved, rtol=0, atol=1e-5)
    assert torch.equal(flat_parameters(two[0]), flat_parameters(two[1]))
    for ours, theirs in zip(two[0].steps, one.steps, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-5)


def test_two_ranks_log_and_control_the_same(one_and_two):
    one, two = one_and_two
    assert one.controls.kl_coef != one.algorithm.kl_coef, "the controller must have acted"
    for rank in two:
        assert rank.controls.kl_coef == pytest.approx(one.controls.kl_coef, rel=1e-5)
        for ours, theirs in zip(rank.logged, one.logged, strict=True):
            for name, value in theirs.items():
                if not name.startswith(("time/", "throughput/")):
                    assert float(ours[name]) == pytest.approx(float(value), rel=1e-4, abs=1e-5), (
                        name
                    )
    assert two[0].controls == two[1].controls


def test_whitening_each_rank_alone_would_take_other_steps(one_and_two, monkeypatch):
    # The mutation of the tests above.
    def local_moments(x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x[mask].mean(), x[mask].var(unbiased=False)

    monkeypatch.setattr(estimators, "global_moments", local_moments)
    one, _ = one_and_two
    two = train(monkeypatch, 2)
    assert (flat_parameters(two[0]) - flat_parameters(one)).abs().max() > 1e-3


def test_ranks_with_few_micro_batches_run_as_many_forwards_as_the_others(monkeypatch):
    # Sharded forwards are collective: a rank that runs one less leaves the others waiting.
    # Equal rows have unequal micro-batches only by their tokens, on CUDA: here unequal rows are let
    # through, which a run refuses.
    monkeypatch.setattr(on_policy, "gathered", lambda value: [value])
    ranks = SimulatedRanks(monkeypatch, 2)
    shares = [prompts()[:2], prompts()[2:]]
    hparams = ppo_hparams(micro_batch_size=2)
    modules = [without_trainer(tiny_module(ppo=hparams)) for _ in range(2)]
    calls = [0, 0]

    def one(rank: int) -> None:
        module = modules[rank]

        def count(*_: Any) -> None:
            calls[rank] += 1

        module.reference.register_forward_hook(count)
        module.policy.register_forward_hook(count)
        rollout, _ = module.collect_rollout(shares[rank], 0)
        module.update(rollout, RunningMeans(), iteration=0, epoch=0)

    ranks.run(one)
    assert calls[0] == calls[1] > 6
