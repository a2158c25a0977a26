"""The share of the machine's matrix rate that PPO's update reaches, and where its time goes.

python -m benchmarks.update_rate --shape 135m --profile
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from benchmarks.command import Setting, add_overrides, finish, models, parser, table
from benchmarks.flops import update_flops
from benchmarks.ppo_iteration import matrix_rates, matrix_side, ppo_side
from benchmarks.processes import alternate


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, write the JSON, print the table."""
    made = parser(__doc__.splitlines()[0])
    made.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    made.add_argument("--warmup", type=int, default=1, help="iterations not counted, a process")
    made.add_argument("--iterations", type=int, default=1, help="iterations counted, a process")
    made.add_argument("--profile", action="store_true", help="name the operators that take longest")
    add_overrides(made)
    setting = Setting("update_rate", made.parse_args(arguments))
    options = setting.options
    with models(setting) as folder:
        task = setting.task(
            folder=str(folder),
            workload=setting.workload.as_dict(),
            warmup=options.warmup,
            overrides=options.overrides,
            iterations=options.iterations,
        )
        sides = [ppo_side("ours", precision, task, "") for precision in options.precisions]
        runs = alternate([matrix_side(setting), *sides], options.repeats, lock=setting.lock)
        profiles = {}
        if options.profile:  # after the measured ones: a profiler takes time itself
            sides = [ppo_side("ours", p, task | {"profile": True}, "") for p in options.precisions]
            for name, taken in alternate(sides, 1, lock=setting.lock).items():
                profiles[name] = taken[0]["profile"]
    summary = summarise(setting, runs) | {"profiles": profiles}
    operations = update_flops(setting.shape, setting.workload)
    settings = {"workload": setting.workload.as_dict(), "update_flops": operations}
    return finish(setting, runs, summary, render, settings=settings)


def summarise(setting: Setting, runs: dict[str, list[dict[str, Any]]]) -> dict[str, Any]:
    """Return the matrix rates, and of each precision the update's seconds and its shares."""
    rates, operations = (
        matrix_rates(runs["matrix rate"]),
        update_flops(setting.shape, setting.workload),
    )
    updates = {}
    for name, taken in runs.items():
        if name == "matrix rate":
            continue
        laps = [lap["update"] for run in taken for lap in run["iterations"]]
        seconds, rate = statistics.median(laps), rates[name.split()[1]]
        updates[name] = {"seconds": seconds, "fastest": min(laps), "slowest": max(laps)}
        for kind, count in operations.items():
            updates[name][f"rate_{kind}"] = count / seconds
            updates[name][f"share_{kind}"] = count / seconds / rate["trunk"]
    return {"matrix_rate": rates, "updates": updates}


def render(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    summary, rows = result["summary"], []
    for name, update in summary["updates"].items():
        rate = summary["matrix_rate"][name.split()[1]]
        rows.append(
            [
                name.split()[1],
                f"{update['seconds']:.2f} s ({update['fastest']:.2f} to {update['slowest']:.2f})",
                f"{rate['trunk'] / 1e9:,.0f} GFLOP/s",
                f"{rate['large'] / 1e9:,.0f} GFLOP/s",
                f"{update['rate_nominal'] / 1e9:,.0f} GFLOP/s, {update['share_nominal']:.0%}",
                f"{update['rate_needed'] / 1e9:,.0f} GFLOP/s, {update['share_needed']:.0%}",
            ]
        )
    head = ["", "update", "matrix rate, trunk's shapes", "large matrices", "nominal", "needed"]
    parts = [table(head, rows)]
    for name, profile in summary["profiles"].items():
        rows = [[f"`{p['operator']}`", f"{p['share']:.1%}", str(p["calls"])] for p in profile]
        parts.append(table([f"update, {name.split()[1]}", "share of time", "calls"], rows))
    return "\n\n".join(parts)


if __name__ == "__main__":
    main(sys.argv[1:])
