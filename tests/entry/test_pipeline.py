"""`python -m rlhf_lightning.pipeline`: what it runs, where it stops, how it goes on."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from rlhf_lightning.app.config.commands import PipelineSettings
from rlhf_lightning.app.config.compose import ConfigError, given, register
from rlhf_lightning.app.config.saved import write_settings
from rlhf_lightning.app.config.settings import CommandSettings, TrainSettings
from rlhf_lightning.app.config.validate import load_settings
from rlhf_lightning.app.config.ways import as_overrides
from rlhf_lightning.app.pipeline import note, run
from rlhf_lightning.app.pipeline_steps import Step, check_pipeline, plan
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import GateResult, new_summary, write_summary
from tests.builders.command_lines import settings_of
from tests.builders.processes import run_python
from tests.entry.test_train import SMALL

pytestmark = pytest.mark.timeout(900)
TINY = [f"train:{word}" for word in SMALL]


@cache
def composed(*overrides: str) -> PipelineSettings:
    register()
    return load_settings(PipelineSettings, "pipeline", as_overrides(overrides))


def settings_of_step(step: Step) -> CommandSettings:
    """Return the settings of a step, where the one that it follows has left its own."""
    if step.lead is not None:
        lead = load_settings(TrainSettings, "train", list(step.lead.words))
        for file in (step.lead.place.with_suffix(".yaml"), RunFolder(step.lead.place).config):
            file.parent.mkdir(parents=True, exist_ok=True)
            write_settings(file, lead)
    return settings_of(*step.words, entry=step.command)


def pipeline(folder: Path, *overrides: str, code: int = 0) -> str:
    done = run_python("-m", "rlhf_lightning.pipeline", *overrides, folder=folder, timeout=850)
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


def only(folder: Path) -> Path:
    (found,) = (folder / "outputs/pipeline").iterdir()
    return found


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def test_the_stages_run_in_order_and_share_one_folder_of_models(tmp_path: Path) -> None:
    steps = plan(composed("collect=true", "ppo:module.ppo.kl_coef=0.1"), tmp_path)
    assert [step.stage for step in steps] == ["base", "sft", "collect", "reward", "ppo", "evaluate"]
    artifacts = given("paths.artifacts", tmp_path / "round_1/artifacts")
    assert all(artifacts in step.words for step in steps)
    by_stage = {step.stage: step for step in steps}
    assert by_stage["ppo"].words[-1] == "module.ppo.kl_coef=0.1"
    assert by_stage["reward"].words[0] == "+experiment=reward"
    assert given("data.path", tmp_path / "round_1/collect/data") in by_stage["reward"].words
    assert by_stage["evaluate"].command == "evaluate"
    assert given("run", tmp_path / "round_1/ppo") in by_stage["evaluate"].words
    assert given("run", tmp_path / "round_1/ppo.yaml") in by_stage["collect"].words
    command = by_stage["sft"].command_line()
    assert given("hydra.run.dir", tmp_path / "round_1/sft") in command
    assert not [word for word in command if word.startswith("ckpt_path")]


def test_words_for_a_stage_reach_it_as_they_are(tmp_path: Path) -> None:
    words = ["sft:a='it\\'s'", "sft:+gates.x={metric: val/loss, at_most: 1}", "train:logger=none"]
    cfg = composed(*words, "seed=3")
    steps = {step.stage: step for step in plan(cfg, tmp_path)}
    assert steps["sft"].words[-3:] == ("logger=none", *(w.partition(":")[2] for w in words[:2]))
    assert steps["ppo"].words[-1] == "logger=none"
    assert "seed=3" in steps["evaluate"].words


def test_stages_that_are_left_out_are_not_run(tmp_path: Path) -> None:
    steps = plan(composed("experiments.base=null", "evaluate=false"), tmp_path)
    assert [step.stage for step in steps] == ["sft", "reward", "ppo"]
    assert not [w for step in steps for w in step.words if w.startswith("data.path")]


@pytest.mark.thorough
def test_every_step_reads_the_experiments_of_the_user(mine: str) -> None:
    settings = composed("experiments.ppo=mine")
    check_pipeline(settings)
    steps = plan(settings, Path("here"))
    assert all(step.command_line()[3] == mine for step in steps)  # in front: Hydra's flag
    assert settings_of_step(next(step for step in steps if step.stage == "ppo")).name == "mine"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["rounds=2", "round_3/ppo:a=1"], "round_3/ppo is no stage"),
        (["rounds=2", "experiments.reward=null"], "experiments.reward=null leaves one out"),
        (["experiments.ppo=null"], "experiments.ppo=null .*evaluate=false"),
        (["ppo:module.estimator=no.py:A"], "round_1/ppo: estimator .no.py:A.: .*no Python file"),
        (["evaluate:++scorer.function=no.py:f"], "round_1/evaluate: .*no Python file no.py"),
        (
            ["experiments.ppo=ppo_smollm2_gsm8k", "collect=true"],
            "is trained on smollm2_gsm8k, and annotator=demo labels .*collect:annotator=page",
        ),
    ],
)
def test_what_cannot_work_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        check_pipeline(composed(*overrides))


@pytest.mark.thorough
def test_a_pipeline_of_another_objective_than_ppo_is_evaluated_too() -> None:
    settings = composed("experiments.ppo=kto", "experiments.reward=null")
    check_pipeline(settings)
    *_, trained, evaluation = plan(settings, Path("somewhere"))
    assert (evaluation.stage, evaluation.lead) == ("evaluate", trained)


ALONE = (
    *(f"experiments.{stage}=null" for stage in ("sft", "reward", "ppo")),
    "evaluate=false",
    "train:paths.publish=false",
)


def ended_base(cfg: PipelineSettings, place: Path, gate: GateResult) -> RunFolder:
    """Write a pipeline whose only stage has ended, and return its folder."""
    folder = RunFolder(place / "outputs/pipeline/2026-11-02_09-30-00")
    (step,) = plan(cfg, folder.path)
    made = new_summary("sft", seed=1, config_hash=step.settings.config_hash)
    made = replace(made, status="completed", metrics={"val/loss": 4.0}, gates=(gate,))
    write_summary(RunFolder(step.place).create(), made)
    note(folder, step, step.read())
    begun = new_summary("pipeline", seed=cfg.seed, config_hash=cfg.config_hash)
    write_summary(folder, replace(begun, status="stopped"))
    return folder


@pytest.mark.thorough
def test_a_failed_gate_stops_it_again_and_again_until_it_is_accepted(
    working_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cfg = composed(*ALONE)
    gate = GateResult("loss", 4.0, 1.0, False, "val/loss is 4.000, wanted at most 1")
    folder = ended_base(cfg, working_folder, gate)
    for _ in range(2):
        found = run(cfg, folder)
        assert found.status == "stopped"
        assert "loss: val/loss is 4.000" in found.cause
        assert found.gates[0].name == "round_1/base loss"
        assert "accept=[base]" in folder.report.read_text()
        assert found.about["stages"] == "round_1/base"
    later = RunFolder(working_folder / "outputs/pipeline/2026-11-03_09-30-00")
    found = run(composed(*ALONE, "accept=[base]"), later)
    assert found.status == "completed"
    assert found.metrics == {"round_1/base/loss": 4.0, "val/loss": 4.0}
    assert not later.path.exists()  # it went on in the folder of the first
    assert f"going on with {folder.path.relative_to(working_folder)}" in capsys.readouterr().out


@pytest.mark.slow
def test_every_stage_runs_and_a_changed_one_runs_anew_with_all_behind_it(tmp_path: Path) -> None:
    few = "evaluate:evaluation.num_prompts=16"
    common = [*TINY, few, "sft:gates=none"]
    pipeline(tmp_path, *common, code=4)
    made = only(tmp_path)
    stages = sorted(path.name for path in (made / "round_1").iterdir())
    assert stages == ["artifacts", "base", "reward", "sft"]
    assert summary(made)["cause"].startswith("round_1/reward failed its gates (accuracy: ")
    first = (made / "round_1/sft/summary.json").stat().st_mtime_ns
    accept = "accept=[reward,ppo,evaluate]"
    pipeline(tmp_path, *common, accept, "reward:module.reward.learning_rate=0.001")
    assert only(tmp_path) == made
    assert (made / "round_1/sft/summary.json").stat().st_mtime_ns == first
    assert (made / "round_1/reward_before_1/summary.json").is_file()
    found = summary(made)
    assert found["status"] == "completed"
    for name in ("base/loss", "sft/gold_win_rate", "reward/accuracy", "ppo/gold_win_rate"):
        assert f"round_1/{name}" in found["metrics"]
    last = summary(made / "round_1/evaluate")["metrics"]
    assert found["metrics"]["val/gold_win_rate"] == last["val/gold_win_rate"]
    models = made / "round_1/artifacts/demo_seed1"
    assert sorted(path.name for path in models.iterdir() if path.is_dir()) == [
        "base",
        "ppo",
        "reward",
        "sft",
    ]
    assert not (tmp_path / "artifacts").exists()
