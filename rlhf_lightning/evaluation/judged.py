"""The win rate by a judge that reads both answers and says which is better."""

from __future__ import annotations

from pathlib import Path

from rlhf_lightning.evaluation.generate import PolicyAnswers
from rlhf_lightning.evaluation.human import draw_blind_pairs
from rlhf_lightning.evaluation.metrics import rows_of, wins
from rlhf_lightning.preferences.annotators import Annotator, label_pairs
from rlhf_lightning.preferences.journal import record_journal
from rlhf_lightning.preferences.judge import JudgeAnnotator
from rlhf_lightning.preferences.records import Label


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
        seed=seed,
    )
