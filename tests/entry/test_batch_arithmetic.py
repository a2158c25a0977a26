"""Batches that cannot be are refused before a model is loaded; few optimizer steps are said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_lightning.app.build import assemble
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.run_summary import (
    start_settings,
)
from rlhf_lightning.models import factory
from rlhf_lightning.runs.folder import RunFolder
from tests.builders.command_lines import overrides_of, settings_of
from tests.builders.runs import settings_for

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def no_model_is_loaded(monkeypatch) -> None:
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded before the mistake was found")

    for name in ("load_policy", "load_scalar_model", "load_base", "_load"):
        monkeypatch.setattr(factory, name, loaded)


def own_records(folder: Path, stage: str, count: int) -> list[str]:
    """Write records of a stage and return the overrides that read them."""
    keys = {"sft": ("completion",), "reward": ("chosen", "rejected"), "ppo": ()}[stage]
    lines = [
        json.dumps(
            {"prompt": f"what is {i} ?"} | {k: f"{i}" + " ." * (n + 1) for n, k in enumerate(keys)}
        )
        for i in range(count)
    ]
    (folder / "train.jsonl").write_text("\n".join(lines))
    held_out = "\n".join(line.replace("what", "which") for line in lines[:3])
    (folder / "validation.jsonl").write_text(held_out)
    return ["dataset=files", f"dataset.path={folder}", "dataset.name=mine", "evaluation.gold=null"]


def composed(stage: str, start: Path, *overrides: str) -> TrainSettings:
    given = [*overrides_of(stage, start), "trainer.limit_train_batches=null", *overrides]
    if "dataset=files" in given:  # the counts of the built-in world's records belong to no file
        given = [o for o in given if not o.startswith("+dataset.source.num_")]
    found: TrainSettings = settings_of(*given)
    return found


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("stage", "overrides", "wanted"),
    [
        (
            "sft",
            ["data.batch_size=12", "trainer.devices=8"],
            "use data.batch_size=8 or 16",
        ),
        (
            "ppo",
            ["data.batch_size=24", "trainer.devices=8", "module.ppo.num_minibatches=2"],
            "use data.batch_size=16 or 32",
        ),
    ],
)
def test_a_batch_must_divide_into_devices_and_minibatches(stage, overrides, wanted, start):
    with pytest.raises(ConfigError, match=wanted):
        settings_for(stage, start, *overrides)


@pytest.mark.parametrize(
    ("stage", "batch", "kind"),
    [("reward", 60, "preferences"), ("ppo", 1_000_000_000, "prompts")],
)
def test_a_batch_larger_than_the_records_is_refused_before_a_model_is_loaded(
    stage, batch, kind, start, tmp_path, request
):
    settings = composed(stage, start, *own_records(tmp_path, stage, 59), f"data.batch_size={batch}")
    request.getfixturevalue("no_model_is_loaded")
    with pytest.raises(ValueError, match=f"batch_size={batch} is more than the 59 .*{kind}"):
        assemble(settings, RunFolder(tmp_path / "run"))


def test_few_optimizer_steps_are_said_with_what_makes_more(start, tmp_path):
    records = own_records(tmp_path, "sft", 59)
    settings = composed("sft", start, *records, "data.batch_size=32", "data.num_epochs=1")
    parts = assemble(settings, RunFolder(tmp_path / "run"))
    shown = start_settings(settings, parts, None)
    assert all(key in shown["warning"] for key in ("data.batch_size", "data.num_epochs"))
    more = composed("sft", start, *records, "data.batch_size=8", "data.num_epochs=5")
    parts = assemble(more, RunFolder(tmp_path / "more"))
    shown = start_settings(more, parts, None)
    assert "warning" not in shown
