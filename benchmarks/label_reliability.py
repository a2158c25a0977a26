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
from typing import Any

import numpy as np

from benchmarks.public_sets import JudgedSet, read_arguments, read_pandalm
from rlhf_lightning.preferences.agreement import (
    Share,
    aggregate,
    agreement_with,
    fleiss_kappa,
    left_out,
    raw_agreement,
)
from rlhf_lightning.preferences.reliability import label_ceiling, people_figures


def describe(judged: JudgedSet) -> dict[str, Any]:
    """Return agreement, ceiling and what the votes come to by their majority."""
    people = people_figures(judged.labels)
    assert people is not None
    shape = people["ceiling"]["shape"] if people["ceiling"] else None
    rows = np.array(judged.row_counts)
    verdicts = aggregate(judged.pairs, judged.labels, people=())
    kept = [v for v in verdicts if v.choice is not None]
    gaps = [len(v.pair.first.split()) - len(v.pair.second.split()) for v in kept]
    unequal = [(gap > 0, v.choice == "first") for v, gap in zip(kept, gaps, strict=True) if gap]
    right = sum(longer == chosen for longer, chosen in unequal)
    return {
        "rows": {
            "rows": len(rows),
            "raw_agreement": raw_agreement(rows),
            "fleiss_kappa": fleiss_kappa(rows),
        },
        "pairs": len(judged.pairs),
        "left_out": dict(judged.left_out),
        "labels": people["labels"],
        "annotators": len({label.annotator for label in judged.labels}),
        "ties": people["ties"],
        "raw_agreement": people["raw_agreement"],
        "fleiss_kappa": people["fleiss_kappa"],
        "ceiling": people["ceiling"],
        "majority": {
            "preferences": len(kept),
            "left_out": left_out(verdicts),
            "mean_margin": sum(v.margin for v in kept) / len(kept),
            "label_ceiling": label_ceiling(verdicts, judged.labels, shape),
            "longer_wins": _share(Share.of(right, len(unequal))),
            "agrees_with_the_sets_verdict": _share(agreement_with(verdicts, judged.verdicts)),
        },
    }


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
