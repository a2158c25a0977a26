"""The memory of a run, before it is launched: `rlhf_lightning.plan +experiment=...`.

It trains nothing and needs no network, no weights and no earlier stage.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rlhf_lightning.app.command_line import fail
from rlhf_lightning.app.config.compose import ConfigError, choices, register
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.targets import did_you_mean
from rlhf_lightning.app.config.validate import load_settings
from rlhf_lightning.models.cpu_kernels import cpu_kernels

if TYPE_CHECKING:
    from rlhf_lightning.app.memory_plan.report import Report

SETTINGS = {
    "device_memory": None,  # of one device, as 80GiB; None asks this machine
    "device": "auto",  # cpu or cuda
    "format": "table",  # or json
    "reward_model": None,  # model config or folder whose shape the reward model has
}
HELP = """\
What a training run takes in memory on each device, and what would make it fit.
Trains nothing; needs no network, no weights and no earlier stage.

  python -m rlhf_lightning.plan +experiment=ppo
  python -m rlhf_lightning.plan +experiment=ppo model=llama3_1_8b dataset=ultrafeedback lora=lora
  python -m rlhf_lightning.plan +experiment=sft model=qwen2_5_7b dataset=ultrachat strategy=fsdp

Takes what rlhf_lightning.train takes, and
  plan.device_memory=80GiB   of one device (default: this machine's)
  plan.device=cuda           cpu or cuda (default: trainer.accelerator; cuda with a device_memory)
  plan.reward_model=NAME     one of conf/model, or a folder, whose shape the reward model has
                             (default: the policy's)
  plan.format=json           for programs

Experiments: {experiments}
"""


def run(settings: TrainSettings, plan: Mapping[str, Any]) -> Report:
    """Return what a run takes.

    Args:
        settings: of the run.
        plan: those of `SETTINGS`.

    Raises:
        ConfigError: if the configuration gives the model no shape.
    """
    from rlhf_lightning.app.memory_plan.report import make_report
    from rlhf_lightning.app.memory_plan.request import device_bytes, read_run

    planned = read_run(settings, plan)
    with cpu_kernels(settings.model.cpu_kernels):
        return make_report(planned.run, device_bytes(planned.run, plan), planned.notes)


def compose_run(overrides: Sequence[str]) -> tuple[TrainSettings, dict[str, Any]]:
    """Return the training settings of the overrides, and those of the plan."""
    plan = dict(SETTINGS)
    kept = []
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        group, _, name = key.partition(".")
        if group != "plan":
            kept.append(override)
        elif name in plan:
            plan[name] = value or None
        else:
            known = [f"plan.{name}" for name in SETTINGS]
            raise ConfigError(f"unknown key {key}{did_you_mean(key, known)}")
    if plan["format"] not in ("table", "json"):
        raise ConfigError(f"plan.format={plan['format']} must be table or json")
    return load_settings(TrainSettings, "train", kept), plan


def main() -> None:
    """Run the command line."""
    arguments = sys.argv[1:]
    if not arguments or {"-h", "--help"} & set(arguments):
        sys.stdout.write(HELP.format(experiments=", ".join(choices("experiment"))))
        return
    register()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        settings, plan = compose_run(arguments)
        report = run(settings, plan)
    except ConfigError as error:
        fail(str(error))
    if plan["format"] == "json":
        sys.stdout.write(json.dumps(asdict(report), indent=2) + "\n")
        return
    from rlhf_lightning.app.memory_plan.table import print_report

    print_report(report, title=" ".join(arguments))


if __name__ == "__main__":
    main()
