"""Agreement of the annotators of two public sets, and the accuracy ceiling of a reward model.

    python -m benchmarks.label_reliability --pandalm testset-v1.json --arguments ukpconvarg1/

Prints the figures as JSON; `--out FILE` writes them too. No model and no network.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any, get_args

import numpy as np

from benchmarks.public_sets import JudgedSet, read_arguments, read_pandalm
from rlhf_lightning.preferences.agreement import (
    Method,
    Share,
    aggregate,
    fleiss_kappa,
    left_out,
    raw_agreement,
)
from rlhf_lightning.preferences.reliability import (
    label_ceiling,
    people_figures,
    verdicts_agree,
)

FEWEST_VOTES = 30  # of a person whose quality is counted among the quartiles


def describe(judged: JudgedSet) -> dict[str, Any]:
    """Return agreement, quality, ceiling and what the votes come to, by each way to weigh them."""
    people = people_figures(judged.labels)
    assert people is not None
    shape = people["ceiling"]["shape"] if people["ceiling"] else None
    given = [label.annotator for label in judged.labels]
    quality = sorted(
        value for name, value in people["accuracy"].items() if given.count(name) >= FEWEST_VOTES
    )
    rows = np.array(judged.row_counts)
    figures: dict[str, Any] = {
        "rows": {
            "rows": len(rows),
            "raw_agreement": raw_agreement(rows),
            "fleiss_kappa": fleiss_kappa(rows),
        },
        "pairs": len(judged.pairs),
        "left_out": dict(judged.left_out),
        "labels": people["labels"],
        "annotators": len(people["accuracy"]),
        "ties": people["ties"],
        "raw_agreement": people["raw_agreement"],
        "fleiss_kappa": people["fleiss_kappa"],
        "ceiling": people["ceiling"],
        "rater_quality": {
            "annotators": len(quality),
            "quartiles": [quality[round(q * (len(quality) - 1))] for q in (0, 0.25, 0.5, 0.75, 1)],
        },
        "aggregation": {},
    }
    for method in get_args(Method)[1:]:
        verdicts = aggregate(judged.pairs, judged.labels, people=(), method=method)
        kept = [v for v in verdicts if v.choice is not None]
        gaps = [len(v.pair.first.split()) - len(v.pair.second.split()) for v in kept]
        unequal = [(gap > 0, v.choice == "first") for v, gap in zip(kept, gaps, strict=True) if gap]
        right = sum(longer == chosen for longer, chosen in unequal)
        figures["aggregation"][method] = {
            "preferences": len(kept),
            "left_out": left_out(verdicts),
            "mean_margin": sum(v.margin for v in kept) / len(kept),
            "label_ceiling": label_ceiling(verdicts, judged.labels, shape),
            "longer_wins": _share(Share.of(right, len(unequal))),
            "agrees_with_the_sets_verdict": _share(verdicts_agree(verdicts, judged.verdicts)),
        }
    return figures


def _share(share: Share) -> dict[str, float] | None:
    return asdict(share) if share.num else None


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pandalm", type=Path, help="testset-v1.json")
    parser.add_argument("--arguments", type=Path, help="folder of UKPConvArg1")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    figures = {}
    if options.pandalm is not None:
        figures["pandalm"] = describe(read_pandalm(options.pandalm))
    if options.arguments is not None:
        figures["arguments"] = describe(read_arguments(options.arguments))
    if not figures:
        parser.error("give --pandalm FILE, --arguments FOLDER, or both")
    text = json.dumps(figures, indent=2) + "\n"
    sys.stdout.write(text)
    if options.out is not None:
        options.out.write_text(text)


if __name__ == "__main__":
    main()
