"""Run sick and healthy runs, any part of them, and say which detectors fired when.

    python -m tests.sick.run --disease kl_off healthy --seeds 0-9 --out FOLDER
    python -m tests.sick.run --report --out FOLDER

A result that is in FOLDER is not made again. The models of the built-in world are looked for in
`--artifacts` and trained there once where they are missing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.sick.diseases import BASE, DISEASES

NOISY = "reward_noisy"
NOISY_OVERRIDES = (
    "+experiment=reward",
    "seed=1",
    "logger=none",
    "+world.source.num_preferences=3000",
    "+world.source.num_validation_preferences=400",
    "+world.source._convert_=object",
    # The labels are coin flips: what the annotators see counts next to nothing.
    "+world.source.panel=[{_target_: rlhf_lightning.data.demo.annotators.SimulatedAnnotator, "
    "name: coin, temperature: 1000.0, length_bias: 0.0}]",
    "gates=none",
)


def make_artifacts(root: Path) -> None:
    """Train what is missing: base, SFT and reward model of world 1, and a noisy reward model."""
    world = root / "demo_seed1"
    commands = []
    if not (world / "reward" / "config.json").is_file():
        commands.append(("+experiment=reward", "seed=1", "logger=none"))
    if not (world / NOISY / "config.json").is_file():
        commands.append((*NOISY_OVERRIDES, f"artifacts.publish={world / NOISY}"))
    with tempfile.TemporaryDirectory() as runs:
        for overrides in commands:
            command = [sys.executable, "-m", "rlhf_lightning.train", *overrides]
            command += [f"paths.artifacts={root}", f"paths.outputs={runs}"]
            subprocess.run(command, check=True)


def run_one(disease: str, seed: int, artifacts: Path) -> dict[str, Any]:
    """Train one run in this process; return its alerts and what was measured."""
    import lightning as L
    from hydra import compose, initialize_config_dir

    from rlhf_lightning.assembly import assemble
    from rlhf_lightning.composition import conf_dir, register
    from rlhf_lightning.runs.doctor_log import alerts_of, read_events
    from rlhf_lightning.runs.folder import RunFolder, read_metrics

    register()
    plan, world = DISEASES[disease], artifacts / "demo_seed1"
    reward = world / (NOISY if plan.noisy_labels else "reward")
    places = (
        f"artifacts.sft={world / 'sft'}",
        f"artifacts.reward={reward}",
        f"seed={seed}",
        f"data.num_iterations={plan.iterations}",
    )
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        cfg = compose("train", overrides=[*BASE, *places, *plan.overrides])
    started = time.process_time()
    with tempfile.TemporaryDirectory() as path:
        L.seed_everything(seed, workers=True, verbose=False)
        folder = RunFolder(Path(path))
        parts = assemble(cfg, folder)
        with contextlib.redirect_stdout(io.StringIO()):
            parts.trainer.fit(parts.module, datamodule=parts.data)
        rows = read_metrics(folder.metrics)
        alerts = alerts_of(read_events(folder.doctor))
    return {
        "disease": disease,
        "seed": seed,
        "cpu_seconds": round(time.process_time() - started, 1),
        "alerts": alerts,
        "rows": rows,
    }


def seeds_of(text: str) -> list[int]:
    """Return the seeds that `0-9,12` names."""
    found: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        found += range(int(low), int(high or low) + 1)
    return found


def fired(result: dict[str, Any]) -> dict[str, int]:
    """Return the iteration at which each detector was first raised."""
    first: dict[str, int] = {}
    for alert in result["alerts"]:
        first.setdefault(alert["detector"], alert["raised_at"])
    return first


def read_results(out: Path) -> list[dict[str, Any]]:
    """Return all results of a folder."""
    return [json.loads(path.read_text()) for path in sorted(out.glob("*_*.json"))]


def report(results: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table: by disease how many runs were noticed, and when."""
    lines = ["| disease | detector | seeds | noticed | iteration, median (latest) |"]
    lines.append("|---|---|---|---|---|")
    for name, plan in DISEASES.items():
        mine = [r for r in results if r["disease"] == name]
        if not mine:
            continue
        seeds = ", ".join(str(r["seed"]) for r in mine)
        if not plan.detectors:
            ill = [r for r in mine if r["alerts"]]
            names = sorted({d for r in ill for d in fired(r)})
            lines.append(f"| {name} | any | {seeds} | {len(ill)} of {len(mine)} | {names} |")
        for detector in plan.detectors:
            when = sorted(fired(r)[detector] for r in mine if detector in fired(r))
            told = f"{when[len(when) // 2]} ({when[-1]})" if when else "-"
            lines.append(f"| {name} | {detector} | {seeds} | {len(when)} of {len(mine)} | {told} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--disease", nargs="*", choices=list(DISEASES), default=list(DISEASES))
    parser.add_argument("--seeds", type=seeds_of, default=[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--artifacts", type=Path, default=Path("artifacts"))
    parser.add_argument("--report", action="store_true", help="only read what is there")
    options = parser.parse_args(arguments)
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.report:
        make_artifacts(options.artifacts.absolute())
        for seed in options.seeds:
            for disease in options.disease:
                path = options.out / f"{disease}_{seed:02d}.json"
                if path.exists():
                    continue
                result = run_one(disease, seed, options.artifacts.absolute())
                unfinished = path.with_suffix(".part")
                unfinished.write_text(json.dumps(result))
                unfinished.rename(path)
                told = f"{disease} seed {seed}: {fired(result)}, {result['cpu_seconds']} s"
                print(f"{told} of {DISEASES[disease].iterations} iterations", flush=True)  # noqa: T201
    print(report(read_results(options.out)))  # noqa: T201


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
