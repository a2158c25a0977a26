"""Build modules from names and hyper-parameters: the work behind each `from_pretrained`.

Nothing is said twice: the tokenizer, the stop tokens and the fingerprint come from the model's
folder or hub name, the precision from the Trainer that the module is given to. What was given is
kept as plain values in the checkpoint, from which `load_from_checkpoint` builds the module again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import lightning as L
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import fitting
from rlhf_lightning.distributed.checkpoint import read_full
from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.misfit import shown
from rlhf_lightning.models.adapter_files import check_same_scale, read_adapter
from rlhf_lightning.models.loading import loading_options
from rlhf_lightning.models.ppo_models import ADAPTER
from rlhf_lightning.modules.checkpoint_state import HYPER_PARAMETERS
from rlhf_lightning.modules.checks import TRAINED_IN
from rlhf_lightning.modules.optimization import Schedule
from rlhf_lightning.rollout.generators.base import Generator
from rlhf_lightning.rollout.generators.captured import CapturedGenerator
from rlhf_lightning.runs.manifest import ManifestError, Source
from rlhf_lightning.runs.resume import CheckpointError, read_data
from rlhf_lightning.text.tokenizers import (
    check_same_tokenizer,
    load_tokenizer,
    read_template,
    stop_ids,
    vocabulary_of,
    with_template,
    with_template_arguments,
)

ModuleT = TypeVar("ModuleT", bound=L.LightningModule)
_PLAIN = ("reward_weights", "from_scratch", "chat_template_arguments")  # lists and mappings
_WITHOUT_ADAPTER = {  # by the argument that names a folder
    "value": "train the reward model on the policy with lora, or use module.value_head=zero",
    "reward": "train the reward model on the policy with lora, or use scorer=reward_model",
    "start": "continue from the adapter of `start` (artifacts.ppo), or use lora=none",
}


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the AdamW of all stages.

    eps is 1e-5, as in Ziegler et al. 2019: Adam's first steps on tiny gradients stay small.
    """
    return torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-5, weight_decay=0.0, fused=True)


def of_trainer(module: L.LightningModule, lora: LoraHparams | None) -> dict[str, Any]:
    """Return the precision of a module's Trainer, and adapters whose base is held in it."""
    trainer = module._trainer
    precision: Any = "32-true" if trainer is None else str(trainer.precision)
    if lora is not None and lora.base_precision is None and precision in TRAINED_IN:
        lora = replace(lora, base_precision=precision)
    return {"lora": lora, "precision": precision}


def of_one_model(
    cls: type[ModuleT],
    start: Start,
    load: Callable[..., Any],
    argument: str,
    hparams: Mapping[str, Any],
    **how: Any,
) -> ModuleT:
    """Return a module that trains one model.

    Args:
        cls: of the module.
        start: of the model.
        load: a function of `models.factory`.
        argument: the name under which `cls` takes what builds the model.
        hparams: hyper-parameters, by the names under which `cls` takes them.
        how: further arguments of `load`.
    """

    def build() -> Any:
        lora = of_trainer(built, start.options["lora"])["lora"]
        return load(**start.model, lora=lora, **how, **start.loading)

    built: Any = cast(Any, cls)(**{argument: build}, **hparams, **start.parts)
    built.tokenizer, built.generator = start.tokenizer, start.generator()
    built.keep(start, **start.model, **hparams, **how)
    return built  # type: ignore[no-any-return]


@contextmanager
def naming_argument(key: str, source: str | Path) -> Iterator[None]:
    """Name the argument that a model was given as where the model cannot be read."""
    try:
        yield
    except (ValueError, ManifestError) as error:
        if str(error).startswith("model."):  # another argument, by its place in a configuration
            raise
        raise ValueError(f"{key}={str(source)!r}: {error}") from error


@dataclass(frozen=True)
class Start:
    """The starting point of a module: a model's source as it is now, its tokenizer, the options.

    Args:
        source: of the model; None for random weights.
        tokenizer: of the model, with `template` in place of its own.
        template: a chat template, if one was given.
        options: all of `ModuleOptions`.
        from_scratch: the config of a model with random weights.
    """

    source: Source | None
    tokenizer: Any
    template: str | None
    options: Mapping[str, Any]
    from_scratch: Mapping[str, Any] | None = None

    @classmethod
    def read(cls, name: str | Path, argument: str, options: Mapping[str, Any]) -> Self:
        """Read the tokenizer and the fingerprint of a model.

        Args:
            name: folder or hub name.
            argument: name of the argument that gave it.
            options: options as in `ModuleOptions`, all of them.
        """
        given = options["chat_template"]
        template = None if given is None else read_template(given)
        origin = {key: options[key] for key in ("revision", "trust_remote_code")}
        with naming_argument(argument, name):
            loading_options(name, **origin)  # which says what else than a model it is
            source = Source.of(name, argument, options["revision"])
            arguments = options["chat_template_arguments"]
            tokenizer = load_tokenizer(
                name, chat_template=given, chat_template_arguments=arguments, **origin
            )
        return cls(source, tokenizer, template, options)

    @classmethod
    def scratch(
        cls,
        config: Mapping[str, Any],
        tokenizer: PreTrainedTokenizerBase | None,
        options: Mapping[str, Any],
    ) -> Self:
        """Return the start of a model with random weights.

        Args:
            config: fields of its config, with `model_type`; the tokenizer gives the vocabulary.
            tokenizer: of the model.
            options: all of `ModuleOptions`.
        """
        if tokenizer is None:
            raise ValueError("from_scratch needs tokenizer=, such as demo_tokenizer()")
        if options["lora"] is not None:
            raise ValueError("lora adapts a trained model: give source= in place of from_scratch")
        given = options["chat_template"]
        template = None if given is None else read_template(given)
        arguments = options["chat_template_arguments"] or {}
        tokenizer = with_template_arguments(with_template(tokenizer, template), arguments)
        return cls(None, tokenizer, template, options, {**config, **vocabulary_of(tokenizer)})

    @property
    def model(self) -> dict[str, Any]:
        """The model to load, as arguments of a loader of `models.factory`."""
        if self.source is None:
            return {"from_scratch": self.from_scratch}
        return {"source": self.source.name}

    def generator(self) -> Generator:
        """Return what continues prompts."""
        name = None if self.source is None else self.source.name
        stops = stop_ids(self.tokenizer, name, revision=self.options["revision"])
        make = self.options["generator"] or CapturedGenerator
        try:
            made = make(stops, int(self.tokenizer.pad_token_id))
        except NotImplementedError as error:
            raise TypeError(f"generator={shown(make)} makes no generator: {error}") from error
        return fitting("generator(stop_ids, pad_token_id)", made, Generator)  # type: ignore[no-any-return]

    def check_tokenizer(self, argument: str, source: str | Path, *, fix: str) -> None:
        """Check that another model has this tokenizer.

        Args:
            argument: that the model was given as.
            source: folder or hub name of it.
            fix: what to give in its place.

        Raises:
            ValueError: if it has another one, or cannot be read.
        """
        with naming_argument(argument, source):
            check_same_tokenizer(self.tokenizer, source, fix=fix)

    def onward(self) -> str | None:
        """Return the name of a policy to continue from, once it is known to fit; None without one.

        Raises:
            ValueError: if it does not.
        """
        source, lora = self.options["start"], self.options["lora"]
        if source is None:
            return None
        if lora is not None:
            self.check_adapter("start", source, scale=lora)
        else:
            fix = "continue from a policy that was trained from `policy` (artifacts.ppo)"
            self.check_tokenizer("start", source, fix=fix)
        return str(source)

    def check_adapter(
        self, argument: str, folder: str | Path, *, scale: LoraHparams | None = None
    ) -> None:
        """Check that the adapter in a folder was trained on this model.

        Args:
            argument: that the folder was given as.
            folder: of a model, with the folder `adapter`.
            scale: what its rank and its alpha must be.

        Raises:
            ValueError: if there is none, or if it does not fit.
        """
        assert self.source is not None  # of a module that takes adapters
        place, name = Path(folder) / ADAPTER, self.source.name
        try:
            files = read_adapter(place)
        except (OSError, ValueError) as error:
            raise ValueError(f"{error}: {_WITHOUT_ADAPTER[argument]}") from error
        if files.base_fingerprint not in ("", self.source.fingerprint):
            told = f"the adapter in {place} was trained on {files.base} and not on policy={name} "
            told += f"({files.base_fingerprint[:12]}, {self.source.fingerprint[:12]})"
            raise ValueError(f"{told}: give the former; or {_WITHOUT_ADAPTER[argument]}")
        if scale is not None:
            check_same_scale(files, scale, place)

    @property
    def loading(self) -> dict[str, Any]:
        """Arguments for loading models."""
        names = ("activation_checkpointing", "seed", "revision", "trust_remote_code")
        return {name: self.options[name] for name in names}

    @property
    def parts(self) -> dict[str, Any]:
        """The `ModuleParts`."""
        return {
            "optimizer": self.options["optimizer"] or adamw,
            "schedule": self.options["schedule"] or Schedule(),
            "fingerprint": "" if self.source is None else self.source.fingerprint,
        }

    @property
    def kept(self) -> dict[str, Any]:
        """The options that a checkpoint holds."""
        schedule = self.parts["schedule"]
        own = {"lora": self.options["lora"], "schedule": schedule, "chat_template": self.template}
        own["chat_template_arguments"] = self.options["chat_template_arguments"] or None
        return self.loading | own


def plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as values that a checkpoint can hold.

    Values without a plain form, such as a reward function or a custom optimizer, are left out and
    have to be given again.
    """
    kept: dict[str, Any] = {}
    for name, value in given.items():
        if name in _PLAIN or value is None or isinstance(value, str | int | float | bool):
            kept[name] = value
        elif hasattr(value, "__dataclass_fields__"):
            kept[name] = asdict(value)
    return kept


def revived(given: dict[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return kept hyper-parameters with their dataclasses: those of `kinds`, adapters, schedule.

    Raises:
        ValueError: if they are those of another kind of module.
    """
    if not all(isinstance(given.get(name), Mapping) for name in kinds):
        others = ("lora", "schedule")
        held = [k for k, v in given.items() if isinstance(v, Mapping) and k not in others]
        told = f"the checkpoint holds the hyper-parameters {held}, expected {sorted(kinds)}"
        raise ValueError(f"{told}: call load_from_checkpoint of the module that was trained")
    known = {"lora": LoraHparams, "schedule": Schedule, **kinds}
    return {
        name: known[name](**value) if name in known and isinstance(value, Mapping) else value
        for name, value in given.items()
    }


def read_checkpoint(
    path: str | Path, changes: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return a checkpoint, read as data on the CPU, and the hyper-parameters in it.

    Args:
        path: checkpoint of a module.
        changes: arguments of `from_pretrained` that the caller gives.

    Raises:
        ValueError: if there are no hyper-parameters, as the module was not built by
            `from_pretrained`; or if they would run code and the caller does not allow it.
    """
    try:
        checkpoint = (read_full if Path(path).is_dir() else read_data)(Path(path))
    except CheckpointError as error:
        last = Path(path) / "checkpoints/last.ckpt"  # of a run folder
        hint = f": give {last}" if last.exists() else ""
        raise CheckpointError(f"checkpoint_path={str(path)!r}: {error}{hint}") from error
    if not checkpoint.get(HYPER_PARAMETERS):
        fix = "build the module as it was, or use rlhf-export on its run folder"
        raise ValueError(f"{path} holds no hyper-parameters of from_pretrained(): {fix}")
    given = dict(checkpoint[HYPER_PARAMETERS])
    is_file = "{" not in str(given.get("chat_template") or "{")
    unsafe = {"trust_remote_code": given.get("trust_remote_code"), "chat_template": is_file}
    for name in (name for name, is_so in unsafe.items() if is_so and name not in changes):
        fix = f"give load_from_checkpoint(path, {name}=...) if you trust it"
        told = f"{path} was trained with {name}={given[name]!r}, and no checkpoint"
        raise ValueError(f"{told} runs code or names files to read: {fix}")
    return checkpoint, given
