"""Print what the doctor said in the runs of the study `doctor`, misses first.

    python -m benchmarks.studies.doctor.table outputs/studies/doctor [--set NAME=VALUE ...]

Alerts are those of the detectors over each run's `metrics.csv`, so other thresholds can be tried;
`--margins` prints how near each detector came to its warning. `--half 1` shows every second of the
healthy and of the sick runs by name, on which thresholds may be set anew, `--half 2` the others.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.studies.sick.replay import nearest, replay
from rlhf_lightning.doctor.thresholds import DoctorThresholds
from rlhf_lightning.runs.folder import RunFolder, read_metrics

# What may be expected of each disease, written down before the first run: one of these must speak.
DUE: Mapping[str, tuple[str, ...]] = {
    "sick_length": ("length_bias", "length_drift", "reward_hacking"),
    "sick_few": ("scorer_disagreement", "reward_hacking"),
    "sick_flipped": ("forgotten_domain", "scorer_disagreement", "reward_hacking"),
    "sick_bag_of_words": ("reward_hacking", "scorer_disagreement", "diversity", "length_drift"),
    "sick_lists": ("length_bias", "length_drift", "diversity", "duplicates"),
    "sick_no_kl": ("kl_high", "reward_hacking", "diversity"),
    "sick_no_kl_harmless": ("kl_high", "diversity", "duplicates", "length_drift"),
    "sick_learning_rate": ("update_size", "kl_high"),
}
HEADER = (
    "| run | due | noticed | also | gold on the way | score | KL, nats a token |",
    "|---|---|---|---|---|---|---|",
)


def first_alerts(
    rows: Sequence[Mapping[str, float]], thresholds: DoctorThresholds
) -> dict[str, int]:
    """Return the iteration at which each detector first spoke."""
    first: dict[str, int] = {}
    for iteration, change in replay(rows, thresholds):
        first.setdefault(change.detector, iteration)
    return first


def line(name: str, rows: Sequence[Mapping[str, float]], thresholds: DoctorThresholds) -> str:
    """Return a row of the table."""
    due, first = DUE.get(name, ()), first_alerts(rows, thresholds)
    noticed = _said({k: v for k, v in first.items() if k in due})
    others = _said({k: v for k, v in first.items() if k not in due})
    gold = " ".join(f"{row['val/gold']:.2f}" for row in rows if "val/gold" in row) or "none"
    score = [row["rollout/score"] for row in rows]
    kl = rows[-1]["rollout/kl_per_token"]
    verdict = noticed or ("missed" if due else "")
    wanted = ", ".join(f"`{d}`" for d in due) or "nothing"
    return (
        f"| `{name}` | {wanted} | {verdict} | {others} | {gold} | "
        f"{score[0]:.2f} to {score[-1]:.2f} | {kl:.3f} |"
    )


def _said(first: Mapping[str, int]) -> str:
    return ", ".join(f"`{k}` {v}" for k, v in sorted(first.items(), key=lambda item: item[1]))


def runs_of(study: Path) -> dict[str, list[dict[str, float]]]:
    """Return the metrics of the newest attempt of each run of PPO and its relatives."""
    found = {}
    for row in sorted(study.glob("*")):
        if row.name.startswith(("healthy", "sick")):
            files = sorted(row.glob("**/metrics.csv"), key=lambda path: path.stat().st_mtime)
            if files:
                folder = RunFolder(files[-1].parent)
                found[row.name] = rows = read_metrics(folder.metrics)
                end = json.loads(folder.summary.read_text())["metrics"].get("val/gold")
                if rows and end is not None:  # the final evaluation, of more prompts
                    rows[-1]["val/gold"] = end
    return found


def half(runs: Mapping[str, Any], number: int | None) -> dict[str, Any]:
    """Return every second of the healthy and every second of the sick runs, or all."""
    kinds = [[name for name in sorted(runs) if (name in DUE) == sick] for sick in (False, True)]
    start = 0 if number is None else number - 1
    step = 1 if number is None else 2
    return {name: runs[name] for names in kinds for name in names[start::step]}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("study", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="THRESHOLD=VALUE")
    parser.add_argument("--margins", action="store_true")
    parser.add_argument("--half", type=int, choices=(1, 2))
    options = parser.parse_args(arguments)
    pairs = (item.partition("=") for item in options.set)
    thresholds = DoctorThresholds(**{k: int(v) if v.isdigit() else float(v) for k, _, v in pairs})
    runs = half(runs_of(options.study), options.half)
    if options.margins:
        for name, rows in runs.items():
            found = nearest(rows, thresholds).items()
            print(name, *(f"{k}={v:.3g}" for k, v in found))  # noqa: T201
        return
    lines = {name: line(name, rows, thresholds) for name, rows in runs.items()}
    order = sorted(lines, key=lambda name: ("| missed |" not in lines[name], name))
    print(*HEADER, *(lines[name] for name in order), sep="\n")  # noqa: T201


if __name__ == "__main__":
    main()
