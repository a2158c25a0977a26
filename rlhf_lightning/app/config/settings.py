"""Typed, frozen settings of a command, and those of training."""

from __future__ import annotations

import copy
import os
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self, cast

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import AfterValidator, Field, PrivateAttr, ValidationError, model_validator

from rlhf_lightning.app.config.compose import (
    LENGTHS,
    ConfigError,
    at,
    describe_interpolation,
    texts,
)
from rlhf_lightning.app.config.groups import (
    HOW_A_MODEL_IS_MADE,
    ArtifactsSettings,
    CallbacksSettings,
    DatasetSettings,
    DataSettings,
    DoctorSettings,
    EvaluationSettings,
    ExportedFolderSettings,
    FolderName,
    Gates,
    LoggerSettings,
    ModelSettings,
    PathsSettings,
    PlanGroup,
    Resume,
    Rollout,
    Safety,
    Scorer,
    Settings,
    StrategySettings,
    Target,
    TrainerSettings,
    builds,
    hparams_of,
)
from rlhf_lightning.app.config.targets import TargetError, resolve
from rlhf_lightning.arguments import Checked, Seed
from rlhf_lightning.hparams import LoraHparams, OnPolicyHparams, Precision
from rlhf_lightning.misfit import misfit
from rlhf_lightning.runs.public_config import is_secret
from rlhf_lightning.runs.resume import config_hash

if TYPE_CHECKING:
    from rlhf_lightning.modules.base import RLHFModule

# `${oc.env:NAME}` or `${oc.env:NAME,DEFAULT}`, whose default may hold other interpolations.
_FROM_ENVIRONMENT = re.compile(r"\$\{oc\.env:\s*(\w+)\s*(?:,\s*((?:[^{}]|\{[^{}]*\})*))?\}")

# Arguments of a module that the run gives, and where they are set.
GIVEN = {"optimizer": "optimizer", "schedule": "scheduler", "generator": "rollout"}
GIVEN |= {"reward": "scorer", "scorer": "scorer"}

# Variables that differ between jobs, nodes or ranks of one run: their values are not its settings.
OF_A_JOB = re.compile(
    r"(SLURM|SUBMITIT|PBS|LSB|OMPI|PMI)_\w+|TMPDIR|TMP|TEMP|HOSTNAME|(LOCAL_|NODE_|GROUP_)?RANK"
)


def with_environment(node: Any, key: str = "") -> Any:
    """Return a configuration with environment variables replaced by their values.

    Secrets stay as they are written, and so do variables of a job, node or rank.
    """
    if isinstance(node, Mapping):
        return {name: with_environment(value, str(name)) for name, value in node.items()}
    if isinstance(node, list):
        return [with_environment(value, key) for value in node]
    if not isinstance(node, str):
        return node

    def value_of(found: re.Match[str]) -> str:
        name, default = found.groups()
        if OF_A_JOB.fullmatch(name):
            return found[0]
        value = os.environ.get(name)
        if value is None:
            value = found[0] if default is None else with_environment(default, key).strip("'\"")
        return found[0] if is_secret(name) or is_secret(key) else str(value)

    return _FROM_ENVIRONMENT.sub(value_of, node)


class CommandSettings(Settings):
    """Settings of a whole command, and the configuration that they were read from.

    Attributes:
        written: that configuration as plain dicts and lists, with its interpolations.
        resolved: the same without interpolations.
    """

    # Groups whose keys a file of conf/ may invent, as long as something refers to them.
    open_groups: ClassVar[tuple[str, ...]] = ("paths", "model", "dataset")

    @property
    def by_reference(self) -> frozenset[str]:
        """Keys of these groups, dotted, that are read only where other settings refer to them."""
        return frozenset()

    @property
    def unread(self) -> frozenset[str]:
        """Keys of other groups that nothing reads, dotted, such as those of what is not done."""
        return frozenset()

    _written: dict[str, Any] = PrivateAttr()
    _resolved: dict[str, Any] = PrivateAttr()
    _digest: str = PrivateAttr()

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
    def of(cls, written: Mapping[str, Any]) -> Self:
        """Return the settings that a configuration says: plain dicts and lists.

        Raises:
            ConfigError: for a key or value that is wrong, an interpolation that leads nowhere, and
                what is not set.
        """
        try:
            resolved: Any = OmegaConf.to_container(OmegaConf.create(dict(written)), resolve=True)
        except OmegaConfBaseException as error:
            raise ConfigError(describe_interpolation(error)) from error
        for key, text in texts(resolved):
            # A model that is made from scratch waits for its tokenizer.
            if text == "???" and not key.startswith(("model.", "module.from_scratch")):
                raise ConfigError(f"{key} is not set: add {key}=...")
        # `debug` and `launcher` are groups that only change others.
        kept = {k: v for k, v in resolved.items() if k not in ("debug", "launcher")}
        try:
            found = cls.model_validate(kept)
        except ValidationError as error:
            text = str(misfit("", kept, cls, error))
            raise ConfigError(_with_reference(written, text)) from None
        found._written, found._resolved = dict(written), resolved
        found._digest = config_hash(with_environment(found._written))
        return found

    def updated(self, changes: Mapping[str, Any]) -> Self:
        """Return the settings with other values, also wherever other settings refer to them.

        Args:
            changes: new values by dotted key; the hash stays.
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
        return at(self._resolved, key)

    def check_targets(self) -> None:
        """Look up everything that is built by name, and hold its arguments against it.

        Imports what is named, and torch with it.

        Raises:
            TargetError: with the place, what it got and what it wants.
        """
        for where, target in self.targets().items():
            try:
                target.read(where)
            except TargetError as error:
                raise TargetError(_with_reference(self._written, str(error))) from error

    def targets(self) -> dict[str, Target]:
        """Return everything that is built by name, by its place."""
        return dict(_targets(self, ""))


def _with_reference(written: Mapping[str, Any], text: str) -> str:
    """Return a message about `KEY=VALUE`, with the keys that the value comes from, if it does."""
    node = at(written, text.partition("=")[0])
    return f"{text} ({node})" if isinstance(node, str) and "${" in node else text


def _targets(node: Any, where: str) -> Iterator[tuple[str, Target]]:
    if isinstance(node, Target):
        yield where, node
        return
    node = node.__dict__ if isinstance(node, Settings) else node
    for key, value in node.items() if isinstance(node, Mapping) else ():
        yield from _targets(value, f"{where}.{key}" if where else str(key))


class RunSettings(CommandSettings):
    """Settings of a command that makes a run folder."""

    paths: PathsSettings
    stage: str
    name: FolderName
    seed: Seed = 1

    @property
    def only_runs(self) -> bool:
        """True if it shows that it runs and nothing is judged, as with `debug=fast`."""
        return self.paths.apart is not None


def _check_not_logged(logger: LoggerSettings) -> LoggerSettings:
    if logger.kind not in ("none", "csv"):
        raise ValueError(f"={logger.kind} shows training, and this trains nothing: use logger=none")
    return logger


class FiguresSettings(RunSettings):
    """Settings of a command that trains nothing but models of the built-in world that it needs."""

    model: ModelSettings
    logger: Annotated[LoggerSettings, AfterValidator(_check_not_logged)] = LoggerSettings()

    @property
    def by_reference(self) -> frozenset[str]:
        """Keys that only a training reads: the lengths of its rows, and how its model is made."""
        made = () if self.only_runs else HOW_A_MODEL_IS_MADE
        return frozenset({"dataset.lengths", *(f"model.{name}" for name in made)})


class TrainSettings(RunSettings):
    """Settings of `rlhf-train`: one stage."""

    # What others refer to stands first: an error names the place where it is written.
    model: ModelSettings
    dataset: DatasetSettings
    resume: Resume = "never"
    ckpt_path: str | None = None
    artifacts: ArtifactsSettings
    export: ExportedFolderSettings = ExportedFolderSettings()
    trainer: TrainerSettings
    strategy: StrategySettings
    optimizer: Annotated[Target, builds("torch.optim.Optimizer", "params", "lr")]
    scheduler: Annotated[Target, builds("rlhf_lightning.modules.optimization.Schedule")]
    logger: LoggerSettings
    callbacks: CallbacksSettings
    doctor: DoctorSettings | None = None
    evaluation: EvaluationSettings
    safety: Safety | None = None
    gates: Gates = Field(default_factory=dict)
    module: Annotated[Target, builds("rlhf_lightning.modules.base.RLHFModule")]
    lora: hparams_of(LoraHparams, "lora") | None = None  # type: ignore[valid-type]
    data: Annotated[DataSettings, builds("lightning.LightningDataModule")]
    rollout: Rollout
    scorer: Scorer | None = None

    _hparams: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="after")
    def _read_hparams(self) -> Self:
        for key, node in self.module.arguments.items():
            name = node.get("_target_") if isinstance(node, Mapping) else None
            is_theirs = str(name).endswith("Hparams") or key in (self.stage, "sampling")
            if isinstance(name, str) and is_theirs:
                cls = resolve(name, f"module.{key}")
                if issubclass(cls, Checked):
                    self._hparams[key] = cls.of_node(node, f"module.{key}")
            elif key in GIVEN:
                place = GIVEN[key]
                raise ConfigError(f"module.{key} is given by the run: set {place} in its place")
        if self.stage not in self._hparams:
            known = " or ".join(key for key in self._hparams if key != "sampling")
            raise ValueError(
                f"stage={self.stage} needs the settings module.{self.stage}, and module has those "
                f"of stage={known or 'none'}: use one of them, or module={self.stage}"
            )
        return self

    @model_validator(mode="after")
    def _has_one_length(self) -> Self:
        lengths = {key: self.data.get(key.removeprefix("data.")) for key in LENGTHS}
        given = [f"{key}={value}" for key, value in lengths.items() if value is not None]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)}: give one, and null for the other")
        if not given:
            raise ValueError(f"{' and '.join(LENGTHS)} are both null: give one")
        return self

    @cached_property
    def spec(self) -> type[RLHFModule]:
        """The class that is trained, which says what differs between stages; imports torch."""
        found = resolve(self.module.path, "module")
        return cast("type[RLHFModule]", getattr(found, "__self__", found))  # of a class method

    @property
    def by_reference(self) -> frozenset[str]:
        """Lengths, which other settings refer to, and a base in place of a missing policy."""
        return frozenset({"dataset.lengths"} | (set() if self.only_runs else {"model.base"}))

    @property
    def unread(self) -> frozenset[str]:
        """Keys that this stage does not read."""
        spec = self.spec
        own = {
            "doctor": spec.rolls_out,
            "scorer": spec.is_scored,
            "safety": spec.trains_policy,
            "artifacts.ppo": spec.rolls_out,
            "evaluation.every_n_iterations": spec.rolls_out,
        }
        return frozenset(key for key, reads in own.items() if not reads)

    @property
    def title(self) -> str:
        """The training in words, such as PPO, or KTO where DPO's loss is that one."""
        return self.spec.title_of(self.hparams)

    @property
    def hparams(self) -> Any:
        """The hyper-parameters of the stage, such as those of `module.ppo`."""
        return self._hparams[self.stage]

    @property
    def all_hparams(self) -> dict[str, Any]:
        """All hyper-parameters of the module, by their keys below `module`."""
        return dict(self._hparams)

    @property
    def compute_precision(self) -> Precision:
        """The precision of forwards: FSDP2 computes in another dtype under `32-true`."""
        sharded = self.strategy.name == "fsdp" and self.strategy.compute_dtype == "bfloat16"
        return "bf16-mixed" if sharded else self.trainer.precision

    @property
    def start(self) -> str | None:
        """Folder or hub name of the model that the stage starts from; None: random weights."""
        return self.artifacts.of(self.spec.starts_from)

    @property
    def publishes(self) -> bool:
        """True if the model is also put where later stages look for it."""
        return self.artifacts.publish is not None and self.paths.publish

    @property
    def length_key(self) -> str:
        """The key that says how long it trains."""
        return next(key for key in LENGTHS if self.select(key) is not None)

    @property
    def passes(self) -> tuple[int, int]:
        """Epochs over the rows of an iteration, and minibatches of each."""
        hparams = self.hparams
        of_rollouts = isinstance(hparams, OnPolicyHparams)
        return (hparams.num_passes, hparams.num_minibatches) if of_rollouts else (1, 1)

    @property
    def sequences_per_row(self) -> int:
        """Sequences that go through a model for each row of the data: two of a pair."""
        return 2 if self.data_kind == "preferences" else 1

    @property
    def data_kind(self) -> str:
        """The kind of records that it is trained on."""
        return str(self.data.get("kind") or self.spec.data.kinds[0])

    @property
    def batch_unit(self) -> int:
        """The unit of `data.batch_size`: devices times minibatches."""
        return self.trainer.world_size * self.passes[1]


class PlanSettings(TrainSettings):
    """Settings of `rlhf-plan`: those of a training run, and of the plan."""

    plan: PlanGroup = PlanGroup()
