"""RLHF as plain LightningModules: supervised fine-tuning, reward modelling, DPO, PPO, GRPO."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rlhf_lightning.callbacks.periodic_evaluation import PeriodicEvaluation
    from rlhf_lightning.callbacks.trainer_arguments import trainer_arguments
    from rlhf_lightning.data.datamodules import (
        DemonstrationDataModule,
        PreferenceDataModule,
        PromptDataModule,
    )
    from rlhf_lightning.data.demo.source import DemoSource
    from rlhf_lightning.data.demo.vocabulary import demo_tokenizer
    from rlhf_lightning.data.sources.base import FileSource
    from rlhf_lightning.distributed.strategy import FSDP2Strategy
    from rlhf_lightning.doctor.interventions import ActionSettings
    from rlhf_lightning.doctor.thresholds import DoctorThresholds
    from rlhf_lightning.evaluation.compare import compare
    from rlhf_lightning.evaluation.normalization import normalize_reward_model
    from rlhf_lightning.evaluation.safety import PhraseRefusals, SafetyCheck
    from rlhf_lightning.hparams import (
        DPOHparams,
        GRPOHparams,
        LoraHparams,
        PPOHparams,
        RewardHparams,
        SamplingHparams,
        SFTHparams,
    )
    from rlhf_lightning.modules.dpo import DPOModule
    from rlhf_lightning.modules.export import export_model
    from rlhf_lightning.modules.grpo import PolicyGradientModule
    from rlhf_lightning.modules.ppo import PPOModule
    from rlhf_lightning.modules.reward import RewardModule
    from rlhf_lightning.modules.schedules import Schedule
    from rlhf_lightning.modules.sft import SFTModule
    from rlhf_lightning.rollout.scorers.base import (
        FunctionScorer,
        RewardModelScorer,
        WeightedScorer,
    )

# The public names and where they live; imported when they are asked for, as torch takes seconds.
_HOMES = {
    "ActionSettings": "rlhf_lightning.doctor.interventions",
    "DPOHparams": "rlhf_lightning.hparams",
    "DPOModule": "rlhf_lightning.modules.dpo",
    "DemoSource": "rlhf_lightning.data.demo.source",
    "DemonstrationDataModule": "rlhf_lightning.data.datamodules",
    "DoctorThresholds": "rlhf_lightning.doctor.thresholds",
    "FSDP2Strategy": "rlhf_lightning.distributed.strategy",
    "FileSource": "rlhf_lightning.data.sources.base",
    "FunctionScorer": "rlhf_lightning.rollout.scorers.base",
    "GRPOHparams": "rlhf_lightning.hparams",
    "LoraHparams": "rlhf_lightning.hparams",
    "PPOHparams": "rlhf_lightning.hparams",
    "PPOModule": "rlhf_lightning.modules.ppo",
    "PeriodicEvaluation": "rlhf_lightning.callbacks.periodic_evaluation",
    "PhraseRefusals": "rlhf_lightning.evaluation.safety",
    "PolicyGradientModule": "rlhf_lightning.modules.grpo",
    "PreferenceDataModule": "rlhf_lightning.data.datamodules",
    "PromptDataModule": "rlhf_lightning.data.datamodules",
    "RewardHparams": "rlhf_lightning.hparams",
    "RewardModelScorer": "rlhf_lightning.rollout.scorers.base",
    "RewardModule": "rlhf_lightning.modules.reward",
    "SFTHparams": "rlhf_lightning.hparams",
    "SFTModule": "rlhf_lightning.modules.sft",
    "SafetyCheck": "rlhf_lightning.evaluation.safety",
    "SamplingHparams": "rlhf_lightning.hparams",
    "Schedule": "rlhf_lightning.modules.schedules",
    "WeightedScorer": "rlhf_lightning.rollout.scorers.base",
    "compare": "rlhf_lightning.evaluation.compare",
    "demo_tokenizer": "rlhf_lightning.data.demo.vocabulary",
    "export_model": "rlhf_lightning.modules.export",
    "normalize_reward_model": "rlhf_lightning.evaluation.normalization",
    "trainer_arguments": "rlhf_lightning.callbacks.trainer_arguments",
}
__all__ = [
    "ActionSettings",
    "DPOHparams",
    "DPOModule",
    "DemoSource",
    "DemonstrationDataModule",
    "DoctorThresholds",
    "FSDP2Strategy",
    "FileSource",
    "FunctionScorer",
    "GRPOHparams",
    "LoraHparams",
    "PPOHparams",
    "PPOModule",
    "PeriodicEvaluation",
    "PhraseRefusals",
    "PolicyGradientModule",
    "PreferenceDataModule",
    "PromptDataModule",
    "RewardHparams",
    "RewardModelScorer",
    "RewardModule",
    "SFTHparams",
    "SFTModule",
    "SafetyCheck",
    "SamplingHparams",
    "Schedule",
    "WeightedScorer",
    "compare",
    "demo_tokenizer",
    "export_model",
    "normalize_reward_model",
    "trainer_arguments",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
