"""The doctor on tiny real PPO runs: measures, alerts, actions, resume."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_lightning.callbacks.doctor.callback import Doctor, scored_by_model
from rlhf_lightning.callbacks.doctor.rollouts import Refusals
from rlhf_lightning.doctor.catalog import DETECTORS
from rlhf_lightning.doctor.interventions import ActionSettings
from rlhf_lightning.doctor.thresholds import DoctorThresholds
from rlhf_lightning.evaluation.final_metrics import score_spread
from rlhf_lightning.rollout.scorers.base import FunctionScorer, RewardModelScorer, WeightedScorer
from rlhf_lightning.runs.doctor_log import read_events
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.stopping import RunStoppedError
from tests.builders.stages import TokenScorer, ppo_hparams
from tests.callbacks.doctor_run import ITERATIONS, doctor_of, fit, second


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


def test_the_measures_are_those_of_the_rollout(watched):
    folder, module = watched
    rollout, row = module.rollouts[-1], read_metrics(RunFolder(folder).metrics)[-1]
    mask = rollout.response_mask
    surplus = (-rollout.logprobs - rollout.entropy)[mask].mean()
    assert row["doctor/sampler_bias"] == pytest.approx(float(surplus), rel=1e-4, abs=1e-6)
    scores = [second(ids[m], True) for ids, m in zip(rollout.response_tensors, mask, strict=True)]
    assert row["doctor/second_score"] == pytest.approx(sum(scores) / len(scores), rel=1e-5)
    mine = [s for s, d in zip(scores, rollout.domains, strict=True) if d == "a"]
    assert row["doctor/domain_score/a"] == pytest.approx(sum(mine) / len(mine), rel=1e-5)


@pytest.mark.filterwarnings("ignore::rlhf_lightning.hparams.UnusualHparamWarning")
def test_the_lag_of_the_sampler_is_no_mismatch_and_is_weighed_out(tmp_path):
    ppo = ppo_hparams(learning_rate=0.03, rollout_lag=1, off_policy="truncated")
    module = fit(tmp_path, doctor_of(tmp_path), ppo=ppo)
    biases = [row["doctor/sampler_bias"] for row in read_metrics(RunFolder(tmp_path).metrics)]
    raw = []
    for rollout, bias in zip(module.rollouts, biases, strict=True):
        mask = rollout.response_mask
        surplus = (-rollout.logprobs - rollout.entropy)[mask]
        weights = (rollout.logprobs - rollout.sampler_logprobs)[mask].exp()
        assert bias == pytest.approx(float((weights * surplus).mean()), rel=1e-4, abs=1e-5)
        raw.append(float(surplus.mean()))
    assert max(map(abs, raw)) > 0.5, "more than an alarm"


def test_a_reward_that_never_varies_is_an_alarm_at_the_third_iteration(tmp_path, caplog):
    fit(tmp_path, doctor_of(tmp_path), scorer=TokenScorer(lambda ids, finished: 1.0))
    rows = read_metrics(RunFolder(tmp_path).metrics)
    assert {row["rollout/score_std"] for row in rows} == {0.0}
    events = [e for e in read_events(RunFolder(tmp_path).doctor) if e.name == "constant_score"]
    assert [(e.iteration, e.kind, e.level) for e in events] == [
        (1, "alert", "warn"),
        (3, "alert", "alarm"),
    ]
    assert "scores were the same 3, above 2" in events[1].message
    logged = [record.getMessage() for record in caplog.records]
    brief = "doctor: iteration 3: Every response gets the same score [alarm]: 3 (above 2)"
    assert f"{brief}\n  what helps: {events[1].remedy}" in logged
    assert score_spread(rows) == {"rollout/score_std_max": 0.0}
    idle = {e.name: e.message for e in read_events(RunFolder(tmp_path).doctor) if e.kind == "idle"}
    assert "nothing to compare with" in idle["saturation"]
    assert idle["reward_hacking"] == "no second scorer"
    assert "missing_eos" not in idle


class ModelScorer(TokenScorer):
    holds = "model"


@pytest.mark.parametrize(
    ("scorer", "helps"),
    [(TokenScorer, "bound the length in it"), (ModelScorer, "balance its pairs")],
)
def test_advice_on_length_is_that_of_a_reward_model_only_where_one_scores(tmp_path, scorer, helps):
    fit(tmp_path, doctor_of(tmp_path), scorer=scorer(lambda ids, finished: float(len(ids))))
    events = read_events(RunFolder(tmp_path).doctor)
    alert = next(e for e in events if e.name == "length_bias" and e.kind == "alert")
    assert helps in alert.remedy


def test_a_weighted_sum_is_scored_by_a_model_if_a_part_is():
    function = FunctionScorer(lambda completions: [0.0])
    model = RewardModelScorer(lambda: None)
    assert not scored_by_model(WeightedScorer({"f": function}))
    assert scored_by_model(WeightedScorer({"f": function, "m": model}))


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
    assert not [name for name in alarms if DETECTORS[name].serious]
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
    slowed = next(e for e in events if "learning_rate_factor" in e.changes).iteration
    rates = [row["ppo/learning_rate"] for row in read_metrics(RunFolder(tmp_path).metrics)]
    plain = [module.algorithm.learning_rate * (1 - i / ITERATIONS) for i in range(ITERATIONS)]
    assert rates[: slowed + 1] == pytest.approx([*plain[:slowed], plain[slowed] / 2])


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


@pytest.mark.thorough
def test_an_alarm_that_stays_ends_the_fit_and_a_resumed_one_has_its_patience_again(tmp_path):
    actions = ActionSettings(on_alarm="stop", alarm_patience=1)
    limits = {"kl_high_warn": 1e-9, "kl_high_alarm": 1e-8, "clear_after": 9}
    ends = []
    for resume in (False, True):
        doctor = doctor_of(tmp_path, actions=actions, limits=limits)
        with pytest.raises(RunStoppedError, match="the doctor, after iteration"):
            fit(tmp_path, doctor, resume=resume)
        assert doctor.request is not None
        assert doctor.request.kind == "stop"
        ends.append(doctor.request.iteration)
        assert len(read_metrics(RunFolder(tmp_path).metrics)) == ends[-1]
        assert read_events(RunFolder(tmp_path).doctor)[-1].kind == "stop"
    assert ends[1] == ends[0] + 1 + actions.alarm_patience < ITERATIONS
    watches = doctor_of(tmp_path, limits=limits)
    fit(tmp_path, watches, resume=True)
    assert watches.request is None
    assert len(read_metrics(RunFolder(tmp_path).metrics)) == ITERATIONS


@pytest.mark.thorough
@pytest.mark.parametrize(("save_every", "kind", "back_to"), [(2, "rollback", 2), (3, "stop", None)])
def test_training_goes_back_only_to_before_the_alarm(tmp_path, save_every, kind, back_to):
    # KL is 0 at iteration 1 and never again: the alarm is raised at 3, and has stayed at 5.
    actions = ActionSettings(on_alarm="rollback", alarm_patience=2)
    limits = {"kl_high_warn": 1e-9, "kl_high_alarm": 1e-8}
    doctor = doctor_of(tmp_path, actions=actions, limits=limits)
    saves = {"every_n_iterations": save_every, "monitor": "doctor/quality", "mode": "max"}
    with pytest.raises(RunStoppedError) if kind == "stop" else nullcontext():
        fit(tmp_path, doctor, saves=saves)
    assert doctor.policy.alarmed_iterations == [3, 4, 5]
    assert doctor.request is not None
    assert (doctor.request.kind, doctor.request.value) == (kind, back_to)
    assert ("no checkpoint is from before an alarm" in doctor.request.message) == (kind == "stop")
