from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from rlhf_lightning.data.sampler import SequentialBatchSampler, StreamBatchSampler


def lengths_of(num_rows):
    return [(7 * i) % 41 + 1 for i in range(num_rows)]


def make(num_rows=37, *, batch_size=4, num_iterations=60, seed=0, grouped=False, **options):
    return StreamBatchSampler(
        num_rows,
        batch_size=batch_size,
        num_iterations=num_iterations,
        seed=seed,
        lengths=lengths_of(num_rows) if grouped else None,
        **options,
    )


@pytest.mark.parametrize("grouped", [False, True])
def test_a_batch_is_a_function_of_seed_and_number_alone(grouped):
    in_order = list(make(grouped=grouped))
    sampler = make(grouped=grouped, num_iterations=1000)
    asked = {i: list(sampler.batch(i)) for i in (59, 3, 17, 0, 58, 3)}
    assert all(in_order[i] == batch for i, batch in asked.items())
    assert in_order != list(make(grouped=grouped, seed=1))
    assert len(in_order) == len(make(grouped=grouped)) == 60


@pytest.mark.parametrize("num_rows", [3, 4, 37])
def test_grouped_passes_use_every_row_once_and_end_together_with_the_stream(num_rows):
    """After the batches of k passes every row was seen k times, the filling once more."""
    for num_passes in (1, 2, 5):
        num_iterations = -(-num_passes * num_rows // 4)
        batches = list(make(num_rows, num_iterations=num_iterations, grouped=True))
        counts = Counter(row for batch in batches for row in batch)
        filling = num_iterations * 4 - num_passes * num_rows
        assert all(len(batch) == 4 for batch in batches)
        assert sum(counts[row] - num_passes for row in range(num_rows)) == filling
        assert all(counts[row] >= num_passes for row in range(num_rows))


def test_grouping_puts_rows_of_like_length_together_and_shuffles_the_batches():
    def spread(sampler):
        lengths = lengths_of(500)
        batches = [[lengths[row] for row in batch] for batch in sampler]
        return sum(max(b) - min(b) for b in batches) / len(batches), [b[0] for b in batches]

    plain, _ = spread(make(500, num_iterations=125))
    grouped, first = spread(make(500, num_iterations=125, grouped=True))
    assert grouped < plain / 4
    assert first != sorted(first)
    rises = sum(a < b for a, b in pairwise(first))
    assert 40 < rises < 85


@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("consumed", [1, 37, 60])
def test_iteration_goes_on_behind_what_was_consumed(grouped, consumed):
    whole = list(make(grouped=grouped))
    resumed = make(grouped=grouped)
    resumed.consumed = consumed
    assert list(resumed) == whole[consumed:]
    assert len(resumed) == 60


@pytest.mark.parametrize("grouped", [False, True])
def test_ranks_take_contiguous_shares_that_make_up_the_batch(grouped):
    whole = list(make(grouped=grouped))
    shares = [list(make(grouped=grouped, rank=rank, world_size=2)) for rank in range(2)]
    assert [a + b for a, b in zip(*shares, strict=True)] == whole
    assert all(len(share) == 2 for share in shares[0] + shares[1])


@pytest.mark.parametrize(
    ("num_rows", "batch_size", "world_size"), [(3, 1, 2), (3, 5, 3), (4, 2, 2), (31, 5, 3)]
)
def test_validation_deals_every_row_once_in_as_many_batches_on_every_rank(
    num_rows, batch_size, world_size
):
    ranks = [
        list(SequentialBatchSampler(num_rows, batch_size=batch_size, rank=r, world_size=world_size))
        for r in range(world_size)
    ]
    assert sorted(row for batches in ranks for b in batches for row in b) == list(range(num_rows))
    assert len({len(batches) for batches in ranks}) == 1
    sizes = [len(b) for batches in ranks for b in batches]
    assert min(sizes) >= 1
    assert max(sizes) <= batch_size + 1
    assert max(sizes) - min(sizes) <= 1


def test_validation_goes_from_short_to_long_or_keeps_the_order():
    kept = SequentialBatchSampler(5, batch_size=2)
    assert [row for batch in kept for row in batch] == [0, 1, 2, 3, 4]
    by_length = SequentialBatchSampler(5, batch_size=2, lengths=[3, 1, 5, 2, 4])
    assert [row for batch in by_length for row in batch] == [1, 3, 0, 4, 2]


def test_validation_with_fewer_rows_than_ranks_is_an_error_and_none_is_none():
    with pytest.raises(ValueError, match="1 validation rows cannot be dealt to 2 ranks"):
        SequentialBatchSampler(1, batch_size=2, world_size=2)
    assert list(SequentialBatchSampler(0, batch_size=2, world_size=2)) == []


def test_rows_of_a_group_follow_each_other_in_an_order_of_each_pass():
    groups = [row % 5 for row in range(37)]
    stream = [row for batch in make(groups=groups, num_iterations=74) for row in batch]
    passes = [stream[i : i + 37] for i in range(0, len(stream) - 36, 37)]
    assert len(passes) == 8
    for one in passes:
        assert sorted(one) == list(range(37))
        seen = [groups[row] for row in one]
        changes = sum(a != b for a, b in pairwise(seen))
        assert changes == 4, "a group was left and taken up again"
    assert len({tuple(dict.fromkeys(groups[row] for row in one)) for one in passes}) > 3
    assert len({tuple(row for row in one if groups[row] == 0) for one in passes}) > 3
