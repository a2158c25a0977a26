"""Decoding of candidates: temperature, top-k and top-p, and grids of them.

PPO's rollouts must sample the full distribution; candidates for labelling need not.

Legend: A rows still being written, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Annotated, Any

import torch
from torch import Tensor

from rlhf_lightning.arguments import CountOrZero, ShareAbove0, Temperature
from rlhf_lightning.hparams import Checked, Usual
from rlhf_lightning.rollout.generators.captured import CapturedGenerator


@dataclass(frozen=True)
class Decoding(Checked):
    """One way to decode.

    Args:
        temperature: divides the logits; 0 takes the likeliest token.
        top_p: keep the likeliest tokens that together have at least this probability.
        top_k: keep at most this many tokens; 0 keeps all.
    """

    temperature: Annotated[Temperature, Usual(0.3, 1.3)] = 1.0
    top_p: ShareAbove0 = 1.0
    top_k: CountOrZero = 0

    @property
    def settings(self) -> dict[str, float]:
        """The settings as candidates keep them; top-k only where there is one."""
        return {key: value for key, value in asdict(self).items() if key != "top_k" or value}


def grid(settings: Mapping[str, Sequence[float]]) -> list[Decoding]:
    """Return every combination of the values, in the order in which they are written.

    Args:
        settings: names of `Decoding` and lists of values.

    Raises:
        ValueError: for an unknown name, an empty list or a value that cannot be.
    """
    for name, values in settings.items():
        if name not in Decoding.__dataclass_fields__:
            known = ", ".join(Decoding.__dataclass_fields__)
            raise ValueError(f"decoding.{name} is unknown: use {known}")
        if isinstance(values, str) or not isinstance(values, Sequence) or not values:
            raise ValueError(f"decoding.{name}={values!r}: give a list of values, [0.7, 1.0]")
    combinations = product(*settings.values())
    rows: list[dict[str, Any]] = [dict(zip(settings, c, strict=True)) for c in combinations]
    return [Decoding(**row) for row in rows]


class TruncatedGenerator(CapturedGenerator):
    """The rollouts' engine with top-k and top-p: for candidates only.

    Args:
        stop_ids: ids that end a response.
        pad_token_id: fills what follows a response.
        decoding: what to keep; its temperature is that of the call.
    """

    def __init__(self, stop_ids: Sequence[int], pad_token_id: int, *, decoding: Decoding) -> None:
        super().__init__(stop_ids, pad_token_id)
        self.decoding = decoding

    def _sampling(self, temperature: float) -> tuple[Any, ...]:
        return (temperature, self.decoding)

    def _truncated(self, logits: Tensor, temperature: float) -> Tensor:
        return truncate(
            logits, temperature=temperature, top_k=self.decoding.top_k, top_p=self.decoding.top_p
        )


def truncate(logits: Tensor, *, temperature: float, top_k: int, top_p: float) -> Tensor:
    """Return logits that are -inf outside the top-k and top-p sets, top-k first.

    The top-p set is the smallest of the likeliest tokens whose probability is at least `top_p`;
    tokens as likely as its last one belong to it too.

    Args:
        logits: `[A, V]` raw logits.
        temperature: temperature of the probabilities.
        top_k: 0 for no limit.
        top_p: 1 for no limit.

    Source: Holtzman et al. 2020, "The curious case of neural text degeneration".
    """
    if temperature == 0:
        return logits
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k, dim=-1).values[:, -1:]
        logits = logits.masked_fill(logits < least, float("-inf"))
    if top_p < 1:
        ordered = logits.sort(dim=-1, descending=True).values  # [A, V]
        probabilities = torch.softmax(ordered.float() / temperature, dim=-1).double()
        before = probabilities.cumsum(-1) - probabilities
        last = (before < top_p).sum(-1, keepdim=True) - 1  # the first token is always kept
        logits = logits.masked_fill(logits < ordered.gather(-1, last), float("-inf"))
    return logits
