"""People and language models as judges: blind pairs go out, labels come back.

The pairs are what `rlhf_lightning.annotate` serves. A key, which raters do not see, says which
answer is the policy's, and what the reward model gave both.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_lightning.data.splits import split_fraction
from rlhf_lightning.evaluation.generate import PolicyAnswers
from rlhf_lightning.evaluation.metrics import rows_of, wins
from rlhf_lightning.evaluation.reward_accuracy import reward_check
from rlhf_lightning.evaluation.win_rate import CONFIDENCE, share, win_rate
from rlhf_lightning.preferences.annotation.store import LabelStore
from rlhf_lightning.preferences.annotators import Annotator, label_pairs
from rlhf_lightning.preferences.journal import record_journal, write_rows
from rlhf_lightning.preferences.judge import JudgeAnnotator
from rlhf_lightning.preferences.records import Label, Pair, Side, read_records, to_row
from rlhf_lightning.runs.reading import parse

PAIRS, KEY, STORE = "pairs.jsonl", "key.jsonl", "labels.sqlite"
PEOPLE = ("person", "simulated")


@dataclass(frozen=True)
class KeyRow:
    """The key of one pair, which raters do not see.

    Args:
        pair_id: of the pair; None where both answers are the same text, a tie that is not asked.
        policy_side: which answer of the pair is the policy's.
        domain: of the prompt.
        policy_score, baseline_score: of the reward model; None without one.
        policy_length, baseline_length: tokens, EOS included.
    """

    pair_id: str | None
    policy_side: Side
    domain: str
    policy_score: float | None
    baseline_score: float | None
    policy_length: int
    baseline_length: int


@dataclass(frozen=True)
class BlindPair:
    """One answer of each side to one prompt.

    Args:
        row: of the policy's answer.
        other: row of the baseline's.
        side: which answer of the pair is the policy's.
        pair: the two; None where they are the same text.
    """

    row: int
    other: int
    side: Side
    pair: Pair | None


def draw_blind_pairs(
    mine: PolicyAnswers, theirs: PolicyAnswers, *, num_pairs: int | None, seed: int
) -> list[BlindPair]:
    """Return the first answers of both sides to prompts, as pairs that do not tell whose is whose.

    Which side is the pair's first is a hash of seed and answer, and the order is one of such
    hashes.

    Args:
        mine: the policy's answers.
        theirs: the baseline's.
        num_pairs: prompts that are drawn; None for all.
        seed: of the drawing and of the sides.
    """
    rows = range(0, len(mine.prompts), mine.answers_per_prompt)
    drawn = sorted(rows, key=lambda row: split_fraction(f"{row}/{mine.prompts[row]}", seed))
    found = []
    for row in drawn[:num_pairs]:
        other = row // mine.answers_per_prompt * theirs.answers_per_prompt
        prompt, own, its = mine.prompts[row], mine.completions[row], theirs.completions[other]
        side: Side = "first" if split_fraction(f"side/{prompt}/{own}", seed) < 0.5 else "second"
        answers = (own, its) if side == "first" else (its, own)
        pair = None if own == its else Pair.make(prompt, *answers, domain=mine.domains[row])
        found.append(BlindPair(row, other, side, pair))
    return found


def blind_pairs(
    mine: PolicyAnswers,
    theirs: PolicyAnswers,
    *,
    num_pairs: int | None,
    scored: bool,
    seed: int,
) -> tuple[list[Pair], list[KeyRow]]:
    """Return what raters see, and the key that they do not; see `draw_blind_pairs`.

    Args:
        mine: the policy's answers.
        theirs: the baseline's.
        num_pairs: prompts that people are asked about, drawn; None for all.
        scored: whether the answers carry scores.
        seed: of the drawing and of the sides.
    """
    drawn = draw_blind_pairs(mine, theirs, num_pairs=num_pairs, seed=seed)
    key = [
        KeyRow(
            None if one.pair is None else one.pair.pair_id,
            one.side,
            mine.domains[one.row],
            mine.scores[one.row] if scored else None,
            theirs.scores[one.other] if scored else None,
            mine.lengths[one.row],
            theirs.lengths[one.other],
        )
        for one in drawn
    ]
    return [one.pair for one in drawn if one.pair is not None], key


def write_blind(folder: Path, pairs: Sequence[Pair], key: Sequence[KeyRow]) -> None:
    """Write `pairs.jsonl` and `key.jsonl` into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in ((PAIRS, map(to_row, pairs)), (KEY, map(asdict, key))):
        write_rows(folder / name, rows)


def read_key(folder: Path) -> list[KeyRow]:
    """Return the key of a folder that `write_blind` wrote.

    Raises:
        FileNotFoundError: if there is none, saying what makes it.
        ValueError: if it is not what `write_blind` writes.
    """
    path = folder / KEY
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} is missing: give the folder of an evaluation that ran with human=export"
        )
    try:
        return [parse(KeyRow, line) for line in path.read_bytes().split(b"\n") if line.strip()]
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): restore it, or export again") from error


def read_labels(folder: Path, file: Path | None) -> list[Label]:
    """Return people's labels: of a file of labels, else of the store in the folder.

    Raises:
        FileNotFoundError: if there is neither, saying how people label.
    """
    if file is not None:
        return [x for x in read_records(Label, file) if x.kind in PEOPLE]
    store = folder / STORE
    if not store.is_file():
        raise FileNotFoundError(f"no labels in {store}: {labelling_command(folder)}")
    with LabelStore(store) as opened:
        return [x for x in opened.labels() if x.kind in PEOPLE]


def labelling_command(folder: Path) -> str:
    """Return how people get to label the pairs of a folder."""
    return (
        f"label with  python -m rlhf_lightning.annotate file={folder / PAIRS} "
        f"store={folder / STORE}"
    )


def human_measures(
    key: Sequence[KeyRow], labels: Iterable[Label], *, score_scale: float | None = None
) -> dict[str, float]:
    """Return people's win rate, how far they agree, and how a reward model stands up to them.

    A pair is won by the side that more of its raters chose; a tie, and `both_bad`, is half a vote
    for each. `skip` counts nowhere. Answers that are the same text are ties, of which there are
    as many as if the others had all been labelled: while labels are missing, each tie weighs the
    share of the different pairs that have some.

    Args:
        key: of the pairs.
        labels: of people.
        score_scale: by which the difference of two scores is a log-odds, such as the standard
            deviation by which the reward model's head was normalized; None where it is not known.

    Returns:
        `val/human_win_rate` with `_low` and `_high` (Wilson 95 %), `val/human_tie_rate`,
        `val/human_identical_rate` (the share of prompts that both answered with the same text),
        `val/human_num_pairs` (with a label), `val/human_num_labels`,
        `val/human_agreement` (of two raters of a pair, where there are two) and, with scores, the
        measures of `reward_check`; its calibration error only with `score_scale`.

    Raises:
        ValueError: if no pair of the key was labelled.
    """
    shares, agreement, count = _votes(key, labels)
    if not count:
        raise ValueError("none of the labels is about a pair of this evaluation")
    labelled = {index: votes for index, votes in enumerate(shares) if votes is not None}
    found = _rates(list(labelled.values()), num_rows=len(key), num_different=len(_different(key)))
    found["val/human_num_labels"] = float(count)
    if agreement is not None:
        found["val/human_agreement"] = agreement
    gaps, lengths = [], []
    for index, votes in labelled.items():
        row = key[index]
        if row.policy_score is None or row.baseline_score is None or votes == 0.5:
            continue
        sign = 1 if votes > 0.5 else -1  # chosen minus rejected
        gaps.append(sign * (row.policy_score - row.baseline_score) * (score_scale or 1.0))
        lengths.append(sign * (row.policy_length - row.baseline_length))
    if gaps:
        known = score_scale is not None
        found |= reward_check(gaps, lengths, "val/human_reward", log_odds=known)
    return found


def _rates(shares: Sequence[float], *, num_rows: int, num_different: int) -> dict[str, float]:
    """Return the rates of the labelled pairs and of the ties that are not asked.

    Args:
        shares: of the policy's votes, of each labelled pair.
        num_rows: prompts that were drawn.
        num_different: of them, those with two different answers.
    """
    asked = win_rate(shares, [1 - each for each in shares], confidence=CONFIDENCE)
    identical = (num_rows - num_different) * len(shares) / num_different
    ties, rows = asked.ties + identical, len(shares) + identical
    wins = asked.wins + ties / 2
    return share("val/human_win_rate", wins, rows) | {
        "val/human_tie_rate": ties / rows,
        "val/human_identical_rate": 1 - num_different / num_rows,
        "val/human_num_pairs": float(len(shares)),
    }


def _different(key: Sequence[KeyRow]) -> set[str]:
    """Return the pairs whose answers are not the same text: those that raters see."""
    return {row.pair_id for row in key if row.pair_id is not None}


def _votes(
    key: Sequence[KeyRow], labels: Iterable[Label]
) -> tuple[list[float | None], float | None, int]:
    """Return the policy's share of the votes by row, how often two raters agree, and the labels.

    A row without a label, and one that is not asked, has None.
    """
    known = _different(key)
    given: dict[str, dict[str, str]] = defaultdict(dict)
    for label in labels:
        if label.pair_id in known and label.choice != "skip":
            given[label.pair_id][label.annotator] = label.choice
    shares: list[float | None] = []
    same: list[bool] = []
    for row in key:
        if row.pair_id is None:
            shares.append(None)
            continue
        votes = [
            float(choice == row.policy_side) if choice in ("first", "second") else 0.5
            for choice in given[row.pair_id].values()
        ]
        shares.append(sum(votes) / len(votes) if votes else None)
        same += [a == b for a, b in itertools.combinations(votes, 2)]
    agreement = sum(same) / len(same) if same else None
    return shares, agreement, sum(map(len, given.values()))


def judge_measures(
    judge: Annotator,
    mine: PolicyAnswers,
    theirs: PolicyAnswers,
    folder: Path,
    *,
    seed: int,
) -> dict[str, float]:
    """Return `val/judge_win_rate` and what belongs to it, and `val/judge_skipped`.

    One answer of each side to a prompt is shown, without saying whose it is. Answers that are the
    same text are ties that are not asked; pairs that the judge skips count nowhere.

    Args:
        judge: compares; what the folder holds is not asked for again.
        mine: the policy's answers.
        theirs: the baseline's.
        folder: for the judge's labels and replies.
        seed: of the sides.

    Raises:
        AnnotationError: if the judge fails; what it said before is in the folder.
    """
    drawn = draw_blind_pairs(mine, theirs, num_pairs=None, seed=seed)
    asked = [one.pair for one in drawn if one.pair is not None]
    if isinstance(judge, JudgeAnnotator):
        judge.keep_in(folder / "judgements.jsonl")
    labels = label_pairs(judge, asked, record_journal(Label, folder / "labels.jsonl"))
    said = {label.pair_id: label.choice for label in labels}
    kept = [one for one in drawn if one.pair is None or said[one.pair.pair_id] != "skip"]
    found = {"val/judge_skipped": float(len(drawn) - len(kept))}
    if not kept:
        return found
    scores = []
    for one in kept:
        choice = "tie" if one.pair is None else said[one.pair.pair_id]
        sided = choice in ("first", "second")
        scores.append(float(choice == one.side) if sided else 0.5)
    return found | wins(
        "judge",
        rows_of(mine, [one.row for one in kept]),
        rows_of(theirs, [one.other for one in kept]),
        scores,
        [1 - score for score in scores],
    )
