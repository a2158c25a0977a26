from __future__ import annotations

import json

import pytest
from lightning import Callback

from rlhf_lightning.data.demo.source import DemoSource
from rlhf_lightning.data.sources.base import (
    FileSource,
    FirstRecords,
    JoinedSource,
    MixedSource,
    PreferenceFolder,
)
from rlhf_lightning.data.sources.given import files_of
from rlhf_lightning.data.sources.templates import TemplateSource
from tests.data.stages import STAGES, CountingSource, content, contents, fit, prompts

HOOK = "on_train_batch_end"


class SaveAt(Callback):
    """Writes a checkpoint when `num_batches` are trained on, in the hook named."""

    def __init__(self, path, num_batches, hook):
        self.path, self.num_batches = path, num_batches
        setattr(self, hook, self._save)

    def _save(self, trainer, *args):
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.num_batches:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize(
    ("stage", "num_done", "hook"),
    [
        ("sft", 1, "on_train_batch_end"),
        ("sft", 6, "on_validation_end"),
        ("reward", 5, "on_train_batch_end"),
        ("reward", 12, "on_validation_end"),
        ("ppo", 11, "on_train_batch_end"),
        ("ppo", 6, "on_validation_end"),
    ],
)
def test_a_resumed_stage_trains_on_exactly_the_remaining_batches(
    tokenizer, tmp_path, stage, num_done, hook
):
    def make():
        options = {"num_iterations": 12} | ({"num_epochs": None} if stage == "sft" else {})
        return STAGES[stage](tokenizer, **options)

    path = tmp_path / "a.ckpt"
    whole = fit(make(), callback=SaveAt(path, num_done, hook), val_check_interval=1)
    resumed = fit(make(), ckpt_path=path, val_check_interval=1)
    assert len(whole.seen) == 12
    assert contents(resumed.seen) == contents(whole.seen)[num_done:]
    assert len({str(content(batch)) for _, batch in whole.seen}) > 6


class AskEarly(Callback):
    """Has the loader made before the checkpoint is read, as the schedule has under FSDP2."""

    def setup(self, trainer, module, stage):
        assert trainer.estimated_stepping_batches == 14


def test_a_loader_made_before_the_checkpoint_is_read_yields_the_remaining_batches(
    tokenizer, tmp_path
):
    path = tmp_path / "a.ckpt"
    whole = fit(prompts(tokenizer), callback=SaveAt(path, 5, "on_train_batch_end"))
    resumed = fit(prompts(tokenizer), ckpt_path=path, callback=AskEarly())
    assert contents(resumed.seen) == contents(whole.seen)[5:]


def test_a_batch_that_was_not_finished_is_trained_on_again(tokenizer, tmp_path):
    path = tmp_path / "a.ckpt"

    class SaveOnException(Callback):
        def on_exception(self, trainer, module, exception):
            trainer.save_checkpoint(path)

    whole = fit(prompts(tokenizer))
    fit(prompts(tokenizer), fail_at=6, callback=SaveOnException())
    resumed = fit(prompts(tokenizer), ckpt_path=path)
    assert contents(resumed.seen) == contents(whole.seen)[6:]


def test_workers_do_not_change_what_is_left_after_a_resume(tokenizer, tmp_path):
    path = tmp_path / "a.ckpt"
    callback = SaveAt(path, 5, "on_train_batch_end")
    whole = fit(prompts(tokenizer, num_workers=1), callback=callback)
    resumed = fit(prompts(tokenizer), ckpt_path=path)
    assert contents(resumed.seen) == contents(whole.seen)[5:]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"batch_size": 2}, "batch_size=4, this run has 2"),
        ({"seed": 1}, "seed=0, this run has 1"),
        ({"source": CountingSource(num_train=22)}, "num_rows=23, this run has 22"),
    ],
)
def test_a_resume_with_other_data_is_an_error(tokenizer, tmp_path, options, name):
    path = tmp_path / "a.ckpt"
    fit(prompts(tokenizer), callback=SaveAt(path, 5, "on_train_batch_end"))
    with pytest.raises(ValueError, match=name):
        fit(prompts(tokenizer, **options), ckpt_path=path)


def write_prompts(path, changed=None):
    letter = "q" if "held_out" in path.name else "p"
    rows = [{"prompt": f"{letter}{i}" + "a" * (i % 5)} for i in range(23)]
    if changed is not None:
        rows[changed] = {"prompt": f"{letter} other"}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def of_file(path, validation):
    return FileSource(path, validation_path=validation)


@pytest.mark.parametrize(
    "make",
    [
        of_file,
        lambda path, validation: JoinedSource([of_file(path, validation)]),
        lambda path, validation: MixedSource([of_file(path, validation), CountingSource()], [2, 1]),
    ],
)
def test_a_resume_after_the_held_out_file_was_edited_is_refused(tokenizer, tmp_path, make):
    """The number of rows is the same, and nothing else tells."""
    edited = "held_out.jsonl"
    paths = [write_prompts(tmp_path / name) for name in ("train.jsonl", "held_out.jsonl")]
    path = tmp_path / "a.ckpt"
    whole = fit(prompts(tokenizer, source=make(*paths)), callback=SaveAt(path, 5, HOOK))
    resumed = fit(prompts(tokenizer, source=make(*paths)), ckpt_path=path)
    assert contents(resumed.seen) == contents(whole.seen)[5:]
    write_prompts(tmp_path / edited, changed=20)
    with pytest.raises(ValueError, match="data validation_rows="):
        fit(prompts(tokenizer, source=make(*paths)), ckpt_path=path)
    moved = [p.rename(tmp_path / f"moved_{p.name}") for p in paths]
    write_prompts(tmp_path / f"moved_{edited}")
    again = fit(prompts(tokenizer, source=make(*moved)), ckpt_path=path)
    assert contents(again.seen) == contents(whole.seen)[5:]


def test_a_resume_with_other_weights_of_a_mix_or_another_order_is_refused(tokenizer, tmp_path):
    # The mix has as many rows whatever its weights, and no file differs.
    file = write_prompts(tmp_path / "train.jsonl")

    def mixed(*weights):
        ours = FileSource(file, validation_fraction=0)
        return MixedSource([ours, CountingSource()], weights)

    path = tmp_path / "a.ckpt"
    fit(prompts(tokenizer, source=mixed(3, 1)), callback=SaveAt(path, 5, HOOK))
    with pytest.raises(ValueError, match="data training_rows="):
        fit(prompts(tokenizer, source=mixed(1, 3)), ckpt_path=path)
    other = prompts(tokenizer, source=mixed(3, 1))
    other.group_by_length = not other.group_by_length
    with pytest.raises(ValueError, match="data group_by_length="):
        fit(other, ckpt_path=path)


def test_each_source_of_files_names_those_that_it_reads(tmp_path):
    folder = tmp_path / "set"
    folder.mkdir()
    for name in ("train.jsonl", "validation.jsonl", "notes.txt"):
        write_prompts(folder / name)
    template = TemplateSource(folder / "train.jsonl", prompt="{prompt}", completion="{prompt}")
    for source, names in (
        (FileSource(folder), {"train.jsonl", "validation.jsonl"}),
        (PreferenceFolder(folder), {"train.jsonl", "validation.jsonl"}),
        (FirstRecords(template, num_records=1, num_copies=1), {"train.jsonl"}),
        (JoinedSource([template]), {"train.jsonl"}),
        (DemoSource(seed=1), set()),
    ):
        assert {path.name for path in files_of(source)} == names, source


def test_a_resumed_stage_with_several_responses_has_the_remaining_groups_and_no_other_number(
    tokenizer, tmp_path
):
    path = tmp_path / "a.ckpt"
    groups = {"num_generations": 3}
    save = SaveAt(path, 5, "on_train_batch_end")
    whole = fit(prompts(tokenizer, **groups), callback=save)
    resumed = fit(prompts(tokenizer, **groups), ckpt_path=path)
    assert contents(resumed.seen) == contents(whole.seen)[5:]
    with pytest.raises(ValueError, match="num_generations"):
        fit(prompts(tokenizer, num_generations=2), ckpt_path=path)
