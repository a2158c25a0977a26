"""Dynamic sampling: prompts that teach nothing give their place to others.

Legend: B rows of a rank, P padded prompt, R response. A group is the rows of one prompt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_lightning.batches import Generation, PromptBatch
from rlhf_lightning.distributed.collectives import gathered, rank, world_size
from rlhf_lightning.functional.advantages import informative_groups
from rlhf_lightning.rollout.scorers.base import Responses, Scores


class Sampled(NamedTuple):
    """Scored responses without their prompts, which every rank has.

    Args:
        row_ids: `[B]` row ids of the prompts.
        generation: the responses alone: its sequences are `[B, R]`.
        completions: the responses as text.
        scores: scores of the rows.
    """

    row_ids: Tensor
    generation: Generation
    completions: tuple[str, ...]
    scores: Scores


def resampled(
    answered: Callable[[PromptBatch], tuple[Responses, Scores]],
    prompts: PromptBatch,
    *,
    max_rounds: int,
    score_clip: float | None,
) -> tuple[Responses, Scores, int]:
    """Return scored responses, with uninformative groups replaced by groups of spare prompts.

    A group is uninformative if its scores, clipped but before penalties, are all equal. A round
    asks the next spare prompts of the stream, as many as uninformative groups are left on all
    ranks, each rank its share. The first informative group of the round takes the place of the
    first uninformative one, and so on, also from one rank to another: which prompts are trained on
    does not depend on the number of ranks. What is uninformative after the last round stays.

    Args:
        answered: samples and scores responses to prompts.
        prompts: groups of equal size; behind them spare ones, the same on every rank, `max_rounds`
            times as many as all ranks have.
        max_rounds: largest number of rounds.
        score_clip: scores are compared as advantages see them, clipped to +-score_clip.

    Returns:
        Responses and scores of as many prompts as are not spare, and the rounds that were needed.

    Source: Yu et al. 2025, "DAPO", section 3.2.
    """
    spares = prompts[prompts.spare]
    size = int((prompts.group_ids == prompts.group_ids[0]).sum())
    responses, scores = answered(prompts[~prompts.spare])
    start = 0  # first spare group of the round
    for rounds in range(max_rounds):
        dull = _uninformative(responses, scores, score_clip)[::size]
        lacking = dull.nonzero().flatten()  # groups
        counts = gathered(len(lacking))
        if not (num_asked := sum(counts)):
            return responses, scores, rounds
        share = -(-num_asked // world_size())  # of each rank: all of them run equally often
        places = rank() * share + torch.arange(share, device=lacking.device)
        groups = (start + places).clamp(max=len(spares) // size - 1)
        more = answered(spares[_rows_of(groups, size)])
        found = ~_uninformative(*more, score_clip)[::size]
        found &= places < num_asked  # the last rank may have been given more
        sent = [_sampled(*more, _rows_of(group, size)) for group in found.nonzero()]
        taken = [group for of_rank in gathered(sent) for group in of_rank]
        taken = taken[sum(counts[: rank()]) :][: len(lacking)]
        if taken:
            replaced = _rows_of(lacking[: len(taken)], size)
            responses, scores = _with_rows(responses, scores, replaced, taken, prompts)
        start += num_asked
    return responses, scores, max_rounds


def _rows_of(groups: Tensor, size: int) -> Tensor:
    return (groups.unsqueeze(1) * size + torch.arange(size, device=groups.device)).flatten()


def _uninformative(responses: Responses, scores: Scores, score_clip: float | None) -> Tensor:
    groups = responses.prompts.group_ids
    return ~informative_groups(scores.total, groups, scores.applies, clip=score_clip)  # [B]


def _sampled(responses: Responses, scores: Scores, rows: Tensor) -> Sampled:
    """Return these rows, on the CPU."""
    generation = responses.generation
    sampled = generation.sequences[:, -generation.response_mask.shape[1] :]
    return Sampled(
        responses.prompts.row_ids[rows].cpu(),
        replace(generation, sequences=sampled)[rows].to("cpu"),
        tuple(responses.completions[row] for row in rows.tolist()),
        _joined([scores], rows, "cpu"),
    )


def _with_rows(
    responses: Responses, scores: Scores, rows: Tensor, new: Sequence[Sampled], prompts: PromptBatch
) -> tuple[Responses, Scores]:
    """Return responses and scores with `new` in place of these rows; `prompts` has all prompts."""
    device = rows.device
    own = _sampled(responses, scores, torch.arange(len(scores.total), device=device))
    every = [own, *new]
    order = torch.arange(len(own.row_ids))
    order[rows.cpu()] = len(order) + torch.arange(len(rows))
    width = max(part.generation.response_mask.shape[1] for part in every)
    generation = Generation.cat([_padded(part.generation, width) for part in every])[order]
    generation = generation.to(device)
    row_ids = torch.cat([part.row_ids for part in every])[order].to(device)
    asked = prompts.with_row_ids(row_ids)
    completions = [text for part in every for text in part.completions]
    merged = Responses(
        asked,
        replace(generation, sequences=torch.cat([asked.input_ids, generation.sequences], 1)),
        torch.cat([asked.attention_mask, generation.response_mask], 1),
        tuple(completions[row] for row in order.tolist()),
    )
    return merged, _joined([part.scores for part in every], order, device)


def _padded(generation: Generation, width: int) -> Generation:
    """Return responses padded on the right to `width` tokens."""
    more = (0, width - generation.response_mask.shape[1])
    return replace(
        generation,
        sequences=pad(generation.sequences, more),
        response_mask=pad(generation.response_mask, more),
        logprobs=None if generation.logprobs is None else pad(generation.logprobs, more),
    )


def _joined(parts: Sequence[Scores], rows: Tensor, device: torch.device | str) -> Scores:
    """Return these rows of the scores `parts`, one behind the other."""

    def join(values: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(values))[rows].to(device)

    names = parts[0].components
    components = {name: join([part.components[name] for part in parts]) for name in names}
    applies = None
    if any(part.applies is not None for part in parts):
        everywhere = ((p.applies, torch.ones_like(p.total, dtype=torch.bool)) for p in parts)
        applies = join([ones if found is None else found for found, ones in everywhere])
    return Scores(join([part.total for part in parts]), components, applies)
