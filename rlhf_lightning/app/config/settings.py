"""Typed, frozen settings of the commands: types, ranges and choices stand in the fields.

Must not import torch: a config error answers at once.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from omegaconf import OmegaConf
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PrivateAttr,
    field_validator,
    model_validator,
)

from rlhf_lightning.app.config.groups import (
    ArtifactsSettings,
    CallbacksSettings,
    DatasetSettings,
    DataSettings,
    DoctorSettings,
    Dtype,
    EvaluationSettings,
    ExportedFolderSettings,
    FilePath,
    FolderName,
    Gates,
    LoggerSettings,
    ModelSettings,
    OptionalPath,
    PathsSettings,
    PlanGroup,
    Positive,
    Precision,
    Resume,
    Seed,
    Settings,
    Split,
    StrategySettings,
    Target,
    TrainerSettings,
    build_hparams,
    hparams_of,
)
from rlhf_lightning.app.config.targets import (
    check_targets,
    trusted_targets,
)
from rlhf_lightning.app.stages.spec import StageSpec, find_stage
from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.preferences.annotation.assignment import Sharing
from rlhf_lightning.preferences.annotation.server.settings import PageSettings
from rlhf_lightning.runs.resume import config_hash


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


def _hosts_joined(page: Any) -> Any:
    if not isinstance(page, Mapping) or not isinstance(page.get("hosts"), list):
        return page
    return {**page, "hosts": ",".join(map(str, page["hosts"]))}


class CommandSettings(Settings):
    """Settings of a whole command, and the configuration that they were read from.

    Attributes:
        written: that configuration as plain dicts and lists, with its interpolations.
        resolved: the same without interpolations.
    """

    # Groups whose keys a file of conf/ may invent, as long as something refers to them.
    open_groups: ClassVar[tuple[str, ...]] = ("paths", "model", "dataset")

    _written: dict[str, Any] = PrivateAttr()
    _resolved: dict[str, Any] = PrivateAttr()
    _digest: str = PrivateAttr()

    def model_post_init(self, context: Any) -> None:
        """Keep the configuration that they were read from, if they were."""
        if context is not None:
            self._written = context["written"]
            self._resolved = context["resolved"]
            self._digest = config_hash(context.get("hashed", context["written"]))

    @property
    def written(self) -> dict[str, Any]:
        """The configuration with its interpolations."""
        return self._written

    @property
    def resolved(self) -> dict[str, Any]:
        """The configuration without interpolations."""
        return self._resolved

    @property
    def config_hash(self) -> str:
        """Equal for configurations that do the same thing, wherever they are kept."""
        return self._digest

    @classmethod
    def of(cls, written: Mapping[str, Any], hashed: Mapping[str, Any] | None = None) -> Self:
        """Return the settings that a configuration says.

        Args:
            written: plain dicts and lists, with interpolations.
            hashed: the configuration that `config_hash` is of; None for this one.

        Raises:
            pydantic.ValidationError: for a key or value that is wrong.
            omegaconf.errors.OmegaConfBaseException: for an interpolation that leads nowhere.
        """
        resolved: Any = OmegaConf.to_container(OmegaConf.create(dict(written)), resolve=True)
        context = {"written": dict(written), "resolved": resolved, "hashed": hashed or written}
        # `debug` and `launcher` are groups that only change others.
        kept = {k: v for k, v in resolved.items() if k not in ("debug", "launcher")}
        return cls.model_validate(kept, context=context)

    def updated(self, changes: Mapping[str, Any]) -> Self:
        """Return the settings with other values, and all that refers to them.

        Args:
            changes: by dotted key; the hash stays.
        """
        cfg = OmegaConf.create(copy.deepcopy(self._written))
        for key, value in changes.items():
            OmegaConf.update(cfg, key, value, force_add=True)
        written: Any = OmegaConf.to_container(cfg, resolve=False)
        new = self.of(written)
        new._digest = self._digest
        return new

    def select(self, key: str) -> Any:
        """Return the value at a dotted key of the configuration; None where nothing stands."""
        node: Any = self._resolved
        for part in key.split("."):
            node = node.get(part) if isinstance(node, Mapping) else None
        return node

    def check_targets(self) -> None:
        """Look up everything that is built by name, and hold its arguments against it.

        Imports what is named, and torch with it.

        Raises:
            TargetError: with the place, what it got and what it wants.
        """
        # Nodes that others refer to come first: an error names the place where it is written.
        first = {k: self._resolved[k] for k in ("dataset", "model", "lora") if k in self._resolved}
        check_targets(first | self._resolved, trusted_targets())


class RunSettings(CommandSettings):
    """Settings of a command that makes a run folder."""

    paths: PathsSettings
    stage: str
    name: FolderName
    seed: Seed = 1


class TrainSettings(RunSettings):
    """Settings of `rlhf-train`: one stage."""

    resume: Resume = "never"
    ckpt_path: str | None = None
    artifacts: ArtifactsSettings
    export: ExportedFolderSettings = ExportedFolderSettings()
    trainer: TrainerSettings
    strategy: StrategySettings
    optimizer: Target
    scheduler: Target
    logger: LoggerSettings
    callbacks: CallbacksSettings
    doctor: DoctorSettings | None = None
    evaluation: EvaluationSettings
    safety: Target | None = None
    gates: Gates = Field(default_factory=dict)
    module: Target
    model: ModelSettings
    lora: hparams_of(LoraHparams) | None = None  # type: ignore[valid-type]
    data: DataSettings
    dataset: DatasetSettings
    rollout: Target
    scorer: Target | None = None

    _hparams: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _build_hparams(self) -> Self:
        for key, cls in self.spec.hparams.items():
            node = self.module.get(key)
            if not isinstance(node, Mapping) or "_target_" not in node:
                raise ValueError(
                    f"stage={self.stage} needs the settings module.{key}, and module is "
                    f"{self.module.path}: use module={self.spec.settings}, or the experiment of "
                    "another stage"
                )
            try:
                self._hparams[key] = build_hparams(cls, node)
            except ValueError as error:
                text = str(error).replace(f"{cls.__name__}.", f"module.{key}.")
                raise ValueError(text.replace(f"{cls.__name__}=", f"module.{key}=")) from error
        return self

    @property
    def spec(self) -> StageSpec:
        """The stage."""
        return find_stage(self.stage)

    @property
    def hparams(self) -> Any:
        """The hyper-parameters of the stage: of `module.sft`, `.reward` or `.ppo`."""
        return self._hparams[self.spec.settings]

    @property
    def all_hparams(self) -> dict[str, Any]:
        """All hyper-parameters of the module, by their keys below `module`."""
        return dict(self._hparams)

    @property
    def start(self) -> str | None:
        """Folder or hub name of the model that the stage starts from; None: random weights."""
        return self.artifacts.of(self.spec.starts_from)

    @property
    def publishes(self) -> bool:
        """True if the model is also put where later stages look for it."""
        return self.artifacts.publish is not None and self.paths.publish

    @property
    def passes(self) -> tuple[int, int]:
        """Epochs over the rows of an iteration, and minibatches of each."""
        minibatches = self.spec.minibatches
        if minibatches is None:
            return 1, 1
        hparams = self.hparams
        return int(getattr(hparams, minibatches.epochs)), int(getattr(hparams, minibatches.count))

    @property
    def batch_unit(self) -> int:
        """The unit of `data.batch_size`: devices times minibatches."""
        return self.trainer.world_size * self.passes[1]


class PromptsSettings(Settings):
    """Prompts of an evaluation."""

    split: Split = "validation"
    max_length: Positive = 64


class PeopleSettings(Settings):
    """Pairs that people judge in an evaluation."""

    num_pairs: Positive | None = 100
    run: str | None = None
    labels: str | None = None


class BestOfSettings(Settings):
    """Best-of-n of the policy by the scorer: the n that are measured, and the answers sampled."""

    n: list[Positive] = Field(default_factory=list)
    pool: Positive = 64


class PrecisionSettings(Settings):
    """Of both sides and the scorer of an evaluation."""

    precision: Precision = "32-true"


class EvaluateSettings(RunSettings):
    """Settings of `rlhf-evaluate`: a policy against a baseline."""

    model: ModelSettings
    dataset: DatasetSettings
    rollout: Target
    scorer: Target | None = None
    judge: Target | None = None
    safety: Target | None = None
    evaluation: EvaluationSettings
    gates: Gates = Field(default_factory=dict)
    run: str | None = None
    policy: str
    baseline: str
    artifacts: ArtifactsSettings
    prompts: PromptsSettings
    references: bool = True
    human: Literal["none", "export", "import"] = "none"
    people: PeopleSettings
    best_of: BestOfSettings = BestOfSettings()
    trainer: PrecisionSettings

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.human == "import" and self.people.run is None:
            raise ValueError("human=import needs people.run=FOLDER of the evaluation that exported")
        if self.evaluation.every_n_iterations is not None:
            raise ValueError("evaluation.every_n_iterations is for training: leave it out")
        self._check_best_of()
        return self

    def _check_best_of(self) -> None:
        counts, pool = self.best_of.n, self.best_of.pool
        if not counts:
            return
        if max(counts) > pool:
            raise ValueError(
                f"best_of.n={counts} must be at most best_of.pool={pool}, the answers that are "
                f"sampled to a prompt: use best_of.pool={max(counts)} or more"
            )
        if self.scorer is None:
            raise ValueError("best_of.n needs a scorer that chooses the answer: scorer=NAME")
        if self.evaluation.temperature == 0:
            raise ValueError(
                "best_of.n needs evaluation.temperature above 0: at 0 all answers are the same one"
            )


class CandidatesSettings(Settings):
    """Answers that are sampled for labelling."""

    policies: dict[str, str | None]
    decoding: dict[str, Any]
    num_samples: Positive = 1
    num_prompts: Positive | None = None
    split: Split = "train"
    max_new_tokens: Positive = 40
    max_prompt_length: Positive = 64
    batch_size: Positive = 64


class LabSettings(Settings):
    """Pairing and aggregation of answers."""

    pairing: str = "random"
    pairs_per_prompt: int = 2
    num_pairs: int | None = 5000
    keep_unfinished: bool = False
    aggregation: str = "people_first"
    margin_scale: float = 1.0
    near_duplicate: float = 0.7
    near_duplicate_n: int = 3


class AdversarialSettings(Settings):
    """Pairs of an earlier collection's overrated answers and better ones."""

    run: str | None = None
    source: str | None = None
    num_pairs: Positive = 1000
    max_length: Positive = 1024


class AnnotatorSettings(Settings):
    """Annotators: automatic ones, and people."""

    automatic: dict[str, Target | None] | None = None
    people: Target


class CollectSettings(RunSettings):
    """Settings of `rlhf-collect`: from prompts to preference records, or to demonstrations."""

    model: ModelSettings
    dataset: DatasetSettings
    annotator: AnnotatorSettings
    judge: Target | None = None
    budget: Target
    resume: Resume = "never"
    run: str | None = None
    records: Literal["preferences", "demonstrations"] = "preferences"
    artifacts: ArtifactsSettings
    candidates: CandidatesSettings
    lab: LabSettings
    adversarial: AdversarialSettings
    score: Target | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.records == "demonstrations":
            if self.artifacts.reward is None:
                raise ValueError(
                    "records=demonstrations needs the reward model that chooses the best answer: "
                    "artifacts.reward=FOLDER"
                )
            if self.adversarial.run is not None:
                raise ValueError(
                    "adversarial.run makes pairs: use records=preferences, or leave it out"
                )
        return self


class PipelineSettings(RunSettings):
    """Settings of `rlhf-pipeline`: all stages in a row."""

    resume: Resume = "auto"
    rounds: Positive = 1
    experiments: dict[str, str | None]
    collect: bool = False
    adversarial: bool = True
    evaluate: bool = True
    evaluation_gates: str | None = None
    accept: list[str] = Field(default_factory=list)
    overrides: dict[str, Any]

    @property
    def config_hash(self) -> str:
        """Equal for pipelines that go on with each other: of name, seed and experiments."""
        return config_hash(
            {"name": self.name, "seed": self.seed, "experiments": dict(self.experiments)}
        )


def _check_not_empty(values: list[Any]) -> list[Any]:
    if not values:
        raise ValueError("=[] is empty: give at least one value")
    return values


Filled = AfterValidator(_check_not_empty)


class RowSettings(Settings):
    """A row of a study: the command line of its runs, but for the seed.

    Args:
        command: what is run.
        experiment: of `train`.
        overrides: words of the command line.
        vary: values of each key; every combination of them is a setting of its own.
    """

    command: Literal["train", "evaluate"] = "train"
    experiment: str | None = None
    overrides: list[str] = Field(default_factory=list)
    vary: dict[str, Annotated[list[Any], Filled]] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if (self.command == "train") != (self.experiment is not None):
            raise ValueError(
                f".experiment={self.experiment} and command={self.command}: a row of train names an"
                " experiment, a row of evaluate none"
            )
        return self


class WordsSettings(Settings):
    """Words of the command lines of all runs, by their command."""

    train: list[str] = Field(default_factory=list)
    evaluate: list[str] = Field(default_factory=list)


class StudySettings(RunSettings):
    """Settings of `rlhf-study`: a matrix of runs and what is measured on them."""

    jobs: Positive = 1
    about: str = ""
    runs: dict[FolderName, RowSettings]
    seeds: Annotated[list[Seed], Filled]
    shared: WordsSettings = WordsSettings()
    overrides: WordsSettings = WordsSettings()
    measure: Annotated[list[str], Filled]
    at_kl: list[Annotated[float, Field(gt=0)]] = Field(default_factory=list)

    @model_validator(mode="after")
    def _has_runs(self) -> Self:
        if not self.runs:
            raise ValueError("runs={} is no study: name one of conf/study, rlhf-study NAME")
        return self


class PlanSettings(TrainSettings):
    """Settings of `rlhf-plan`: those of a training run, and of the plan."""

    plan: PlanGroup = PlanGroup()


class ExportSettings(CommandSettings):
    """Settings of `rlhf-export`: a run's model as a Hugging Face folder.

    Args:
        run: run folder, checkpoint or exported folder.
        to: the new folder; None for `export/` (`adapter/`) in the run folder.
        adapter_only: the adapter of a LoRA run without its base.
        dtype: of the weights; None as the run's configuration says.
        push_to_hub: repository to upload to; None uploads nothing.
        public: True if a new repository is public.
    """

    run: FilePath
    to: OptionalPath = None
    adapter_only: bool = False
    dtype: Dtype | None = None
    push_to_hub: str | None = None
    public: bool = False


class ReportSettings(CommandSettings):
    """Settings of `rlhf-report`: `report.html` of runs, and the page that compares them.

    Args:
        run: folders of runs or sweeps.
        output: file of the comparison; None for `comparison.html` beside the runs.
    """

    run: Annotated[list[FilePath], Field(min_length=1), BeforeValidator(_as_list)]
    output: OptionalPath = None


class DashboardSettings(CommandSettings):
    """Settings of `rlhf-dashboard`: a project's workspace in Weights & Biases."""

    action: Literal["save", "print"] = "save"
    project: str
    entity: str | None = None
    name: str
    compare: list[str | int] = Field(default_factory=list)

    @field_validator("compare")
    @classmethod
    def _two_or_none(cls, runs: list[str | int]) -> list[str | int]:
        if len(runs) not in (0, 2):
            raise ValueError(f" has {len(runs)} runs: give two, or none")
        return runs


class AnnotateSettings(CommandSettings):
    """Settings of `rlhf-annotate`: the page where people label pairs."""

    paths: PathsSettings
    store: FilePath
    action: Literal["serve", "import", "export", "status"] = "serve"
    file: OptionalPath = None
    format: Literal["auto", "pairs", "labels", "trl", "argilla", "label_studio"] = "auto"
    known: Literal["auto", "labels", "gold", "ignore"] = "auto"
    labels: Literal["aggregated", "raw"] = "aggregated"
    method: Literal["people_first", "majority", "dawid_skene"] = "people_first"
    ratings_per_pair: Positive = 1
    sharing: hparams_of(Sharing)  # type: ignore[valid-type]
    # It knows the token.
    page: Annotated[hparams_of(PageSettings), BeforeValidator(_hosts_joined)] = Field(repr=False)  # type: ignore[valid-type]

    @model_validator(mode="after")
    def _check_file(self) -> Self:
        if self.action in ("import", "export") and self.file is None:
            raise ValueError(f"file is not set: {self.action} needs a file")
        if self.action == "export" and self.format == "auto":
            raise ValueError(
                "format=auto tells what is read: export needs one of pairs, labels, trl, argilla, "
                "label_studio"
            )
        if self.action == "export" and (self.format, self.labels) == ("labels", "aggregated"):
            raise ValueError("format=labels holds labels of single annotators: add labels=raw")
        return self

    @property
    def known_of_file(self) -> Literal["labels", "gold", "ignore"]:
        """The use of preferences in the file: pairs that are served are to be labelled."""
        if self.known != "auto":
            return self.known
        return "ignore" if self.action == "serve" else "labels"


RUNS: dict[str, type[RunSettings]] = {
    "train": TrainSettings,
    "evaluate": EvaluateSettings,
    "collect": CollectSettings,
    "pipeline": PipelineSettings,
    "study": StudySettings,
}
COMMANDS: dict[str, type[CommandSettings]] = {
    **RUNS,
    "plan": PlanSettings,
    "export": ExportSettings,
    "report": ReportSettings,
    "dashboard": DashboardSettings,
    "annotate": AnnotateSettings,
}
