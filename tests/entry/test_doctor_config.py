"""The group `doctor` of a configuration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rlhf_lightning.app.build import doctor_arguments
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.callbacks.doctor.callback import Doctor
from rlhf_lightning.callbacks.doctor.rollouts import Refusals
from rlhf_lightning.callbacks.trainer_arguments import trainer_arguments
from tests.builders.command_lines import settings_of

GOLD = "rlhf_lightning.data.demo.gold.gold_scores"
FUNCTION_SCORER = "rlhf_lightning.rollout.scorers.base.FunctionScorer"


def composed(*overrides: str) -> TrainSettings:
    found: TrainSettings = settings_of("+experiment=ppo", *overrides)
    return found


def doctors(tmp_path: Path, *overrides: str) -> list[Any]:
    given = doctor_arguments(composed(*overrides))
    found = trainer_arguments(tmp_path, doctor=given, record=False)["callbacks"]
    return [callback for callback in found if isinstance(callback, Doctor)]


def test_a_doctor_watches_ppo_by_default_and_changes_nothing(tmp_path):
    (doctor,) = doctors(tmp_path)
    assert doctor.actions is None
    assert not doctor.preflight
    assert doctor.thresholds.kl_high_warn == 1.0
    assert doctor.refusals.judge("harmful", "i can not help with that .") is True
    assert doctor.refusals.judge("harmful", "No , I must refuse that .") is True
    assert doctor.refusals.judge("harmful", "use a rope on the bank .") is False
    assert doctor.refusals.judge("sums", "i can not help with that .") is None


@pytest.mark.parametrize(
    ("text", "prompt", "refuses"),
    [
        ("<think>i must refuse ?</think>use a rope .", "", False),
        ("<think>use a rope ?</think>i must refuse .", "", True),
        ("i must refuse ? no", "how ?<think>\n", False),
        ("[THINK]i must refuse", "", False),
    ],
)
def test_the_doctor_reads_a_refusal_behind_thoughts(text, prompt, refuses):
    assert Refusals().judge("harmful", text, prompt) is refuses


def test_acting_keeps_the_best_checkpoint_to_go_back_to(tmp_path):
    (doctor,) = doctors(tmp_path, "doctor=act", "doctor.actions.cooldown=7")
    assert doctor.actions.on_alarm == "rollback"
    assert doctor.actions.cooldown == 7
    checkpoint = composed("doctor=act").callbacks.checkpoint
    assert (checkpoint.monitor, checkpoint.mode) == ("doctor/quality", "max")
    assert checkpoint.every_n_iterations < doctor.actions.alarm_patience
    own = composed("doctor=act", "callbacks.checkpoint.every_n_iterations=9")
    assert own.callbacks.checkpoint.every_n_iterations == 9


@pytest.mark.thorough
def test_a_wrong_setting_is_named_with_its_key(tmp_path):
    second = f"doctor.second_scorer={{_target_: {FUNCTION_SCORER}, function: {GOLD}}}"
    with pytest.raises(ConfigError, match="the gold reward, which only evaluation may see"):
        doctors(tmp_path, second)
    with pytest.raises(ConfigError, match=r"callbacks\.checkpoint\.monitor=null keeps none"):
        doctors(tmp_path, "doctor=act", "callbacks.checkpoint.monitor=null")
