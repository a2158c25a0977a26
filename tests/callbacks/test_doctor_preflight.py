"""The preflight on tiny real PPO runs: what it lets pass, and what it refuses."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lightning.callbacks.doctor.rollouts import PreflightError
from rlhf_lightning.doctor.preflight_checks import FirstRollout, check_first_rollout
from rlhf_lightning.models.precision import round_frozen_weights
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.runs.doctor_log import read_events
from rlhf_lightning.runs.folder import RunFolder
from tests.builders.models import EOS, PAD, tiny_policy
from tests.builders.stages import STOPS, TokenScorer, tiny_models
from tests.callbacks.doctor_run import ITERATIONS, doctor_of, fit, second


@pytest.mark.thorough
def test_a_sane_run_passes_the_preflight_and_trains_as_without_it(tmp_path):
    alone = fit(tmp_path / "alone", doctor_of(tmp_path / "alone"))
    doctor = doctor_of(tmp_path, preflight=True)
    # Random weights say the pad token as often as any other, unless it is EOS.
    module = fit(tmp_path, doctor, pad=EOS)
    checks = [e for e in read_events(RunFolder(tmp_path).doctor) if e.kind == "check"]
    assert len(checks) == 7
    assert {c.level for c in checks} == {"healthy"}, checks
    spread = module.rollouts[0].scores.double().std(correction=0)
    assert any(f"standard deviation {float(spread):.3g}" in c.message for c in checks)
    assert len(module.rollouts) == ITERATIONS + 1, "one more was made to be looked at"
    for name, value in alone.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name


def test_the_preflight_looks_at_the_precision_that_trains(tmp_path):
    def models() -> Any:
        made = tiny_models()
        round_frozen_weights(made.reference.model, "bf16-mixed")
        return made

    dtypes = []

    class Second(TokenScorer):
        def __call__(self, answers: Any) -> Any:
            on = torch.is_autocast_enabled("cpu")
            dtypes.append(torch.get_autocast_dtype("cpu") if on else None)
            return super().__call__(answers)

    doctor = doctor_of(tmp_path, preflight=True, second_scorer=Second(second))
    module = fit(
        tmp_path, doctor, pad=EOS, precision="bf16-mixed", models=models, seed=4
    )  # half its responses end
    checks = {e.name: e for e in read_events(RunFolder(tmp_path).doctor) if e.kind == "check"}
    assert {c.level for c in checks.values()} == {"healthy"}, checks
    looked, first = module.rollouts[0], module.rollouts[1]
    assert torch.equal(looked.sequences, first.sequences)
    assert torch.equal(looked.logprobs, first.logprobs)
    assert torch.equal(looked.logprobs, looked.ref_logprobs)
    for name in ("ratio 1", "KL 0"):
        assert " 0 nats a token" in checks[name].message
    assert dtypes == [torch.bfloat16] * ITERATIONS


def refused(folder: Path, **changes: Any) -> str:
    with pytest.raises(PreflightError) as error:
        fit(folder, doctor_of(folder, preflight=True), **({"pad": EOS} | changes))
    failed = [
        e.name for e in read_events(RunFolder(folder).doctor) if e.kind == "check" and e.remedy
    ]
    assert failed
    assert all(name in str(error.value) for name in failed)
    assert not RunFolder(folder).metrics.exists()
    return ", ".join(failed)


class MorePads(CachedGenerator):
    def _truncated(self, logits: Tensor, temperature: float) -> Tensor:
        logits = logits.clone()
        logits[:, PAD] += 4
        return logits


def test_a_pad_token_that_answers_hold_is_refused(tmp_path):
    assert "padding" in refused(tmp_path, pad=PAD, generator=MorePads(STOPS, PAD))


def test_an_untrained_policy_is_blamed_for_what_chance_does_not_explain():
    even = {"entropy_share": 0.97, "vocabulary": 50_000, "finished": 0.0, "shortest": 40}
    found = {
        "responses end": {"stop_errors": 1},
        "padding": {"padded": 0.1},
        "lengths": {"length_mean": 1.0},
        "scores differ": {"score_std": 0.0},
    }
    for name, fault in found.items():
        failed = [c.name for c in check_first_rollout(first(**even, **fault)) if not c.passed]
        assert failed == [name]
    no_eos = [c.name for c in check_first_rollout(first(**even, eos_known=False)) if not c.passed]
    assert no_eos == ["responses end"]


def first(**changes: Any) -> FirstRollout:
    sound = {
        "ratio_error": 0.0,
        "reference_error": 0.0,
        "finished": 0.9,
        "stop_errors": 0,
        "padded": 0.0,
        "eos_known": True,
        "score_mean": 0.0,
        "score_std": 1.0,
        "finite": True,
        "length_mean": 20.0,
        "shortest": 3,
        "longest": 40,
        "max_new_tokens": 40,
        "sampler_bias": 0.0,
        "sampler_error": 0.01,
        "tolerance": 0.0,
    }
    return FirstRollout(**(sound | changes))


def test_a_scorer_that_gives_all_answers_the_same_is_refused(tmp_path):
    assert refused(tmp_path, scorer=TokenScorer(lambda ids, done: 0.7)) == "scores differ"


def test_a_wrong_stop_token_is_refused(tmp_path):
    assert "responses end" in refused(tmp_path, generator=CachedGenerator((39,), EOS))


@pytest.mark.thorough
def test_a_reference_from_other_weights_is_refused(tmp_path):
    def models() -> Any:
        return replace(tiny_models(), reference=tiny_policy("gpt2", seed=7))

    assert refused(tmp_path, models=models) == "KL 0"
    later = tmp_path / "later round"
    later.mkdir()

    def of_a_later_round() -> Any:
        return replace(models(), same_source=False)

    fit(later, doctor_of(later, preflight=True), pad=EOS, models=of_a_later_round)


def test_a_truncating_sampler_is_refused(tmp_path):
    class TopK(CachedGenerator):
        def _truncated(self, logits: Tensor, temperature: float) -> Tensor:
            least = logits.topk(2).values[:, -1:]
            return logits.masked_fill(logits < least, -math.inf)

    assert "samples are the policy's" in refused(tmp_path, generator=TopK(STOPS, EOS))
