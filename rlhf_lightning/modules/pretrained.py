"""Build modules from names and hyper-parameters: the work behind each `from_pretrained`.

Nothing is said twice: the tokenizer, the stop tokens and the fingerprint come from the model's
folder or hub name, the precision from the Trainer that the module is given to. What was given is
kept as plain values in the checkpoint, from which `load_from_checkpoint` builds the module again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self, TypeVar

import lightning as L
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import PathOrName, fitting
from rlhf_lightning.distributed.checkpoint import read_full
from rlhf_lightning.hparams import LoraHparams, SamplingHparams
from rlhf_lightning.models.factory import load_scalar_model
from rlhf_lightning.models.loading import loading_options, naming_source
from rlhf_lightning.modules.checkpoint_state import HYPER_PARAMETERS
from rlhf_lightning.modules.checks import TRAINED_IN
from rlhf_lightning.modules.schedules import Schedule
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.scorers.base import (
    FunctionScorer,
    RewardModelScorer,
    Scorer,
    WeightedScorer,
)
from rlhf_lightning.rollout.scorers.text_reward_model import TextRewardModelScorer
from rlhf_lightning.runs.manifest import ManifestError
from rlhf_lightning.runs.resume import CheckpointError, read_data
from rlhf_lightning.runs.source import Source
from rlhf_lightning.text.tokenizers import (
    as_saved,
    check_same_tokenizer,
    load_tokenizer,
    read_template,
    stop_ids,
)

ModuleT = TypeVar("ModuleT", bound=L.LightningModule)


def adamw(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the AdamW of all stages.

    eps is 1e-5, as in Ziegler et al. 2019: Adam's first steps on tiny gradients stay small.
    """
    return torch.optim.AdamW(groups, betas=(0.9, 0.999), eps=1e-5, weight_decay=0.0, fused=True)


def trainer_precision(module: L.LightningModule) -> str:
    """Return the precision of the Trainer that has the module, "32-true" where none has it."""
    trainer = module._trainer
    return "32-true" if trainer is None else str(trainer.precision)


def of_trainer(module: L.LightningModule, lora: LoraHparams | None) -> dict[str, Any]:
    """Return the precision of a module's Trainer, and adapters whose base is held in it."""
    precision: Any = trainer_precision(module)
    if lora is not None and precision in TRAINED_IN:
        lora = replace(lora, base_precision=precision)
    return {"lora": lora, "precision": precision}


def as_scorer(
    reward: Any,
    policy: str,
    tokenizer: PreTrainedTokenizerBase,
    weights: Sequence[float] | None = None,
) -> Scorer:
    """Return the scorer that `reward` names.

    Args:
        reward: a scorer; a function `(prompts, completions, **columns) -> list of numbers`; or the
            folder or hub name of a reward model, read by its own tokenizer if that is another one;
            or `path.py:name` of a function; or a list of these, whose sum is the score.
        policy: folder or hub name of the policy.
        tokenizer: tokenizer of the policy.
        weights: one weight per reward of a list; 1 by default.

    Raises:
        TypeError: if it is none of these.
        ValueError: if there is no such function, or the model's tokenizer cannot be loaded.
    """
    if isinstance(reward, list | tuple):
        return _weighted([as_scorer(one, policy, tokenizer) for one in reward], weights)
    if weights is not None:
        raise ValueError(
            f"reward_weights={list(weights)} is of a list of rewards: give reward=[...], or leave "
            "it out"
        )
    if isinstance(reward, str | Path):
        source = str(fitting("reward", reward, PathOrName))
        if _names_function(source):
            return FunctionScorer(source)
        try:
            with naming_source(source):
                as_saved(source, loading_options(source))
        except ValueError as error:
            raise ValueError(
                f"reward={source!r} has no tokenizer that can be loaded: {error}. A function in a "
                "file is given as path.py:name"
            ) from error
        try:
            check_same_tokenizer(tokenizer, source, fix="")
        except ValueError:
            return TextRewardModelScorer(source)
        return RewardModelScorer(lambda: load_scalar_model(source), policy=policy, source=source)
    if hasattr(reward, "build") and callable(reward) and not inspect.isclass(reward):
        return reward  # type: ignore[no-any-return]
    if callable(reward) and getattr(type(reward), "forward", 0) is not L.LightningModule.forward:
        return FunctionScorer(reward)
    raise TypeError(
        f"reward={reward!r} is {type(reward).__name__}: give a function (prompts, completions, "
        "**columns) -> list of numbers, a scorer, or the folder or hub name of a reward model"
    )


def _weighted(scorers: Sequence[Scorer], weights: Sequence[float] | None) -> WeightedScorer:
    given = [1.0] * len(scorers) if weights is None else list(weights)
    if not scorers or len(given) != len(scorers):
        raise ValueError(
            f"reward has {len(scorers)} entries and reward_weights {len(given)}: give as many, and "
            "at least one"
        )
    names: list[str] = []
    for scorer in scorers:
        name = str(getattr(scorer, "name", type(scorer).__name__))
        taken = sum(other.partition("#")[0] == name for other in names)
        names.append(f"{name}#{taken + 1}" if taken else name)
    return WeightedScorer(
        dict(zip(names, scorers, strict=True)), weights=dict(zip(names, given, strict=True))
    )


def _names_function(reward: Any) -> bool:
    return isinstance(reward, str) and reward.rpartition(":")[0].endswith(".py")


def of_one_model(
    cls: type[ModuleT],
    source: str | Path,
    load: Callable[..., Any],
    argument: str,
    hparams: Mapping[str, Any],
    options: Mapping[str, Any],
) -> ModuleT:
    """Return a module that trains the model which `load` loads from `source`.

    Args:
        cls: class of the module.
        source: folder or hub name.
        load: a function of `models.factory`.
        argument: the name under which `cls` takes what builds the model.
        hparams: hyper-parameters, by the names under which `cls` takes them.
        options: options as in `ModuleOptions`, all of them.
    """
    start = Start.read(source, "source", options)

    def build() -> Any:
        return load(str(source), lora=of_trainer(built, options["lora"])["lora"], **start.loading)

    made: Any = cls
    built: Any = made(**{argument: build}, **hparams, **start.parts)
    built.tokenizer = start.tokenizer
    built.keep(start, source=str(source), **hparams)
    return built  # type: ignore[no-any-return]


def of_policy(
    cls: type[ModuleT],
    policy: str | Path,
    reward: Any,
    build: Callable[..., Any],
    hparams: Mapping[str, Any],
    options: Mapping[str, Any],
    **kept: Any,
) -> ModuleT:
    """Return a module that trains `policy` on its own scored responses.

    Args:
        cls: class of the module.
        policy: folder or hub name of the policy to start from, which is the reference too.
        reward: reward, as in `as_scorer`.
        build: (policy, scorer, options) -> models, by a function of `models.ppo_models`.
        hparams: hyper-parameters, by the names under which `cls` takes them.
        options: options as in `OnPolicyOptions`, all of them.
        kept: further arguments, for the checkpoint.
    """
    lora, weights = options["lora"], options["reward_weights"]
    if lora is not None and lora.dropout:  # of every forward: the ratio would not start at 1
        raise ValueError(f"lora.dropout={lora.dropout:g} must be 0 in {cls.__name__}: leave it out")
    start = Start.read(policy, "policy", options)
    tokenizer = start.tokenizer
    stops = stop_ids(tokenizer, str(policy), revision=options["revision"])
    scorer = as_scorer(reward, str(policy), tokenizer, weights)
    hparams = {**hparams, "sampling": options["sampling"] or SamplingHparams()}

    def models() -> Any:
        return build(str(policy), scorer, **of_trainer(built, lora), **start.loading)

    made: Any = cls
    built: Any = made(
        models=models,
        scorer=scorer,
        generator=CachedGenerator(stops, int(tokenizer.pad_token_id)),
        tokenizer=tokenizer,
        seed=options["seed"],
        surrogate=options["surrogate"],
        estimator=options["estimator"],
        **hparams,
        **start.parts,
    )
    built.keep(
        start,
        policy=str(policy),
        reward=str(reward) if isinstance(reward, str | Path) else reward,
        reward_weights=None if weights is None else list(weights),
        **hparams,
        **{key: repr(it) for key in ("surrogate", "estimator") if (it := options[key]) is not None},
        **kept,
    )
    return built  # type: ignore[no-any-return]


def check_reward(path: str | Path, reward: Any, *, is_given: bool) -> None:
    """Check that the reward of a checkpoint is known, and is code only where the user gives it.

    Raises:
        ValueError: if not.
    """
    if reward is None:
        raise ValueError(
            f"{path} was trained with a reward that no checkpoint can hold: give "
            "load_from_checkpoint(path, reward=function)"
        )
    if not is_given and _names_function(reward):
        raise ValueError(
            f"{path} was trained with reward={reward!r}, which is code, and no checkpoint runs "
            f"code: give load_from_checkpoint(path, reward={reward!r})"
        )


def check_objects(path: str | Path, kept: Mapping[str, Any]) -> None:
    """Check that what a checkpoint has only in words was given again.

    Raises:
        ValueError: if not, with the argument.
    """
    for key, value in kept.items():
        if isinstance(value, str):
            raise ValueError(
                f"{path} was trained with {key}={value}, which no checkpoint can hold: give "
                f"load_from_checkpoint(path, {key}={value})"
            )


@contextmanager
def naming_argument(key: str, source: str | Path) -> Iterator[None]:
    """Name the argument that a model was given as where the model cannot be read."""
    try:
        yield
    except (ValueError, ManifestError) as error:
        raise ValueError(f"{key}={str(source)!r}: {error}") from error


@dataclass(frozen=True)
class Start:
    """The starting point of a module: a model's source as it is now, its tokenizer, the options.

    Args:
        source: source of the model.
        tokenizer: tokenizer of the model, with `template` if there is one.
        template: a chat template, if one was given.
        options: options as in `ModuleOptions`, all of them.
    """

    source: Source
    tokenizer: Any
    template: str | None
    options: Mapping[str, Any]

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
            tokenizer = load_tokenizer(name, chat_template=given, **origin)
        return cls(source, tokenizer, template, options)

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
            "fingerprint": self.source.fingerprint,
        }

    @property
    def kept(self) -> dict[str, Any]:
        """The options that a checkpoint holds."""
        schedule = self.parts["schedule"]
        own = {"lora": self.options["lora"], "schedule": schedule, "chat_template": self.template}
        return self.loading | own


def plain(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments as values that a checkpoint can hold.

    Values without a plain form, such as a reward function or a custom optimizer, are left out and
    have to be given again.
    """
    kept: dict[str, Any] = {}
    for name, value in given.items():
        numbers = isinstance(value, list) and name == "reward_weights"
        if numbers or value is None or isinstance(value, str | int | float | bool):
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
        raise ValueError(
            f"the checkpoint is of another module: it holds the hyper-parameters {held}, expected "
            f"{sorted(kinds)}: call load_from_checkpoint of the module that was trained"
        )
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
        raise CheckpointError(f"checkpoint_path={str(path)!r}: {error}") from error
    if not checkpoint.get(HYPER_PARAMETERS):
        raise ValueError(
            f"{path} holds no hyper-parameters, since its module was not built by "
            "from_pretrained(): build the module as it was, or use rlhf-export on its run folder"
        )
    given = dict(checkpoint[HYPER_PARAMETERS])
    if given.get("trust_remote_code") and "trust_remote_code" not in changes:
        raise ValueError(
            f"{path} was trained with trust_remote_code=True, and no checkpoint runs code: give "
            "load_from_checkpoint(path, trust_remote_code=True) if you trust the model's own"
        )
    return checkpoint, given
