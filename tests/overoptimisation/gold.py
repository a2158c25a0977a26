"""Gold as a scorer that watches: it never trains, and only this measurement reads it."""

from __future__ import annotations

from typing import Any

import torch

from rlhf_lightning.data.demo.gold import gold_scores
from rlhf_lightning.rollout.scorers.base import Answers, Scores


class GoldScorer:
    """The gold reward of each answer, whether it ended by itself included."""

    def build(self, base: Any = None) -> list[torch.nn.Module]:
        return []

    def __call__(self, answers: Answers) -> Scores:
        prompts = answers.prompts.columns["prompt"]
        found = gold_scores(prompts, answers.completions, answers.finished.tolist())
        total = torch.tensor(found, device=answers.sequences.device)
        return Scores(total, {"gold": total})
