"""A rank that trains PPO as a user of the library does: FOLDER of the material, RUN, DEVICES."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from safetensors.torch import load_file

from rlhf_lightning import (
    FSDP2Strategy,
    PPOHparams,
    PPOModule,
    PromptDataModule,
    SamplingHparams,
    compare,
    export_model,
    trainer_arguments,
)
from tests.multiprocess.train_stage import leave


def length(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(text)) for text in completions]


def main() -> None:
    material, run, devices = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    ppo = PPOHparams(learning_rate=1e-3, value_learning_rate=1e-3, num_minibatches=2)
    sampling = SamplingHparams(max_new_tokens=5)
    module = PPOModule.from_pretrained(material / "policy", length, ppo=ppo, sampling=sampling)
    data = PromptDataModule(material / "prompts.jsonl", module.tokenizer, batch_size=4)
    placed = {"strategy": FSDP2Strategy(compute_dtype=None)} if devices > 1 else {}
    trainer = L.Trainer(
        **trainer_arguments(
            run, max_iterations=2, accelerator="cpu", devices=devices, enable_progress_bar=False,
            **placed,
        )
    )  # fmt: skip
    trainer.fit(module, data)
    export_model(module, run / "export")
    checkpoint = run / "checkpoints" / "last.ckpt"
    assert checkpoint.is_dir() == (devices > 1), "ranks write a folder together"
    restored = PPOModule.load_from_checkpoint(checkpoint, reward=length)
    if int(os.environ["RANK"]) == 0:
        written = load_file(run / "export/model.safetensors")
        state = restored.policy.model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in written.items())
    found = compare(
        module, module, material / "prompts.jsonl", reward=length, max_new_tokens=5, num_prompts=2
    )
    assert 0 <= found.win_rate <= 1


if __name__ == "__main__":
    main()
    leave()
