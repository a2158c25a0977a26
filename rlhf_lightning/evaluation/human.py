"""People and language models as judges: blind pairs go out, labels come back.

The pairs are what `rlhf_lightning.annotate` serves. A key, which raters do not see, says which
response is the policy's, and the reward model's scores of both.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

from rlhf_lightning.data.splits import split_fraction
from rlhf_lightning.evaluation.generate import PolicyAnswers
from rlhf_lightning.evaluation.win_rate import length_controlled_win_rate, share
from rlhf_lightning.preferences.annotation.store import LabelStore
from rlhf_lightning.preferences.annotators import Annotator, label_pairs
from rlhf_lightning.preferences.judge import JudgeAnnotator, judge_figures
from rlhf_lightning.preferences.records import (
    SIDES,
    Journal,
    Label,
    Pair,
    Side,
    read_records,
    write_records,
    write_rows,
)
from rlhf_lightning.runs.metric_catalog import part_key
from rlhf_lightning.runs.reading import parse

PAIRS, KEY, STORE = "pairs.jsonl", "key.jsonl", "labels.sqlite"
PEOPLE = ("person", "simulated")


@dataclass(frozen=True)
class KeyRow:
    """The key of one pair, which raters do not see.

    Args:
        pair_id: id of the pair; None where both responses are the same text, a tie that is not
            asked.
        policy_side: the side of the pair that is the policy's.
        domain: domain of the prompt.
        policy_score, baseline_score: scores by the reward model; None without one, or a score.
        policy_length, baseline_length: lengths in tokens, EOS included.
    """

    pair_id: str | None
    policy_side: Side
    domain: str
    policy_score: float | None
    baseline_score: float | None
    policy_length: int
    baseline_length: int


def blind_pairs(
    mine: PolicyAnswers, theirs: PolicyAnswers, *, num_pairs: int | None, scored: bool, seed: int
) -> tuple[list[Pair], list[KeyRow]]:
    """Return the first responses of both sides to prompts, as pairs that hide whose is whose.

    Which side is the pair's first is a hash of seed and response, and the order is one of such
    hashes.

    Args:
        mine: responses of the policy.
        theirs: responses of the baseline.
        num_pairs: number of prompts to draw; None for all.
        scored: whether the responses have scores.
        seed: seeds the choice of prompts and of the sides.

    Returns:
        The pairs for raters, and the key that they do not see.
    """
    rows = range(0, len(mine.prompts), mine.answers_per_prompt)
    drawn = sorted(rows, key=lambda row: split_fraction(f"{row}/{mine.prompts[row]}", seed))
    pairs, key = [], []
    for row in drawn[:num_pairs]:
        other = row // mine.answers_per_prompt * theirs.answers_per_prompt
        prompt, own, its = mine.prompts[row], mine.completions[row], theirs.completions[other]
        side: Side = "first" if split_fraction(f"side/{prompt}/{own}", seed) < 0.5 else "second"
        answers = (own, its) if side == "first" else (its, own)
        if own != its:
            pairs.append(Pair.make(prompt, *answers, domain=mine.domains[row]))
        name = pairs[-1].pair_id if own != its else None
        scores = (mine.scores[row], theirs.scores[other]) if scored else (math.nan, math.nan)
        ours, others = (None if math.isnan(one) else one for one in scores)
        lengths = (mine.lengths[row], theirs.lengths[other])
        key.append(KeyRow(name, side, mine.domains[row], ours, others, *lengths))
    return pairs, key


def write_blind(folder: Path, pairs: Sequence[Pair], key: Sequence[KeyRow]) -> None:
    """Write `pairs.jsonl` and `key.jsonl` into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_records(folder / PAIRS, pairs)
    write_rows(folder / KEY, map(asdict, key))


def read_key(folder: Path) -> list[KeyRow]:
    """Return the key of a folder that `write_blind` wrote.

    Raises:
        ValueError: if there is none, or another file, saying what makes it.
    """
    path = folder / KEY
    try:
        return [parse(KeyRow, line) for line in path.read_bytes().splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        fix = "give the folder of an evaluation with human=export"
        raise ValueError(f"{path} cannot be read ({error}): {fix}") from error


def read_labels(folder: Path, file: Path | None) -> list[Label]:
    """Return people's labels: of a file of labels, else of the store in the folder.

    Raises:
        FileNotFoundError: if there is neither, saying how people label.
    """
    if file is not None:
        return [x for x in read_records(Label, file) if x.kind in PEOPLE]
    if not (folder / STORE).is_file():
        raise FileNotFoundError(f"no labels in {folder / STORE}: {labelling_command(folder)}")
    with LabelStore(folder / STORE) as store:
        return [x for x in store.labels() if x.kind in PEOPLE]


def labelling_command(folder: Path) -> str:
    """Return how people get to label the pairs of a folder."""
    command = f"python -m rlhf_lightning.annotate file={folder / PAIRS} store={folder / STORE}"
    return f"label with  {command}"


def human_measures(key: Sequence[KeyRow], labels: Iterable[Label]) -> dict[str, float]:
    """Return people's win rate, their agreement, and a reward model's accuracy on their labels.

    A pair is won by the side that more of its raters chose; a tie, and `both_bad`, is half a vote
    for each. `skip` counts nowhere. Responses with the same text are ties, counted as if all other
    pairs had been labelled: while labels are missing, each tie weighs the share of the different
    pairs that have some.

    Args:
        key: key of the pairs.
        labels: labels by people.

    Returns:
        `val/human_win_rate` with `_low` and `_high` (Wilson 95 %), `val/human_tie_rate`,
        `val/human_identical_rate` (the share of prompts with the same response from both),
        `val/human_num_pairs` (with a label), `val/human_num_labels`, `val/human_skipped` (pairs
        that were seen and skipped alone), `val/human_agreement` (of two raters of a pair, where
        there are two) and, with scores, `val/human_reward_accuracy` (the share of pairs with a
        winner that the scores rank alike, equal scores being wrong) with its interval, and
        `val/human_reward_num_pairs`.

    Raises:
        ValueError: if no pair of the key was labelled.
    """
    labels = list(labels)
    seen, votes = {label.pair_id for label in labels}, _votes(key, labels)
    if not any(votes):
        raise ValueError("none of the labels is about a pair of this evaluation")
    found = _rates("val/human", key, votes)
    found["val/human_num_labels"] = float(sum(map(len, votes)))
    labelled = [(row, _share(given)) for row, given in zip(key, votes, strict=True) if given]
    found["val/human_skipped"] = float(sum(row.pair_id in seen for row in key) - len(labelled))
    if same := [a == b for given in votes for a, b in combinations(given, 2)]:
        found["val/human_agreement"] = sum(same) / len(same)
    right = [
        row.policy_score > row.baseline_score
        if won > 0.5
        else row.policy_score < row.baseline_score
        for row, won in labelled
        if row.policy_score is not None and row.baseline_score is not None and won != 0.5
    ]
    if right:
        found |= share(sum(right), len(right)).named("val/human_reward_accuracy")
        found["val/human_reward_num_pairs"] = float(len(right))
    return found


def _votes(key: Sequence[KeyRow], labels: Iterable[Label]) -> list[list[float]]:
    """Return the votes on each row: 1 for the policy's response, 0 for the other, 0.5 for a tie."""
    given: dict[str | None, dict[str, str]] = defaultdict(dict)
    for label in labels:
        if label.choice != "skip":
            given[label.pair_id][label.annotator] = label.choice
    return [
        [float(x == row.policy_side) if x in SIDES else 0.5 for x in given[row.pair_id].values()]
        for row in key
    ]


def _share(votes: Sequence[float]) -> float:
    return sum(votes) / len(votes)


def _rates(prefix: str, key: Sequence[KeyRow], votes: Sequence[list[float]]) -> dict[str, float]:
    """Return the rates of the labelled pairs and of the ties that are not asked.

    Args:
        prefix: prefix of the names.
        key: key of the prompts that were drawn.
        votes: votes on each, from `_votes`.
    """
    given = [_share(one) for one in votes if one]
    same = sum(row.pair_id is None for row in key)
    identical = same * _labelled_share(key, votes)
    ties, rows = given.count(0.5) + identical, len(given) + identical
    wins = sum(won > 0.5 for won in given) + ties / 2
    return share(wins, rows).named(f"{prefix}_win_rate") | {
        f"{prefix}_tie_rate": ties / rows,
        f"{prefix}_identical_rate": same / len(key),
        f"{prefix}_num_pairs": float(len(given)),
    }


def _labelled_share(key: Sequence[KeyRow], votes: Sequence[list[float]]) -> float:
    """Return the weight of a tie of two equal responses: the share of other pairs with a label."""
    different = sum(row.pair_id is not None for row in key)
    return sum(map(bool, votes)) / different if different else 1.0


def judge_measures(
    judge: Annotator, mine: PolicyAnswers, theirs: PolicyAnswers, folder: Path, *, seed: int
) -> dict[str, float]:
    """Return the judge's win rate, by domain and at equal length too, and its counts.

    One response of each side to a prompt is shown, without its source. Responses with the same text
    are ties that are not asked, with the weight that they have for people: the rate is that of all
    prompts if the judge would rate the skipped pairs like the others.

    Args:
        judge: annotator; pairs with a label in the folder are not asked again.
        mine: responses of the policy.
        theirs: responses of the baseline.
        folder: folder of the judge's labels and replies.
        seed: seeds the choice of the sides.

    Returns:
        `val/judge_win_rate` with `_low` and `_high` (Wilson 95 %), `_length_controlled` and
        `/domain/<domain>`; `val/judge_tie_rate`, `val/judge_identical_rate`, `val/judge_num_pairs`
        (with a verdict), `val/judge_skipped` (different pairs without one) and, of a
        `JudgeAnnotator`, `val/judge_spelled` (see `judge_figures`). No rate if it skipped all.

    Raises:
        AnnotationError: if the judge fails; its earlier labels are in the folder.
    """
    pairs, key = blind_pairs(mine, theirs, num_pairs=None, scored=False, seed=seed)
    if isinstance(judge, JudgeAnnotator):
        judge.keep_in(folder / "judgements.jsonl")
    labels = label_pairs(judge, pairs, Journal(folder / "labels.jsonl", Label))
    votes = _votes(key, labels)
    known = [number for number, given in enumerate(votes) if given]
    found = {"val/judge_skipped": float(len(pairs) - len(known))}
    if isinstance(judge, JudgeAnnotator):
        asked = {pair.pair_id for pair in pairs}  # not all that `judge.known` has
        replies = [reply for reply in judge.judgements if reply.pair_id in asked]
        found["val/judge_spelled"] = float(judge_figures(replies)["spelled"])
    if pairs and not known:
        return found
    found |= _rates("val/judge", key, votes)
    # Equal responses are interchangeable, so that some of them can carry the weight of all.
    same = [number for number, row in enumerate(key) if row.pair_id is None]
    kept = [*known, *same[: round(len(same) * _labelled_share(key, votes))]]
    scores = [_share(votes[number] or [0.5]) for number in kept]
    found |= length_controlled_win_rate(
        scores,
        [1 - score for score in scores],
        [key[number].policy_length for number in kept],
        [key[number].baseline_length for number in kept],
    ).named("val/judge_win_rate_length_controlled")
    for domain in sorted({row.domain for row in key} - {""}):
        inside = [number for number, row in enumerate(key) if row.domain == domain]
        rows, given = [key[number] for number in inside], [votes[number] for number in inside]
        if any(given) or not any(row.pair_id for row in rows):
            rates = _rates("val/judge", rows, given)
            names = [name for name in rates if name.startswith("val/judge_win_rate")]
            found |= {part_key(name, "domain", domain): rates[name] for name in names}
    return found
