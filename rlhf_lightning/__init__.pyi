"""The public names: each stands here once; `__init__.py` imports it when it is asked for."""

from rlhf_lightning.callbacks.periodic_evaluation import PeriodicEvaluation as PeriodicEvaluation
from rlhf_lightning.callbacks.profiling import ProfileIterations as ProfileIterations
from rlhf_lightning.callbacks.trainer_arguments import trainer_arguments as trainer_arguments
from rlhf_lightning.data.datamodules import (
    DemonstrationDataModule as DemonstrationDataModule,
    PreferenceDataModule as PreferenceDataModule,
    PromptDataModule as PromptDataModule,
)
from rlhf_lightning.data.demo.annotators import SimulatedAnnotator as SimulatedAnnotator
from rlhf_lightning.data.demo.gold import gold_scores as gold_scores
from rlhf_lightning.data.demo.source import DemoSource as DemoSource
from rlhf_lightning.data.demo.vocabulary import demo_tokenizer as demo_tokenizer
from rlhf_lightning.data.sources.base import (
    FileSource as FileSource,
    FirstRecords as FirstRecords,
    HubSource as HubSource,
    JoinedSource as JoinedSource,
    MixedSource as MixedSource,
)
from rlhf_lightning.data.sources.templates import TemplateSource as TemplateSource
from rlhf_lightning.distributed.strategy import FSDP2Strategy as FSDP2Strategy
from rlhf_lightning.doctor.interventions import ActionSettings as ActionSettings
from rlhf_lightning.doctor.thresholds import DoctorThresholds as DoctorThresholds
from rlhf_lightning.evaluation.benchmarks import (
    PairsBenchmark as PairsBenchmark,
    RewardBench2 as RewardBench2,
)
from rlhf_lightning.evaluation.compare import compare as compare
from rlhf_lightning.evaluation.gold_rewards import (
    CommandGold as CommandGold,
    ExactMatchGold as ExactMatchGold,
    NumberGold as NumberGold,
)
from rlhf_lightning.evaluation.lm_eval_tasks import LmEvalBenchmark as LmEvalBenchmark
from rlhf_lightning.evaluation.normalization import normalize_reward_model as normalize_reward_model
from rlhf_lightning.evaluation.safety import (
    PhraseRefusals as PhraseRefusals,
    SafetyCheck as SafetyCheck,
)
from rlhf_lightning.hparams import (
    DistillationHparams as DistillationHparams,
    DPOHparams as DPOHparams,
    GRPOHparams as GRPOHparams,
    LoraHparams as LoraHparams,
    PPOHparams as PPOHparams,
    RewardHparams as RewardHparams,
    SamplingHparams as SamplingHparams,
    SFTHparams as SFTHparams,
)
from rlhf_lightning.models.factory import load_scalar_model as load_scalar_model
from rlhf_lightning.modules.distillation import DistillationModule as DistillationModule
from rlhf_lightning.modules.dpo import DPOModule as DPOModule
from rlhf_lightning.modules.export import export_model as export_model
from rlhf_lightning.modules.grpo import PolicyGradientModule as PolicyGradientModule
from rlhf_lightning.modules.ppo import PPOModule as PPOModule
from rlhf_lightning.modules.reward import RewardModule as RewardModule
from rlhf_lightning.modules.optimization import Schedule as Schedule
from rlhf_lightning.modules.sft import SFTModule as SFTModule
from rlhf_lightning.preferences.annotators import (
    RuleAnnotator as RuleAnnotator,
    SimulatedPerson as SimulatedPerson,
)
from rlhf_lightning.preferences.budget import BudgetHparams as BudgetHparams
from rlhf_lightning.preferences.collection import LabHparams as LabHparams
from rlhf_lightning.preferences.annotators import (
    PageAnnotators as PageAnnotators,
    Panel as Panel,
)
from rlhf_lightning.preferences.judge import JudgeAnnotator as JudgeAnnotator
from rlhf_lightning.preferences.reward_annotator import RewardModelAnnotator as RewardModelAnnotator
from rlhf_lightning.preferences.annotators import (
    CallableRule as CallableRule,
    EndingRule as EndingRule,
    LengthRule as LengthRule,
    RepetitionRule as RepetitionRule,
    demo_style as demo_style,
)
from rlhf_lightning.rollout.generators.base import (
    CachedGenerator as CachedGenerator,
    TransformersGenerator as TransformersGenerator,
)
from rlhf_lightning.rollout.generators.captured import CapturedGenerator as CapturedGenerator
from rlhf_lightning.rollout.generators.vllm import VllmGenerator as VllmGenerator
from rlhf_lightning.rollout.scorers.base import (
    FunctionScorer as FunctionScorer,
    NoReward as NoReward,
    RewardModelScorer as RewardModelScorer,
    WeightedScorer as WeightedScorer,
)
from rlhf_lightning.rollout.scorers.reward_models import (
    RewardAdapterScorer as RewardAdapterScorer,
    RewardEnsembleScorer as RewardEnsembleScorer,
)
from rlhf_lightning.rollout.scorers.http import HttpScorer as HttpScorer
from rlhf_lightning.rollout.scorers.text_reward_model import (
    TextRewardModelScorer as TextRewardModelScorer,
)
from rlhf_lightning.rollout.scorers.verifiable import NumberReward as NumberReward

__version__: str
__all__: list[str]
