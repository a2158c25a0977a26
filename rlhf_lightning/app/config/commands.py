"""Settings of every command but training, and the list of all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.groups import (
    Annotator,
    ArtifactsSettings,
    Benchmark,
    DatasetSettings,
    Dtype,
    EvaluationSettings,
    FilePath,
    Gates,
    OptionalPath,
    PathsSettings,
    PrecisionSettings,
    Resume,
    Rollout,
    Safety,
    Score,
    Scorer,
    Settings,
    Target,
    builds,
)
from rlhf_lightning.app.config.settings import (
    CommandSettings,
    FiguresSettings,
    PlanSettings,
    RunSettings,
    TrainSettings,
)
from rlhf_lightning.app.config.ways import ADDRESSED
from rlhf_lightning.arguments import Count, CountOrZero, Seed, Temperature
from rlhf_lightning.data.files import read_rows, split_files
from rlhf_lightning.data.records import LossOn, RecordKind, Split, Value
from rlhf_lightning.misfit import did_you_mean, near_path
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import is_available, no_model
from rlhf_lightning.runs.resume import config_hash
from rlhf_lightning.text.thoughts import Thoughts


def _as_list(value: Any) -> Any:
    return value if isinstance(value, list) else [value]


class PromptsSettings(Settings):
    """Prompts of an evaluation."""

    split: Split | Literal["all"] | None = None
    max_length: Count | None = 64


class PeopleSettings(Settings):
    """Pairs that people judge in an evaluation."""

    num_pairs: Count | None = 100
    run: str | None = None
    labels: str | None = None


class BestOfSettings(Settings):
    """Best-of-n of the policy by the scorer: the values of n, and the number of responses."""

    n: list[Count] = Field(default_factory=list)
    pool: Count = 64


class EvaluateSettings(FiguresSettings):
    """Settings of `rlhf-evaluate`: a policy against a baseline."""

    dataset: DatasetSettings
    rollout: Rollout
    scorer: Scorer | None = None
    judge: Annotator | None = None
    safety: Safety | None = None
    evaluation: EvaluationSettings
    gates: Gates = Field(default_factory=dict)
    run: str | None = None
    policy: str
    baseline: str
    artifacts: ArtifactsSettings
    prompts: PromptsSettings
    human: Literal["none", "export", "import"] = "none"
    people: PeopleSettings
    best_of: BestOfSettings = BestOfSettings()
    benchmark: Benchmark | None = None
    trainer: PrecisionSettings

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.human == "import" and self.people.run is None:
            raise ValueError("human=import needs people.run=FOLDER of the evaluation that exported")
        if self.evaluation.every_n_iterations is not None:
            raise ValueError("evaluation.every_n_iterations is for training: leave it out")
        if self.benchmark is not None and (self.human != "none" or self.best_of.n):
            raise ValueError("benchmark takes the place of the comparison: leave human and best_of")
        self._check_best_of()
        return self

    def check_sides(self) -> None:
        """Refuse a policy or baseline that is no model, and none that a stage makes.

        Raises:
            ConfigError: with the nearest folder.
        """
        for side in ("policy", "baseline") if self.compares_policies else ():
            value, ours = getattr(self, side), self.artifacts.models().values()
            if value not in ours and not is_available(value):
                raise ConfigError(f"{side}={no_model(value, 'give a model folder or a hub name')}")

    def _check_best_of(self) -> None:
        counts, pool = self.best_of.n, self.best_of.pool
        if not counts:
            return
        if max(counts) > pool:
            raise ValueError(f"best_of.n={counts} must be at most best_of.pool={pool}: raise that")
        call = None if self.scorer is None else self.scorer.read("scorer").call
        if call is None or not getattr(call, "is_reward", True):
            raise ValueError("best_of.n needs a scorer that chooses the response: scorer=NAME")
        if self.evaluation.temperature == 0:
            raise ValueError("best_of.n needs evaluation.temperature above 0")

    @property
    def unread(self) -> frozenset[str]:
        """Keys of what is not asked of people, and of best of n without an n."""
        people = {"none": {"people"}, "export": {"people.run", "people.labels"}}
        best_of = set() if self.best_of.n else {"best_of.pool"}
        return super().unread | people.get(self.human, set()) | best_of

    @property
    def compares_policies(self) -> bool:
        """True unless a benchmark measures a reward model: those of policies have tasks."""
        return self.benchmark is None or "tasks" in self.benchmark.arguments


class CandidatesSettings(Settings):
    """Responses that are sampled for labelling."""

    policies: dict[str, str | None]
    decoding: dict[str, Any]
    num_samples: Count = 1
    num_prompts: Count | None = None
    split: Split = "train"
    max_new_tokens: Count = 40
    max_prompt_length: Count = 64
    batch_size: Count = 64
    skip_special_tokens: bool = False


class AdversarialSettings(Settings):
    """Pairs of an earlier collection's overrated responses and better ones."""

    run: str | None = None
    source: str | None = None
    num_pairs: Count = 1000
    max_length: Count = 1024


class AnnotatorSettings(Settings):
    """Annotators: automatic ones, and people."""

    automatic: dict[str, Annotator | None] | None = None
    people: Annotated[Target, builds("rlhf_lightning.preferences.annotators.People")] | None = None


class CollectSettings(FiguresSettings):
    """Settings of `rlhf-collect`: from prompts to preference records, or to demonstrations."""

    dataset: DatasetSettings
    annotator: AnnotatorSettings
    judge: Annotator | None = None
    budget: Annotated[Target, builds("rlhf_lightning.preferences.budget.BudgetHparams")]
    trainer: PrecisionSettings
    resume: Resume = "never"
    run: str | None = None
    records: Literal["preferences", "demonstrations"] = "preferences"
    artifacts: ArtifactsSettings
    candidates: CandidatesSettings
    lab: Annotated[Target, builds("rlhf_lightning.preferences.collection.LabHparams")]
    adversarial: AdversarialSettings
    score: Score | None = None

    @model_validator(mode="after")
    def _fits(self) -> Self:
        automatic = [self.judge, *(self.annotator.automatic or {}).values()]
        if self.annotator.people is None and not any(automatic):
            raise ValueError("annotator=judge has no judge: choose judge=local or judge=openai")
        if self.records == "demonstrations":
            if self.artifacts.reward is None:
                raise ValueError("records=demonstrations needs scores of artifacts.reward=FOLDER")
            if self.adversarial.run is not None:
                raise ValueError("adversarial.run makes pairs: use records=preferences")
        return self

    @property
    def unread(self) -> frozenset[str]:
        """Keys of pairs of an earlier collection, where there is none."""
        names = set(type(self.adversarial).model_fields) - {"run"}
        without = set() if self.adversarial.run else {f"adversarial.{name}" for name in names}
        return super().unread | without


_Words = list[str] | dict[str, list[str]]


class PipelineSettings(RunSettings):
    """Settings of `rlhf-pipeline`: all stages in a row."""

    resume: Resume = "auto"
    rounds: Count = 1
    experiments: dict[Literal["base", "sft", "reward", "ppo"], str | None]
    collect: bool = False
    adversarial: bool = True
    evaluate: bool = True
    evaluation_gates: str | None = None
    accept: list[str] = Field(default_factory=list)
    overrides: dict[str, _Words]

    @model_validator(mode="after")
    def _names_stages(self) -> Self:
        for stage in ("reward", "ppo"):
            if self.rounds > 1 and self.experiments[stage] is None:
                told = f"experiments.{stage}=null leaves one out that every round trains"
                raise ValueError(f"{told}: name an experiment, or use rounds=1")
        rounds = range(1, self.rounds + 1)
        names = [*ADDRESSED, *(f"round_{k}/{stage}" for k in rounds for stage in ADDRESSED)]
        for name in (*self.accept, *self.addressed):
            if name not in names:
                raise ValueError(f"{name} is no stage{did_you_mean(name, names)}")
        return self

    @property
    def addressed(self) -> dict[str, list[str]]:
        """Words of a stage by its name, such as `ppo` or `round_2/ppo`."""
        found: dict[str, list[str]] = {}
        for place, words in self.overrides.items():
            inside = words.items() if isinstance(words, dict) else [("", words)]
            found |= {f"{place}/{stage}".rstrip("/"): own for stage, own in inside}
        return found

    @property
    def config_hash(self) -> str:
        """Hash of name, seed and experiments; equal for pipelines that continue each other."""
        return config_hash(
            {"name": self.name, "seed": self.seed, "experiments": dict(self.experiments)}
        )


class ExportSettings(CommandSettings):
    """Settings of `rlhf-export`: a run's model as a Hugging Face folder.

    Args:
        run: run folder, checkpoint or exported folder.
        to: the new folder; None for `export/` (`adapter/`) in the run folder.
        adapter_only: the adapter of a LoRA run without its base.
        dtype: dtype of the weights; None keeps that of the run's configuration.
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


def _is_policy(name: str) -> str:
    if not (RunFolder(Path(name)).config.is_file() or is_available(name)):
        raise ValueError(f"={no_model(name, 'give a run, a model folder or a hub name ORG/NAME')}")
    return name


def _is_model(name: str) -> str:
    if not is_available(name):
        fix = "give a reward model, its folder or hub name, or --reward FILE.py:NAME"
        raise ValueError(f"={no_model(name, fix)}")
    return name


class ChatSettings(CommandSettings):
    """Settings of `rlhf-chat`: talk to a policy, or to two side by side.

    Args:
        run: one or two run folders, model folders or hub names.
        temperature: sampling temperature, 0 for the likeliest token.
        seed: seeds the sampling noise.
        max_new_tokens: longest response; None for 512, or half of the model's positions.
        scorer: what scores responses; None for the reward model of the run.
        reward: folder or hub name of a reward model that scores them in place of that.
        save: file that `/save` appends preferences to.
    """

    run: Annotated[
        list[Annotated[str, AfterValidator(_is_policy)]],
        Field(min_length=1, max_length=2),
        BeforeValidator(_as_list),
    ]
    temperature: Temperature = 1.0
    seed: Seed = 1
    max_new_tokens: Count | None = None
    scorer: Scorer | None = None
    reward: Annotated[str, AfterValidator(_is_model)] | None = None
    save: FilePath = Path("preferences.jsonl")


class DashboardSettings(CommandSettings):
    """Settings of `rlhf-dashboard`: a project's workspace in Weights & Biases."""

    action: Literal["save", "print"] = "save"
    project: str | None = None
    entity: str | None = None
    name: str


class PreviewModelSettings(Settings):
    """The model whose tokenizer encodes the records."""

    source: str | None
    chat_template: str | None = None
    chat_template_arguments: dict[str, Any] = Field(default_factory=dict)
    revision: str | None = None


class PreviewSettings(CommandSettings):
    """Settings of `rlhf-data`: what is read of a file before anything is trained.

    Args:
        path: file of records, or folder of split files.
        num_rows: most records that are encoded; None for all.
        num_examples: records that are shown.
        html: page with the same, and with whole records.
    """

    path: FilePath
    model: PreviewModelSettings
    kind: RecordKind | None = None
    columns: dict[str, str | None] | None = None
    label_good: Value | None = None
    rendered: bool = False
    system_into_user: bool = False
    loss_on: LossOn = "last"
    max_length: Count | None = None
    num_rows: Count | None = 2000
    num_examples: CountOrZero = 5
    html: OptionalPath = None

    @model_validator(mode="after")
    def _begins_to_be_read(self) -> Self:
        """Find a model or a file that is missing before transformers is imported."""
        source, fix = self.model.source, "add model=FOLDER, or OWNER/NAME on the hub"
        if source is None:
            raise ValueError(f"model is not set: {fix}")
        if not (Path(source).is_dir() or is_available(source)):
            raise ValueError(f"model={no_model(source, fix)}")
        path = self.path.expanduser()
        next(read_rows(split_files(path)[0][0] if path.is_dir() else path), None)
        return self


class EnvSettings(CommandSettings):
    """Settings of `rlhf-env`: it has none."""


class PageSettings(Settings):
    """The page where people label pairs."""

    title: str = "Which answer is better?"
    instructions: str = ""
    thoughts: Thoughts = "drop"
    port: Annotated[int, Field(ge=0, le=65535)] = 8000


class AnnotateSettings(CommandSettings):
    """Settings of `rlhf-annotate`: the page where people label pairs."""

    paths: PathsSettings
    store: FilePath
    action: Literal["serve", "import", "export", "status"] = "serve"
    file: OptionalPath = None
    format: Literal["auto", "pairs", "labels", "trl", "label_studio"] = "auto"
    add: bool = False
    labels_per_pair: Count = 1
    page: PageSettings

    @model_validator(mode="after")
    def _check_file(self) -> Self:
        if self.action in ("import", "export") and self.file is None:
            raise ValueError(f"file is not set: {self.action} needs a file")
        if self.action == "export" and self.format == "auto":
            raise ValueError(
                "format=auto tells what is read: export needs pairs, labels, trl or label_studio"
            )
        if not self.store.exists() and (self.file is None or self.action == "export"):
            near = near_path(self.store, Path.is_file)
            raise ValueError(
                f"store={self.store} does not exist: add file=PAIRS for a new one{near}"
            )
        if self.action in ("serve", "import") and self.file and not self.file.exists():
            near = near_path(self.file, Path.is_file)
            raise ValueError(f"file={self.file} does not exist: check the path{near}")
        return self


COMMANDS: dict[str, type[CommandSettings]] = {
    "train": TrainSettings,
    "evaluate": EvaluateSettings,
    "collect": CollectSettings,
    "pipeline": PipelineSettings,
    "plan": PlanSettings,
    "export": ExportSettings,
    "report": ReportSettings,
    "chat": ChatSettings,
    "dashboard": DashboardSettings,
    "annotate": AnnotateSettings,
    "preview": PreviewSettings,
    "env": EnvSettings,
}
