"""Batches that cannot be are refused before a model is loaded; few optimizer steps are said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_lightning.app.batch_arithmetic import FEW_STEPS, more_steps
from rlhf_lightning.app.build import assemble
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.run_summary import (
    batch_arithmetic,
    few_steps,
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
            "data.batch_size=12 is global and must be a multiple of 8 devices "
            "(trainer.devices=8, trainer.num_nodes=1): use data.batch_size=8 or 16",
        ),
        (
            "reward",
            ["data.batch_size=4", "trainer.devices=4", "trainer.num_nodes=2"],
            "data.batch_size=4 is global and must be a multiple of 8 devices "
            "(trainer.devices=4, trainer.num_nodes=2): use data.batch_size=8",
        ),
        (
            "ppo",
            ["data.batch_size=24", "trainer.devices=8", "module.ppo.num_minibatches=2"],
            "data.batch_size=24 is global and must be a multiple of 8 devices "
            "(trainer.devices=8, trainer.num_nodes=1) x module.ppo.num_minibatches=2 = 16: "
            "use data.batch_size=16 or 32",
        ),
        (
            "ppo",
            ["data.batch_size=4", "module.ppo.num_minibatches=8"],
            "module.ppo.num_minibatches=8 must divide data.batch_size=4: use one of [1, 2, 4], "
            "or data.batch_size=8",
        ),
    ],
)
def test_a_batch_must_divide_into_devices_and_minibatches(stage, overrides, wanted, start):
    with pytest.raises(ConfigError) as caught:
        settings_for(stage, start, *overrides)
    assert str(caught.value) == wanted


@pytest.mark.parametrize(
    ("stage", "batch", "kind"),
    [
        ("sft", 128, "demonstrations"),
        ("reward", 60, "preferences"),
        ("ppo", 1_000_000_000, "prompts"),
    ],
)
def test_a_batch_larger_than_the_records_is_refused_before_a_model_is_loaded(
    stage, batch, kind, start, tmp_path, request
):
    settings = composed(stage, start, *own_records(tmp_path, stage, 59), f"data.batch_size={batch}")
    request.getfixturevalue("no_model_is_loaded")
    with pytest.raises(ConfigError) as caught:
        assemble(settings, RunFolder(tmp_path / "run"))
    assert str(caught.value) == (
        f"data.batch_size={batch} is more than the 59 training {kind}, so a batch would hold some "
        f"of them several times: use data.batch_size=32, or give more {kind}"
    )


@pytest.mark.parametrize(
    ("num_rows", "batch", "epochs", "unit"),
    [(59, 59, 1, 1), (190, 64, 1, 1), (10_000, 4_096, 1, 1), (190, 64, 1, 8), (31, 16, 0.5, 4)],
)
def test_what_is_advised_makes_enough_steps(num_rows, batch, epochs, unit):
    size, passes, steps = more_steps(num_rows, batch, epochs, unit=unit)
    assert steps == -(-passes * num_rows // size)
    assert steps >= FEW_STEPS
    assert size % unit == 0 or size == batch
    assert size <= batch
    assert passes >= epochs


def test_few_optimizer_steps_are_said_with_what_makes_more(start, tmp_path):
    records = own_records(tmp_path, "sft", 59)
    settings = composed("sft", start, *records, "data.batch_size=32", "data.num_epochs=1")
    parts = assemble(settings, RunFolder(tmp_path / "run"))
    shown = start_settings(settings, parts, None)
    assert shown["batches"] == "2 iterations of 32 rows = 2 optimizer steps"
    assert shown["warning"] == (
        "2 optimizer steps are too few to learn much: data.batch_size=8 data.num_epochs=5 makes 37"
    )
    assert shown["learning rate"] == "learning_rate 0.001, as set"
    more = composed("sft", start, *records, "data.batch_size=8", "data.num_epochs=5")
    parts = assemble(more, RunFolder(tmp_path / "more"))
    shown = start_settings(more, parts, None)
    assert shown["batches"] == "37 iterations of 8 rows = 37 optimizer steps"
    assert "warning" not in shown


def test_few_iterations_of_ppo_are_said_and_a_run_cut_short_on_purpose_is_not(start):
    settings = composed("ppo", start, "data.num_iterations=5", "module.ppo.num_ppo_epochs=2")
    assert few_steps(settings, 600, 5) == (
        "10 optimizer steps are too few to learn much: use data.num_iterations=15 or more"
    )
    assert few_steps(settings, 600, 15) is None
    assert few_steps(settings.updated({"trainer.limit_train_batches": 3}), 600, 3) is None


def test_prompts_and_micro_batches_beyond_what_there_is_are_said(start):
    settings = composed(
        "ppo", start, "evaluation.num_prompts=512", "module.ppo.micro_batch_size=64"
    )
    (note,) = settings.spec.start_notes(settings, 600, 30)
    assert note.startswith("evaluation.num_prompts=512 is more than the 30 held-out prompts, which")
    assert settings.spec.start_notes(settings, 600, 512) == []
    assert "4 rows, all at once (module.ppo.micro_batch_size=64 is more than the 4)" in (
        batch_arithmetic(settings, 50, 1)
    )
