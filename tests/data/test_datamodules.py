from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from lightning import Callback, LightningModule, Trainer

from rlhf_lightning.batches import PreferenceBatch, PromptBatch, SFTBatch
from rlhf_lightning.data.datamodules import PreferenceDataModule, PromptDataModule, SFTDataModule
from rlhf_lightning.data.records import (
    DemonstrationRecord,
    PreferenceRecord,
    PromptRecord,
    TextRecord,
)

MAKE = {
    "prompts": lambda i: PromptRecord(f"p{i}" + "a" * (i % 5), columns={"number": str(i)}),
    "demonstrations": lambda i: DemonstrationRecord(f"p{i}", "c" * (i % 7)),
    "preferences": lambda i: PreferenceRecord(f"p{i}", "c" * (i % 7 + 1), "r"),
    "texts": lambda i: TextRecord(f"text {i}" + "t" * (i % 9)),
}


class CountingSource:
    """Makes records by number, and counts how often it is asked."""

    def __init__(self, num_train=23, num_validation=7):
        self.ranges = {"train": range(num_train), "validation": range(100, 100 + num_validation)}
        self.asked = []

    def records(self, kind, split):
        self.asked.append((kind, split))
        return [MAKE[kind](i) for i in self.ranges[split]]


class Recorder(LightningModule):
    """Trains nothing under manual optimization, takes steps, and notes every batch it gets."""

    def __init__(self, fail_at=None):
        super().__init__()
        self.automatic_optimization = False
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.fail_at = fail_at
        self.seen = []
        self.validated = []

    def training_step(self, batch, batch_idx):
        if batch_idx == self.fail_at:
            raise KeyboardInterrupt
        for _ in range(batch_idx % 3 + 1):
            self.optimizers().step()
        self.seen.append((batch_idx, batch))

    def validation_step(self, batch, batch_idx):
        self.validated.append(batch)

    def configure_optimizers(self):
        return torch.optim.SGD([self.weight], lr=0.1)


class SaveAt(Callback):
    """Writes a checkpoint when `num_batches` are trained on, in the hook named."""

    def __init__(self, path, num_batches, hook):
        self.path, self.num_batches = path, num_batches
        setattr(self, hook, self._save)

    def _save(self, trainer, *args):
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.num_batches:
            trainer.save_checkpoint(self.path)


def fit(datamodule, *, callback=None, ckpt_path=None, fail_at=None, **options):
    module = Recorder(fail_at)
    trainer = Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        callbacks=[callback] if callback else None,
        **options,
    )
    if fail_at is None:
        trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path)
    else:
        with pytest.raises(SystemExit):
            trainer.fit(module, datamodule=datamodule, ckpt_path=ckpt_path)
    return module


def prompts(tokenizer, source=None, **options):
    defaults = {"batch_size": 4, "num_iterations": 14, "max_prompt_length": 20, "seed": 0}
    return PromptDataModule(source or CountingSource(), tokenizer, **(defaults | options))


def demonstrations(tokenizer, source=None, **options):
    defaults = {"batch_size": 4, "num_epochs": 2, "max_length": 20, "seed": 0}
    return SFTDataModule(source or CountingSource(), tokenizer, **(defaults | options))


def preferences(tokenizer, source=None, **options):
    defaults = {"batch_size": 4, "num_iterations": 14, "max_length": 20, "seed": 0}
    return PreferenceDataModule(source or CountingSource(), tokenizer, **(defaults | options))


STAGES = {"sft": demonstrations, "reward": preferences, "ppo": prompts}


def content(batch):
    """Return everything a batch holds, as something that can be compared."""
    return {
        name: value.tolist() if isinstance(value, torch.Tensor) else value
        for name, value in vars(batch).items()
    }


def contents(seen):
    return [(index, content(batch)) for index, batch in seen]


@pytest.mark.parametrize(
    ("stage", "kind"), [("sft", SFTBatch), ("reward", PreferenceBatch), ("ppo", PromptBatch)]
)
def test_a_stage_is_one_epoch_whose_batches_are_its_iterations(tokenizer, stage, kind):
    datamodule = STAGES[stage](tokenizer)
    module = fit(datamodule)
    num_iterations = {"sft": 12, "reward": 14, "ppo": 14}[stage]
    assert datamodule.num_iterations == num_iterations
    assert [index for index, _ in module.seen] == list(range(num_iterations))
    assert all(type(batch) is kind and len(batch) == 4 for _, batch in module.seen)
    assert sum(len(batch) for batch in module.validated) == 7


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


def test_row_ids_are_the_places_in_the_stream(tokenizer):
    loader = prompts(tokenizer).train_dataloader()
    ids = torch.cat([batch.row_ids for batch in loader])
    assert ids.tolist() == list(range(14 * 4))


def test_every_prompt_comes_once_a_pass(tokenizer):
    loader = prompts(tokenizer).train_dataloader()
    numbers = [n for batch in loader for n in batch.columns["number"]]
    assert sorted(numbers[:23], key=int) == [str(i) for i in range(23)]
    assert sorted(numbers[23:46], key=int) == [str(i) for i in range(23)]


def test_held_out_prompts_keep_their_row_ids_in_every_validation(tokenizer):
    datamodule = prompts(tokenizer)
    for _ in range(2):
        batches = list(datamodule.val_dataloader())
        assert torch.cat([batch.row_ids for batch in batches]).tolist() == list(range(7))
        numbers = [n for batch in batches for n in batch.columns["number"]]
        assert numbers == [str(i) for i in range(100, 107)]


def test_texts_are_a_kind_of_sft(tokenizer):
    datamodule = demonstrations(tokenizer, kind="texts")
    batch = next(iter(datamodule.train_dataloader()))
    assert torch.equal(batch.loss_mask[:, 1:], batch.attention_mask[:, 1:])
    assert not batch.loss_mask[:, 0].any()


def test_setup_reads_and_encodes_once(tokenizer):
    datamodule = demonstrations(tokenizer)
    for _ in range(3):
        datamodule.setup("fit")
    datamodule.train_dataloader()
    datamodule.val_dataloader()
    assert datamodule.source.asked == [
        ("demonstrations", "train"),
        ("demonstrations", "validation"),
    ]


def test_loaders_leave_the_global_random_state_alone(tokenizer):
    datamodule = prompts(tokenizer)
    before = torch.get_rng_state()
    list(datamodule.train_dataloader())
    list(datamodule.val_dataloader())
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("stage", STAGES)
def test_two_ranks_together_hold_the_global_batch(tokenizer, stage):
    whole = [content(batch) for batch in STAGES[stage](tokenizer).train_dataloader()]
    shares = []
    for rank in range(2):
        datamodule = STAGES[stage](tokenizer)
        datamodule.trainer = SimpleNamespace(global_rank=rank, world_size=2)
        shares.append([content(batch) for batch in datamodule.train_dataloader()])
        assert len(list(datamodule.val_dataloader())) == 1
    for batch, first, second in zip(whole, *shares, strict=True):
        ids = "chosen_input_ids" if stage == "reward" else "input_ids"
        mask = ids.replace("input_ids", "attention_mask")
        both = [
            [i for i, m in zip(row, marks, strict=True) if m]
            for part in (first, second)
            for row, marks in zip(part[ids], part[mask], strict=True)
        ]
        expected = [
            [i for i, m in zip(row, marks, strict=True) if m]
            for row, marks in zip(batch[ids], batch[mask], strict=True)
        ]
        assert both == expected


def test_a_batch_that_the_ranks_do_not_divide_is_an_error(tokenizer):
    datamodule = prompts(tokenizer)
    datamodule.trainer = SimpleNamespace(global_rank=0, world_size=3)
    with pytest.raises(ValueError, match="batch_size=4 .* divisible by the 3 ranks: use 3 or 6"):
        datamodule.train_dataloader()


@pytest.mark.parametrize(("num_epochs", "expected"), [(1, 6), (2, 12), (0.5, 3), (0.01, 1)])
def test_epochs_are_turned_into_iterations(tokenizer, num_epochs, expected):
    datamodule = demonstrations(tokenizer, num_epochs=num_epochs)
    assert datamodule.num_iterations == expected == len(datamodule.train_dataloader())


def test_validation_may_be_a_part_or_missing(tokenizer):
    part = demonstrations(tokenizer, max_validation_rows=3)
    assert sum(len(batch) for batch in part.val_dataloader()) == 3
    source = CountingSource(num_validation=0)
    datamodule = demonstrations(tokenizer, source)
    assert datamodule.val_dataloader() == []
    assert len(fit(datamodule).seen) == 12


def test_the_summary_and_examples_are_shown_before_training(tokenizer, caplog):
    with caplog.at_level("INFO"):
        datamodule = demonstrations(tokenizer, show_examples=2)
        datamodule.setup()
    assert datamodule.summary.num_rows == 23
    assert datamodule.summaries["validation"].num_rows == 7
    for part in (
        "train demonstrations",
        "validation demonstrations",
        "example 2: p1[[c<|im_end|>]]",
    ):
        assert part in datamodule.render_summary()
        assert part in caplog.text


def test_dropped_records_are_counted_and_nothing_left_is_an_error(tokenizer):
    datamodule = demonstrations(tokenizer, max_length=5)
    assert dict(datamodule.summary.dropped) == {"over-long": 23 - datamodule.summary.num_rows}
    assert 0 < datamodule.summary.num_rows < 23
    with pytest.raises(
        ValueError, match="no training row is left .*max_length=1. Raise max_length"
    ):
        demonstrations(tokenizer, max_length=1).setup()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be positive"),
        ({"max_length": -1}, "max_length=-1 must be positive"),
        ({"num_epochs": float("nan")}, "num_epochs=nan must be positive"),
        ({"num_iterations": 3}, "give exactly one"),
        ({"num_epochs": None}, "give exactly one"),
        ({"over_long": "cut"}, "use 'drop' or 'truncate_left'"),
        ({"kind": "preferences"}, "use 'demonstrations' or 'texts'"),
        ({"max_validation_rows": 0}, "max_validation_rows=0 must be positive"),
    ],
)
def test_bad_arguments_are_errors_before_anything_is_read(tokenizer, options, message):
    source = CountingSource()
    with pytest.raises(ValueError, match=message):
        demonstrations(tokenizer, source, **options)
    assert source.asked == []
