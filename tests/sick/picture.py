"""Draw what a sick run looked like, and when it was noticed: docs/images/doctor_<disease>.svg.

python -m tests.sick.picture --results FOLDER --disease length_loving --seed 0 --out FILE.svg
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.sick.run import fired

PANELS = (
    ("rollout/score", "score (trained on)"),
    ("doctor/second_score", "gold (second scorer)"),
    ("rollout/response_length", "tokens an answer"),
    ("rollout/kl_per_token", "KL, nats a token"),
)


def draw(sick: Mapping[str, Any], healthy: Mapping[str, Any], out: Path) -> None:
    """Write the picture of a sick run over a healthy one."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(PANELS), figsize=(13, 3.1), constrained_layout=True)
    when = sorted(fired(sick).items(), key=lambda item: item[1])
    for axis, (metric, label) in zip(axes, PANELS, strict=True):
        for result, colour, name in ((healthy, "0.6", "healthy"), (sick, "C3", sick["disease"])):
            rows = [row for row in result["rows"] if metric in row]
            x, y = [row["iteration"] for row in rows], [row[metric] for row in rows]
            axis.plot(x, y, color=colour, label=name)
        for at in sorted({iteration for _, iteration in when}):
            axis.axvline(at, color="C3", linewidth=0.8, linestyle=":")
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("iteration")
    axes[0].legend(fontsize=8)
    told = ", ".join(f"{name} at {iteration}" for name, iteration in when)
    figure.suptitle(f"{sick['disease']}, seed {sick['seed']}: {told}", fontsize=10)
    figure.savefig(out, metadata={"Date": None})


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("--disease", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args(arguments)
    names = (options.disease, "healthy")
    files = (options.results / f"{name}_{options.seed:02d}.json" for name in names)
    sick, healthy = (json.loads(file.read_text()) for file in files)
    draw(sick, healthy, options.out)


if __name__ == "__main__":
    main()
