"""Groups of settings: their fields give types, ranges and choices."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    ValidationInfo,
    model_validator,
)

from rlhf_lightning.app.config.compose import check_path_name
from rlhf_lightning.app.config.targets import Kind, Node, TargetError, check_names, read_node
from rlhf_lightning.arguments import Count, CountOrZero, Name, RunsCode, Temperature
from rlhf_lightning.doctor.interventions import ActionSettings
from rlhf_lightning.doctor.thresholds import DoctorThresholds
from rlhf_lightning.evaluation.gates import gate_problem
from rlhf_lightning.hparams import Checked, Precision

MOST_MINUTES = 1_000_000  # two years


FolderName = Annotated[str, AfterValidator(check_path_name)]
Resume = Literal["never", "auto"]
Dtype = Literal["auto", "fp32", "bf16"]
FilePath = Annotated[Path, Field(strict=False)]
OptionalPath = Annotated[Path | None, Field(strict=False)]
MatmulPrecision = Literal["highest", "high"]


def hparams_of(cls: type[Checked], where: str) -> Any:
    """Return the type of a node that holds the hyper-parameters `cls`."""
    return Annotated[Any, BeforeValidator(lambda node: cls.of_node(node, where))]


class Settings(BaseModel):
    """A group of settings: frozen, strict in its types, without unknown keys."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class Target(Settings):
    """A thing that is built by name: a node with `_target_`.

    Args:
        path: dotted name of a class or function.
        arguments: plain values, and nodes that are built first.
        is_partial: it is built with further arguments later.
        kind: what its place takes.
        where: place in the configuration.
    """

    path: str
    arguments: dict[str, Any]
    is_partial: bool = False
    kind: Kind | None = Field(None, repr=False)
    where: str = Field("", repr=False)

    @model_validator(mode="before")
    @classmethod
    def _of_node(cls, node: Any) -> Any:
        if not isinstance(node, Mapping) or "_target_" not in node:
            raise ValueError(f"={node!r} must name what is to be built: ._target_=package.Name")
        check_names(node)
        kept = {str(k): v for k, v in node.items() if k not in ("_target_", "_partial_")}
        partial = node.get("_partial_", False)
        return {"path": str(node["_target_"]), "arguments": kept, "is_partial": partial}

    def get(self, key: str, default: Any = None) -> Any:
        """Return an argument."""
        return self.arguments.get(key, default)

    @property
    def class_name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    def node(self) -> dict[str, Any]:
        """Return it as the configuration writes it."""
        partial = {"_partial_": True} if self.is_partial else {}
        return {"_target_": self.path, **partial, **self.arguments}

    def read(self, where: str = "") -> Node:
        """Return the call that it describes; imports what it names, and calls nothing.

        Raises:
            TargetError: with the place, what it got and what it wants.
        """
        assert self.kind is not None  # of every field of the settings
        return read_node(self.node(), self.kind, where or self.where)

    def build(self, **more: Any) -> Any:
        """Build it, with further arguments; a partial one is returned as `functools.partial`.

        Raises:
            TargetError: for what may not be built, or an argument that the run gives.
            Exception: whatever the constructor raises.
        """
        for key in more.keys() & self.arguments.keys():
            raise TargetError(f"{self.where}.{key} is given by the run: leave it out")
        return self.read().make(**more)


def builds(name: str, *given_later: str) -> AfterValidator:
    """Say what a target of the settings builds: a class, a protocol or an alias, by its name."""

    def told(target: Target, info: ValidationInfo) -> Target:
        update = {"kind": Kind(name, given_later), "where": info.field_name or ""}
        return target.model_copy(update=update)

    return AfterValidator(told)


Annotator = Annotated[Target, builds("rlhf_lightning.preferences.annotators.Annotator")]
Gold = Annotated[Target, builds("rlhf_lightning.preferences.annotators.Gold")]
Benchmark = Annotated[Target, builds("rlhf_lightning.evaluation.lm_eval_tasks.Benchmark")]
Safety = Annotated[Target, builds("rlhf_lightning.evaluation.safety.SafetyCheck")]
Scorer = Annotated[Target, builds("rlhf_lightning.rollout.scorers.base.Scorer")]
Score = Annotated[Target, builds("rlhf_lightning.preferences.pairing.ScoreFunction")]
Source = Annotated[Target, builds("rlhf_lightning.data.sources.base.RecordSource")]
Tokenizer = Annotated[Target, builds("transformers.PreTrainedTokenizerBase")]
Callback = Annotated[Target, builds("lightning.pytorch.Callback")]
Rollout = Annotated[
    Target,
    builds("rlhf_lightning.rollout.generators.base.Generator", "stop_ids", "pad_token_id"),
]


class PathsSettings(Settings):
    """Folders of runs and models, and whether a run publishes its model."""

    model_config = ConfigDict(extra="allow")

    outputs: Name = "outputs"
    artifacts: Name = "artifacts"
    publish: bool = True
    apart: FolderName | None = None


class ArtifactsSettings(Settings):
    """Folders or hub names of models."""

    base: str | None = None
    sft: str | None = None
    reward: str | None = None
    ppo: str | None = None
    dpo: str | None = None
    teacher: str | None = None
    publish: str | None = None

    def of(self, kind: str) -> str | None:
        """Return the model of a kind."""
        return cast("str | None", getattr(self, kind))

    def models(self) -> dict[str, str]:
        """Return all models that are named, by kind."""
        return {kind: found for kind in MODELS if (found := self.of(kind)) is not None}


MODELS = tuple(key for key in ArtifactsSettings.model_fields if key != "publish")


class PrecisionSettings(Settings):
    """The precision of models that answer and score, and are not trained."""

    precision: Precision = "32-true"
    matmul_precision: MatmulPrecision = "high"


class TrainerSettings(PrecisionSettings):
    """Arguments of `lightning.Trainer`."""

    accelerator: Literal["auto", "cpu", "gpu", "cuda", "mps"] = "auto"
    devices: Count
    num_nodes: Count = 1
    validations: CountOrZero = 4
    limit_train_batches: Count | None = None
    limit_val_batches: Count | None = None

    @property
    def world_size(self) -> int:
        """Processes of the run."""
        return self.devices * self.num_nodes


class StrategySettings(Settings):
    """Placement of models on devices, and the patience of ranks with each other."""

    name: Literal["auto", "ddp", "fsdp"] = "auto"
    compute_dtype: Literal["bfloat16", "float32"] | None = None
    timeout_minutes: Annotated[float, Field(gt=0, le=MOST_MINUTES)] = 30.0
    checkpoint: Literal["full", "sharded"] = "sharded"
    shard_over: Count | None = None
    cpu_offload: bool = False
    gradient_sync: Literal["micro_batch", "step"] | None = None


class LoggerSettings(Settings):
    """The destination of metrics in addition to `metrics.csv`."""

    kind: Literal["none", "csv", "tensorboard", "wandb"] = "none"
    project: str | None = None
    group: str | None = None
    tags: list[str] | None = None
    mode: Literal["auto", "online", "offline", "disabled"] = "auto"


class CheckpointSettings(Settings):
    """The times of checkpoints, and those that are kept."""

    every_n_iterations: Count | None = 10
    every_minutes: Annotated[float, Field(gt=0, le=MOST_MINUTES)] | None = None
    keep_last: Count = 2
    monitor: str | None = None
    mode: Literal["min", "max"] | None = None


class SamplesSettings(Settings):
    """The log of samples."""

    every_n_iterations: Count = 10
    num_samples: Count = 8


class EarlyStoppingSettings(Settings):
    """Early end of SFT or reward training; further keys are Lightning's."""

    model_config = ConfigDict(extra="allow")

    patience: Count = 3
    min_delta: Annotated[float, Field(ge=0)] = 0.0


class CallbacksSettings(Settings):
    """Callbacks of a run: ours, and the user's under `extra`."""

    checkpoint: CheckpointSettings
    samples: SamplesSettings
    early_stopping: EarlyStoppingSettings | None = None
    extra: dict[str, Callback] = {}


class DoctorSettings(Settings):
    """Detectors of a PPO run, and what they may change."""

    thresholds: hparams_of(DoctorThresholds, "doctor.thresholds")  # type: ignore[valid-type]
    actions: hparams_of(ActionSettings, "doctor.actions") | None = None  # type: ignore[valid-type]
    preflight: bool = False
    second_scorer: Scorer | None = None
    second_every_n_iterations: Count = 1
    harmful_domains: list[str] | None = None
    refusals: list[str] | None = None


class EvaluationSettings(Settings):
    """The comparison at the end, and during PPO."""

    num_prompts: Count = 512
    answers_per_prompt: Count = 1
    batch_size: Count = 128
    micro_batch_size: Count | None = None
    temperature: Temperature = 1.0
    max_new_tokens: Count
    skip_special_tokens: bool = False
    gold: Gold | None = None
    num_samples: CountOrZero = 24
    every_n_iterations: Count | None = None
    during_training: Count = 128

    @property
    def decoding(self) -> dict[str, Any]:
        """Arguments of `Sampling` for the responses."""
        names = ("temperature", "max_new_tokens", "micro_batch_size", "skip_special_tokens")
        return {name: getattr(self, name) for name in names}


class ModelSettings(Settings):
    """A model: its source, tokenizer, shape, and what depends on its size."""

    model_config = ConfigDict(extra="allow")

    name: str = ""
    source: str | None = None
    license: str | None = None
    num_parameters: int | None = None
    tokenizer: Tokenizer | None = None
    from_scratch: dict[str, Any] | None = None
    chat_template: str | None = None
    chat_template_arguments: dict[str, Any] | None = None
    revision: str | None = None
    trust_remote_code: RunsCode = False
    base: str | None = None
    activation_checkpointing: bool = False
    cpu_kernels: bool = True
    cpu_threads: Count | None = None
    kernels: Literal["auto", "torch"] = "auto"
    micro_batches: Literal["auto", "buckets", "tokens"] = "auto"
    attention_backends: Literal["auto", "torch"] = "auto"
    shape: dict[str, Any] | None = None

    @property
    def template(self) -> dict[str, Any]:
        """The chat template and its arguments, as `load_tokenizer` takes them."""
        names = ("chat_template", "chat_template_arguments")
        return {name: getattr(self, name) for name in names}

    @property
    def origin(self) -> dict[str, Any]:
        """The version of a hub model, and whether its code runs."""
        return {"revision": self.revision, "trust_remote_code": self.trust_remote_code}


# Fields that only a training reads.
HOW_A_MODEL_IS_MADE = (
    *("name", "source", "license", "num_parameters", "tokenizer", "from_scratch", "base", "shape"),
    "activation_checkpointing",
)


class LengthsSettings(Settings):
    """The lengths that suit a dataset, in tokens."""

    max_length: Count | None = None
    max_prompt_length: Count | None = None
    max_new_tokens: Count | None = None


class DatasetSettings(Settings):
    """A dataset: its name, its source, and further parameters."""

    model_config = ConfigDict(extra="allow")

    name: FolderName
    source: Source
    lengths: LengthsSettings | None = None
    gold: Gold | None = None
    hub_name: str | None = None


class DataSettings(Target):
    """A data module."""

    @property
    def batch_size(self) -> int:
        """Rows of an iteration, on all devices."""
        return int(self.arguments["batch_size"])

    @property
    def num_generations(self) -> int:
        """Responses to each prompt of an iteration."""
        return int(self.arguments.get("num_generations", 1))

    @property
    def num_rows(self) -> int:
        """Sequences or responses of an iteration, on all devices."""
        return self.batch_size * self.num_generations

    @property
    def source(self) -> Target:
        """The source of its records."""
        found = Target.model_validate(self.arguments["source"])
        kind = Kind("rlhf_lightning.data.sources.base.RecordSource")
        return found.model_copy(update={"kind": kind, "where": f"{self.where}.source"})

    @property
    def prompt_length_key(self) -> str:
        """The key that bounds its prompts."""
        return "max_prompt_length" if "max_prompt_length" in self.arguments else "max_length"


class ExportedFolderSettings(Settings):
    """The folder that a run exports."""

    dtype: Dtype = "auto"


class PlanGroup(Settings):
    """The device of a memory plan, and the form of its output.

    Args:
        device_memory: memory of one device, such as 80GiB; None asks this machine.
        device: cpu or cuda; auto takes that of the trainer.
        format: table, or json for programs.
    """

    device_memory: Annotated[ByteSize, BeforeValidator(str), Field(gt=0)] | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    format: Literal["table", "json"] = "table"


def _checked_gates(gates: Any) -> Any:
    if not isinstance(gates, Mapping | None):
        raise ValueError(f"={gates!r} must be a group of gates by their names")
    for name, gate in (gates or {}).items():
        if problem := gate_problem(gate):
            raise ValueError(f".{name}={gate} {problem}")
    return gates or {}


Gates = Annotated[dict[str, Any], BeforeValidator(_checked_gates)]
