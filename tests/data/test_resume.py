from __future__ import annotations

import pytest
from lightning import Callback

from tests.data.stages import STAGES, CountingSource, content, contents, fit, prompts


class SaveAt(Callback):
    """Writes a checkpoint when `num_batches` are trained on, in the hook named."""

    def __init__(self, path, num_batches, hook):
        self.path, self.num_batches = path, num_batches
        setattr(self, hook, self._save)

    def _save(self, trainer, *args):
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.num_batches:
            trainer.save_checkpoint(self.path)


@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_validation_end"])
@pytest.mark.parametrize("num_done", [1, 5, 6, 11, 12])
@pytest.mark.parametrize("stage", STAGES)
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


def test_a_stage_resumed_twice_still_trains_on_the_remaining_batches(tokenizer, tmp_path):
    first, second = tmp_path / "1.ckpt", tmp_path / "2.ckpt"
    whole = fit(prompts(tokenizer), callback=SaveAt(first, 3, "on_train_batch_end"))
    fit(prompts(tokenizer), ckpt_path=first, callback=SaveAt(second, 8, "on_train_batch_end"))
    resumed = fit(prompts(tokenizer), ckpt_path=second)
    assert contents(resumed.seen) == contents(whole.seen)[8:]


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


def test_another_fit_after_a_resumed_one_starts_at_the_first_batch(tokenizer, tmp_path):
    path = tmp_path / "a.ckpt"
    whole = fit(prompts(tokenizer), callback=SaveAt(path, 5, "on_train_batch_end"))
    datamodule = prompts(tokenizer)
    fit(datamodule, ckpt_path=path)
    assert contents(fit(datamodule).seen) == contents(whole.seen)


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
