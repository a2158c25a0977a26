"""A rank of GRPO from Python: MATERIAL, RUN, DEVICES, STRATEGY, [lora, lag, teacher or reverse].

With `reverse` it is distillation by the reverse KL, without a reward.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L

from rlhf_lightning import (
    DistillationHparams,
    DistillationModule,
    FSDP2Strategy,
    GRPOHparams,
    LoraHparams,
    PolicyGradientModule,
    PromptDataModule,
    SamplingHparams,
    export_model,
    trainer_arguments,
)
from tests.multiprocess.train_stage import leave, strategy_of


def length(prompts: list[str], completions: list[str], **_: list[str]) -> list[float]:
    return [len(text) / 10 for text in completions]


def main(material: Path, run: Path, devices: int, strategy: str, variant: str = "") -> None:
    lagged: dict[str, Any] = {"rollout_lag": 1, "off_policy": "truncated", "off_policy_cap": 1.1}
    steps: dict[str, Any] = {"micro_batch_size": 3, "num_minibatches": 2, "num_epochs": 2}
    steps |= {"learning_rate": 1e-3, **(lagged if variant == "lag" else {})}
    given: dict[str, Any] = {
        "sampling": SamplingHparams(max_new_tokens=6),
        "lora": LoraHparams(r=4) if variant == "lora" else None,
        "teacher": material / "teacher" if variant in ("teacher", "reverse") else None,
    }
    module: DistillationModule | PolicyGradientModule
    if variant == "reverse":
        module = DistillationModule.from_pretrained(
            material / "policy", distillation=DistillationHparams(**steps), **given
        )
    else:
        module = PolicyGradientModule.from_pretrained(
            material / "policy", length, grpo=GRPOHparams(**steps), **given
        )
    data = PromptDataModule(
        material / "prompts.jsonl", module.tokenizer, batch_size=4, num_generations=3
    )
    placed: dict[str, Any] = {}
    if devices > 1:
        fsdp = strategy == "fsdp"
        placed["strategy"] = (
            FSDP2Strategy(compute_dtype=None) if fsdp else strategy_of(strategy, devices)
        )
    trainer = L.Trainer(
        **trainer_arguments(
            run, max_iterations=3, accelerator="cpu", devices=devices, enable_progress_bar=False,
            **placed,
        )
    )  # fmt: skip
    trainer.fit(module, data)
    export_model(module, run / "export")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), *sys.argv[4:])
    leave()
