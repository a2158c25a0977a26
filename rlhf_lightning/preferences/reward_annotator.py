"""A reward model as an annotator: it prefers the response that it scores higher.

Legend: B responses, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any, cast

import torch

from rlhf_lightning.arguments import AtLeast0, Count, PathOrName, Size, checked
from rlhf_lightning.data.collate import SFTCollator
from rlhf_lightning.data.encode import EncodedSequence, RecordEncoder
from rlhf_lightning.data.formats import with_row_keys
from rlhf_lightning.data.records import DemonstrationRecord, Text
from rlhf_lightning.models.classifiers import max_positions
from rlhf_lightning.models.factory import frozen, load_scalar_model
from rlhf_lightning.models.forward import sequence_scores
from rlhf_lightning.models.heads import ScalarHeadModel
from rlhf_lightning.preferences.annotators import by_gap, labelled
from rlhf_lightning.preferences.records import Answer, Kind, Label, Pair, answered, completion_of
from rlhf_lightning.text.tokenizers import load_tokenizer
from rlhf_lightning.text.tokens import ControlTokens


@torch.no_grad()
def score_rows(
    model: ScalarHeadModel, rows: Sequence[EncodedSequence], *, batch_size: int, pad_token_id: int
) -> list[float]:
    """Return a reward model's score of each row; like lengths go together, which pads little."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    collate, device = SFTCollator(pad_token_id), next(model.root.parameters()).device
    scores: dict[int, float] = {}
    for start in range(0, len(order), batch_size):
        part = order[start : start + batch_size]
        batch = collate([rows[i] for i in part]).to(device)  # [B, T]
        values = sequence_scores(model, batch.input_ids, batch.attention_mask)  # [B]
        scores |= dict(zip(part, values.tolist(), strict=True))
    return [scores[i] for i in range(len(rows))]


@checked
@dataclass(eq=False)
class RewardModelAnnotator:
    """Scores prompt and response as the reward stage encodes them, read at the last token.

    Args:
        source: folder or hub name of a sequence classifier with one score, such as the reward stage
            exports; its tokenizer and chat template are those it was trained with.
        name: name of the annotator.
        max_length: longest prompt and response in tokens, at most the model's context; a pair with
            a longer side is skipped.
        tie_below: a difference of scores that is smaller than this is a tie.
        batch_size: pairs that are scored, and whose labels reach the disk, together.
        micro_batch_size: responses in one forward.
        revision: branch, tag or commit of a hub name.
        precision: `bf16-mixed` holds matrices in bf16 and computes in it.

    Raises:
        ValueError: for an impossible number.
    """

    source: PathOrName
    _: KW_ONLY
    name: str = "reward_model"
    max_length: Count = 1024
    tie_below: AtLeast0 = 0.0
    batch_size: Size = 256
    micro_batch_size: Count = 32
    revision: str | None = None
    precision: str = "32-true"
    kind: Kind = field(default="reward_model", init=False)

    @cached_property
    def _loaded(self) -> tuple[Any, Any, ControlTokens]:
        """Tokenizer, model, and what the tokenizer's texts must not spell."""
        origin: dict[str, Any] = {"revision": self.revision}
        model: Any = load_scalar_model(self.source, precision=self.precision, **origin)
        device = "cuda" if torch.cuda.is_available() else "cpu"
        tokenizer = load_tokenizer(self.source, **origin)
        return tokenizer, frozen(model).to(device), ControlTokens(tokenizer)

    @property
    def _longest(self) -> int:
        return min(self.max_length, max_positions(self._loaded[1].trunk) or self.max_length)

    def label(self, pairs: Sequence[Pair]) -> list[Label]:
        """Return one label a pair; the margin is the difference of the scores."""
        # By name, because messages cannot be keys; a response in several pairs is scored once.
        texts = {(p.prompt_id, t): answered(p, t) for p in pairs for t in (p.first, p.second)}
        scores = dict(zip(texts, self.scores(list(texts.values())), strict=True))
        labels = []
        for pair in pairs:
            first, second = scores[pair.prompt_id, pair.first], scores[pair.prompt_id, pair.second]
            if first is None or second is None:
                why = f"longer than {self._longest} tokens"
                labels.append(labelled(self, pair, "skip", reason=why))
            else:
                labels.append(by_gap(pair, first - second, self, tie_below=self.tie_below))
        return labels

    def scores(self, answers: Sequence[Answer]) -> list[float | None]:
        """Return the score of each prompt and response, None where it is too long."""
        tokenizer, model, _ = self._loaded
        encoded = [self._encode(*answer) for answer in answers]
        rows, size = [row for row in encoded if row is not None], self.micro_batch_size
        scores = iter(score_rows(model, rows, batch_size=size, pad_token_id=tokenizer.pad_token_id))
        return [None if row is None else next(scores) for row in encoded]

    def _encode(
        self, prompt: Text, answer: str, variables: Mapping[str, str] = MappingProxyType({})
    ) -> EncodedSequence | None:
        disarmed = self._loaded[2].disarmed
        record = DemonstrationRecord(disarmed(prompt), completion_of(prompt, disarmed(answer)))
        asked, _ = with_row_keys(record, variables)
        record = replace(record, variables=disarmed(asked.variables))
        rows = RecordEncoder(self._loaded[0], max_length=self._longest)(record)
        return cast(EncodedSequence, rows[0]) if rows else None
