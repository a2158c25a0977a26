"""The doctor on tiny real PPO runs: measures, alerts, actions, resume, preflight."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lightning.callbacks.checkpoint_io import AtomicCheckpointIO
from rlhf_lightning.callbacks.checkpointing import IterationCheckpoint
from rlhf_lightning.callbacks.doctor.callback import Doctor
from rlhf_lightning.callbacks.doctor.preflight import PreflightError
from rlhf_lightning.callbacks.doctor.records import Refusals
from rlhf_lightning.callbacks.metrics_log import MetricsLog
from rlhf_lightning.callbacks.random_state import RandomState
from rlhf_lightning.data.datamodules import PromptDataModule
from rlhf_lightning.data.records import PromptRecord
from rlhf_lightning.evaluation.doctor.settings import ActionSettings, DoctorThresholds
from rlhf_lightning.evaluation.doctor.treatments import SERIOUS
from rlhf_lightning.models.precision import round_frozen_weights
from rlhf_lightning.rollout.generate import CachedGenerator
from rlhf_lightning.runs.doctor_log import read_events
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from tests.modules.tiny_ppo import STOPS, TokenScorer, tiny_models, tiny_module, trainer
from tests.tiny import EOS, PAD, prompt_rows, tiny_policy, tiny_tokenizer

ITERATIONS = 8


class Prompts:
    def records(self, kind: str, split: str) -> list[PromptRecord]:
        if split == "validation":
            return []
        rows = prompt_rows([3, 7, 1, 5, 8, 2, 4, 6, 9, 2], seed=4)
        texts = (" ".join(f"w{i}" for i in row) for row in rows)
        return [PromptRecord(text, domain="ab"[i % 2]) for i, text in enumerate(texts)]


def doctor_of(folder: Path, **options: Any) -> Doctor:
    limits = {"window": 2, "baseline_iterations": 2, "raise_after": 2} | options.pop("limits", {})
    return Doctor(RunFolder(folder), DoctorThresholds(**limits), **options)


def fit(
    folder: Path,
    doctor: Doctor,
    *,
    resume: bool = False,
    pad: int = PAD,
    precision: str = "32-true",
    saves: Mapping[str, Any] = MappingProxyType({}),
    **changes: Any,
) -> Any:
    """Train the tiny module with the callbacks that a run has, in their order."""
    torch.manual_seed(99 if resume else 1)
    module = tiny_module(pad=pad, **changes)
    data = PromptDataModule(
        Prompts(),
        tiny_tokenizer(pad_is_eos=pad == EOS),
        batch_size=8,
        num_iterations=ITERATIONS,
        max_prompt_length=16,
        seed=5,
    )
    run_folder = RunFolder(folder)
    the_trainer = trainer(
        enable_checkpointing=True,
        precision=precision,
        plugins=[AtomicCheckpointIO()],
        callbacks=[
            doctor,
            RandomState(),
            MetricsLog(run_folder),
            IterationCheckpoint(
                run_folder.checkpoints, **({"every_n_iterations": 2, "keep_last": 5} | dict(saves))
            ),
        ],
    )
    start = run_folder.last_checkpoint if resume else None
    the_trainer.fit(module, datamodule=data, ckpt_path=start, weights_only=True)
    return module


def second(ids: Tensor, finished: bool) -> float:
    return float(ids.float().mean())


@pytest.fixture(scope="module")
def watched(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("watched")
    doctor = doctor_of(
        folder,
        second_scorer=TokenScorer(second),
        refusals=Refusals(("a",), (r"\bw2\b",)),
        limits={
            "kl_high_warn": 1e-7,
            "kl_high_alarm": 1e6,
            "eos_warn_floor": 1.0,
            "eos_alarm_floor": 1.0,
            "hacking_warn": 1e6,
            "hacking_alarm": 1e6,
        },
    )
    return folder, fit(folder, doctor)


def test_the_measures_stand_in_the_row_of_their_iteration(watched):
    rows = read_metrics(RunFolder(watched[0]).metrics)
    assert len(rows) == ITERATIONS
    names = {
        "doctor/most_common",
        "doctor/sampler_bias",
        "doctor/harmful_prompts",
        "doctor/refusal_rate",
        "doctor/second_score",
        "doctor/second_correlation",
        "doctor/domain_score_a",
        "doctor/domain_score_b",
        "doctor/warnings",
        "doctor/alarms",
        "doctor/quality",
        "rollout/score",
    }
    assert all(names <= set(row) for row in rows)
    assert [row["iteration"] for row in rows] == list(range(1, ITERATIONS + 1))


def test_the_measures_are_those_of_the_rollout(watched):
    folder, module = watched
    rollout, row = module.rollouts[-1], read_metrics(RunFolder(folder).metrics)[-1]
    mask = rollout.response_mask
    surplus = (-rollout.logprobs - rollout.entropy)[mask].mean()
    assert row["doctor/sampler_bias"] == pytest.approx(float(surplus), rel=1e-4, abs=1e-6)
    scores = [second(ids[m], True) for ids, m in zip(rollout.response_tensors, mask, strict=True)]
    assert row["doctor/second_score"] == pytest.approx(sum(scores) / len(scores), rel=1e-5)
    mine = [s for s, d in zip(scores, rollout.domains, strict=True) if d == "a"]
    assert row["doctor/domain_score_a"] == pytest.approx(sum(mine) / len(mine), rel=1e-5)


def test_an_alert_is_written_with_value_unit_cause_and_remedy(watched):
    events = read_events(RunFolder(watched[0]).doctor)
    assert events[0].kind == "watch"
    alert = next(e for e in events if e.kind == "alert" and e.name == "kl_high")
    assert alert.level == "warn"
    assert alert.value > alert.threshold == 1e-7
    assert alert.unit == "nats a token"
    assert alert.cause
    assert alert.remedy
    assert alert.iteration >= 2


def test_alerts_make_a_checkpoint_worse_and_only_serious_alarms_worse_than_that(watched):
    rows = read_metrics(RunFolder(watched[0]).metrics)
    seconds = [row["doctor/second_score"] for row in rows]
    alerts = [e for e in read_events(RunFolder(watched[0]).doctor) if e.kind == "alert"]
    alarms = {e.name for e in alerts if e.level == "alarm"}
    assert "missing_eos" in alarms
    assert not alarms & set(SERIOUS)
    assert rows[-1]["doctor/alarms"] >= 1
    for before, row, mean in zip(seconds, rows[1:], seconds[1:], strict=False):
        alert = row["doctor/warnings"] + row["doctor/alarms"] > 0
        expected = (before + mean) / 2 - 100 * alert
        assert row["doctor/quality"] == pytest.approx(expected, rel=1e-6)


def test_watching_changes_nothing_that_is_trained(watched, tmp_path):
    class Nobody(Doctor):
        def on_train_batch_end(self, *args: Any) -> None:
            pass

    alone = fit(tmp_path, Nobody(RunFolder(tmp_path), DoctorThresholds()))
    for name, value in watched[1].state_dict().items():
        assert torch.equal(alone.state_dict()[name], value), name


ACTS = {
    "kl_high_warn": 1e-7,
    "kl_high_alarm": 1e6,
    "duplicates_warn": 0.01,
    "duplicates_alarm": 0.99,
    "update_warn": 1e-9,
    "update_alarm": 1e6,
}


def acting(folder: Path, **changes: Any) -> Doctor:
    actions = ActionSettings(**({"cooldown": 2, "max_diversity": 0.1} | changes))
    return doctor_of(folder, actions=actions, limits=ACTS)


def test_actions_turn_the_controls_and_act_on_the_next_rollout(tmp_path):
    module = fit(tmp_path, acting(tmp_path))
    controls = module.controls
    assert controls.kl_coef == 0.2
    assert controls.diversity_bonus == 0.1
    assert controls.learning_rate_factor == 0.125
    assert controls.temperature > module.sampling.temperature
    events = read_events(RunFolder(tmp_path).doctor)
    first = next(e for e in events if "kl_coef" in e.changes)
    assert first.changes["kl_coef"] == [0.05, 0.1]
    coefs = [row["ppo/kl_coef"] for row in read_metrics(RunFolder(tmp_path).metrics)]
    assert coefs[: first.iteration] == pytest.approx([0.05] * first.iteration)
    assert coefs[first.iteration] == pytest.approx(0.1)


def test_a_run_resumed_in_the_middle_is_bitwise_the_run_never_stopped(tmp_path):
    whole = fit(tmp_path / "whole", acting(tmp_path / "whole"))

    def die(tr: Any, module: Any, batch: Any, index: int) -> None:
        if index == 5:
            raise KeyError("killed")

    part = tmp_path / "part"
    dies: Any = acting(part)
    dies.on_train_batch_start = die
    with pytest.raises(KeyError, match="killed"):
        fit(part, dies)
    doctor = acting(part)
    resumed = fit(part, doctor, resume=True)
    assert resumed.controls == whole.controls
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name
    one, other = (RunFolder(tmp_path / name) for name in ("whole", "part"))
    assert read_events(one.doctor) == read_events(other.doctor)
    for a, b in zip(read_metrics(one.metrics), read_metrics(other.metrics), strict=True):
        for name in a.keys() | b.keys():
            if not name.startswith(("time/", "throughput/")):
                assert a[name] == b[name], (name, a["iteration"])


def test_an_alarm_that_stays_ends_the_fit_and_asks_for_what_comes_next(tmp_path):
    actions = ActionSettings(on_alarm="stop", alarm_patience=2)
    limits = {"kl_high_warn": 1e-9, "kl_high_alarm": 1e-8}
    doctor = doctor_of(tmp_path, actions=actions, limits=limits)
    fit(tmp_path, doctor)
    assert doctor.request is not None
    assert doctor.request.kind == "stop"
    assert len(read_metrics(RunFolder(tmp_path).metrics)) == doctor.request.iteration < ITERATIONS
    assert read_events(RunFolder(tmp_path).doctor)[-1].kind == "stop"


@pytest.mark.parametrize(("save_every", "kind", "back_to"), [(2, "rollback", 2), (3, "stop", None)])
def test_training_goes_back_only_to_before_the_alarm(tmp_path, save_every, kind, back_to):
    # KL is 0 at iteration 1 and never again: the alarm is raised at 3, and has stayed at 5.
    actions = ActionSettings(on_alarm="rollback", alarm_patience=2)
    limits = {"kl_high_warn": 1e-9, "kl_high_alarm": 1e-8}
    doctor = doctor_of(tmp_path, actions=actions, limits=limits)
    saves = {"every_n_iterations": save_every, "monitor": "doctor/quality", "mode": "max"}
    fit(tmp_path, doctor, saves=saves)
    assert doctor.practice.ill == [3, 4, 5]
    assert doctor.request is not None
    assert (doctor.request.kind, doctor.request.checkpoint) == (kind, back_to)
    assert ("no checkpoint from before an alarm" in doctor.request.reason) == (kind == "stop")


def test_the_state_is_plain_values(watched, tmp_path):
    checkpoint = torch.load(RunFolder(watched[0]).last_checkpoint, weights_only=True)
    state = checkpoint["callbacks"]["Doctor"]
    assert json.loads(json.dumps(state))["events"] == [
        asdict(event) for event in read_events(RunFolder(watched[0]).doctor)
    ]


# -- preflight --------------------------------------------------------------------------------


def test_a_sane_run_passes_the_preflight_and_trains_as_without_it(watched, tmp_path):
    doctor = doctor_of(tmp_path, preflight=True)
    # Random weights say the pad token as often as any other, unless it is EOS.
    module = fit(tmp_path, doctor, pad=EOS)
    checks = [e for e in read_events(RunFolder(tmp_path).doctor) if e.kind == "check"]
    assert len(checks) == 7
    assert {c.level for c in checks} == {"healthy"}, checks
    assert len(module.rollouts) == ITERATIONS + 1, "one more was made to be looked at"
    for name, value in watched[1].state_dict().items():
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
    module = fit(tmp_path, doctor, pad=EOS, precision="bf16-mixed", models=models)
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


def test_a_pad_token_that_answers_hold_is_refused(tmp_path):
    assert refused(tmp_path, pad=PAD) == "padding"


def test_a_scorer_that_gives_all_answers_the_same_is_refused(tmp_path):
    assert refused(tmp_path, scorer=TokenScorer(lambda ids, done: 0.7)) == "scores differ"


def test_a_wrong_stop_token_is_refused(tmp_path):
    assert "answers end" in refused(tmp_path, generator=CachedGenerator((39,), EOS))


def test_a_reference_from_other_weights_is_refused(tmp_path):
    def models() -> Any:
        return replace(tiny_models(), reference=tiny_policy("gpt2", seed=7))

    assert refused(tmp_path, models=models) == "KL 0"
    later = tmp_path / "later round"
    later.mkdir()
    fit(later, doctor_of(later, preflight=True, goes_on=True), pad=EOS, models=models)


def test_a_truncating_sampler_is_refused(tmp_path):
    class TopK(CachedGenerator):
        def _truncated(self, logits: Tensor, temperature: float) -> Tensor:
            least = logits.topk(2).values[:, -1:]
            return logits.masked_fill(logits < least, -math.inf)

    assert "samples are the policy's" in refused(tmp_path, generator=TopK(STOPS, EOS))
