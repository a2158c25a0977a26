"""Sweeps as a user runs them: a job that fails is counted and named, and stops no other."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import open_dict

from rlhf_lightning import PPOModule, RewardModule
from rlhf_lightning.app.collect import _start
from rlhf_lightning.app.config.commands import CollectSettings
from rlhf_lightning.app.config.compose import ConfigError, composed, conf_dir, register
from rlhf_lightning.app.config.validate import load_settings
from rlhf_lightning.app.run_claim import ClaimFolder
from rlhf_lightning.app.sweep import finish_sweep, should_continue
from rlhf_lightning.app.train import _where_to_start, objective
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.stopping import RunStoppedError
from rlhf_lightning.runs.summary import Summary, new_summary, read_summary, write_summary
from tests.builders.command_lines import settings_of
from tests.reports.test_compare import sweep as finished_sweep

SWEEPS = conf_dir().parent / "sweeps"


@pytest.fixture
def job(tmp_path):
    """The folder of a run that is a job of a sweep."""
    register()
    cfg = composed("train", ["+experiment=ppo"])
    with open_dict(cfg):
        cfg.hydra.mode = "MULTIRUN"
    HydraConfig.instance().set_config(cfg)
    return RunFolder(tmp_path / "3")


def test_a_sweep_goes_on_after_an_error_but_not_after_a_stop_or_among_ranks(job):
    def goes(error, environment):
        return should_continue(job, error, kind="ppo", seed=1, environment=environment)

    refused = ConfigError("kl_coef=-1 must be at least 0")
    assert goes(refused, {})
    assert read_summary(job).status == "failed"
    assert read_summary(job).cause == str(refused)
    assert not goes(KeyboardInterrupt(), {})
    assert not goes(RunStoppedError("SIGTERM"), {})
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):
        assert not goes(refused, {name: "0"})
    HydraConfig.instance().cfg = None  # a single run
    assert not goes(refused, {})


@pytest.mark.parametrize(
    ("entry", "asked", "publishes"),
    [
        ("train", ["+experiment=sft"], False),
        ("train", ["+experiment=sft", "artifacts.publish=mine"], True),
        ("collect", ["annotator=demo"], False),
    ],
)
def test_the_jobs_of_a_sweep_publish_nothing_unless_it_says_where(
    job, tmp_path, entry, asked, publishes
):
    HydraConfig.instance().cfg = None
    words = ["hydra.mode=MULTIRUN", f"hydra.sweep.dir={tmp_path}/sweep"]
    cfg = composed(entry, [*words, *asked])
    ClaimFolder().on_multirun_start(cfg)
    settings = settings_of(*cfg.hydra.overrides.task, entry=entry)
    assert settings.artifacts.publish is not None
    assert settings.paths.publish is publishes


def unfinished(folder: Path, digest: str) -> RunFolder:
    """Make what a run leaves that was told to stop after iteration 5."""
    run = RunFolder(folder)
    run.checkpoints.mkdir(parents=True)
    begun = new_summary("ppo", seed=1, config_hash=digest)
    write_summary(run, replace(begun, status="stopped", cause="SIGUSR2"))
    torch.save({"state_dict": {}}, run.checkpoints / "iteration=000005.ckpt")
    run.config.parent.mkdir()
    run.config.write_text("seed: 1\n")
    return run


def test_a_job_submitted_again_goes_on_and_the_page_of_its_sweep_counts_it(job, tmp_path, capsys):
    def start(settings, name):
        new = RunFolder(tmp_path / "multirun" / name)
        (new.path / ".hydra").mkdir(parents=True)
        return new, *_where_to_start(settings, new)

    asked = ["+experiment=ppo", "resume=auto", f"paths.outputs={tmp_path}"]
    settings, other = settings_of(*asked), settings_of(*asked, "seed=2")
    unfinished(tmp_path / "ppo/2026-11-22_10-00-00", settings.config_hash)
    new, folder, checkpoint = start(settings, "2026-11-22_11-00-00/0")
    assert (folder, checkpoint) == (new, None), "it is a single run's"
    sweep = tmp_path / "multirun/2026-11-22_09-00-00"
    stopped = unfinished(sweep / "0", settings.config_hash)
    unfinished(sweep / "1", other.config_hash)
    for name in ("2026-11-22_12-00-00/0", "2026-11-22_13-00-00/0"):  # the second after a link
        new, folder, checkpoint = start(settings, name)
        assert folder == stopped
        assert checkpoint == stopped.checkpoints / "iteration=000005.ckpt"
        assert new.path.is_symlink()
        assert new.path.resolve() == stopped.path.resolve()
    with pytest.raises(SystemExit):
        finish_sweep(new.path.parent)
    assert "SIGUSR2" in capsys.readouterr().err
    collect = load_settings(CollectSettings, "collect", asked[1:])
    labels = unfinished(sweep / "2", collect.config_hash)
    assert _start(collect, RunFolder(new.path.with_name("2"))) == labels


def test_a_job_that_failed_is_named_at_the_end_and_on_the_page(tmp_path, capsys):
    folders = finished_sweep(tmp_path)
    for folder, kl_coef in zip(folders, (0.01, 0.05, 0.1, 0.2), strict=True):
        chosen = ["+experiment=ppo", f"module.ppo.kl_coef={kl_coef}"]
        (folder.path / ".hydra" / "overrides.yaml").write_text(yaml.safe_dump(chosen))
    finish_sweep(tmp_path)  # all have ended
    capsys.readouterr()
    ended = read_summary(folders[1])
    write_summary(folders[1], replace(ended, status="failed", cause="out of memory in <update>"))
    folders[3].summary.unlink()
    with pytest.raises(SystemExit) as left:
        finish_sweep(tmp_path)
    assert left.value.code == 1
    told = capsys.readouterr().err
    assert "module.ppo.kl_coef=0.05" in told
    assert "module.ppo.kl_coef=0.2" in told
    assert "out of memory in &lt;update&gt;" in (tmp_path / "comparison.html").read_text()


def values_of(override):
    """What a sweep gives to a key: of an interval its ends."""
    if override.is_interval_sweep():
        return [override.value().start, override.value().end]
    if override.is_sweep_override():
        return list(override.sweep_string_iterator())
    return [override.get_value_element_as_str()]


@pytest.mark.thorough
@pytest.mark.parametrize("file", sorted(SWEEPS.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_sweep_is_found_and_its_first_and_last_job_build_their_hyper_parameters(file):
    if file.stem == "ppo_search":
        pytest.importorskip("hydra_plugins.hydra_optuna_sweeper", reason="the extra `sweeps`")
    stage = file.stem.partition("_")[0]
    asked = [f"+experiment={stage}", f"+sweeps={file.stem}"]
    register()
    hydra = composed("train", asked).hydra
    assert hydra.mode.name == "MULTIRUN"
    grid = OverridesParser.create().parse_overrides(
        [f"{key}={values}" for key, values in hydra.sweeper.params.items()]
    )
    for which in (0, -1):
        job = [f"{o.key_or_group}={values_of(o)[which]}" for o in grid]
        settings = settings_of(*asked, *job)
        for override in job:
            key, _, value = override.partition("=")
            if "$" not in value:
                assert settings.select(key) == yaml.safe_load(value)


@pytest.mark.parametrize("file", sorted((SWEEPS / "wandb").glob("*.yaml")), ids=lambda f: f.stem)
def test_the_command_of_a_w_and_b_sweep_composes_as_the_agent_would_write_it(file):
    sweep = yaml.safe_load(file.read_text())
    assert sweep["metric"]["name"] == "val/score_win_rate", "gold may not choose a setting"
    assert sweep["program"] == "rlhf_lightning.train"
    start = ["${env}", "python", "-m", "${program}"]
    assert (sweep["command"][:4], sweep["command"][-1]) == (start, "${args_no_hyphens}")
    values = [f"{key}={spec['values'][0]}" for key, spec in sweep["parameters"].items()]
    assert settings_of(*sweep["command"][4:-1], *values).hparams.kl_coef == 0.01


def test_gold_chooses_no_setting_and_what_is_no_number_is_none():
    metrics = {"val/gold_win_rate": 0.9, "val/score_win_rate": 0.0, "val/loss": 2.0}
    assert objective(Summary("ppo", "completed", 1, metrics), PPOModule) == 0.0
    # Optuna ends the search at a NaN, and takes None for one failed trial.
    for accuracy, value in ((0.8, 0.8), (float("nan"), None), (float("inf"), None)):
        summary = Summary("reward", "completed", 1, {"val/accuracy": accuracy})
        assert objective(summary, RewardModule) == value
    assert objective(Summary("reward", "completed", 1, {}), RewardModule) is None
