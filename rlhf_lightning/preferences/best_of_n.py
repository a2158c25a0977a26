"""Demonstrations by rejection sampling: of several responses the one with the best score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_lightning.data.records import PromptRecord, Text, asked_columns
from rlhf_lightning.preferences.annotators import Gold
from rlhf_lightning.preferences.candidates import (
    ADVICE,
    METRICS,
    Sampling,
    collect_candidates,
    describe_dropped,
)
from rlhf_lightning.preferences.pairing import ResponseScores
from rlhf_lightning.preferences.records import (
    Candidate,
    answered,
    completion_of,
    readable,
    variables_of,
)


@dataclass(frozen=True)
class Demonstrations:
    """The result of a `RejectionSampler`.

    Args:
        rows: records in TRL's format of prompt and completion, one a prompt.
        metrics: metrics of the run, as `collect/*`.
    """

    rows: Sequence[dict[str, Any]]
    metrics: dict[str, float]


@dataclass(frozen=True)
class RejectionSampler:
    """Samples responses, scores them, and keeps the best one of each prompt.

    Args:
        folder: folder of the run.
        sampling: policies and decoding; n is its `per_prompt`.
        score: scores responses; those without a score are dropped.
        keep_unfinished: keep responses that were cut off at the token limit.
        gold: the true reward, where it is known; only reported.
        say: prints one line.

    Source: Dong et al. 2023, "RAFT"; Touvron et al. 2023, "Llama 2", section 3.2.3.
    """

    folder: Path
    sampling: Sampling
    score: ResponseScores
    keep_unfinished: bool
    gold: Gold | None
    say: Callable[[str], None]

    def run(self, prompts: Sequence[PromptRecord]) -> Demonstrations:
        """Return one demonstration per prompt; a prompt without a usable response has none.

        Raises:
            ValueError: if no response is left.
        """
        kept, num_asked, dropped = collect_candidates(
            prompts, self.sampling, self.folder, keep_unfinished=self.keep_unfinished
        )
        self.say(describe_dropped(num_asked, dropped))
        scores = self.score([answered(c, c.response) for c in kept])
        scored = [(c, s) for c, s in zip(kept, scores, strict=True) if s is not None]
        if not scored:
            raise ValueError(f"no response is left: {ADVICE}")
        best = _best(scored)
        figures = {
            "collect/num_candidates": num_asked,
            "collect/usable_candidates": len(scored),
            "collect/train_records": len(best),
            "collect/score": _mean([score for _, score in scored]),
            "collect/score_best": _mean([score for _, score in best]),
        } | {name: dropped.get(reason, 0) for reason, name in METRICS.items()}
        if self.gold is not None:
            figures["collect/gold"] = _mean(self._gold([c for c, _ in scored], self.gold))
            figures["collect/gold_best"] = _mean(self._gold([c for c, _ in best], self.gold))
        rows = [_row(candidate, score) for candidate, score in best]
        return Demonstrations(rows, {name: float(value) for name, value in figures.items()})

    def _gold(self, answers: Sequence[Candidate], gold: Gold) -> list[float]:
        return gold(
            [readable(c.prompt) for c in answers],
            [c.response for c in answers],
            [c.finished is not False for c in answers],
            **asked_columns(gold, [c.columns for c in answers]),
        )


def _best(scored: Sequence[tuple[Candidate, float]]) -> list[tuple[Candidate, float]]:
    """Return the best response of each prompt, of equal ones the first, in the order of prompts."""
    best: dict[str, tuple[Candidate, float]] = {}
    for candidate, score in scored:
        held = best.get(candidate.prompt_id)
        if held is None or score > held[1]:
            best[candidate.prompt_id] = (candidate, score)
    return list(best.values())


def _row(candidate: Candidate, score: float) -> dict[str, Any]:
    prompt: Text = candidate.prompt
    return {
        "prompt": prompt if isinstance(prompt, str) else list(prompt),
        "completion": completion_of(prompt, candidate.response),
        **variables_of(candidate),
        "domain": candidate.domain,
        "score": round(score, 6),
        "label": True,  # it is the best one: without this a score would be a rating
        "source": candidate.source,
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
