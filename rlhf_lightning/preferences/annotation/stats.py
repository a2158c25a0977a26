"""Who has labelled how much, how fast, and how well the known answers were found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median

from rlhf_lightning.preferences.annotation.store import LabelStore
from rlhf_lightning.preferences.records import AnnotatorKind, Label


@dataclass(frozen=True)
class Standing:
    """One annotator in numbers.

    Args:
        name: of the annotator.
        kind: what sort of annotator it is.
        labelled: pairs that were judged.
        skipped: pairs that were not.
        seconds: median time of a label; None where none was measured.
        gold_right: known answers that were found.
        gold_asked: labels on pairs with a known answer.
    """

    name: str
    kind: AnnotatorKind
    labelled: int
    skipped: int
    seconds: float | None
    gold_right: int
    gold_asked: int


def standings(store: LabelStore) -> list[Standing]:
    """Return every annotator's numbers, in the order in which they came."""
    gold = {pair.pair_id: pair.gold for pair in store.pairs() if pair.gold is not None}
    labels: defaultdict[tuple[str, AnnotatorKind], list[Label]] = defaultdict(list)
    for label in store.labels():
        labels[label.annotator, label.kind].append(label)
    return [_standing(name, kind, given, gold) for (name, kind), given in labels.items()]


def describe_store(store: LabelStore) -> str:
    """Return how the store stands, as lines for a terminal."""
    progress = store.progress()
    rows = [("annotator", "kind", "labels", "skips", "seconds", "known answers found")]
    for standing in standings(store):
        found = f"{standing.gold_right} of {standing.gold_asked}" if standing.gold_asked else "-"
        seconds = "-" if standing.seconds is None else f"{standing.seconds:.1f}"
        counts = str(standing.labelled), str(standing.skipped)
        rows.append((standing.name, standing.kind, *counts, seconds, found))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"{store.path}: {progress.done} of {progress.wanted} labels"]
    for row in rows:
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _standing(
    name: str, kind: AnnotatorKind, labels: list[Label], gold: Mapping[str, str]
) -> Standing:
    judged = [label for label in labels if label.choice != "skip"]
    seconds = [label.seconds for label in judged if label.seconds is not None]
    asked = [label for label in judged if label.pair_id in gold]
    return Standing(
        name=name,
        kind=kind,
        labelled=len(judged),
        skipped=len(labels) - len(judged),
        seconds=median(seconds) if seconds else None,
        gold_right=sum(label.choice == gold[label.pair_id] for label in asked),
        gold_asked=len(asked),
    )
