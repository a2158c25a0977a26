"""The type of a stage: everything in which one kind of training differs from another.

Must not import torch: configurations are checked with it.
"""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from rlhf_lightning.app.config.targets import trusted_targets

if TYPE_CHECKING:
    import lightning as L
    from transformers import PreTrainedTokenizerBase

    from rlhf_lightning.data.record_datamodule import RecordDataModule
    from rlhf_lightning.evaluation.final_metrics import Findings
    from rlhf_lightning.evaluation.generate import Sampling
    from rlhf_lightning.models.learning_rates import Kind
    from rlhf_lightning.rollout.scorers.base import Scorer
    from rlhf_lightning.runs.folder import RunFolder

FOLDER = "rlhf_lightning.app.stages"
TrainSettings = Any  # that of app/config/settings.py, which looks stages up here
_NAME = re.compile(r"[a-z][a-z0-9_]*")
POLICY, SCALAR = "policy", "value"  # kinds of models that are trained


class StageError(ValueError):
    """There is no stage of this name, or it may not be imported."""


@dataclass
class TrainingComponents:
    """Everything a stage needs; the scorer only where answers are scored during training."""

    settings: TrainSettings  # with the learning rates and the vocabulary that were found
    tokenizer: PreTrainedTokenizerBase
    data: RecordDataModule
    module: Any  # the LightningModule of the stage
    trainer: L.Trainer
    sampling: Sampling
    scorer: Scorer | None
    rates: tuple[str, ...]  # the learning rates, with why, a line each


@dataclass(frozen=True)
class StageCallbacks:
    """Callbacks that a stage adds: before all others, so that rows hold what they log, or last."""

    first: Sequence[L.Callback] = ()
    last: Sequence[L.Callback] = ()


@dataclass(frozen=True)
class Minibatches:
    """Settings of a stage that makes several optimizer steps of one batch.

    Args:
        count: the key of how many minibatches a batch is divided into.
        epochs: the key of how often all of them are gone through.
    """

    count: str
    epochs: str


def _checks_nothing(settings: TrainSettings) -> None:
    del settings


def _adds_no_arguments(*_: Any) -> dict[str, Any]:
    return {}


def _adds_no_callbacks(*_: Any) -> StageCallbacks:
    return StageCallbacks()


def _starts_with_no_line(settings: TrainSettings) -> dict[str, object]:
    del settings
    return {}


def _notes_nothing(settings: TrainSettings, num_rows: int, held_out: int) -> list[str]:
    del settings, num_rows, held_out
    return []


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """One stage of training.

    Args:
        name: in summaries, manifests and messages.
        title: in a sentence.
        settings: the key below `module` at which its hyper-parameters stand.
        hparams: what `hparams/NAME` of the configuration is made of.
        rates: what each learning rate among its settings is the rate of.
        starts_from: the key below `artifacts` of the model that it starts from.
        uses: the keys below `artifacts` of all models that it loads.
        measures_with: the keys below `evaluation` that it reads, of those that are null by default.
        trains: the kinds of models that it trains.
        trained: the attribute of the module that is exported.
        models: the key below `module` of what builds that.
        factory: a `_target_` that builds it together with others, from the source that its
            argument `trained` names.
        paired: a row of its data is a pair of sequences.
        validates: `val/loss` is measured during training, and may end it.
        rolls_out: it generates and scores responses during training.
        holds_reference: the policy that it started from stays in memory.
        minibatches: where it makes several optimizer steps of one batch.
        context: settings whose sums must be within the model's context.
        shortened_by: the setting that makes its rows shorter.
        objective: the final metric that a sweep looks at: never gold, which may not choose.
        maximised: whether more of it is better.
        finish: measures the trained model.
        num_answered: how many prompts are answered when training is over.
        check: refuses settings that cannot work; must not import torch.
        check_buildable: builds what is cheap once, before anything is trained.
        arguments: what its module is given besides the common: of the settings, tokenizer,
            generator, and the fingerprint of the start. The scorer is named `scorer`.
        callbacks: what it adds: of settings, run folder, tokenizer, sampling, scorer.
        start_lines: what the first screen says of it, by topic.
        start_notes: what the first screen says of settings that ask for more rows than there are.
    """

    name: str
    title: str
    settings: str
    hparams: Mapping[str, type]
    rates: Mapping[str, Kind]
    starts_from: str
    uses: tuple[str, ...]
    objective: str
    finish: Callable[[TrainSettings, RunFolder, TrainingComponents], Findings]
    num_answered: Callable[[TrainSettings], int]
    maximised: bool = True
    measures_with: tuple[str, ...] = ("gold", "micro_batch_size")
    trains: tuple[str, ...] = (POLICY,)
    trained: str = "policy"
    models: str = "policy"
    factory: str | None = None
    paired: bool = False
    validates: bool = True
    rolls_out: bool = False
    holds_reference: bool = False
    minibatches: Minibatches | None = None
    context: tuple[tuple[str, ...], ...] = (("data.max_length",), ("evaluation.max_new_tokens",))
    shortened_by: str = "data.max_length"
    check: Callable[[TrainSettings], None] = field(default=_checks_nothing)
    check_buildable: Callable[[TrainSettings], None] = field(default=_checks_nothing)
    arguments: Callable[[TrainSettings, PreTrainedTokenizerBase, Any, str], dict[str, Any]] = field(
        default=_adds_no_arguments
    )
    callbacks: Callable[
        [TrainSettings, RunFolder, PreTrainedTokenizerBase, Sampling, Scorer | None], StageCallbacks
    ] = field(default=_adds_no_callbacks)
    start_lines: Callable[[TrainSettings], dict[str, object]] = field(default=_starts_with_no_line)
    start_notes: Callable[[TrainSettings, int, int], list[str]] = field(default=_notes_nothing)

    @property
    def trains_policy(self) -> bool:
        """True if it trains a policy; else it trains a reward model."""
        return POLICY in self.trains

    @property
    def sequences_per_row(self) -> int:
        """Sequences that go through a model for each row of the data."""
        return 2 if self.paired else 1


def find_stage(name: object) -> StageSpec:
    """Return the stage of a name, or of the dotted path at which another package holds one.

    A path must be below a prefix that `RLHF_ALLOWED_TARGETS` lists.

    Raises:
        StageError: if there is none, or if it may not be imported.
    """
    text = str(name)
    short = _NAME.fullmatch(text) is not None
    if not short and not text.startswith(trusted_targets() or ("\0",)):
        raise StageError(
            f"stage={text} is no stage of ours ({', '.join(stage_names())}), and not below what "
            "RLHF_ALLOWED_TARGETS lists (prefixes, separated by commas)"
        )
    if short and text not in stage_names():
        raise StageError(f"stage={text} must be one of {', '.join(stage_names())}")
    module, _, attribute = (f"{FOLDER}.{text}.STAGE" if short else text).rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise StageError(f"stage={text} cannot be imported: {error}") from error
    if not isinstance(found, StageSpec):
        raise StageError(f"stage={text} is {type(found).__name__}, expected a StageSpec")
    return found


def stage_names() -> list[str]:
    """Return the names of our stages."""
    folder = importlib.import_module(FOLDER).__path__
    return sorted(module.name for module in pkgutil.iter_modules(folder) if module.name != "spec")


def run_kind(stage: object) -> str:
    """Return what summaries call a run: by the name of its stage, else by that of its command."""
    try:
        return find_stage(stage).name
    except StageError:
        return str(stage)
