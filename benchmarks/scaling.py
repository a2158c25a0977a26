"""Cost of a PPO iteration over its tokens: a sweep over batch and response length.

python -m benchmarks.scaling --shape 10m
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.command import Setting, add_overrides, finish, gib, models, parser, table
from benchmarks.ppo_iteration import PHASES, ppo_side
from benchmarks.processes import alternate
from benchmarks.shapes import Workload

PROMPTS, RESPONSES = (16, 32, 64, 128), (16, 32, 64, 128)
QUICK = (8, 16), (4, 8)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, write the JSON, print the table."""
    made = parser(__doc__.splitlines()[0], repeats=1, shape="10m")
    made.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    made.add_argument("--warmup", type=int, default=1, help="iterations not counted, a process")
    made.add_argument("--iterations", type=int, default=3, help="iterations counted, a process")
    add_overrides(made)
    setting = Setting("scaling", made.parse_args(arguments))
    options = setting.options
    counts, lengths = QUICK if options.quick else (PROMPTS, RESPONSES)
    workloads = {
        f"{count} x {length}": replace(setting.workload, num_prompts=count, new_tokens=length)
        for count in counts
        for length in lengths
    }
    with models(setting) as folder:
        task = setting.task(
            folder=str(folder),
            warmup=options.warmup,
            iterations=options.iterations,
            overrides=options.overrides,
        )
        sides = [
            replace(
                ppo_side("ours", options.precision, task | {"workload": w.as_dict()}, ""), name=name
            )
            for name, w in workloads.items()
        ]
        runs = alternate(sides, options.repeats, lock=setting.lock)
    settings = {"precision": options.precision, "workload": setting.workload.as_dict()}
    return finish(setting, runs, summarise(workloads, runs), render, settings=settings)


def summarise(
    workloads: dict[str, Workload], runs: dict[str, list[dict[str, Any]]]
) -> dict[str, Any]:
    """Return the medians of every point and, for each phase, the line through them."""
    points = {}
    for name, taken in runs.items():
        laps = [lap for run in taken for lap in run["iterations"]]
        points[name] = {
            "num_prompts": workloads[name].num_prompts,
            "new_tokens": workloads[name].new_tokens,
            "tokens": laps[0]["prompt_tokens"] + laps[0]["response_tokens"],
            **{key: statistics.median(lap[key] for lap in laps) for key in ("seconds", *PHASES)},
            "memory_peak": statistics.median(run["memory"]["peak"] for run in taken),
        }
    # Generation reads every weight once a step, whatever the batch: its time follows the steps,
    # so the line in tokens is that of the other phases and of the whole.
    fits = {
        key: fit([(p["tokens"], p[key]) for p in points.values()])
        for key in ("seconds", "score", "update")
    }
    return {"points": points, "fits": fits}


def fit(pairs: list[tuple[float, float]]) -> dict[str, float]:
    """Return the least-squares line, how well it fits, and the slope in logarithms.

    `exponent` is 1 where the cost is linear, 2 where it is quadratic.
    """
    tokens, seconds = np.array(pairs).T
    design = np.stack([np.ones_like(tokens), tokens], 1)
    (intercept, slope), *_ = np.linalg.lstsq(design, seconds, rcond=None)
    residual = seconds - design @ np.array([intercept, slope])
    exponent = np.polyfit(np.log(tokens), np.log(seconds), 1)[0]
    return {
        "intercept_seconds": float(intercept),
        "milliseconds_per_token": 1000 * float(slope),
        "r_squared": 1 - float(residual.var() / seconds.var()),
        "exponent": float(exponent),
    }


def render(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    rows = [
        [
            f"{p['num_prompts']:.0f} x {p['new_tokens']:.0f}",
            f"{p['tokens']:,.0f}",
            f"{p['seconds']:.2f} s",
            *(f"{p[phase]:.2f}" for phase in PHASES),
            f"{1000 * p['seconds'] / p['tokens']:.2f}",
            gib(p["memory_peak"]),
        ]
        for p in result["summary"]["points"].values()
    ]
    head = ["prompts x response", "tokens", "iteration", *PHASES, "ms a token", "peak memory"]
    lines = [table(head, rows), ""]
    for name, f in result["summary"]["fits"].items():
        lines.append(
            f"* {'iteration' if name == 'seconds' else name}: {f['intercept_seconds']:.3f} s + "
            f"{f['milliseconds_per_token']:.3f} ms a token, R² {f['r_squared']:.4f}; "
            f"seconds grow as tokens^{f['exponent']:.2f}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])
