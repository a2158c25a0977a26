"""RLHF as plain LightningModules: supervised fine-tuning, reward modelling, DPO, PPO, GRPO."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from rlhf_lightning.callbacks.periodic_evaluation import PeriodicEvaluation
    from rlhf_lightning.callbacks.profiling import ProfileIterations
    from rlhf_lightning.callbacks.trainer_arguments import trainer_arguments
    from rlhf_lightning.data.datamodules import (
        DemonstrationDataModule,
        PreferenceDataModule,
        PromptDataModule,
    )
    from rlhf_lightning.data.demo.annotators import SimulatedAnnotator
    from rlhf_lightning.data.demo.gold import gold_scores
    from rlhf_lightning.data.demo.source import DemoSource
    from rlhf_lightning.data.demo.vocabulary import demo_tokenizer
    from rlhf_lightning.data.sources.base import (
        FileSource,
        FirstRecords,
        HubSource,
        JoinedSource,
        MixedSource,
    )
    from rlhf_lightning.data.sources.templates import TemplateSource
    from rlhf_lightning.data.sources.transcripts import TranscriptSource
    from rlhf_lightning.distributed.strategy import FSDP2Strategy
    from rlhf_lightning.doctor.interventions import ActionSettings
    from rlhf_lightning.doctor.thresholds import DoctorThresholds
    from rlhf_lightning.evaluation.benchmarks import PairsBenchmark, RewardBench2
    from rlhf_lightning.evaluation.compare import compare
    from rlhf_lightning.evaluation.gold_rewards import CommandGold, ExactMatchGold, NumberGold
    from rlhf_lightning.evaluation.lm_eval_tasks import LmEvalBenchmark
    from rlhf_lightning.evaluation.normalization import normalize_reward_model
    from rlhf_lightning.evaluation.safety import PhraseRefusals, SafetyCheck
    from rlhf_lightning.hparams import (
        DistillationHparams,
        DPOHparams,
        GRPOHparams,
        LoraHparams,
        PPOHparams,
        RewardHparams,
        SamplingHparams,
        SFTHparams,
    )
    from rlhf_lightning.models.factory import load_scalar_model
    from rlhf_lightning.modules.distillation import DistillationModule
    from rlhf_lightning.modules.dpo import DPOModule
    from rlhf_lightning.modules.export import export_model
    from rlhf_lightning.modules.grpo import PolicyGradientModule
    from rlhf_lightning.modules.ppo import PPOModule
    from rlhf_lightning.modules.reward import RewardModule
    from rlhf_lightning.modules.schedules import Schedule
    from rlhf_lightning.modules.sft import SFTModule
    from rlhf_lightning.preferences.annotators import RuleAnnotator, SimulatedPerson
    from rlhf_lightning.preferences.budget import BudgetHparams
    from rlhf_lightning.preferences.collection import LabHparams
    from rlhf_lightning.preferences.human_annotators import PageAnnotators, Panel
    from rlhf_lightning.preferences.judge import JudgeAnnotator
    from rlhf_lightning.preferences.reward_annotator import RewardModelAnnotator
    from rlhf_lightning.preferences.rules import (
        CallableRule,
        EndingRule,
        LengthRule,
        RepetitionRule,
        demo_style,
    )
    from rlhf_lightning.rollout.generators.base import CachedGenerator, TransformersGenerator
    from rlhf_lightning.rollout.generators.captured import CapturedGenerator
    from rlhf_lightning.rollout.generators.vllm import VllmGenerator
    from rlhf_lightning.rollout.scorers.adapter import RewardAdapterScorer
    from rlhf_lightning.rollout.scorers.base import (
        FunctionScorer,
        NoReward,
        RewardModelScorer,
        WeightedScorer,
    )
    from rlhf_lightning.rollout.scorers.ensemble import RewardEnsembleScorer
    from rlhf_lightning.rollout.scorers.http import HttpScorer
    from rlhf_lightning.rollout.scorers.text_reward_model import TextRewardModelScorer
    from rlhf_lightning.rollout.scorers.verifiable import NumberReward

# The public names and where they live; imported when they are asked for, as torch takes seconds.
_HOMES = {
    "ActionSettings": "rlhf_lightning.doctor.interventions",
    "BudgetHparams": "rlhf_lightning.preferences.budget",
    "CachedGenerator": "rlhf_lightning.rollout.generators.base",
    "CallableRule": "rlhf_lightning.preferences.rules",
    "CapturedGenerator": "rlhf_lightning.rollout.generators.captured",
    "CommandGold": "rlhf_lightning.evaluation.gold_rewards",
    "DPOHparams": "rlhf_lightning.hparams",
    "DPOModule": "rlhf_lightning.modules.dpo",
    "DemoSource": "rlhf_lightning.data.demo.source",
    "DemonstrationDataModule": "rlhf_lightning.data.datamodules",
    "DistillationHparams": "rlhf_lightning.hparams",
    "DistillationModule": "rlhf_lightning.modules.distillation",
    "DoctorThresholds": "rlhf_lightning.doctor.thresholds",
    "EndingRule": "rlhf_lightning.preferences.rules",
    "ExactMatchGold": "rlhf_lightning.evaluation.gold_rewards",
    "FSDP2Strategy": "rlhf_lightning.distributed.strategy",
    "FileSource": "rlhf_lightning.data.sources.base",
    "FirstRecords": "rlhf_lightning.data.sources.base",
    "FunctionScorer": "rlhf_lightning.rollout.scorers.base",
    "GRPOHparams": "rlhf_lightning.hparams",
    "HttpScorer": "rlhf_lightning.rollout.scorers.http",
    "HubSource": "rlhf_lightning.data.sources.base",
    "JoinedSource": "rlhf_lightning.data.sources.base",
    "JudgeAnnotator": "rlhf_lightning.preferences.judge",
    "LabHparams": "rlhf_lightning.preferences.collection",
    "LengthRule": "rlhf_lightning.preferences.rules",
    "LmEvalBenchmark": "rlhf_lightning.evaluation.lm_eval_tasks",
    "LoraHparams": "rlhf_lightning.hparams",
    "MixedSource": "rlhf_lightning.data.sources.base",
    "NoReward": "rlhf_lightning.rollout.scorers.base",
    "NumberGold": "rlhf_lightning.evaluation.gold_rewards",
    "NumberReward": "rlhf_lightning.rollout.scorers.verifiable",
    "PPOHparams": "rlhf_lightning.hparams",
    "PPOModule": "rlhf_lightning.modules.ppo",
    "PageAnnotators": "rlhf_lightning.preferences.human_annotators",
    "PairsBenchmark": "rlhf_lightning.evaluation.benchmarks",
    "Panel": "rlhf_lightning.preferences.human_annotators",
    "PeriodicEvaluation": "rlhf_lightning.callbacks.periodic_evaluation",
    "PhraseRefusals": "rlhf_lightning.evaluation.safety",
    "PolicyGradientModule": "rlhf_lightning.modules.grpo",
    "PreferenceDataModule": "rlhf_lightning.data.datamodules",
    "ProfileIterations": "rlhf_lightning.callbacks.profiling",
    "PromptDataModule": "rlhf_lightning.data.datamodules",
    "RepetitionRule": "rlhf_lightning.preferences.rules",
    "RewardAdapterScorer": "rlhf_lightning.rollout.scorers.adapter",
    "RewardBench2": "rlhf_lightning.evaluation.benchmarks",
    "RewardEnsembleScorer": "rlhf_lightning.rollout.scorers.ensemble",
    "RewardHparams": "rlhf_lightning.hparams",
    "RewardModelAnnotator": "rlhf_lightning.preferences.reward_annotator",
    "RewardModelScorer": "rlhf_lightning.rollout.scorers.base",
    "RewardModule": "rlhf_lightning.modules.reward",
    "RuleAnnotator": "rlhf_lightning.preferences.annotators",
    "SFTHparams": "rlhf_lightning.hparams",
    "SFTModule": "rlhf_lightning.modules.sft",
    "SafetyCheck": "rlhf_lightning.evaluation.safety",
    "SamplingHparams": "rlhf_lightning.hparams",
    "Schedule": "rlhf_lightning.modules.schedules",
    "SimulatedAnnotator": "rlhf_lightning.data.demo.annotators",
    "SimulatedPerson": "rlhf_lightning.preferences.annotators",
    "TemplateSource": "rlhf_lightning.data.sources.templates",
    "TextRewardModelScorer": "rlhf_lightning.rollout.scorers.text_reward_model",
    "TranscriptSource": "rlhf_lightning.data.sources.transcripts",
    "TransformersGenerator": "rlhf_lightning.rollout.generators.base",
    "VllmGenerator": "rlhf_lightning.rollout.generators.vllm",
    "WeightedScorer": "rlhf_lightning.rollout.scorers.base",
    "compare": "rlhf_lightning.evaluation.compare",
    "demo_style": "rlhf_lightning.preferences.rules",
    "demo_tokenizer": "rlhf_lightning.data.demo.vocabulary",
    "export_model": "rlhf_lightning.modules.export",
    "gold_scores": "rlhf_lightning.data.demo.gold",
    "load_scalar_model": "rlhf_lightning.models.factory",
    "normalize_reward_model": "rlhf_lightning.evaluation.normalization",
    "trainer_arguments": "rlhf_lightning.callbacks.trainer_arguments",
}
__all__ = [
    "ActionSettings",
    "BudgetHparams",
    "CachedGenerator",
    "CallableRule",
    "CapturedGenerator",
    "CommandGold",
    "DPOHparams",
    "DPOModule",
    "DemoSource",
    "DemonstrationDataModule",
    "DistillationHparams",
    "DistillationModule",
    "DoctorThresholds",
    "EndingRule",
    "ExactMatchGold",
    "FSDP2Strategy",
    "FileSource",
    "FirstRecords",
    "FunctionScorer",
    "GRPOHparams",
    "HttpScorer",
    "HubSource",
    "JoinedSource",
    "JudgeAnnotator",
    "LabHparams",
    "LengthRule",
    "LmEvalBenchmark",
    "LoraHparams",
    "MixedSource",
    "NoReward",
    "NumberGold",
    "NumberReward",
    "PPOHparams",
    "PPOModule",
    "PageAnnotators",
    "PairsBenchmark",
    "Panel",
    "PeriodicEvaluation",
    "PhraseRefusals",
    "PolicyGradientModule",
    "PreferenceDataModule",
    "ProfileIterations",
    "PromptDataModule",
    "RepetitionRule",
    "RewardAdapterScorer",
    "RewardBench2",
    "RewardEnsembleScorer",
    "RewardHparams",
    "RewardModelAnnotator",
    "RewardModelScorer",
    "RewardModule",
    "RuleAnnotator",
    "SFTHparams",
    "SFTModule",
    "SafetyCheck",
    "SamplingHparams",
    "Schedule",
    "SimulatedAnnotator",
    "SimulatedPerson",
    "TemplateSource",
    "TextRewardModelScorer",
    "TranscriptSource",
    "TransformersGenerator",
    "VllmGenerator",
    "WeightedScorer",
    "compare",
    "demo_style",
    "demo_tokenizer",
    "export_model",
    "gold_scores",
    "load_scalar_model",
    "normalize_reward_model",
    "trainer_arguments",
]


_EXAMPLES = ("ArgumentPairSource", "LabelledTextSource", "QuestionSource", "sentiment_gold")
_WITHDRAWN = {  # what is written instead
    "VllmServerGenerator": "VllmGenerator(..., python=PYTHON)",
    **{name: f"from examples.datasets, in a checkout, import {name}" for name in _EXAMPLES},
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        instead = _WITHDRAWN.get(name)
        told = f": write {instead}" if instead else ""
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{told}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
