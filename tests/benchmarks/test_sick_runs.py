"""Each disease is noticed in time, and healthy runs are left in peace; see docs/doctor.md.

`RLHF_SICK_ARTIFACTS` names a folder that holds, or is to hold, the models of world 1.
"""

from __future__ import annotations

import os
import threading
from argparse import Namespace
from pathlib import Path

import pytest

from benchmarks.studies.sick.continued import SAVING, raised, study_settings
from benchmarks.studies.sick.diseases import BASE, DISEASES
from benchmarks.studies.sick.run import (
    NOISY_OVERRIDES,
    REWARD_OVERRIDES,
    fired,
    make_artifacts,
    make_result,
    report,
    run_one,
    seeds_of,
)
from rlhf_lightning.callbacks.doctor.callback import Doctor
from rlhf_lightning.doctor.thresholds import DoctorThresholds
from rlhf_lightning.runs.doctor_log import DoctorEvent
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import artifact_lock
from tests.builders.command_lines import settings_of

# Not among those on which the thresholds were set.
SEED = 11
HEALTHY_SEEDS = (12, 13)
MOST_SECONDS = 90


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    given = os.environ.get("RLHF_SICK_ARTIFACTS")
    folder = Path(given) if given else tmp_path_factory.mktemp("sick") / "artifacts"
    make_artifacts(folder.absolute())
    return folder.absolute()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in DISEASES if name != "healthy"])
def test_a_disease_is_noticed_in_time(name: str, artifacts: Path) -> None:
    result, plan = run_one(name, SEED, artifacts), DISEASES[name]
    when = fired(result)
    assert set(plan.detectors) <= set(when), when
    late = {d: when[d] for d in plan.detectors if when[d] > plan.within}
    assert not late
    assert result["cpu_seconds"] <= MOST_SECONDS


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", HEALTHY_SEEDS)
def test_no_detector_fires_on_a_healthy_run(seed: int, artifacts: Path) -> None:
    assert fired(run_one("healthy", seed, artifacts)) == {}


@pytest.mark.thorough
@pytest.mark.parametrize("name", DISEASES)
def test_every_disease_is_built_from_its_settings(name: str) -> None:
    models = ("artifacts.sft=sft", "artifacts.reward=reward")
    settings = study_settings([*BASE, *models, *DISEASES[name].overrides, *SAVING])
    for group in (settings.scorer, settings.rollout, settings.doctor.second_scorer):
        group.read()


def test_a_run_ends_by_the_alerts_of_its_doctor(tmp_path: Path) -> None:
    doctor = Doctor(RunFolder(tmp_path), DoctorThresholds())
    for level in ("warn", "healthy"):
        event = DoctorEvent(3, "alert", f"kl_{level}", level, "")
        doctor.alert_log.events.append(event)
    assert [event.name for event in raised(doctor)] == ["kl_warn"]


@pytest.mark.parametrize("overrides", [REWARD_OVERRIDES, NOISY_OVERRIDES])
def test_the_settings_of_the_reward_models_are_settings(overrides: tuple[str, ...]) -> None:
    settings = settings_of(*overrides, "artifacts.sft=sft")
    settings.data.source.build()


def test_seeds_are_read_as_ranges() -> None:
    assert seeds_of("0-2,7") == [0, 1, 2, 7]


def result(disease: str, seed: int, **raised: int) -> dict:
    alerts = [{"detector": name, "raised_at": t} for name, t in raised.items()]
    return {"disease": disease, "seed": seed, "alerts": alerts}


def test_a_run_that_another_call_makes_is_waited_for_and_not_made_again(tmp_path: Path) -> None:
    begun, result_file = threading.Event(), tmp_path / "healthy_01.json"

    def another_call() -> None:
        with artifact_lock(tmp_path / "runs" / "healthy_01"):
            begun.set()
            threading.Event().wait(0.5)
            result_file.write_text("theirs")

    other = threading.Thread(target=another_call)
    other.start()
    begun.wait()
    make_result("healthy", 1, Namespace(out=tmp_path, artifacts=tmp_path / "none", whole=False))
    other.join()
    assert result_file.read_text() == "theirs"


def test_the_table_says_how_many_runs_were_noticed_when_and_how_many_in_time() -> None:
    runs = [result("kl_off", seed, kl_high=when) for seed, when in ((1, 7), (2, 9), (4, 23))]
    table = report([*runs, result("kl_off", 7)])
    assert "| kl_off | kl_high | 1-2, 4, 7 | 3 of 4 | 2 by 22 | 9 (23) |" in table
