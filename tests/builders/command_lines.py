"""Command lines of `rlhf_lightning.train` for runs of a few iterations on the built-in world.

Must not import torch: processes that only start runs import it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from rlhf_lightning.app.config.compose import composed, conf_dir, register
from rlhf_lightning.app.config.inherit import command_settings
from tests.builders.processes import run_python

ROOT = Path(__file__).resolve().parents[2]
FEW = [  # iterations of everything
    "trainer.limit_train_batches=3",
    "trainer.limit_val_batches=2",
    "trainer.validations=1",
    "evaluation.num_samples=4",
]
SMALL = [
    *FEW,
    "logger=none",
    "data.batch_size=4",
    "callbacks.checkpoint.every_n_iterations=1",
    "callbacks.checkpoint.keep_last=3",
    "evaluation.num_prompts=8",
    "artifacts.publish=null",
    "+dataset.source.num_texts=24",
    "+dataset.source.num_demonstrations=24",
    "+dataset.source.num_preferences=24",
    "+dataset.source.num_validation_preferences=16",
]
LENGTH_REWARD = "def score(prompts, completions):\n    return [len(c) / 10 for c in completions]\n"


def by_length(folder: Path) -> list[str]:
    """Write a reward function into `folder`, and return the words that score by it."""
    (folder / "reward.py").write_text(LENGTH_REWARD)
    return ["scorer=function", f"scorer.function={folder}/reward.py:score"]


def overrides_of(stage: str, start: Path) -> list[str]:
    """Return the command line of a run of a few iterations."""
    key = {"base": None, "sft": "artifacts.base"}.get(stage, "artifacts.sft")
    own = [] if key is None else [f"{key}={start}"]
    if stage in ("ppo", "grpo"):
        own += [
            *by_length(start.parent),
            "module.sampling.max_new_tokens=4",
            f"module.{stage}.num_minibatches=1",
        ]
        own += {
            "grpo": ["data.num_generations=3"],
            "ppo": [
                "module.value=null",
                "module.value_head=zero",
                "module.ppo.num_ppo_epochs=1",
            ],
        }[stage]
    return [f"+experiment={stage}", *SMALL, *own]


def command(*overrides: str) -> list[str]:
    return [sys.executable, "-m", "rlhf_lightning.train", *overrides]


def small_sft(start: Path, *overrides: str) -> list[str]:
    return ["+experiment=sft", *SMALL, f"artifacts.base={start}", *overrides]


def environment(**changes: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RLHF_")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | changes


def train(folder: Path, *overrides: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return run_python(*command(*overrides)[1:], folder=folder, environment=environment(**changes))


def run_folder(folder: Path) -> Path:
    (found,) = folder.glob("outputs/*/*/summary.json")
    return found.parent


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_folder(folder) / "summary.json").read_text())
    return content


def settings_of(*overrides: str, entry: str = "train") -> Any:
    """Return the settings that a command line composes, checked as the command checks them."""
    register()
    cfg = composed(entry, list(overrides))
    return command_settings(entry, cfg, overrides)


def named_model(name: str) -> dict[str, Any]:
    """Return one of `conf/model` with interpolations resolved; empty if there is none."""
    file = conf_dir() / "model" / f"{name}.yaml"
    if not file.is_file():
        return {}
    content = OmegaConf.create({"model": OmegaConf.load(file)})
    found: Any = OmegaConf.to_container(content.model, resolve=True)
    return dict(found)
