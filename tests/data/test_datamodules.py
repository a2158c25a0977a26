from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rlhf_lightning import DemonstrationDataModule
from rlhf_lightning.batches import PreferenceBatch, PromptBatch, SFTBatch
from rlhf_lightning.data.datamodules import balanced_by_length
from rlhf_lightning.data.encode import EncodedPreference
from rlhf_lightning.data.records import PreferenceRecord
from tests.data.stages import (
    STAGES,
    CountingSource,
    content,
    demonstrations,
    fit,
    preferences,
    prompts,
)


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


def test_every_prompt_comes_once_a_pass(tokenizer):
    loader = prompts(tokenizer).train_dataloader()
    numbers = [n for batch in loader for n in batch.columns["number"]]
    assert sorted(numbers[:23], key=int) == [str(i) for i in range(23)]
    assert sorted(numbers[23:46], key=int) == [str(i) for i in range(23)]


def test_a_fit_and_a_validation_read_a_source_that_is_encoded_already_no_more(tokenizer):
    datamodule = demonstrations(tokenizer)
    datamodule.setup()
    module = fit(datamodule)
    module.trainer.validate(module, dataloaders=datamodule.val_dataloader(), verbose=False)
    assert [split for _, split in datamodule.source.asked] == ["train", "validation"]


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


@pytest.mark.parametrize(("num_epochs", "expected"), [(1, 6), (2, 12), (0.5, 3), (0.01, 1)])
def test_epochs_are_turned_into_iterations(tokenizer, num_epochs, expected, caplog):
    caplog.set_level("INFO")
    datamodule = demonstrations(tokenizer, num_epochs=num_epochs)
    assert datamodule.num_iterations == expected == len(datamodule.train_dataloader())
    assert "max_iterations" not in caplog.text
    asked = {"limit_train_batches": expected + 1}
    datamodule.trainer = SimpleNamespace(global_rank=0, world_size=1, **asked)
    datamodule.train_dataloader()
    assert f"max_iterations={expected + 1}, and the data have {expected}:" in caplog.text


def test_dropped_records_are_counted_and_nothing_left_is_an_error(tokenizer):
    datamodule = demonstrations(tokenizer, max_length=5)
    with pytest.warns(UserWarning, match=r"of 23 rows are too long and left out: .*max_length"):
        datamodule.setup()
    assert dict(datamodule.summary.dropped) == {"over-long": 23 - datamodule.summary.num_rows}
    assert 0 < datamodule.summary.num_rows < 23
    with pytest.raises(ValueError, match=r"no training row is left .*max_length=1. Raise max_len"):
        demonstrations(tokenizer, max_length=1).setup()
    source = CountingSource()
    source.ranges["validation"] = source.ranges["train"]
    with pytest.raises(ValueError, match=r"CountingSource\.records gives both splits the same"):
        demonstrations(tokenizer, source).setup()


def test_a_subclass_may_read_the_rows_in_its_own_setup(tokenizer):
    class Own(DemonstrationDataModule):
        def setup(self, stage=None):
            super().setup(stage)
            self.num_rows = len(self.rows("train"))

    data = Own(CountingSource(), tokenizer, batch_size=2)
    data.setup()
    assert data.num_rows == 23


def test_data_that_nobody_gave_a_length_say_so_when_they_are_asked(tokenizer):
    data = demonstrations(tokenizer, CountingSource(), num_epochs=None)
    with pytest.raises(ValueError, match="nothing says how long to train"):
        assert data.num_iterations


# -- several responses to a prompt ----------------------------------------------------------------


def of_ranks(tokenizer, size, num_generations):
    """Return the batches of each rank."""
    found = []
    for rank in range(size):
        datamodule = prompts(tokenizer, num_generations=num_generations)
        datamodule.trainer = SimpleNamespace(global_rank=rank, world_size=size)
        found.append(list(datamodule.train_dataloader()))
    return found


def test_every_prompt_gets_its_rows_next_to_each_other_in_the_order_of_one_row(tokenizer):
    (single,), (several,) = (of_ranks(tokenizer, 1, k) for k in (1, 3))
    assert len(single) == len(several) == 14
    for number, (one, three) in enumerate(zip(single, several, strict=True)):
        assert len(three) == 3 * len(one) == 12
        assert one.group_ids.tolist() == one.row_ids.tolist()
        assert three.group_ids.tolist() == one.row_ids.repeat_interleave(3).tolist()
        assert three.row_ids.tolist() == [*range(12 * number, 12 * number + 12)]
        for name, texts in one.columns.items():
            assert three.columns[name] == tuple(text for text in texts for _ in range(3))
        assert torch.equal(three.input_ids, one.input_ids.repeat_interleave(3, 0))
        assert torch.equal(three.attention_mask, one.attention_mask.repeat_interleave(3, 0))


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_share_whole_groups_and_hold_the_rows_of_one_process(tokenizer, size):
    (whole,) = of_ranks(tokenizer, 1, 3)
    ranks = of_ranks(tokenizer, size, 3)
    for number, batch in enumerate(whole):
        parts = [batches[number] for batches in ranks]
        for name in ("row_ids", "group_ids"):
            assert torch.equal(torch.cat([getattr(p, name) for p in parts]), getattr(batch, name))
        numbers = [n for part in parts for n in part.columns["number"]]
        assert numbers == list(batch.columns["number"])
        for part in parts:
            assert part.group_ids.unique(return_counts=True)[1].tolist() == [3] * (4 // size)


def test_held_out_prompts_are_asked_once_whatever_the_responses_to_a_training_prompt(tokenizer):
    single, several = (list(prompts(tokenizer, num_generations=k).val_dataloader()) for k in (1, 3))
    assert [content(batch) for batch in several] == [content(batch) for batch in single]
    assert sum(len(batch) for batch in several) == 7


class Compared:
    """All comparisons of four answers to three prompts each; mostly the longer one is chosen."""

    def records(self, kind, split):
        if split == "validation":
            return []
        pairs = []
        for prompt in ("first", "second", "third"):
            answers = [f"{prompt}" + " x" * n for n in range(1, 5)]
            for i in range(4):
                for j in range(i):
                    chosen, rejected = (j, i) if (i, j) == (1, 0) else (i, j)
                    pairs.append(PreferenceRecord(prompt, answers[chosen], answers[rejected]))
        return pairs


def compared(tokenizer, **options):
    usual = {"batch_size": 6, "num_iterations": 6, "max_length": 60}
    return preferences(tokenizer, Compared(), **usual, **options)


def test_pairs_of_a_prompt_share_a_batch_and_equal_answers_a_number(tokenizer):
    for batch in compared(tokenizer, group_by_prompt=True).train_dataloader():
        numbers = {n for pair in batch.answer_ids for n in pair}
        assert len(numbers) == 4
        sides = [batch.chosen_input_ids, batch.rejected_input_ids]
        texts = {}
        for side, ids in enumerate(sides):
            for row, pair in zip(ids.tolist(), batch.answer_ids, strict=True):
                texts.setdefault(pair[side], set()).add(tuple(row))
        assert all(len(found) == 1 for found in texts.values())
    mixed = compared(tokenizer, group_by_length=False).train_dataloader()
    assert max(len({n for pair in batch.answer_ids for n in pair}) for batch in mixed) > 4


def test_balance_by_length_repeats_the_rarer_kind_evenly(tokenizer):
    plain, even = compared(tokenizer), compared(tokenizer, balance_length=True)
    counts = []
    for datamodule in (plain, even):
        rows = datamodule.rows("train")
        longer = [len(r.chosen_input_ids) > len(r.rejected_input_ids) for r in rows]
        counts.append((sum(longer), len(longer) - sum(longer)))
        assert [row.row_id for row in rows] == list(range(len(rows)))
    assert counts == [(15, 3), (15, 15)]
    short = Counter(
        r.chosen_input_ids.tobytes()
        for r in even.rows("train")
        if len(r.chosen_input_ids) < len(r.rejected_input_ids)
    )
    assert sorted(short.values()) == [5, 5, 5]


def test_balance_by_length_draws_the_rest_where_the_counts_do_not_divide():
    def row(first: int, chosen: int, rejected: int) -> EncodedPreference:
        sides = (np.arange(first, first + n, dtype=np.int32) for n in (chosen, rejected))
        return EncodedPreference(*sides, prompt_length=1)

    rows = [*(row(i, 3, 2) for i in range(8)), *(row(10 + i, 2, 3) for i in range(3))]
    even = balanced_by_length(rows, seed=1)
    counts = Counter(int(each.chosen_input_ids[0]) for each in even[11:])
    assert len(even) == 16
    assert sorted(counts) == [10, 11, 12]
    assert sorted(counts.values()) == [1, 2, 2]


@pytest.mark.parametrize("option", ["group_by_prompt", "balance_length"])
def test_a_resume_in_another_order_is_refused_by_its_name(tokenizer, option):
    state = compared(tokenizer, **{option: True}).state_dict()
    other = compared(tokenizer)
    other.load_state_dict(state)
    with pytest.raises(ValueError, match=rf"data (num_rows|{option})="):
        other.train_dataloader()
