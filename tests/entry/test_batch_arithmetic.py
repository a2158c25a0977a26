"""Batches that cannot be are refused before a model is loaded; few optimizer steps are said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rlhf_lightning.app.build import assemble
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.run_summary import start_settings
from rlhf_lightning.callbacks.run_record import about_run
from rlhf_lightning.models import factory
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import Summary, write_summary
from tests.builders.command_lines import overrides_of, settings_of

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def records(tmp_path: Path) -> list[str]:
    """Write 59 pairs, whose chosen responses SFT learns, and return overrides that read them."""
    pair = {"chosen": "yes .", "rejected": "no ."}
    rows = [{"prompt": f"what is {i} ?"} | pair for i in range(59)]
    lines = [json.dumps(row) for row in rows]
    (tmp_path / "train.jsonl").write_text("\n".join(lines))
    held_out = "\n".join(line.replace("what", "which") for line in lines[:3])
    (tmp_path / "validation.jsonl").write_text(held_out)
    named = ["dataset=files", f"dataset.path={tmp_path}", "dataset.name=mine"]
    return [*named, "evaluation.gold=null", "trainer.limit_train_batches=null"]


def composed(start: Path, *overrides: str) -> TrainSettings:
    # The counts of the built-in world's records belong to no file.
    own = [o for o in overrides_of("sft", start) if not o.startswith("+dataset.source.num_")]
    found: TrainSettings = settings_of(*own, *overrides)
    return found


def test_a_batch_larger_than_the_records_is_refused_before_a_model_is_loaded(
    start, records, tmp_path, monkeypatch
):
    def loaded(*_: Any, **__: Any) -> None:
        raise AssertionError("a model was loaded before the mistake was found")

    settings = composed(start, *records, "data.batch_size=60")
    for name in ("load_policy", "load_scalar_model", "load_base", "_load"):
        monkeypatch.setattr(factory, name, loaded)
    with pytest.raises(ValueError, match=r"batch_size=60 is more than the 59 .*demonstrations"):
        assemble(settings, RunFolder(tmp_path / "run"))


def test_the_first_screen_says_what_a_run_starts_from_and_learns_and_that_it_continues_nothing(
    start, records, tmp_path
):
    settings = composed(start, *records, "resume=auto", f"paths.outputs={tmp_path}")
    parts = assemble(settings, RunFolder(tmp_path / "run"))
    checkpoint = tmp_path / "run/checkpoints/last.ckpt"
    shown = [start_settings(settings, parts, one) for one in (None, checkpoint)]
    assert [one["continues"] for one in shown] == [
        f"nothing: {tmp_path} has no run of this configuration to continue",
        checkpoint,
    ]
    done = RunFolder(tmp_path / "sft/2026-11-29_08-00-00").create()
    write_summary(done, Summary("sft", "completed", 1, config_hash=settings.config_hash))
    told = str(start_settings(settings, parts, None)["continues"])
    assert f"is complete, {done.path}; for a longer one give ckpt_path={done.path}/" in told
    assert told.endswith("a larger data.num_epochs")
    assert shown[0]["starts from"] == str(start)  # whatever trained it
    for told in (shown[0]["data"], about_run(parts.module, parts.data)["data"]):
        assert "59 demonstrations (chosen responses of preferences), 3 held out" in str(told)


def test_few_optimizer_steps_are_said_with_what_makes_more(start, records, tmp_path):
    def shown(*more: str) -> dict[str, Any]:
        settings = composed(start, *records, *more)
        parts = assemble(settings, RunFolder(tmp_path / more[0]))
        return start_settings(settings, parts, None)

    few = shown("data.batch_size=32", "data.num_epochs=1")
    assert all(key in few["warning"] for key in ("data.batch_size", "data.num_epochs"))
    assert "warning" not in shown("data.batch_size=8", "data.num_epochs=5")
