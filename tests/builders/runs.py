"""Runs of a few iterations on the built-in world, in this process, from a start of random weights.

`killed` leaves what a run leaves that was killed after its last checkpoint; `completed` finishes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlhf_lightning.app.build import assemble
from rlhf_lightning.app.config.saved import write_settings
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.train import run
from rlhf_lightning.data.demo.vocabulary import demo_tokenizer
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.modules.export import save_hf_model
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import new_summary, write_summary
from tests.builders.command_lines import FEW, overrides_of, settings_of


def make_start(
    folder: Path, *, eos_scale: float = 1.0, tokenizer: Any = None, **changes: Any
) -> Path:
    """Write a tiny policy with a model card and a licence; by default it knows the built-in world.

    `eos_scale` multiplies the output weights of EOS, `changes` are fields of the configuration.
    """
    tokenizer = tokenizer or demo_tokenizer()
    fields = {
        "model_type": "llama",
        "vocab_size": len(tokenizer),
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    policy = load_policy(from_scratch=fields | changes)
    stop = int(tokenizer.eos_token_id)
    with torch.no_grad():
        policy.model.get_output_embeddings().weight[stop] *= eos_scale
    save_hf_model(policy, tokenizer, folder, policy.state_dict(), stop_ids=[stop])
    (folder / "README.md").write_text("---\nlicense: mit\nbase_model: org/tiny\n---\n\n# Tiny\n")
    return folder


def settings_for(stage: str, start: Path, *overrides: str) -> TrainSettings:
    other_mode = any(o.startswith("debug=") for o in overrides)
    own = [o for o in overrides_of(stage, start) if not (other_mode and o in FEW)]
    settings: TrainSettings = settings_of(*own, *overrides)
    return settings


def killed(folder: Path, stage: str, start: Path, *overrides: str) -> RunFolder:
    settings, made = _begun(folder, stage, start, *overrides)
    write_summary(made, new_summary(settings.stage, seed=1, config_hash="x"))
    parts: Any = assemble(settings, made)
    parts.trainer.fit(parts.module, datamodule=parts.data)
    return made


def completed(folder: Path, stage: str, start: Path, *overrides: str) -> RunFolder:
    settings, made = _begun(folder, stage, start, *overrides)
    run(settings, made, [])
    return made


def _begun(
    folder: Path, stage: str, start: Path, *overrides: str
) -> tuple[TrainSettings, RunFolder]:
    settings = settings_for(stage, start, *overrides)
    made = RunFolder(folder)
    made.config.parent.mkdir(parents=True)
    write_settings(made.config, settings)  # as Hydra does
    return settings, made
