"""A reward model's accuracy on parts of the held-out pairs, where length alone cannot help it.

Legend: B responses, T tokens.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.data.encode import EncodedPreference, EncodedSequence
from rlhf_lightning.evaluation.win_rate import Interval, share_over_groups
from rlhf_lightning.models.building import in_eval_mode
from rlhf_lightning.models.heads import ScalarHeadModel
from rlhf_lightning.preferences.reward_annotator import score_rows
from rlhf_lightning.runs.metric_catalog import part_key
from rlhf_lightning.text.decode import decoded, response_texts

MATCHED = 0.1
MOST_WRONG = 6  # pairs whose texts a page shows
BINS = 10


class ScoredPair(NamedTuple):
    """The scores of both responses of a held-out pair, and its subsets and domain.

    Args:
        chosen: score of the preferred response.
        rejected: score of the other response.
        chosen_length: tokens of the preferred response, EOS included.
        rejected_length: tokens of the other response.
        subsets: subsets that the pair belongs to.
        domain: name of the domain, or "".
        prompt: equal for pairs of one prompt; None for a pair that shares its prompt with no other.
    """

    chosen: float
    rejected: float
    chosen_length: int
    rejected_length: int
    subsets: tuple[str, ...] = ()
    domain: str = ""
    prompt: Hashable = None


def score_pairs(
    model: ScalarHeadModel, rows: Sequence[EncodedPreference], *, batch_size: int, pad_token_id: int
) -> list[ScoredPair]:
    """Score both responses of each pair, in the order of `rows`; a repeated response only once.

    Args:
        model: reward model; put into eval mode for the time being.
        rows: encoded pairs to score.
        batch_size: responses in one forward.
        pad_token_id: id of the padding.
    """
    keys = [(r.chosen_input_ids.tobytes(), r.rejected_input_ids.tobytes()) for r in rows]
    answers = {
        ids.tobytes(): ids for r in rows for ids in (r.chosen_input_ids, r.rejected_input_ids)
    }
    texts = [EncodedSequence(ids, np.ones(len(ids), dtype=np.bool_)) for ids in answers.values()]
    with in_eval_mode(model):
        values = score_rows(model, texts, batch_size=batch_size, pad_token_id=pad_token_id)
    scores = dict(zip(answers, values, strict=True))
    return [
        ScoredPair(
            scores[chosen],
            scores[rejected],
            len(row.chosen_input_ids) - row.prompt_length,
            len(row.rejected_input_ids) - row.prompt_length,
            row.subsets,
            row.domain,
            chosen[: row.prompt_length * row.chosen_input_ids.itemsize],
        )
        for row, (chosen, rejected) in zip(rows, keys, strict=True)
    ]


def pair_metrics(pairs: Sequence[ScoredPair]) -> dict[str, float]:
    """Return accuracies on parts of the pairs, each with its number of pairs.

    For all pairs and for each subset: where the lengths differ by at most 10 % of the longer one
    (`_length_matched`), where the preferred response is the shorter one (`_chosen_shorter`), where
    it is the longer one (`_chosen_longer`). For each subset also all of it, with its interval and
    "the longer one wins" (see `whole_metrics`); and the accuracy in each domain, with its interval.
    Equal scores are wrong. An empty part gives no metric. The name of a subset or a domain comes
    behind a whole key: `val/accuracy_low/subset/<name>`, `val/accuracy/domain/<name>`.

    Intervals are over prompts, of which several pairs are alike: see `interval_over_groups`. Beside
    them stands `val/num_pair_prompts<cut>`, the number of prompts, if that of the pairs is another.
    """
    measures = _by_length(pairs)
    for name in sorted({name for pair in pairs for name in pair.subsets}):
        part = [pair for pair in pairs if name in pair.subsets]
        found = whole_metrics(part) | _by_length(part)
        measures |= {part_key(k, "subset", name): v for k, v in found.items()}
    for domain in sorted({pair.domain for pair in pairs} - {""}):
        found = _accuracy([pair for pair in pairs if pair.domain == domain], interval=True)
        measures |= {part_key(k, "domain", domain): v for k, v in found.items()}
    return measures


def whole_metrics(pairs: Sequence[ScoredPair]) -> dict[str, float]:
    """Return accuracy with its interval, and that of "the longer one wins" on the same pairs.

    It has to guess which of two equally long responses is the better one: they count one half.
    """
    signs = [int(np.sign(p.chosen_length - p.rejected_length)) for p in pairs]
    longer = {"val/longer_wins_accuracy": (sum(signs) / len(signs) + 1) / 2} if signs else {}
    return _accuracy(pairs, interval=True) | longer


def pair_values(
    pairs: Sequence[ScoredPair],
    rows: Sequence[EncodedPreference],
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Return the values of held-out pairs for distributions.jsonl.

    `margin` of each; `reliability`, a part for each tenth of the stated probability that the
    model's preferred response is the better one: the mean that is stated, the share that is right,
    its 95 % interval over prompts and the number of pairs; and `wrong`, the texts of the pairs that
    are ranked wrong most surely.

    Args:
        pairs: the scores of `rows`.
        rows: encoded pairs, in the same order.
        tokenizer: tokenizer of the model.
    """
    margins = np.array([pair.chosen - pair.rejected for pair in pairs])
    stated = 1 / (1 + np.exp(-np.clip(np.abs(margins), -700, 700)))
    tenths = np.minimum((stated * BINS).astype(int), BINS - 1)
    parts = []
    for tenth in np.unique(tenths):
        inside = tenths == tenth
        right = share_right([pairs[i] for i in inside.nonzero()[0]])
        parts.append([float(stated[inside].mean()), *right, int(inside.sum())])
    surest = [int(i) for i in margins.argsort(kind="stable")[:MOST_WRONG] if margins[i] < 0]
    wrong = [_as_text(rows[i], tokenizer) | {"margin": float(margins[i])} for i in surest]
    return {
        "held_out": "pairs",
        "margin": margins.tolist(),
        "reliability": parts,
        "wrong": wrong,
    }


def _as_text(row: EncodedPreference, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    prompt = row.chosen_input_ids[: row.prompt_length].tolist()
    answers = [
        ids[row.prompt_length :].tolist() for ids in (row.chosen_input_ids, row.rejected_input_ids)
    ]
    texts = response_texts([prompt, prompt], answers, tokenizer, skip_special_tokens=True)
    shown = decoded(prompt, tokenizer, skip_special_tokens=True)
    return {"prompt": shown, "chosen": texts[0], "rejected": texts[1]}


def comparable_rows(
    train: Sequence[EncodedPreference], held_out: Sequence[EncodedPreference], *, count: int
) -> list[EncodedPreference]:
    """Return at most `count` training pairs, evenly spaced, on which to look for overfitting.

    A repeated pair counts once. Pairs of a subset that no held-out pair belongs to, such as pairs
    made to be easy, are left out: accuracy on them says nothing about the other ones.
    """
    names = {name for row in held_out for name in row.subsets}
    once: dict[tuple[bytes, bytes], EncodedPreference] = {}
    for row in train:
        if names.issuperset(row.subsets):
            once.setdefault((row.chosen_input_ids.tobytes(), row.rejected_input_ids.tobytes()), row)
    rows = list(once.values())
    count = min(count, len(rows))
    return [rows[i * len(rows) // count] for i in range(count)]


def share_right(pairs: Sequence[ScoredPair]) -> Interval:
    """Return the share of pairs whose preferred response scores higher; equal scores are wrong."""
    return share_over_groups([pair.chosen > pair.rejected for pair in pairs], _prompts(pairs))


def _prompts(pairs: Sequence[ScoredPair]) -> list[Hashable]:
    return [i if pair.prompt is None else pair.prompt for i, pair in enumerate(pairs)]


def _by_length(pairs: Sequence[ScoredPair]) -> dict[str, float]:
    lengths = [(pair, pair.chosen_length, pair.rejected_length) for pair in pairs]
    matched = [pair for pair, a, b in lengths if abs(a - b) <= MATCHED * max(a, b)]
    found = _accuracy(matched, "_length_matched", interval=True)
    found |= _accuracy([p for p, a, b in lengths if a < b], "_chosen_shorter", interval=False)
    return found | _accuracy([p for p, a, b in lengths if a > b], "_chosen_longer", interval=False)


def _accuracy(pairs: Sequence[ScoredPair], cut: str = "", *, interval: bool) -> dict[str, float]:
    if not pairs:
        return {}
    key, right = f"val/accuracy{cut}", share_right(pairs)
    found = right.named(key) if interval else {key: right.mean}
    found[f"val/num_pairs{cut}"] = float(len(pairs))
    if interval and (prompts := len({*_prompts(pairs)})) < len(pairs):
        found[f"val/num_pair_prompts{cut}"] = float(prompts)
    return found
