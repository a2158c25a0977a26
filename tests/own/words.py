"""A scorer that likes responses of a certain number of words."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from rlhf_lightning.arguments import Above0, Count, checked
from rlhf_lightning.rollout.scorers.base import Responses, Scores


class WordScorer:
    """Minus the distance from `wanted` words, in units of `unit` words."""

    loads_no_model = True

    @checked
    def __init__(self, *, wanted: Count, unit: Above0 = 10.0) -> None:
        self.wanted, self.unit, self.name = wanted, unit, "words"

    def build(self, base: Any = None) -> list[nn.Module]:
        return []

    def __call__(self, answers: Responses) -> Scores:
        counts = torch.tensor([float(len(text.split())) for text in answers.completions])
        total = -(counts - self.wanted).abs() / self.unit
        return Scores(total, {self.name: total})
