"""Reliability of labels, and what a collection publishes: records, figures, and flat metrics.

The ceiling is the accuracy that noisy labels leave possible. People differ about a pair: a share p
of them prefers its first response. A reward model that always names the side most people are on
still misses the labels of the others. With labels that are one vote each, its accuracy is `E[max(p,
1 - p)]`, and none is higher. p is never observed, only a few votes per pair.
"""

from __future__ import annotations

import json
import math
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import brentq, minimize_scalar
from scipy.special import betaln
from scipy.stats import beta, chi2

from rlhf_lightning.data.sources.base import RELIABILITY
from rlhf_lightning.preferences import agreement
from rlhf_lightning.preferences.agreement import THREE, Verdict, left_out, preference_row
from rlhf_lightning.preferences.annotators import Gold, gold_scores
from rlhf_lightning.preferences.candidates import METRICS
from rlhf_lightning.preferences.collection import Collection, LabHparams
from rlhf_lightning.preferences.records import SIDES, Label, write_rows
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import to_json
from rlhf_lightning.runs.lock import replacing_folder

# (votes for one side, votes for the other) of an item -> how many items.
Tally = Mapping[tuple[int, int], int]
LOG_SHAPES = (-6.0, 7.0)  # p is nearly 0 or 1, or nearly one half
# Of twice a difference of log-likelihoods: the 95 % quantile of chi-squared.
LIKELY = float(chi2.ppf(0.95, 1))


def estimate_ceiling(tally: Tally) -> dict[str, Any] | None:
    """Return the ceiling from a few votes an item, None where no item has two.

    p is assumed to follow Beta(a, a): the position of a response carries no information. Its shape
    a has the largest likelihood of the votes.

    Args:
        tally: votes for the first and for the second response of each item -> number of items.

    Returns:
        `single`, the ceiling for labels of one vote each, by the model, with `single_low` to
        `single_high`, a 95 % interval: of the shapes that are not unlikely; `shape`, the model's
        one parameter; `num_items` with at least two votes.
    """
    several = {votes: n for votes, n in tally.items() if sum(votes) >= 2}
    if not several:
        return None
    shape = fit_shape(several)
    low, high = _likely_shapes(several, shape)  # the larger, the nearer p is to one half
    return {
        "single": single_ceiling(shape),
        "single_low": single_ceiling(high),
        "single_high": single_ceiling(low),
        "shape": shape,
        "num_items": sum(several.values()),
    }


def fit_shape(tally: Tally) -> float:
    """Return the shape a of Beta(a, a) under which the votes are likeliest."""
    how: dict[str, Any] = {"bounds": LOG_SHAPES, "method": "bounded", "options": {"xatol": 1e-6}}
    found = minimize_scalar(lambda log_shape: -_log_likelihood(tally, log_shape), **how)
    return math.exp(float(found.x))


def _likely_shapes(tally: Tally, best: float) -> tuple[float, float]:
    """Return the ends of the shapes whose likelihood is not too far below that of the best one.

    Draws of the votes that were seen, a bootstrap, would never differ where all people agree.
    """
    at, top = math.log(best), _log_likelihood(tally, math.log(best))

    def beyond(log_shape: float) -> float:
        return 2 * (top - _log_likelihood(tally, log_shape)) - LIKELY

    ends = [x if beyond(x) <= 0 else float(brentq(beyond, at, x)) for x in LOG_SHAPES]
    return math.exp(ends[0]), math.exp(ends[1])


def _log_likelihood(tally: Tally, log_shape: float) -> float:
    """Return the log-likelihood of the votes under Beta(a, a) with this log a."""
    votes, a = np.array(list(tally), dtype=np.float64), math.exp(log_shape)
    each = betaln(votes[:, 0] + a, votes[:, 1] + a) - betaln(a, a)
    return float((np.array(list(tally.values())) * each).sum())


def single_ceiling(shape: float) -> float:
    """Return `E[max(p, 1 - p)]` over p of Beta(a, a), which is `1 / 2 + 4^-a / (a B(a, a))`."""
    return 0.5 + math.exp(-shape * math.log(4) - math.log(shape) - betaln(shape, shape))


def expected_correct(tally: Tally, shape: float) -> float:
    """Return the expected share of majority labels that name the side most people are on.

    Given its votes, an item's p follows Beta(a + votes for, a + votes against). It is the accuracy
    that the best reward model can expect on just these labels; NaN where no item has a majority.

    Args:
        tally: votes for and against -> number of items; items without a majority do not count.
        shape: parameter a, from `fit_shape`.
    """
    decided = {votes: n for votes, n in tally.items() if votes[0] != votes[1]}
    right = [n * float(beta.sf(0.5, shape + max(v), shape + min(v))) for v, n in decided.items()]
    return sum(right) / sum(decided.values()) if decided else math.nan


def _tally_sides(by_item: Iterable[Sequence[Label]]) -> Tally:
    """Return how many pairs have which votes for first and second, as a ceiling is read from."""
    votes = (Counter(label.choice for label in labels) for labels in by_item)
    return Counter((found["first"], found["second"]) for found in votes)


def people_figures(labels: Iterable[Label]) -> dict[str, Any] | None:
    """Return what people's labels say about them, None if there is none.

    Returns:
        Numbers of `labels` (skips left out) and labelled `pairs`; `raw_agreement`, the share of
        pairs of votes on one pair that agree, among first, second and tie; `fleiss_kappa`, the same
        beyond chance; `ties`, the share of labels that find neither better; `position_bias`, how
        often the response shown first won; `ceiling`, None where no pair has two votes for a side.
    """
    given = [label for label in labels if label.choice != "skip"]
    if not given:
        return None
    counts = agreement.vote_counts(given)
    return {
        "labels": int(counts.sum()),
        "pairs": len(counts),
        "raw_agreement": agreement.raw_agreement(counts),
        "fleiss_kappa": agreement.fleiss_kappa(counts),
        "ties": float(counts[:, THREE.index("tie")].sum() / counts.sum()),
        "position_bias": asdict(agreement.position_bias(given)),
        "ceiling": estimate_ceiling(_tally_sides(agreement.by_pair(given).values())),
    }


def people_majority(labels: Iterable[Label]) -> dict[str, str]:
    """Return pair id -> what most people said, without the pairs on which they are divided."""
    found = {pair: agreement.majority(own) for pair, own in agreement.by_pair(labels).items()}
    return {pair: most for pair, most in found.items() if most is not None}


def annotator_figures(labels: Sequence[Label], people: Mapping[str, str]) -> dict[str, Any]:
    """Return the figures of one annotator compared with the majority of people.

    Args:
        labels: labels of one annotator, at least one.
        people: result of `people_majority`.

    Returns:
        `name`, `kind`, numbers of `labels` and `skips`, the share of `ties` among the labels; where
        both take a side, how often it `agrees` with people; Cohen's `kappa` with ties included.
    """
    given = [label for label in labels if label.choice != "skip"]
    votes = [(agreement.three(label.choice), people.get(label.pair_id)) for label in given]
    both = [(THREE.index(own), THREE.index(most)) for own, most in votes if most is not None]
    ties = sum(own == "tie" for own, _ in votes)
    return {
        "name": labels[0].annotator,
        "kind": labels[0].kind,
        "labels": len(given),
        "skips": len(labels) - len(given),
        "ties": ties / len(given) if given else math.nan,
        "agrees": asdict(agreement.agreement_with(given, people)),
        "kappa": agreement.cohen_kappa(*zip(*both, strict=True)) if both else math.nan,
    }


def all_annotators(labels: Iterable[Label], people: Iterable[str]) -> list[dict[str, Any]]:
    """Return the figures of every annotator that is not among the people."""
    found: defaultdict[str, list[Label]] = defaultdict(list)
    for label in labels:
        found[label.annotator].append(label)
    reference = people_majority(label for name in people for label in found.pop(name, []))
    return [annotator_figures(own, reference) for own in found.values()]


def label_ceiling(
    verdicts: Iterable[Verdict], labels: Iterable[Label], shape: float | None
) -> float:
    """Return the accuracy that the best reward model can expect on the pairs with a verdict.

    Args:
        verdicts: verdicts on the held-out pairs.
        labels: labels by people, on these pairs.
        shape: parameter of the people's noise, from `estimate_ceiling`; None where it could not be
            estimated.
    """
    if shape is None:
        return math.nan
    found = agreement.by_pair(labels)
    kept = [found.get(v.pair_id, []) for v in verdicts if v.choice is not None]
    return expected_correct(_tally_sides(kept), shape)


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
    routing, asked, dropped = collection.routing, collection.num_candidates, collection.dropped
    pairs = {name: len(getattr(routing, name)) for name in ("automatic", "people", "validation")}
    held_out = {pair.pair_id for pair in routing.validation}
    theirs = [x for x in collection.labels if x.annotator in collection.people]
    on_held_out = [x for x in theirs if x.pair_id in held_out]
    people = people_figures(on_held_out)
    shape = people["ceiling"]["shape"] if people and people["ceiling"] else None
    others = [x for x in collection.labels if x.annotator not in collection.people]
    automatic = agreement.aggregate(routing.validation, others, people=())
    agrees = agreement.agreement_with(automatic, people_majority(on_held_out))
    figures: dict[str, Any] = {
        "candidates": {"asked": asked, "usable": asked - sum(dropped.values()), "dropped": dropped},
        "pairs": pairs | {"near_duplicate_prompts_removed": collection.near_duplicates},
        "records": {
            name: {"kept": sum(v.choice is not None for v in part), "left_out": left_out(part)}
            for name, part in (("train", collection.train), ("validation", collection.validation))
        },
        "cost": {"before": asdict(collection.before), "after": asdict(collection.after)},
        "people": people,
        # On held-out pairs alone: the others that people saw are those that annotators differ on.
        "annotators": all_annotators([*others, *on_held_out], collection.people),
        "automatic_agrees_with_people": asdict(agrees),
        "judge": collection.judge,
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
    truth = {pair.pair_id: SIDES[b > a] for pair, (a, b) in scores if a != b}
    names = ("train", "train_automatic", "train_people", "validation")
    alone, people = ([v for v in collection.train if v.by_people is by] for by in (False, True))
    parts = zip(names, (collection.train, alone, people, collection.validation), strict=True)
    return {name: asdict(agreement.agreement_with(part, truth)) for name, part in parts}
