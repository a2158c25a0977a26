"""What is not exported: no runs, folders in use, and configurations that nobody vouches for."""

from __future__ import annotations

import shutil

import pytest
from omegaconf import OmegaConf

from rlhf_lightning.app.config.commands import ExportSettings
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.export import run

pytestmark = pytest.mark.timeout(120)


def export(folder, tmp_path, **options):
    run(ExportSettings(run=folder, to=tmp_path / "out", **options))
    return tmp_path / "out"


def edited(sft, tmp_path, *values):
    copy = tmp_path / "run"
    shutil.copytree(sft.path, copy, symlinks=True)
    config = OmegaConf.load(copy / ".hydra/config.yaml")
    for key, value in values:
        OmegaConf.update(config, key, value, force_add=True)
    OmegaConf.save(config, copy / ".hydra/config.yaml")
    return copy


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (
            [("dataset.source._target_", "os.system")],
            r"dataset\.source\._target_=os\.system is not",
        ),
        (
            # Under an allowed prefix, but it would run a file.
            [("module._target_", "rlhf_lightning.rollout.scorers.base.load_function")],
            r"module\._target_=.* is not allowed there|unknown key module\.",
        ),
        (
            [
                ("artifacts.base", None),
                ("model.tokenizer._target_", "rlhf_lightning.rollout.scorers.base.load_function"),
                ("model.tokenizer.path", "/tmp/evil.py:run"),
            ],
            "is not allowed there",
        ),
        ([("module.trust_remote_code", True)], "would run code that the run folder names"),
    ],
)
def test_a_configuration_is_data_and_is_checked_before_anything_is_built(
    sft, tmp_path, values, said
):
    with pytest.raises(ConfigError, match=said):
        export(edited(sft, tmp_path, *values), tmp_path)
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda run, tmp: run.path / "nothing", "does not exist"),
        (lambda run, tmp: tmp, "is no run folder"),
    ],
)
def test_what_is_no_run_is_said_to_be_none(sft, tmp_path, make, said):
    with pytest.raises(ConfigError, match=said):
        export(make(sft, tmp_path), tmp_path)


def test_a_run_without_a_checkpoint_and_a_folder_in_use_are_refused(sft, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(sft.path, copy, symlinks=True)
    shutil.rmtree(copy / "checkpoints")
    with pytest.raises(ConfigError, match="holds no complete checkpoint"):
        export(copy, tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/notes.txt").touch()
    with pytest.raises(ConfigError, match="is there already: give another folder"):
        run(ExportSettings(run=sft.path, to=tmp_path / "mine"))
    assert (tmp_path / "mine/notes.txt").exists()
