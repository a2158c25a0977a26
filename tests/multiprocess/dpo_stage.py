"""A rank of DPO from Python: MATERIAL, RUN, DEVICES, STRATEGY, [lora or kto]."""

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


def main(material: Path, run: Path, devices: int, strategy: str, how: str = "") -> None:
    kto = how == "kto"
    module = DPOModule.from_pretrained(
        material / "policy",
        dpo=DPOHparams(learning_rate=1e-3, micro_batch_size=3, kind="kto" if kto else "sigmoid"),
        lora=LoraHparams(r=4) if how == "lora" else None,
    )
    kind = "unpaired" if kto else "preferences"
    pairs = material / "pairs.jsonl"
    data = PreferenceDataModule(pairs, module.tokenizer, batch_size=8, kind=kind)
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
