"""Output of a collection: preference records, figures of reliability, and flat metrics."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rlhf_lightning.data.sources.base import RELIABILITY
from rlhf_lightning.preferences.aggregate import Verdict, aggregate, left_out, preference_row
from rlhf_lightning.preferences.annotators import Gold, gold_scores
from rlhf_lightning.preferences.candidates import METRICS
from rlhf_lightning.preferences.collection import Collection, LabHparams
from rlhf_lightning.preferences.journal import write_rows
from rlhf_lightning.preferences.reliability import (
    agreement_with_truth,
    all_annotators,
    label_ceiling,
    people_figures,
    people_majority,
    verdicts_agree,
)
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import to_json
from rlhf_lightning.runs.publish import replacing_folder


def write_collection(
    folder: Path, collection: Collection, hparams: LabHparams, *, gold: Gold | None = None
) -> dict[str, Any]:
    """Write the records and figures into `folder`, in one step, and return the figures.

    Args:
        folder: gets `train.jsonl`, `validation.jsonl` and `reliability.json`.
        collection: what the lab has made.
        hparams: settings of the lab.
        gold: the true reward, where it is known; it changes no label.
    """
    figures = describe(collection, gold=gold)
    with replacing_folder(folder, ours=True) as staging:
        staging.mkdir(parents=True)
        for name, verdicts in (("train", collection.train), ("validation", collection.validation)):
            kept = [verdict for verdict in verdicts if verdict.choice is not None]
            if kept or name == "train":
                rows = (preference_row(v, margin_scale=hparams.margin_scale) for v in kept)
                write_rows(staging / f"{name}.jsonl", rows)
        write_text(staging / RELIABILITY, to_json(figures, indent=2) + "\n")
    return figures


def write_demonstrations(folder: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Write rows as `train.jsonl` into `folder`, in one step."""
    with replacing_folder(folder, ours=True) as staging:
        staging.mkdir(parents=True)
        write_rows(staging / "train.jsonl", rows)


def copy_collection(source: Path, target: Path) -> None:
    """Put a copy of the folder at `target`, in one step.

    Raises:
        FolderTakenError: if the target is something other than a collection.
    """
    with replacing_folder(target) as staging:
        shutil.copytree(source, staging)


def describe(collection: Collection, *, gold: Gold | None = None) -> dict[str, Any]:
    """Return every figure of a collection, as plain values; see docs/preferences.md."""
    routing = collection.routing
    held_out = {pair.pair_id for pair in routing.validation}
    theirs = [x for x in collection.labels if x.annotator in collection.people]
    on_held_out = [x for x in theirs if x.pair_id in held_out]
    people = people_figures(on_held_out)
    shape = people.ceiling.shape if people and people.ceiling else None
    others = [x for x in collection.labels if x.annotator not in collection.people]
    automatic = aggregate(routing.validation, others, people=())
    figures: dict[str, Any] = {
        "candidates": {
            "asked": collection.num_candidates,
            "usable": collection.num_candidates - sum(collection.dropped.values()),
            "dropped": collection.dropped,
        },
        "pairs": {
            "automatic": len(routing.automatic),
            "people": len(routing.people),
            "validation": len(routing.validation),
            "near_duplicate_prompts_removed": collection.near_duplicates,
        },
        "records": {
            name: {"kept": sum(v.choice is not None for v in part), "left_out": left_out(part)}
            for name, part in (("train", collection.train), ("validation", collection.validation))
        },
        "cost": {
            "before": asdict(collection.before) | {"money": collection.before.money},
            "after": asdict(collection.after) | {"money": collection.after.money},
        },
        "people": None if people is None else asdict(people),
        # On held-out pairs alone: the others that people saw are those that annotators differ on.
        "annotators": [
            asdict(a) for a in all_annotators([*others, *on_held_out], collection.people)
        ],
        "automatic_agrees_with_people": asdict(
            verdicts_agree(automatic, people_majority(on_held_out))
        ),
        "judge": None if collection.judge is None else asdict(collection.judge),
        "label_ceiling": label_ceiling(collection.validation, on_held_out, shape),
    }
    if gold is not None:
        figures["gold"] = _truth(collection, gold)
    return json.loads(to_json(figures))


def flat_metrics(figures: Mapping[str, Any]) -> dict[str, float]:
    """Return the figures for `summary.json`, by flat names; unknown ones are left out."""
    people, judge = figures["people"] or {}, figures["judge"] or {}
    ceiling = people.get("ceiling") or {}
    pairs, cost = figures["pairs"], figures["cost"]
    labelled = sum(pairs[key] for key in ("automatic", "people", "validation"))
    found: dict[str, Any] = {
        "collect/num_candidates": figures["candidates"]["asked"],
        "collect/usable_candidates": figures["candidates"]["usable"],
        "collect/num_pairs": labelled,
        "collect/automatic_share": pairs["automatic"] / labelled,
        "collect/train_records": figures["records"]["train"]["kept"],
        "collect/validation_records": figures["records"]["validation"]["kept"],
        "collect/near_duplicate_prompts": pairs["near_duplicate_prompts_removed"],
        "collect/hours": cost["after"]["hours"],
        "collect/hours_before": cost["before"]["hours"],
        "collect/money": cost["after"]["money"],
        "collect/money_before": cost["before"]["money"],
        "collect/raw_agreement": people.get("raw_agreement"),
        "collect/fleiss_kappa": people.get("fleiss_kappa"),
        "collect/single_label_ceiling": ceiling.get("single"),
        "collect/automatic_agrees_with_people": figures["automatic_agrees_with_people"]["value"],
        "collect/judge_replies": judge.get("requests"),
        "collect/judge_unreadable": judge["unreadable"] + judge["refused"] if judge else None,
        "collect/judge_spelled": judge.get("spelled"),
        "val/label_ceiling": figures["label_ceiling"],
    }
    dropped = figures["candidates"]["dropped"]
    found |= {name: dropped.get(reason, 0) for reason, name in METRICS.items()}
    for name, share in (figures.get("gold") or {}).items():
        found[f"collect/gold_{name}"] = share["value"]
    return {name: float(value) for name, value in found.items() if value is not None}


def _truth(collection: Collection, gold: Gold) -> dict[str, dict[str, float]]:
    routing = collection.routing
    pairs = (*routing.automatic, *routing.people, *routing.validation)
    scores = zip(pairs, gold_scores(pairs, gold), strict=True)
    truth = {pair.pair_id: first - second for pair, (first, second) in scores}
    parts: dict[str, Sequence[Verdict]] = {
        "train": collection.train,
        "train_automatic": [v for v in collection.train if not v.by_people],
        "train_people": [v for v in collection.train if v.by_people],
        "validation": collection.validation,
    }
    return {name: asdict(agreement_with_truth(part, truth)) for name, part in parts.items()}
