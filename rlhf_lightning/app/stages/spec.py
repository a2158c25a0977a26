"""The application's view of a kind of training."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.targets import TargetError, resolve, trusted_targets

if TYPE_CHECKING:
    import lightning as L
    from transformers import PreTrainedTokenizerBase

    from rlhf_lightning.data.record_datamodule import RecordDataModule
    from rlhf_lightning.evaluation.final_metrics import Findings
    from rlhf_lightning.evaluation.generate import Sampling
    from rlhf_lightning.models.learning_rates import Kind
    from rlhf_lightning.modules.base import RLHFModule
    from rlhf_lightning.rollout.scorers.base import Scorer
    from rlhf_lightning.runs.folder import RunFolder

FOLDER = "rlhf_lightning.app.stages"
TrainSettings = Any  # that of app/config/settings.py, which looks stages up here
_NAME = re.compile(r"[a-z][a-z0-9_]*")
POLICY, SCALAR = "policy", "value"  # kinds of models that are trained


class StageError(ConfigError):
    """There is no stage of this name, or it may not be imported."""


@dataclass
class TrainingComponents:
    """Everything a stage needs; the scorer only where answers are scored during training."""

    settings: TrainSettings  # with the learning rates and the vocabulary that were found
    tokenizer: PreTrainedTokenizerBase
    data: RecordDataModule
    module: RLHFModule
    trainer: L.Trainer
    sampling: Sampling
    scorer: Scorer | None
    rates: tuple[str, ...]  # the learning rates, with why, a line each


class Stage:
    """One kind of training. Each file of this folder has one, as `STAGE`.

    Attributes:
        module: trains. Its `stage` is the key of its hyper-parameters below `module`, its `kinds`
            are their classes.
        family: the class whose subclasses are trained like this, whatever they call themselves;
            None for `module`.
        rates: what each learning rate among its settings is the rate of.
        starts_from: the key below `artifacts` of the model that it starts from.
        uses: the keys below `artifacts` of all models that it loads.
        objective: the final metric that a sweep looks at: never gold, which may not choose.
        maximised: whether more of it is better.
        measures_with: the keys below `evaluation` that it reads, of those that are null by default.
        trains: the kinds of models that it trains.
        trained: the attribute of the module that is exported.
        sequences_per_row: sequences that go through a model for each row of the data.
        rolls_out: it generates and scores responses during training, next to a reference in memory;
            else `val/loss` is measured during training, and may end it.
        scores: it scores responses, during training or at its end.
        context: settings whose sums must be within the model's context.
        shortened_by: the setting that makes its rows shorter.
    """

    module: type[RLHFModule]
    family: ClassVar[type[RLHFModule] | None] = None
    rates: ClassVar[dict[str, Kind]]
    starts_from: ClassVar[str]
    uses: ClassVar[tuple[str, ...]]
    objective: ClassVar[str]
    maximised: ClassVar[bool] = True
    measures_with: ClassVar[tuple[str, ...]] = ("gold", "micro_batch_size")
    trains: ClassVar[tuple[str, ...]] = (POLICY,)
    trained: ClassVar[str] = "policy"
    sequences_per_row: ClassVar[int] = 1
    rolls_out: ClassVar[bool] = False
    scores: ClassVar[bool] = False
    context: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("data.max_length",),
        ("evaluation.max_new_tokens",),
    )
    shortened_by: ClassVar[str] = "data.max_length"

    @property
    def name(self) -> str:
        """Its name in summaries, manifests and messages."""
        return self.module.stage

    @property
    def title(self) -> str:
        """Its name in a sentence."""
        return self.module.title or self.name

    @property
    def settings(self) -> str:
        """The key below `module` of its hyper-parameters."""
        return self.module.stage

    def of(self, module: type[RLHFModule]) -> Stage:
        """Return the stage that trains another module in the same way."""
        own = copy(self)
        own.module = module
        return own

    @property
    def minibatches_key(self) -> str | None:
        """The setting that divides a batch into minibatches; None where nothing does."""
        return f"module.{self.settings}.num_minibatches" if self.rolls_out else None

    @property
    def trains_policy(self) -> bool:
        """True if it trains a policy; else it trains a reward model."""
        return POLICY in self.trains

    def check(self, settings: TrainSettings) -> None:
        """Refuse settings that cannot work.

        Raises:
            ConfigError: with the key, what it got and what it wants.
        """

    def check_buildable(self, settings: TrainSettings) -> None:
        """Build what is cheap once, before anything is trained.

        Raises:
            ConfigError: with the place, what it got and what it wants.
        """

    def callbacks(
        self, settings: TrainSettings, sampling: Sampling, scorer: Scorer | None
    ) -> Sequence[L.Callback]:
        """Return what it adds to the callbacks of every run."""
        return ()

    def finish(
        self, settings: TrainSettings, folder: RunFolder, parts: TrainingComponents
    ) -> Findings:
        """Measure the trained model."""
        raise NotImplementedError

    def num_answered(self, settings: TrainSettings) -> int:
        """Return how many prompts are answered when training is over."""
        return int(settings.evaluation.num_prompts)

    def start_lines(self, settings: TrainSettings) -> dict[str, object]:
        """Return what the first screen says of it, by topic."""
        return {}


def find_stage(name: object, module: str | None = None) -> Stage:
    """Return the stage of a name, or of the dotted path at which another package holds one.

    Another name is that of an objective without a separate stage: what the class `module` calls
    itself. It is trained as the nearest class that it inherits from.

    Args:
        name: name of the stage. A path must be below a prefix that `RLHF_ALLOWED_TARGETS` lists.
        module: dotted name of the class that is trained; None for the stage's own.

    Raises:
        StageError: if there is none, or if it may not be imported.
    """
    text, trained = str(name), _module(module)
    if text in stage_names():
        found = _imported(f"{FOLDER}.{text}.STAGE", text)
        is_variant = trained is not None and issubclass(trained, found.family or found.module)
        return found.of(trained) if trained and is_variant and trained.stage == text else found
    if _NAME.fullmatch(text) is None:
        if not text.startswith(trusted_targets() or ("\0",)):
            raise StageError(
                f"stage={text} is no stage of ours ({', '.join(stage_names())}), and not below "
                "what RLHF_ALLOWED_TARGETS lists (prefixes, separated by commas)"
            )
        return _imported(text, text)
    if trained is None or trained.stage != text:
        own = "" if trained is None else f", or stage={trained.stage} with module={module}"
        raise StageError(f"stage={text} must be one of {', '.join(stage_names())}{own}")
    ours = [find_stage(own) for own in stage_names()]
    like = {stage.family or stage.module: stage for stage in ours}
    nearest = next((like[base] for base in trained.__mro__ if base in like), None)
    if nearest is None:
        raise StageError(
            f"stage={text}: {module} inherits from none of {', '.join(c.__name__ for c in like)}, "
            "which says how it is trained: inherit from one, or write a Stage and name it by its "
            "path, as docs/architecture.md has it"
        )
    return nearest.of(trained)


def _module(name: str | None) -> type[RLHFModule] | None:
    """Return the class that a configuration trains; None where its name says none of ours."""
    if name is None:
        return None
    try:
        found: Any = resolve(name, "module")
    except TargetError:  # which is told where the module is read
        return None
    found = getattr(found, "__self__", found)  # of a class method
    if not inspect.isclass(found) or not hasattr(found, "stage"):
        return None
    return cast("type[RLHFModule]", found)


def _imported(path: str, text: str) -> Stage:
    module, _, attribute = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, ValueError) as error:
        raise StageError(f"stage={text} cannot be imported: {error}") from error
    if not isinstance(found, Stage):
        raise StageError(f"stage={text} is {type(found).__name__}, expected a Stage")
    return found


def stage_names() -> list[str]:
    """Return the names of our stages; imports none of them."""
    folder = importlib.import_module(FOLDER).__path__
    return sorted(module.name for module in pkgutil.iter_modules(folder) if module.name != "spec")
