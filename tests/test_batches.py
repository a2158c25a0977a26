from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from rlhf_lightning.batches import (
    PreferenceBatch,
    PromptBatch,
    RolloutBatch,
    SFTBatch,
    TensorBatch,
)
from rlhf_lightning.rollout.noise import RowNoise


def rollout_batch(rows: int = 8, *, prompt: int = 3, response: int = 4) -> RolloutBatch:
    per_token = ("logprobs", "ref_logprobs", "values", "rewards", "advantages", "returns")
    tokens = {
        name: torch.arange(rows * response).view(rows, response) + 100.0 * i
        for i, name in enumerate((*per_token, "entropy"))
    }
    width = prompt + response
    return RolloutBatch(
        sequences=torch.arange(rows * width).view(rows, width),
        attention_mask=torch.ones(rows, width, dtype=torch.bool),
        response_mask=torch.ones(rows, response, dtype=torch.bool),
        scores=torch.arange(rows).float(),
        finish_reason=torch.zeros(rows, dtype=torch.int64),
        row_ids=torch.arange(rows),
        prompt_length=prompt,
        domains=tuple(f"domain {i}" for i in range(rows)),
        score_components={"length": torch.arange(rows) * 2.0},
        **tokens,
    )


def prompt_batch(rows: int = 3, width: int = 4) -> PromptBatch:
    return PromptBatch(
        input_ids=torch.arange(rows * width).view(rows, width),
        attention_mask=torch.ones(rows, width, dtype=torch.bool),
        row_ids=torch.arange(rows),
        domains=("a", "b", "c")[:rows],
        columns={"prompt": ("p", "q", "r")[:rows]},
    )


def sft_batch(rows: int = 2, width: int = 3) -> SFTBatch:
    mask = torch.ones(rows, width, dtype=torch.bool)
    return SFTBatch(torch.zeros(rows, width, dtype=torch.int64), mask, mask, ("",) * rows)


def preference_batch(rows: int = 2, width: int = 3) -> PreferenceBatch:
    ids = torch.zeros(rows, width, dtype=torch.int64)
    mask = torch.ones(rows, width, dtype=torch.bool)
    length = torch.ones(rows, dtype=torch.int64)
    margin, domains = torch.zeros(rows), ("",) * rows
    return PreferenceBatch(
        ids, mask, ids, mask, length, length, margin, domains, torch.arange(rows)
    )


@pytest.mark.parametrize(
    ("index", "rows"),
    [
        (slice(1, 6, 2), [1, 3, 5]),
        ([5, 0, 5], [5, 0, 5]),
        (torch.tensor([7, 2]), [7, 2]),
        (torch.arange(8) > 5, [6, 7]),
        ([], []),
    ],
)
def test_indexing_takes_the_rows_of_every_field_in_their_order(index, rows):
    batch = rollout_batch()
    taken = batch[index]
    assert len(taken) == len(rows)
    assert taken.scores.tolist() == rows
    assert taken.domains == tuple(f"domain {i}" for i in rows)
    assert taken.score_components["length"].tolist() == [2 * i for i in rows]
    assert taken.prompt_length == 3
    for name in ("sequences", "values", "entropy", "response_mask"):
        assert torch.equal(getattr(taken, name), getattr(batch, name)[rows]), name


def test_cat_joins_what_indexing_took_apart():
    batch = rollout_batch()
    joined = RolloutBatch.cat([batch[:3], batch[3:4], batch[4:]])
    for name, value in vars(batch).items():
        other = getattr(joined, name)
        if isinstance(value, torch.Tensor):
            assert torch.equal(other, value), name
    assert joined.domains == batch.domains
    assert torch.equal(joined.score_components["length"], batch.score_components["length"])


@dataclass(frozen=True)
class Shared(TensorBatch):
    x: torch.Tensor
    width: int


def test_cat_refuses_other_shared_values():
    with pytest.raises(ValueError, match=r"differ in a shared value: \[3, 5\]"):
        Shared.cat([Shared(torch.ones(2), 3), Shared(torch.ones(2), 5)])


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (prompt_batch, "row_ids"),
        (sft_batch, "loss_mask"),
        (preference_batch, "rejected_input_ids"),
        (preference_batch, "margin"),
    ],
)
def test_a_field_of_another_shape_is_named(make, field):
    batch = make()
    with pytest.raises(ValueError, match=rf"{type(batch).__name__}\.{field} has shape"):
        replace(batch, **{field: getattr(batch, field)[:-1]})


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (sft_batch, "loss_mask"),
        (preference_batch, "chosen_attention_mask"),
        (rollout_batch, "response_mask"),
    ],
)
def test_a_mask_that_is_not_bool_is_named(make, field):
    batch = make()
    with pytest.raises(TypeError, match=rf"\.{field} has dtype torch\.int64, expected torch\.bool"):
        replace(batch, **{field: getattr(batch, field).long()})


# -- minibatches ----------------------------------------------------------------------------


def keys(rows: torch.Tensor, epoch: int = 0) -> torch.Tensor:
    return RowNoise(3, "minibatches").uniform(rows, epoch)


@pytest.mark.parametrize("num_minibatches", [1, 2, 4, 8])
def test_minibatches_hold_every_row_once_in_equal_shares(num_minibatches):
    batch = rollout_batch()
    parts = list(batch.minibatches(num_minibatches, keys=keys(batch.row_ids)))
    assert len(parts) == num_minibatches
    assert {len(part) for part in parts} == {8 // num_minibatches}
    assert sorted(torch.cat([p.row_ids for p in parts]).tolist()) == list(range(8))
    for part in parts:
        assert torch.equal(part.values, batch.values[part.row_ids])


def test_every_epoch_deals_the_rows_anew():
    batch = rollout_batch(rows=64)
    dealt = {
        tuple(next(iter(batch.minibatches(2, keys=keys(batch.row_ids, e)))).row_ids.tolist())
        for e in range(8)
    }
    assert len(dealt) == 8


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_minibatch_has_the_same_rows_for_any_number_of_ranks(ranks):
    batch = rollout_batch(rows=16)
    whole = [p.row_ids.tolist() for p in batch.minibatches(4, keys=keys(batch.row_ids))]
    shares = [batch[i * 16 // ranks : (i + 1) * 16 // ranks] for i in range(ranks)]
    dealt = [list(share.minibatches(4, keys=keys(share.row_ids))) for share in shares]
    for number, rows in enumerate(whole):
        assert rows == [row for share in dealt for row in share[number].row_ids.tolist()]


@pytest.mark.parametrize("num_minibatches", [0, 3, 16])
def test_a_number_of_minibatches_that_does_not_divide_the_rows_is_refused(num_minibatches):
    batch = rollout_batch()
    message = rf"num_minibatches={num_minibatches} must divide the 8 .*use one of \[1, 2, 4, 8\]"
    with pytest.raises(ValueError, match=message):
        next(batch.minibatches(num_minibatches, keys=keys(batch.row_ids)))


def groups(rows: int = 16, size: int = 4) -> RolloutBatch:
    batch = rollout_batch(rows)
    return replace(batch, group_ids=batch.row_ids // size, group_size=None)


@pytest.mark.parametrize("num_minibatches", [1, 2, 4])
def test_minibatches_of_whole_groups_hold_every_group_once(num_minibatches):
    batch = groups()
    parts = list(batch.minibatches(num_minibatches, keys=keys(batch.row_ids), whole_groups=True))
    assert {len(part) for part in parts} == {16 // num_minibatches}
    assert sorted(torch.cat([p.row_ids for p in parts]).tolist()) == list(range(16))
    for part in parts:
        _, counts = part.group_ids.unique(return_counts=True)
        assert counts.tolist() == [4] * (4 // num_minibatches)
        assert torch.equal(part.group_ids, part.row_ids // 4)
        assert torch.equal(part.values, batch.values[part.row_ids])
    # The mutation: rows that are dealt by themselves tear groups apart.
    torn = next(batch.minibatches(4, keys=keys(batch.row_ids)))
    assert torn.group_ids.unique(return_counts=True)[1].tolist() != [4]


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_minibatch_has_the_same_groups_for_any_number_of_ranks(ranks):
    batch = groups(32)
    whole = list(batch.minibatches(2, keys=keys(batch.row_ids), whole_groups=True))
    share = 32 // ranks
    shares = [batch[i * share : (i + 1) * share] for i in range(ranks)]
    dealt = [list(s.minibatches(2, keys=keys(s.row_ids), whole_groups=True)) for s in shares]
    for number, part in enumerate(whole):
        rows = [row for parts in dealt for row in parts[number].row_ids.tolist()]
        assert rows == part.row_ids.tolist()
