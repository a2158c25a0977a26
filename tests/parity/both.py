"""The same rows, weights and optimizer for TRL's trainers and for our modules."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from trl import RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

from rlhf_lightning.data.collate import PreferenceCollator, SFTCollator
from rlhf_lightning.data.records import DemonstrationRecord, PreferenceRecord
from rlhf_lightning.hparams import RewardHparams, SFTHparams
from rlhf_lightning.models.factory import load_policy, load_scalar_model
from rlhf_lightning.modules.export import save_hf_model
from rlhf_lightning.modules.optimization import Schedule
from rlhf_lightning.modules.reward import RewardModule
from rlhf_lightning.modules.sft import SFTModule
from rlhf_lightning.text.tokenizers import load_tokenizer
from tests.builders.encoding import encode_all
from tests.builders.models import EOS, VOCABULARY, tiny_policy, tiny_scalar_model, tiny_tokenizer
from tests.builders.stages import trainer

STEPS = 20
LEARNING_RATE = 2e-3
EPS = 1e-5
MAX_GRAD_NORM = 0.5

COMMON: dict[str, Any] = {
    "learning_rate": LEARNING_RATE,
    "lr_scheduler_type": "linear",
    "adam_epsilon": EPS,
    "weight_decay": 0.0,
    "max_grad_norm": MAX_GRAD_NORM,
    "bf16": False,
    "gradient_checkpointing": False,
    "use_cpu": True,
    "report_to": "none",
    "save_strategy": "no",
    "logging_strategy": "no",
    "disable_tqdm": True,
    "train_sampling_strategy": "sequential",
    "dataloader_pin_memory": False,
}


def export_policy_folder(folder: Path, model_type: str) -> Path:
    policy = tiny_policy(model_type)
    save_hf_model(policy, tiny_tokenizer(), folder, policy.state_dict(), stop_ids=[EOS])
    return folder


def export_reward_folder(folder: Path, model_type: str, *, pad_is_eos: bool = False) -> Path:
    model = tiny_scalar_model(model_type)
    tokenizer = tiny_tokenizer(pad_is_eos=pad_is_eos)
    save_hf_model(model, tokenizer, folder, model.state_dict(), stop_ids=[EOS])
    return folder


def texts(count: int, longest: int, *, seed: int) -> list[str]:
    drawn = random.Random(seed)
    return [
        " ".join(
            f"w{drawn.randrange(3, VOCABULARY)}" for _ in range(drawn.randrange(1, longest + 1))
        )
        for _ in range(count)
    ]


def demonstrations(count: int) -> list[dict[str, str]]:
    pairs = zip(texts(count, 9, seed=1), texts(count, 12, seed=2), strict=True)
    return [{"prompt": prompt, "completion": f" {answer}"} for prompt, answer in pairs]


def preferences(count: int) -> list[dict[str, str]]:
    columns = (texts(count, n, seed=seed) for n, seed in ((9, 1), (12, 2), (12, 3)))
    rows = zip(*columns, strict=True)
    return [{"prompt": p, "chosen": f" {c}", "rejected": f" {r}"} for p, c, r in rows]


class StepLosses:
    """Keeps the loss of every micro-batch as TRL's trainer adds it to the gradient, unrounded."""

    def training_step(self, *arguments: Any, **options: Any) -> torch.Tensor:
        loss = super().training_step(*arguments, **options)  # type: ignore[misc]
        self.micro_losses = [*getattr(self, "micro_losses", []), loss.item()]
        return loss

    def step_losses(self, micro_batches: int) -> list[float]:
        parts = torch.tensor(self.micro_losses, dtype=torch.float64)
        return parts.view(-1, micro_batches).sum(1).tolist()


class RecordedSFT(StepLosses, SFTTrainer):
    pass


class RecordedReward(StepLosses, RewardTrainer):
    pass


def trl_sft(folder: Path, rows: Sequence[Any], work: Path, **options: Any) -> RecordedSFT:
    config = SFTConfig(str(work), completion_only_loss=True, **(COMMON | options))
    run = RecordedSFT(str(folder), config, train_dataset=Dataset.from_list(list(rows)))
    run.train()
    return run


def trl_reward(folder: Path, rows: Sequence[Any], work: Path, **options: Any) -> RecordedReward:
    config = RewardConfig(str(work), **(COMMON | options))
    run = RecordedReward(str(folder), config, train_dataset=Dataset.from_list(list(rows)))
    run.train()
    return run


class Recorder(L.Callback):
    def __init__(self, metric: str) -> None:
        self.metric = metric
        self.losses: list[float] = []
        self.norms: list[float] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.losses.append(float(trainer.callback_metrics[f"{self.metric}/loss"]))
        self.norms.append(float(trainer.callback_metrics[f"{self.metric}/grad_norm"]))


def _adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, eps=EPS, weight_decay=0.0)


def sft_batches(folder: Path, rows: Sequence[Any], batch_size: int) -> list[Any]:
    records = [DemonstrationRecord(row["prompt"], row["completion"]) for row in rows]
    return _batches(folder, records, SFTCollator, batch_size)


def preference_batches(folder: Path, rows: Sequence[Any], batch_size: int) -> list[Any]:
    records = [PreferenceRecord(r["prompt"], r["chosen"], r["rejected"]) for r in rows]
    return _batches(folder, records, PreferenceCollator, batch_size)


def _batches(folder: Path, records: list[Any], collator: Any, batch_size: int) -> list[Any]:
    tokenizer = load_tokenizer(folder)
    encoded, _ = encode_all(records, tokenizer, max_length=64)
    assert len(encoded) == len(records)
    collate = collator(int(tokenizer.pad_token_id))
    return [collate(encoded[i : i + batch_size]) for i in range(0, len(encoded), batch_size)]


def our_sft(
    folder: Path, batches: Sequence[Any], *, micro_batch_size: int | None = None
) -> tuple[SFTModule, Recorder]:
    module = SFTModule(
        sft=SFTHparams(
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_GRAD_NORM,
            micro_batch_size=micro_batch_size,
        ),
        policy=partial(load_policy, folder),
        optimizer=_adamw,
        schedule=Schedule("linear"),
    )
    return module, _fit(module, batches, "sft")


def our_reward(
    folder: Path,
    batches: Sequence[Any],
    *,
    center_coef: float = 0.0,
    micro_batch_size: int | None = None,
    trained_bias: bool = True,
) -> tuple[RewardModule, Recorder]:
    def load() -> Any:
        model = load_scalar_model(folder)
        model.head.bias.requires_grad_(trained_bias)
        return model

    module = RewardModule(
        reward=RewardHparams(
            learning_rate=LEARNING_RATE,
            max_grad_norm=MAX_GRAD_NORM,
            center_coef=center_coef,
            micro_batch_size=micro_batch_size,
        ),
        model=load,
        optimizer=_adamw,
        schedule=Schedule("linear"),
    )
    return module, _fit(module, batches, "reward")


def _fit(module: Any, batches: Sequence[Any], metric: str) -> Recorder:
    recorder = Recorder(metric)
    loader = DataLoader(list(batches), batch_size=None)
    trainer(callbacks=[recorder]).fit(module, loader)
    return recorder


def largest_relative_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    assert len(ours) == len(theirs) == STEPS
    return max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
