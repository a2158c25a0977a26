"""A rank of DPO from Python: MATERIAL, RUN, DEVICES, STRATEGY, [lora]."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import lightning as L

from rlhf_lightning import (
    DPOHparams,
    DPOModule,
    FSDP2Strategy,
    LoraHparams,
    PreferenceDataModule,
    export_model,
    trainer_arguments,
)
from tests.multiprocess.train_stage import leave, strategy_of


def main(material: Path, run: Path, devices: int, strategy: str, lora: str = "") -> None:
    module = DPOModule.from_pretrained(
        material / "policy",
        dpo=DPOHparams(learning_rate=1e-3, micro_batch_size=3),
        lora=LoraHparams(r=4) if lora else None,
    )
    data = PreferenceDataModule(material / "pairs.jsonl", module.tokenizer, batch_size=8)
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
