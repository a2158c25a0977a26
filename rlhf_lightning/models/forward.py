"""Every full-sequence model call.

Rows arrive as left-padded prompts followed by right-padded responses. Each is re-packed to start
at column 0 and padded on the right. On a CPU it is padded to its length bucket, a function of the
row alone: a row is always evaluated at one width, and a ratio of 1 is exactly 1. On a GPU, whose
kernels depend on the shape of a batch anyway, rows of similar lengths are padded to the longest.

Legend: B rows, P prompt width, R response width, b rows of a micro-batch, W its bucket,
N response tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_lightning.functional.sequences import (
    last_token_index,
    next_token_labels,
    response_state_index,
)
from rlhf_lightning.models.cpu_kernels import side_by_side
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel, Teaching, TokenStatistics
from rlhf_lightning.models.micro_batching import automatic, in_buckets, token_budget

BUCKET = 16
# Padding that costs what a further micro-batch of a GPU costs: its launches, weights that are cast
# or gathered for it, gradients that are added or sent. At 0.5 billion weights an H100 took as long
# as for 7,000 tokens (benchmarks/README.md); the larger the model, the fewer they are.
WASTE = 1024


class Responses(Protocol):
    """The tensors that the functions below read; `RolloutBatch` and `ResponseRows` have them."""

    @property
    def sequences(self) -> Tensor: ...  # noqa: D102
    @property
    def attention_mask(self) -> Tensor: ...  # noqa: D102
    @property
    def response_mask(self) -> Tensor: ...  # noqa: D102


@dataclass(frozen=True)
class ResponseRows:
    """Some rows of responses that are no rollout yet: `[b, P + R]`, `[b, P + R]` and `[b, R]`."""

    sequences: Tensor
    attention_mask: Tensor
    response_mask: Tensor


class Packed(NamedTuple):
    """Rows re-packed to the right, and where their response tokens are predicted.

    Args:
        input_ids: `[b, W]` ids, padded on the right.
        positions: `[N]` into the flattened `[b * W]`: the state before each response token.
        tokens: `[N]` the response tokens, row by row.
    """

    input_ids: Tensor
    positions: Tensor
    tokens: Tensor


def bucket_width(lengths: Tensor) -> Tensor:
    """Return the padded width of rows with `lengths` tokens: the next multiple of 16."""
    return (lengths + BUCKET - 1) // BUCKET * BUCKET


def pack_right(input_ids: Tensor, attention_mask: Tensor, width: int | None = None) -> Tensor:
    """Return `[b, W]` ids that start at column 0; what follows a row's tokens is id 0.

    Args:
        input_ids: `[b, T]`, each row's tokens contiguous.
        attention_mask: `[b, T]` bool, True on real tokens.
        width: W, where it is known; the host waits for the device otherwise.
    """
    lengths = attention_mask.sum(-1)  # [b]
    start = last_token_index(attention_mask) + 1 - lengths
    width = width or int(bucket_width(lengths).max())
    columns = torch.arange(width, device=input_ids.device)
    source = (start.unsqueeze(-1) + columns).clamp(max=input_ids.shape[1] - 1)  # [b, W]
    return torch.where(columns < lengths.unsqueeze(-1), input_ids.gather(1, source), 0)


class PackedRows(NamedTuple):
    """Rows one after the other in one sequence, without padding between them.

    Args:
        input_ids: `[1, W]`; a last row of id 0 fills W up to a multiple of 16.
        offsets: `[b]`; the token of row i in column t is at `t + offsets[i]`.
        row_lengths: lengths of all rows, that last one included.
    """

    input_ids: Tensor
    offsets: Tensor
    row_lengths: tuple[int, ...]


def pack_together(input_ids: Tensor, attention_mask: Tensor) -> PackedRows:
    """Pack `[b, T]` rows, padded on any side, into one sequence; see `PackedRows`."""
    mask = attention_mask.bool()
    lengths = mask.sum(-1)  # [b]
    ends = lengths.cumsum(0)
    count = int(ends[-1])
    rest = -count % BUCKET
    row_lengths = (*lengths.tolist(), *([rest] if rest else []))
    together = pad(input_ids[mask], (0, rest)).unsqueeze(0)  # [1, W]
    return PackedRows(together, ends - 1 - last_token_index(mask), row_lengths)


def pack(batch: Responses) -> Packed:
    """Re-pack a micro-batch; see `Packed`."""
    # The only wait of a forward: the lengths and the mask make shapes.
    lengths = batch.attention_mask.sum(-1, keepdim=True)  # [b, 1]
    lengths, response_mask = torch.cat([lengths, batch.response_mask], 1).cpu().tensor_split([1], 1)
    width = int(bucket_width(lengths).max())
    response_mask = response_mask.bool()  # [b, R], as what follows on the host
    prompt_length = lengths.squeeze(1) - response_mask.sum(-1)
    index = response_state_index(prompt_length, response_mask.shape[1])  # [b, R]
    rows = torch.arange(len(index)).unsqueeze(-1)
    asked = torch.stack([(index + rows * width)[response_mask], *response_mask.nonzero().T])
    positions, row, column = asked.to(batch.sequences.device, non_blocking=True)  # [N] each
    responses = batch.sequences[:, -response_mask.shape[1] :]
    input_ids = pack_right(batch.sequences, batch.attention_mask, width)
    return Packed(input_ids, positions, responses[row, column])


def equal_widths(lengths: Sequence[int], *, waste: int, budget: int) -> list[range]:
    """Cut ascending `lengths` into runs that are read in one forward each, the longest first.

    Args:
        lengths: tokens of each row, ascending.
        waste: padding in one forward at most; as much as costs what another forward costs.
        budget: tokens in one forward at most, padding included; bounds the memory.

    Returns:
        Ranges of indices that cover all rows, each once.
    """
    runs: list[range] = []
    end = len(lengths)
    while end:
        width, start, padding = lengths[end - 1], end - 1, 0
        while start:
            padding += width - lengths[start - 1]
            if padding > waste or (end - start + 1) * width > budget:
                break
            start -= 1
        runs.append(range(start, end))
        end = start
    return runs


def packs(model: PolicyModel | ScalarHeadModel) -> bool:
    """Return whether rows of `model` are packed into one sequence where no padding is to decide.

    Only by `model.micro_batches=auto`, on a CPU whose kernels keep the rows apart.
    """
    return automatic() and model.packs


def packed_micro_batches(lengths: Tensor, budget: int) -> list[Tensor]:
    """Return row indices of micro-batches of nearly equal numbers of tokens, the longest first.

    Args:
        lengths: `[B]` tokens of each row, on a CPU.
        budget: tokens of a micro-batch at most, unless a single row has more.
    """
    order = lengths.argsort(descending=True, stable=True)
    sizes = lengths[order]
    middles = sizes.cumsum(0) - sizes / 2
    total = int(sizes.sum())
    for count in range(-(-total // budget), len(order) + 1):
        part = (middles * count / total).long()  # [B], ascending
        parts = list(order.split(torch.unique_consecutive(part, return_counts=True)[1].tolist()))
        if all(len(rows) == 1 or int(lengths[rows].sum()) <= budget for rows in parts):
            return parts
    return list(order.split(1))


def micro_batches(
    attention_mask: Tensor,
    micro_batch_size: int | None,
    *,
    packed: bool = False,
    sequences: int = 1,
) -> list[Tensor]:
    """Return row indices, on the host, of micro-batches, the longest rows first.

    By "buckets" a micro-batch has rows of one bucket, at most `micro_batch_size`; None does not
    bound it. By "tokens" it has rows of similar lengths, and at most the tokens of
    `micro_batch_size` rows of the width T, padding included: more rows if they are short, for the
    same memory. None is `token_budget()` tokens there, an eighth of them padding at most.
    `model.micro_batches` says which; by default buckets on a CPU and tokens elsewhere.

    Args:
        attention_mask: `[B, T]` bool, True on real tokens.
        micro_batch_size: rows of a micro-batch.
        packed: rows are packed into one sequence, so that none is padded: any rows go together,
            with at most the tokens of `micro_batch_size` rows of the width T.
        sequences: sequences that a row stands for: 2 where it is a pair.
    """
    if packed:
        budget = (micro_batch_size or len(attention_mask)) * attention_mask.shape[1]
        return packed_micro_batches(attention_mask.sum(-1).cpu(), budget)
    widths = bucket_width(attention_mask.sum(-1)).cpu()
    if in_buckets(attention_mask.device.type):
        order = widths.argsort(descending=True, stable=True)
        sizes = torch.unique_consecutive(widths[order], return_counts=True)[1]
        groups = torch.split(order, sizes.tolist())
        return [
            part for rows in groups for part in torch.split(rows, micro_batch_size or len(rows))
        ]
    order = widths.argsort(stable=True)
    if micro_batch_size is None:
        budget = token_budget() // sequences
        waste = budget // 8
    else:
        budget, waste = micro_batch_size * (-(-attention_mask.shape[1] // BUCKET) * BUCKET), WASTE
    runs = equal_widths(widths[order].tolist(), waste=waste, budget=budget)
    return [order[run.start : run.stop] for run in runs]


def pair_micro_batches(
    chosen_mask: Tensor,
    rejected_mask: Tensor,
    micro_batch_size: int | None,
    *,
    packed: bool = False,
) -> list[Tensor]:
    """Return the indices of pairs whose two rows share a forward, as `micro_batches` does of rows.

    Args:
        chosen_mask: `[B, T]` bool, True on real tokens.
        rejected_mask: `[B, T]` bool, True on real tokens.
        micro_batch_size: pairs; None does not bound it.
        packed: rows are packed, as in `micro_batches`; the budget is that of twice as many rows.
    """
    if packed:
        lengths = (chosen_mask.sum(-1) + rejected_mask.sum(-1)).cpu()
        budget = 2 * (micro_batch_size or len(lengths)) * chosen_mask.shape[1]
        return packed_micro_batches(lengths, budget)
    return micro_batches(chosen_mask | rejected_mask, micro_batch_size, sequences=2)


def group_micro_batches(
    attention_mask: Tensor, group_size: int, micro_batch_size: int | None
) -> list[Tensor]:
    """Return the rows of micro-batches that hold whole groups, at least one each.

    Args:
        attention_mask: `[B, T]` bool, True on real tokens.
        group_size: rows of a group, next to each other.
        micro_batch_size: rows, as in `micro_batches`.
    """
    if group_size == 1:
        return micro_batches(attention_mask, micro_batch_size)
    longest = attention_mask.unflatten(0, (-1, group_size)).any(1)  # [B / group_size, T]
    size = None if micro_batch_size is None else max(micro_batch_size // group_size, 1)
    inside = torch.arange(group_size)
    parts = micro_batches(longest, size, sequences=group_size)
    return [(part.unsqueeze(1) * group_size + inside).flatten() for part in parts]


def response_statistics(
    policy: PolicyModel,
    batch: Responses,
    *,
    temperature: float,
    with_entropy: bool = True,
    teaching: Teaching | None = None,
    with_states: bool = False,
) -> TokenStatistics:
    """Return log-probabilities and entropy `[b, R]` of a micro-batch's responses, 0 off mask.

    Args:
        policy: policy that is asked.
        batch: rows of the micro-batch.
        temperature: divides the logits; above 0.
        with_entropy: False leaves the entropy out.
        teaching: also return the divergence `[b, R]` from this teacher, whose states are
            `[b, R, H']` here; the entropy is left out.
        with_states: also return the states `[b, R, H]` before the response tokens.
    """
    packed, mask = pack(batch), batch.response_mask
    if teaching is not None:
        teaching = teaching._replace(states=teaching.states[mask])
    found = policy(*packed, temperature, with_entropy, None, teaching, with_states)
    return TokenStatistics(*(None if one is None else _unpack(one, mask) for one in found))  # type: ignore[arg-type]


def response_values(value_model: ScalarHeadModel, batch: Responses) -> Tensor:
    """Return `[b, R]` values of the state before each response token, 0 off mask."""
    packed = pack(batch)
    return _unpack(value_model(packed.input_ids, packed.positions), batch.response_mask)


def sequence_scores(
    model: ScalarHeadModel, input_ids: Tensor, attention_mask: Tensor, *, packed: bool = False
) -> Tensor:
    """Return `[b]` scores read at each row's last token; `[b, T]` padded on any side.

    Args:
        model: value or reward model.
        input_ids: `[b, T]`, padded on any side.
        attention_mask: `[b, T]` bool, True on real tokens.
        packed: let the rows be one sequence; see `packs`.
    """
    if packed:
        together = pack_together(input_ids, attention_mask)
        last = together.offsets + last_token_index(attention_mask)  # [b]
        return model(together.input_ids, last, together.row_lengths)  # type: ignore[no-any-return]
    shifted = pack_right(input_ids, attention_mask)
    rows = torch.arange(len(shifted), device=shifted.device)
    last = rows * shifted.shape[1] + attention_mask.sum(-1) - 1
    return model(shifted, last)  # type: ignore[no-any-return]


def response_logprobs(
    policy: PolicyModel, input_ids: Tensor, attention_mask: Tensor, response_length: Tensor
) -> Tensor:
    """Return `[b]` log-probabilities of whole responses, nats: sums over tokens, EOS included.

    Args:
        policy: policy whose log-probabilities are returned.
        input_ids: `[b, T]`, padded on any side.
        attention_mask: `[b, T]` bool, True on real tokens.
        response_length: `[b]`, the last tokens of each row.
    """
    packed = pack_right(input_ids, attention_mask)  # [b, W]
    length = attention_mask.sum(-1, keepdim=True)
    columns = torch.arange(packed.shape[1], device=packed.device)
    is_response = (columns >= length - response_length.unsqueeze(-1)) & (columns < length)
    labels = next_token_labels(packed, is_response)
    asked = labels >= 0
    positions = asked.flatten().nonzero().squeeze(-1)
    logprobs = policy(packed, positions, labels[asked], 1.0, False).logprobs
    return _unpack(logprobs, asked).sum(-1)


def by_micro_batch(
    function: Callable[[Tensor], tuple[Tensor | None, ...]],
    attention_mask: Tensor,
    micro_batch_size: int | None,
    *,
    agree: Callable[[int, torch.device], int] | None = None,
    models: Sequence[Any] = (),
) -> tuple[Any, ...]:
    """Apply `function` to the row indices of each micro-batch; return rows in their order.

    Args:
        function: rows `[b]`, on the device -> tensors whose first dimension is b, or None.
        attention_mask: `[B, T]` bool of all rows.
        micro_batch_size: largest number of rows, see `micro_batches`.
        agree: returns the largest number of calls that a rank needs. Ranks that shard a model must
            call it equally often; those with fewer micro-batches repeat one and drop the result.
        models: two micro-batches are computed at the same time where `side_by_side` lets these;
            without any they take turns.
    """
    parts = micro_batches(attention_mask, micro_batch_size)
    # Agreed before the first call: between two calls of a rank that shards, others must be in one.
    device = attention_mask.device
    count = agree(len(parts), device) if agree else len(parts)
    calls = [partial(function, rows.to(device, non_blocking=True)) for rows in parts]
    beside = side_by_side(*models) if models else None
    outputs = [call() for call in calls] if beside is None else beside.run(calls)
    for _ in range(len(parts), count):
        function(parts[0].to(device, non_blocking=True))
    back = torch.cat(parts).argsort().to(device, non_blocking=True)
    columns = zip(*outputs, strict=True)
    return tuple(None if each[0] is None else torch.cat(each)[back] for each in columns)


def _unpack(flat: Tensor, mask: Tensor) -> Tensor:
    if flat.dim() == 2:  # states, without a gradient
        rows = flat.new_zeros(*mask.shape, flat.shape[1])
        rows[mask] = flat
        return rows
    return torch.zeros(mask.shape, dtype=flat.dtype, device=flat.device).masked_scatter(mask, flat)
