"""`rollout_lag=1`: an iteration trains on what was sampled before the update of the one before."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor

from rlhf_lightning.batches import Generation, PromptBatch
from rlhf_lightning.hparams import GRPOHparams, PPOHparams, UnusualHparamWarning
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.generators.vllm import VllmGenerator
from rlhf_lightning.rollout.pending import PendingGeneration
from tests.builders.library_runs import assert_same_rollouts, assert_same_weights
from tests.builders.models import PAD, flat_parameters, prompt_batch, prompt_rows
from tests.builders.ranks import ROOT, SimulatedRanks
from tests.builders.stages import (
    STOPS,
    average_over_ranks,
    grouped,
    grpo_hparams,
    ppo_hparams,
    tiny_grpo,
    tiny_models,
    tiny_module,
    without_trainer,
)
from tests.modules.test_ppo_resume import ITERATIONS, KilledError, run
from tests.own.stale import StaleGenerator

LAGGED = {"rollout_lag": 1, "off_policy": "truncated"}
pytestmark = pytest.mark.filterwarnings("ignore::rlhf_lightning.hparams.UnusualHparamWarning")


@dataclass(frozen=True)
class Call:
    row_ids: list[int]
    iteration: int
    weights: Tensor
    generation: Generation


class Noted(CachedGenerator):
    """Notes what it sampled, for which rows, by which noise and with which weights."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.calls: list[Call] = []

    def __call__(self, model: Any, prompts: PromptBatch, *, noise: Any, **options: Any) -> Any:
        result = super().__call__(model, prompts, noise=noise, **options)
        weights = flat_parameters(model).clone()
        self.calls.append(Call(prompts.row_ids.tolist(), noise.iteration, weights, result))
        return result


class Weights(L.Callback):
    """Keeps the policy's weights before each iteration."""

    def __init__(self) -> None:
        self.before: list[Tensor] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        self.before.append(flat_parameters(pl_module.policy.model).clone())


@pytest.fixture(scope="module")
def lagged(tmp_path_factory) -> Any:
    weights, generator = Weights(), Noted(STOPS, PAD)
    folder = tmp_path_factory.mktemp("lagged")
    _, module, _ = run(folder, callback=weights, generator=generator, **LAGGED)
    return module, weights.before, generator.calls


def test_each_iteration_is_sampled_once_by_the_policy_after_the_update_two_before(lagged):
    _, before, calls = lagged
    assert [call.row_ids for call in calls] == [
        list(range(i * 8, i * 8 + 8)) for i in range(ITERATIONS)
    ]
    assert [call.iteration for call in calls] == list(range(ITERATIONS))
    for i, call in enumerate(calls):
        # Before iteration i - 1 the weights are those after the update of iteration i - 2.
        assert torch.equal(call.weights, before[max(i - 1, 0)])
        assert i < 2 or not torch.equal(call.weights, before[i])


def test_the_rollouts_are_what_was_sampled_and_old_log_probabilities_those_of_now(lagged):
    module, _, calls = lagged
    assert len(module.rollouts) == ITERATIONS
    gaps = []
    for rollout, call in zip(module.rollouts, calls, strict=True):
        assert rollout.row_ids.tolist() == call.row_ids
        assert torch.equal(rollout.response_mask, call.generation.response_mask)
        own = call.generation.sequences[:, -rollout.response_mask.shape[1] :]
        assert torch.equal(rollout.response_tensors, own)
        assert torch.equal(rollout.sampler_logprobs, call.generation.logprobs)
        assert torch.equal(rollout.finish_reason, call.generation.finish_reason)
        gaps.append(float((rollout.logprobs - rollout.sampler_logprobs).abs().max()))
    assert gaps[0] < 1e-5, "the first iteration has nothing before it"
    assert min(gaps[1:]) > 1e-2
    assert module.steps[0]["ppo/clipfrac"] == 0
    # The ratio to the old policy still starts at 1 in each iteration.
    firsts = [step for number, step in enumerate(module.steps) if number % 4 == 0]
    assert [step["ppo/approx_kl"] for step in firsts] == [0.0] * ITERATIONS


def test_a_killed_run_with_a_lag_goes_on_bitwise(lagged, tmp_path: Path):
    whole, _, calls = lagged
    with pytest.raises(KilledError):
        run(tmp_path, die_at=3, **LAGGED)
    generator = Noted(STOPS, PAD)
    _, module, _ = run(tmp_path, resume=True, generator=generator, **LAGGED)
    assert len(module.rollouts) == ITERATIONS - 2
    # Iteration 3 was sampled before the kill: it comes out of the checkpoint.
    assert [call.row_ids for call in generator.calls] == [calls[3].row_ids]
    assert_same_run(module, whole)
    assert module.controls == whole.controls


class AtOnce(VllmGenerator):
    """Waits for the servers before it returns."""

    begin = None  # type: ignore[assignment]


def served(cls: type = VllmGenerator, **environment: Any) -> dict[str, Any]:
    folder = ROOT / "tests/builders/vllm_stand_in"
    replica = {"PYTHONPATH": folder, "OMP_NUM_THREADS": 1, **environment}
    generator = cls(STOPS, PAD, python=sys.executable, replicas=[replica], logprob_tolerance=1e-4)
    return LAGGED | {"models": lambda: tiny_models("llama"), "generator": generator}


@pytest.fixture(scope="module")
def served_at_once(tmp_path_factory) -> Any:
    return run(tmp_path_factory.mktemp("served"), **served(AtOnce))[1]


def assert_same_run(module: Any, whole: Any) -> None:
    assert_same_rollouts(module.rollouts, whole.rollouts)
    assert module.steps == whole.steps[-len(module.steps) :]
    assert_same_weights(module, whole)


class Opened(L.Callback):
    """Lets the engine write only when an iteration has begun with its updates."""

    def __init__(self, gate: Path) -> None:
        self.gate = gate
        self.under_way: list[bool] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, number: int) -> None:
        updates, self.number = pl_module.update, number

        def update(*arguments: Any, **options: Any) -> Any:
            if len(self.under_way) == self.number:
                self.under_way.append(not pl_module.generator.under_way.done())
                self.gate.touch()
            return updates(*arguments, **options)

        if number == 0:
            self.gate.touch()  # the responses of the first iteration have none to wait for
            pl_module.update = update


def test_servers_write_the_next_responses_while_the_policy_is_updated(served_at_once, tmp_path):
    opened = Opened(tmp_path / "gate")
    _, module, _ = run(tmp_path, callback=opened, **served(STAND_IN_GATE=opened.gate))
    assert opened.under_way == [True] * (ITERATIONS - 1) + [False], "nothing after the last one"
    assert len(module.rollouts) == ITERATIONS
    assert_same_run(module, served_at_once)


def test_a_killed_run_whose_responses_servers_were_writing_goes_on_bitwise(
    served_at_once, tmp_path
):
    with pytest.raises(KilledError):
        run(tmp_path, die_at=3, **served())
    _, module, _ = run(tmp_path, resume=True, **served())
    assert len(module.rollouts) == ITERATIONS - 2
    assert_same_run(module, served_at_once)


def test_a_checkpoint_without_what_is_pending_is_refused(tmp_path: Path):
    with pytest.raises(KilledError):
        run(tmp_path, die_at=3)
    with pytest.raises(ValueError, match=r"has no pending: .* resume=never"):
        run(tmp_path, resume=True, **LAGGED)


def batch(iteration: int, *, rows: int = 8) -> PromptBatch:
    """Return the prompts of an iteration with those of the next one as spares."""
    parts = [
        prompt_batch(prompt_rows(range(1, rows + 1), seed=n), width=10, first_row=n * rows)
        for n in (iteration, iteration + 1)
    ]
    spare = [torch.full((rows,), bool(n)) for n in (0, 1)]
    return PromptBatch.cat(
        [replace(part, spare=which) for part, which in zip(parts, spare, strict=True)]
    )


def group_batch(iteration: int) -> PromptBatch:
    whole = batch(iteration)
    return replace(grouped(whole), spare=whole.spare.repeat_interleave(4))


def share(whole: PromptBatch, rank: int, size: int) -> PromptBatch:
    own, following = whole[~whole.spare], whole[whole.spare]
    rows = len(own) // size
    return PromptBatch.cat([x[rank * rows : (rank + 1) * rows] for x in (own, following)])


def with_steps(module: Any, iterations: int) -> Any:
    module = without_trainer(module)
    module._trainer = SimpleNamespace(
        strategy=module._trainer.strategy, estimated_stepping_batches=iterations
    )
    return module


def train_ranks(
    monkeypatch: pytest.MonkeyPatch, size: int, stage: str, *, iterations: int = 3
) -> list[Any]:
    ranks = SimulatedRanks(monkeypatch, size)
    average_over_ranks(monkeypatch, size)
    if stage == "ppo":
        made = [tiny_module(ppo=ppo_hparams(**LAGGED)) for _ in range(size)]
    else:
        made = [tiny_grpo(grpo=grpo_hparams(num_epochs=2, **LAGGED)) for _ in range(size)]
    modules = [with_steps(module, iterations) for module in made]
    states: list[Any] = [None] * size

    def one(rank: int) -> None:
        for iteration in range(iterations):
            prompts = batch(iteration) if stage == "ppo" else group_batch(iteration)
            modules[rank].training_step(share(prompts, rank, size), iteration)
            if iteration == 1:  # as a checkpoint of all ranks, and a resume from it
                states[rank] = modules[rank].pending.state_dict()
                modules[rank].pending = PendingGeneration()
                modules[rank].pending.load_state_dict(states[rank])

    ranks.run(one)
    for module, state in zip(modules, states, strict=True):
        module.saved = state
    return modules


@pytest.mark.parametrize("stage", ["ppo", "grpo"])
def test_ranks_take_the_steps_of_one_and_save_the_rows_of_all(monkeypatch, stage):
    (one,) = train_ranks(monkeypatch, 1, stage)
    two = train_ranks(monkeypatch, 2, stage)
    for module in two:
        assert (flat_parameters(module) - flat_parameters(one)).abs().max() < 2e-5
        assert module.saved["iteration"] == one.saved["iteration"] == 2
        assert set(module.saved["rows"]) == set(one.saved["rows"])
        for name, value in module.saved["rows"].items():
            expected = one.saved["rows"][name]
            if name == "responses":  # what stands off the mask means nothing
                off = ~one.saved["rows"]["response_mask"]
                value, expected = value.masked_fill(off, 0), expected.masked_fill(off, 0)
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-4)
    widths = [module.rollouts[2].response_mask.shape[1] for module in two]
    masks = [module.rollouts[2].response_mask for module in two]
    assert widths == [int(mask.sum(-1).max()) for mask in masks], "cut to the rank's own longest"


def test_prompts_and_responses_that_are_missing_or_others_are_errors():
    module = with_steps(tiny_module(ppo=ppo_hparams(**LAGGED)), 4)
    with pytest.raises(ValueError, match=r"rollout_lag=1 needs .* has 0 for 8: .*PromptData"):
        module.training_step(batch(0)[:8], 0)
    with pytest.raises(RuntimeError, match="responses of iteration 3 are missing"):
        module.training_step(batch(2), 2)
    module.training_step(batch(0), 0)
    with pytest.raises(ValueError, match="iteration 2 were sampled for other prompts"):
        module.training_step(batch(2), 1)


def test_a_lag_wants_a_correction_and_no_resampling():
    for cls in (PPOHparams, GRPOHparams):
        with pytest.warns(UnusualHparamWarning, match="rollout_lag=1 trains on samples of older"):
            cls(rollout_lag=1)
    with pytest.raises(ValueError, match="max_resampling_rounds=2 and rollout_lag=1"):
        GRPOHparams(max_resampling_rounds=2, **LAGGED)


def test_a_generator_that_lags_by_one_samples_what_rollout_lag_samples(lagged, tmp_path):
    module, *_ = lagged
    generator = StaleGenerator(STOPS, PAD, lag=1)
    _, stale, _ = run(tmp_path, generator=generator, off_policy="truncated")
    for ours, theirs in zip(stale.rollouts, module.rollouts, strict=True):
        assert torch.equal(ours.sequences, theirs.sequences)
        assert torch.equal(ours.sampler_logprobs, theirs.sampler_logprobs)
    assert torch.equal(flat_parameters(stale), flat_parameters(module))
    _, fresh, _ = run(tmp_path / "fresh", off_policy="truncated")
    assert not torch.equal(flat_parameters(stale), flat_parameters(fresh))
