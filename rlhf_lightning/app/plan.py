"""What a run takes in memory, before it is launched: `rlhf_lightning.plan +experiment=...`.

It trains nothing and needs no network, no weights and no earlier stage.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from rlhf_lightning.app.config.compose import (
    ConfigError,
    check_config,
    check_hparams,
    choices,
    conf_dir,
    did_you_mean,
    register,
)
from rlhf_lightning.app.config.errors import COMPOSE_ERRORS, explain
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


def run(cfg: DictConfig, settings: Mapping[str, Any]) -> Report:
    """Return what the run of `cfg` takes.

    Args:
        cfg: composed training configuration.
        settings: those of `SETTINGS`.

    Raises:
        ConfigError: if the configuration is none, or gives the model no shape.
    """
    allowed = tuple(filter(None, os.environ.get("RLHF_ALLOWED_TARGETS", "").split(",")))
    check_config(cfg, allowed)
    check_hparams(cfg)
    from rlhf_lightning.app.memory_plan.report import make_report
    from rlhf_lightning.app.memory_plan.request import device_bytes, read_run

    planned = read_run(cfg, settings)
    with cpu_kernels(cfg.model.get("cpu_kernels", True)):
        return make_report(planned.run, device_bytes(planned.run, settings), planned.notes)


def compose_run(overrides: Sequence[str]) -> tuple[DictConfig, dict[str, Any]]:
    """Return the training configuration of the overrides, and the settings of the plan."""
    settings = dict(SETTINGS)
    kept = []
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        group, _, name = key.partition(".")
        if group != "plan":
            kept.append(override)
        elif name in settings:
            settings[name] = value or None
        else:
            known = [f"plan.{name}" for name in SETTINGS]
            raise ConfigError(f"unknown key {key}{did_you_mean(key, known)}")
    if settings["format"] not in ("table", "json"):
        raise ConfigError(f"plan.format={settings['format']} must be table or json")
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        try:
            return compose("train", overrides=kept), settings
        except COMPOSE_ERRORS as error:
            raise ConfigError(explain(error, kept)) from error


def main() -> None:
    """Run the command line."""
    arguments = sys.argv[1:]
    if not arguments or {"-h", "--help"} & set(arguments):
        sys.stdout.write(HELP.format(experiments=", ".join(choices("experiment"))))
        return
    register()
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    try:
        cfg, settings = compose_run(arguments)
        report = run(cfg, settings)
    except (ConfigError, HydraException, OmegaConfBaseException) as error:
        sys.stderr.write(f"error: {error}\n")
        raise SystemExit(2) from error
    if settings["format"] == "json":
        sys.stdout.write(json.dumps(asdict(report), indent=2) + "\n")
        return
    from rlhf_lightning.app.memory_plan.table import print_report

    print_report(report, title=" ".join(arguments))


if __name__ == "__main__":
    main()
