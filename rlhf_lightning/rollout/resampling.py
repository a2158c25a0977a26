"""Dynamic sampling: prompts that teach nothing give their place to others.

Legend: B rows of a rank, P padded prompt, R response. A group is the rows of one prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlhf_lightning.batches import Generation, PromptBatch
from rlhf_lightning.distributed.collectives import agreed_max
from rlhf_lightning.functional.advantages import informative_groups
from rlhf_lightning.functional.rewards import adjust_scores
from rlhf_lightning.rollout.scorers.base import Answers, Scores


def resampled(
    answered: Callable[[PromptBatch], tuple[Answers, Scores]],
    prompts: PromptBatch,
    *,
    max_rounds: int,
    score_clip: float | None,
) -> tuple[Answers, Scores, int]:
    """Return scored answers whose uninformative groups gave place to groups of spare prompts.

    A group is uninformative if its scores, clipped but before penalties, are all equal. A round
    asks the next spare prompts: as many as uninformative groups are left on the rank that has most
    of them, so that all ranks run equally often. The first informative group of the round takes the
    place of the first uninformative one, and so on. What is uninformative after the last round
    stays.

    Args:
        answered: samples and scores responses to prompts.
        prompts: groups of equal size; behind them spare ones, `max_rounds` times as many.
        max_rounds: at which it ends.
        score_clip: scores are compared as advantages see them, clipped to +-score_clip.

    Returns:
        Answers and scores of as many prompts as are not spare, and the rounds that were needed.

    Source: Yu et al. 2025, "DAPO", section 3.2.
    """
    spares = prompts[prompts.spare]
    size = int((prompts.group_ids == prompts.group_ids[0]).sum())
    answers, scores = answered(prompts[~prompts.spare])
    for rounds in range(max_rounds):
        lacking = _uninformative(answers, scores, score_clip)[::size].nonzero().flatten()  # groups
        num_asked = size * agreed_max(len(lacking), lacking.device)
        if not num_asked:
            return answers, scores, rounds
        more_answers, more_scores = answered(spares[:num_asked])
        spares = spares[num_asked:]
        uninformative = _uninformative(more_answers, more_scores, score_clip)
        found = (~uninformative)[::size].nonzero().flatten()
        replaced = lacking[: len(found)]
        groups = torch.arange(len(scores.total) // size, device=lacking.device)
        groups[replaced] = len(groups) + found[: len(replaced)]  # those of the round stand behind
        rows = (groups.unsqueeze(1) * size + torch.arange(size, device=groups.device)).flatten()
        answers = _rows_of_both(answers, more_answers, rows)
        scores = Scores(
            torch.cat([scores.total, more_scores.total])[rows],
            {
                name: torch.cat([part, more_scores.components[name]])[rows]
                for name, part in scores.components.items()
            },
            None
            if scores.applies is None or more_scores.applies is None
            else torch.cat([scores.applies, more_scores.applies])[rows],
        )
    return answers, scores, max_rounds


def _uninformative(answers: Answers, scores: Scores, score_clip: float | None) -> Tensor:
    compared = adjust_scores(
        scores.total, answers.finished, clip=score_clip, missing_eos_penalty=0.0
    )
    return ~informative_groups(compared, answers.prompts.group_ids, scores.applies)  # [B]


def _rows_of_both(first: Answers, second: Answers, rows: Tensor) -> Answers:
    """Return these rows of the answers `first` with `second` behind them, padded to one width."""
    both = (first, second)
    width = max(answers.response_mask.shape[1] for answers in both)
    generation = Generation.cat([_padded(answers.generation, width) for answers in both])[rows]
    prompts = PromptBatch.cat([answers.prompts for answers in both])[rows]
    completions = first.completions + second.completions
    return Answers(
        prompts,
        generation,
        torch.cat([prompts.attention_mask, generation.response_mask], 1),
        tuple(completions[row] for row in rows.tolist()),
    )


def _padded(generation: Generation, width: int) -> Generation:
    """Return the responses padded on the right to `width` tokens."""
    more = (0, width - generation.response_mask.shape[1])
    return replace(
        generation,
        sequences=pad(generation.sequences, more),
        response_mask=pad(generation.response_mask, more),
        logprobs=None if generation.logprobs is None else pad(generation.logprobs, more),
    )
