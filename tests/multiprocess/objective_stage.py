"""A rank of an objective from Python: MATERIAL, RUN, DEVICES, STRATEGY, OBJECTIVE, [VARIANT].

It is `ppo`, `dpo` or `grpo`. Of `dpo` the variants are lora and kto, of `grpo` lora, lag, teacher
and reverse, which is distillation by the reverse KL, without a reward.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning as L
import torch
from safetensors.torch import load_file

from rlhf_lightning import (
    DistillationHparams,
    DistillationModule,
    DPOHparams,
    DPOModule,
    FSDP2Strategy,
    GRPOHparams,
    LoraHparams,
    PolicyGradientModule,
    PPOHparams,
    PPOModule,
    PreferenceDataModule,
    PromptDataModule,
    SamplingHparams,
    compare,
    export_model,
    trainer_arguments,
)
from tests.multiprocess.train_stage import leave, strategy_of

LAGGED: dict[str, Any] = {"rollout_lag": 1, "off_policy": "truncated", "off_policy_cap": 1.1}
STEPS: dict[str, Any] = {"micro_batch_size": 3, "num_minibatches": 2, "num_epochs": 2}


def length(prompts: list[str], completions: list[str], **_: list[str]) -> list[float]:
    return [len(text) / 10 for text in completions]


def of_prompts(material: Path, variant: str) -> tuple[Any, Any]:
    del variant
    ppo = PPOHparams(learning_rate=1e-3, value_learning_rate=1e-3, num_minibatches=2)
    sampling = SamplingHparams(max_new_tokens=5)
    module = PPOModule.from_pretrained(material / "policy", length, ppo=ppo, sampling=sampling)
    return module, PromptDataModule(material / "prompts.jsonl", module.tokenizer, batch_size=4)


def of_pairs(material: Path, variant: str) -> tuple[Any, Any]:
    kto = variant == "kto"
    module = DPOModule.from_pretrained(
        material / "policy",
        dpo=DPOHparams(learning_rate=1e-3, micro_batch_size=3, kind="kto" if kto else "sigmoid"),
        lora=LoraHparams(r=4) if variant == "lora" else None,
    )
    pairs, kind = material / "pairs.jsonl", "unpaired" if kto else "preferences"
    return module, PreferenceDataModule(pairs, module.tokenizer, batch_size=8, kind=kind)


def of_groups(material: Path, variant: str) -> tuple[Any, Any]:
    policy = material / "policy"
    steps = STEPS | {"learning_rate": 1e-3} | (LAGGED if variant == "lag" else {})
    given: dict[str, Any] = {
        "sampling": SamplingHparams(max_new_tokens=6),
        "lora": LoraHparams(r=4) if variant == "lora" else None,
        "teacher": material / "teacher" if variant in ("teacher", "reverse") else None,
    }
    module: DistillationModule | PolicyGradientModule
    if variant == "reverse":
        hparams = DistillationHparams(**steps)
        module = DistillationModule.from_pretrained(policy, distillation=hparams, **given)
    else:
        grpo = GRPOHparams(**steps)
        module = PolicyGradientModule.from_pretrained(policy, length, grpo=grpo, **given)
    prompts = material / "prompts.jsonl"
    return module, PromptDataModule(prompts, module.tokenizer, batch_size=4, num_generations=3)


def main(
    material: Path, run: Path, devices: int, strategy: str, objective: str, variant: str = ""
) -> None:
    made_by = {"ppo": of_prompts, "dpo": of_pairs, "grpo": of_groups}
    module, data = made_by[objective](material, variant)
    iterations = 2 if objective == "ppo" else 3
    placed: dict[str, Any] = {}
    if devices > 1:
        fsdp = strategy == "fsdp"
        placed["strategy"] = (
            FSDP2Strategy(compute_dtype=None) if fsdp else strategy_of(strategy, devices)
        )
    trainer = L.Trainer(
        **trainer_arguments(
            run, max_iterations=iterations, accelerator="cpu", devices=devices,
            enable_progress_bar=False, **placed,
        )
    )  # fmt: skip
    trainer.fit(module, data)
    export_model(module, run / "export")
    if objective == "ppo":
        check_afterwards(module, material, run, devices)


def check_afterwards(module: PPOModule, material: Path, run: Path, devices: int) -> None:
    """Read the checkpoint as one policy, and compare policies, on all ranks."""
    checkpoint = run / "checkpoints" / "last.ckpt"
    assert checkpoint.is_dir() == (devices > 1), "ranks write a folder together"
    restored = PPOModule.load_from_checkpoint(checkpoint, reward=length)
    if int(os.environ["RANK"]) == 0:
        written = load_file(run / "export/model.safetensors")
        state = restored.policy.model.state_dict()
        assert all(torch.equal(state[name], value) for name, value in written.items())
    prompts = material / "prompts.jsonl"
    found = compare(module, module, prompts, reward=length, max_new_tokens=5, num_prompts=2)
    assert 0 <= found.win_rate <= 1


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    leave()
