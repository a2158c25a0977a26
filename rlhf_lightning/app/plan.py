"""The memory of a run, before it is launched: `rlhf_lightning.plan +experiment=...`.

It trains nothing and needs no network, no weights and no earlier stage.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, replace

from rlhf_lightning.app.command_line import run_command, say
from rlhf_lightning.app.config.settings import PlanSettings
from rlhf_lightning.app.memory_plan.report import Report, make_report
from rlhf_lightning.app.memory_plan.request import device_bytes, read_run
from rlhf_lightning.app.memory_plan.simulation import simulate
from rlhf_lightning.app.memory_plan.table import print_report
from rlhf_lightning.models.cpu_kernels import cpu_kernels
from rlhf_lightning.models.quiet import quieten_transformers


def run(settings: PlanSettings) -> Report:
    """Return what a run takes.

    Raises:
        ConfigError: if the configuration gives the model no shape.
    """
    planned = read_run(settings, settings.plan)
    with cpu_kernels(settings.model.cpu_kernels):
        report = make_report(planned.run, device_bytes(planned.run, settings.plan), planned.notes)
        simulated = simulate(planned.run) if planned.run.sharded > 1 else None
        return replace(report, simulated=simulated)


def _show(settings: PlanSettings) -> None:
    quieten_transformers()
    report = run(settings)
    if settings.plan.format == "json":
        say(json.dumps(asdict(report), indent=2))
        return
    print_report(report, title=" ".join(sys.argv[1:]))


def main() -> None:
    """Run the command line."""
    run_command("plan", _show, config="train")


if __name__ == "__main__":
    main()
