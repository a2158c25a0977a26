"""Replay the doctor's detectors over the `metrics.csv` of a run.

    python -m benchmarks.studies.sick.replay RUN_FOLDER [--picture FILE.png] [--set NAME=VALUE ...]

It trains nothing, so thresholds can be tried on existing runs. A run without
the doctor has no `doctor/*` columns; the detectors that read them stay silent.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf_lightning.doctor.catalog import DETECTORS
from rlhf_lightning.doctor.detectors import Detectors, Transition
from rlhf_lightning.doctor.spec import Reading
from rlhf_lightning.doctor.thresholds import DoctorThresholds
from rlhf_lightning.runs.folder import RunFolder, read_metrics

PHASES = ("rollout/", "ppo/", "grpo/", "doctor/")
PANELS = (
    ("rollout/score", "score"),
    ("rollout/response_length", "tokens a response"),
    ("rollout/eos_fraction", "share that ends"),
    ("rollout/kl_per_token", "KL, nats a token"),
)
TREATED = ("ppo/kl_coef", "kl_coef")  # drawn where the doctor changed it


def replay(
    rows: Sequence[Mapping[str, float]],
    thresholds: DoctorThresholds,
    num_iterations: int | None = None,
) -> list[tuple[int, Transition]]:
    """Return every alert that was raised, changed or cleared, with its iteration.

    Args:
        rows: of `metrics.csv`.
        thresholds: of the detectors.
        num_iterations: that the run was going to have; None: as many as there are rows.
    """
    detectors = Detectors(thresholds, num_iterations or len(rows))
    found = []
    for row in rows:
        iteration = int(row["iteration"])
        values = {k.partition("/")[2]: v for k, v in row.items() if k.startswith(PHASES)}
        found += [(iteration, change) for change in detectors.observe(iteration, values)]
    return found


def nearest(
    rows: Sequence[Mapping[str, float]],
    thresholds: DoctorThresholds,
    num_iterations: int | None = None,
) -> dict[str, float]:
    """Return the value of each detector that came nearest to its warning.

    Kept means read in `raise_after` iterations in a row, as an alert asks; a warning at this very
    value would have been raised. A detector that read nothing is left out.

    Args:
        rows: of `metrics.csv`.
        thresholds: of the detectors.
        num_iterations: that the run was going to have; None: as many as there are rows.
    """
    detectors = Detectors(thresholds, num_iterations or len(rows))
    read: dict[str, list[float]] = {name: [] for name in DETECTORS}
    last: dict[str, Reading] = {}
    for row in rows:
        values = {k.partition("/")[2]: v for k, v in row.items() if k.startswith(PHASES)}
        detectors.observe(int(row["iteration"]), values)
        for name, reading in detectors.readings.items():
            if reading is not last.get(name):  # else the iteration did not measure it
                read[name].append(reading.value)
        last = dict(detectors.readings)
    found, length = {}, thresholds.raise_after
    for name, values_read in read.items():
        windows = [values_read[i : i + length] for i in range(len(values_read) - length + 1)]
        if windows and DETECTORS[name].beyond == "above":
            found[name] = max(min(window) for window in windows)
        elif windows:
            found[name] = min(max(window) for window in windows)
    return found


def draw(
    rows: Sequence[Mapping[str, float]], found: Sequence[tuple[int, Transition]], out: Path
) -> None:
    """Write a picture of the run with a line where a detector was first raised."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    first: dict[str, int] = {}
    for iteration, change in found:
        first.setdefault(change.detector, iteration)
    changed = len({row[TREATED[0]] for row in rows if TREATED[0] in row}) > 1
    panels = (*PANELS, TREATED) if changed else PANELS
    figure, axes = plt.subplots(
        1, len(panels), figsize=(3 * len(panels), 3.2), constrained_layout=True
    )
    for axis, (metric, label) in zip(axes, panels, strict=True):
        axis.plot([row["iteration"] for row in rows], [row[metric] for row in rows], color="C0")
        for iteration in set(first.values()):
            axis.axvline(iteration, color="C3", linewidth=0.8, linestyle=":")
        axis.set_title(label, fontsize=10)
        axis.set_xlabel("iteration")
    told = ", ".join(f"{name} {at}" for name, at in sorted(first.items(), key=lambda i: i[1]))
    figure.suptitle(f"first warned: {told}" if told else "no alert", fontsize=10)
    figure.savefig(out, dpi=110)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--set", nargs="*", default=[], metavar="THRESHOLD=VALUE")
    options = parser.parse_args(arguments)
    rows = read_metrics(RunFolder(options.folder).metrics)
    if not rows:
        raise SystemExit(f"{options.folder} has no metrics.csv: give the folder of a PPO run")
    pairs = (item.partition("=") for item in options.set)
    limits = {key: int(v) if v.isdigit() else float(v) for key, _, v in pairs}
    found = replay(rows, DoctorThresholds(**limits))
    for iteration, change in found:
        print(f"iteration {iteration}: {change.describe()}")  # noqa: T201
    if not found:
        print(f"no alert in {len(rows)} iterations")  # noqa: T201
    if options.picture is not None:
        draw(rows, found, options.picture)


if __name__ == "__main__":
    main()
