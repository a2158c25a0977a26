"""Build modules from names and hyper-parameters: the work behind each `from_pretrained`.

Nothing is said twice: the tokenizer, the stop tokens and the fingerprint come from the model's
folder or hub name, the precision from the Trainer that the module is given to. What was given is
kept as plain values in the checkpoint, from which `load_from_checkpoint` builds the module again.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

import lightning as L
import torch
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import PathOrName, fitting
from rlhf_lightning.distributed.checkpoint import read_full
from rlhf_lightning.hparams import (
    DPOHparams,
    GRPOHparams,
    LoraHparams,
    PPOHparams,
    RewardHparams,
    SamplingHparams,
    SFTHparams,
)
from rlhf_lightning.models.factory import load_scalar_model
from rlhf_lightning.models.loading import loading_options, naming_source
from rlhf_lightning.modules.checkpoint_state import HYPER_PARAMETERS
from rlhf_lightning.modules.schedules import Schedule
from rlhf_lightning.modules.trainer_flags import TRAINED_IN
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
Optimizer = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
HPARAMS: dict[str, type] = {
    "dpo": DPOHparams,
    "grpo": GRPOHparams,
    "ppo": PPOHparams,
    "reward": RewardHparams,
    "sampling": SamplingHparams,
    "sft": SFTHparams,
}


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
    precision = trainer_precision(module)
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
        tokenizer: of the policy.
        weights: of a list, one each; 1 by default.

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


def _names_function(reward: str | None) -> bool:
    return reward is not None and reward.rpartition(":")[0].endswith(".py")


def on_policy_module(
    cls: type[ModuleT],
    policy: str | Path,
    reward: Any,
    *,
    reward_weights: Sequence[float] | None,
    models: Callable[..., Any],
    hparams: Mapping[str, Any],
    lora: LoraHparams | None,
    schedule: Schedule | None,
    optimizer: Optimizer | None,
    seed: int,
    activation_checkpointing: bool,
    chat_template: str | None,
    revision: str | None,
    trust_remote_code: bool,
    **kept: Any,
) -> ModuleT:
    """Return a module that trains a policy on its own scored responses.

    Args:
        cls: of the module.
        policy: folder or hub name of the policy to start from, which is the reference too.
        reward: see `as_scorer`.
        reward_weights: of a list of rewards.
        models: (policy, scorer, options) -> models, a function of `models.ppo_models`.
        hparams: the hyper-parameters, by the name under which `cls` takes them.
        lora: as in `PPOModule.from_pretrained`, and so are all below.
        schedule: of the learning rates.
        optimizer: parameter groups -> optimizer.
        seed: of sampling noise, minibatches and new weights.
        activation_checkpointing: compute decoder layers again in the backward pass.
        chat_template: in place of the model's.
        revision: of a hub name.
        trust_remote_code: run the code beside the weights.
        kept: further arguments of `from_pretrained`, for the checkpoint.
    """
    if lora is not None and lora.dropout:  # of every forward: the ratio would not start at 1
        raise ValueError(f"lora.dropout={lora.dropout:g} must be 0 in {cls.__name__}: leave it out")
    policy = str(policy)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    start, template, tokenizer = _start(policy, "policy", chat_template, options)
    stops = stop_ids(tokenizer, policy, revision=revision)
    scorer = as_scorer(reward, policy, tokenizer, reward_weights)
    built: list[ModuleT] = []
    given = {"activation_checkpointing": activation_checkpointing, "seed": seed, **options}
    module = cls(
        models=lambda: models(policy, scorer, **of_trainer(built[0], lora), **given),
        scorer=scorer,
        generator=CachedGenerator(stops, int(tokenizer.pad_token_id)),
        tokenizer=tokenizer,
        seed=seed,
        **hparams,
        **common_arguments(start, optimizer=optimizer, schedule=schedule),
    )
    built.append(module)
    return keep_hyper_parameters(
        module,
        start,
        policy=policy,
        reward=str(reward) if isinstance(reward, str | Path) else reward,
        reward_weights=None if reward_weights is None else list(reward_weights),
        **hparams,
        lora=lora,
        schedule=module.schedule,
        chat_template=template,
        **(kept | given),
    )


def restored_on_policy(
    cls: Any, path: str | Path, reward: Any, kinds: Mapping[str, type], changes: Mapping[str, Any]
) -> Any:
    """Return the module of a checkpoint whose module `on_policy_module` built.

    Raises:
        ValueError: if the checkpoint holds no hyper-parameters, if no reward is known, or if its
            model runs code and `changes` do not say so.
    """
    checkpoint, given = read_checkpoint(path, changes)
    given = revived(given, kinds) | dict(changes)
    if reward is not None:
        given["reward"] = reward
    elif _names_function(given.get("reward")):
        raise ValueError(
            f"{path} was trained with reward={given['reward']!r}, which is code, and no checkpoint "
            f"runs code: give load_from_checkpoint(path, reward={given['reward']!r})"
        )
    if given.get("reward") is None:
        raise ValueError(
            f"{path} was trained with a reward that no checkpoint can hold: give "
            "load_from_checkpoint(path, reward=function)"
        )
    return restored(cls.from_pretrained(**given), checkpoint)


def one_model_module(
    cls: type[ModuleT],
    source: str | Path,
    *,
    argument: str,
    load: Callable[..., Any],
    hparams: Mapping[str, Any],
    lora: LoraHparams | None,
    schedule: Schedule | None,
    optimizer: Optimizer | None,
    seed: int,
    activation_checkpointing: bool,
    chat_template: str | None,
    revision: str | None,
    trust_remote_code: bool,
) -> ModuleT:
    """Return a module that trains one model, of SFT or a reward model.

    Args:
        cls: of the module.
        source: folder or hub name of the model to start from.
        argument: under which `cls` takes what builds the model.
        load: loads it, a function of `models.factory`.
        hparams: the hyper-parameters, by the name under which `cls` takes them.
        lora: as in `SFTModule.from_pretrained`, and so are all below.
        schedule: of the learning rate.
        optimizer: parameter groups -> optimizer.
        seed: of new weights.
        activation_checkpointing: compute decoder layers again in the backward pass.
        chat_template: in place of the model's.
        revision: of a hub name.
        trust_remote_code: run the code beside the weights.
    """
    options = {"revision": revision, "trust_remote_code": trust_remote_code}
    start, template, tokenizer = _start(source, "source", chat_template, options)
    built: list[ModuleT] = []

    def build() -> Any:
        return load(
            str(source),
            seed=seed,
            lora=of_trainer(built[0], lora)["lora"],
            activation_checkpointing=activation_checkpointing,
            **options,
        )

    module = cls(
        **{argument: build},
        **hparams,
        **common_arguments(start, optimizer=optimizer, schedule=schedule),
    )
    built.append(module)
    module.tokenizer = tokenizer
    return keep_hyper_parameters(
        module,
        start,
        source=str(source),
        **hparams,
        lora=lora,
        schedule=module.schedule,
        seed=seed,
        activation_checkpointing=activation_checkpointing,
        chat_template=template,
        **options,
    )


def _start(
    name: str | Path, key: str, chat_template: str | None, options: dict[str, Any]
) -> tuple[Source, str | None, Any]:
    """Return the model that a module starts from, as it is now, its template and its tokenizer."""
    template = None if chat_template is None else read_template(chat_template)
    with naming_argument(key, name):
        loading_options(name, **options)  # which says what else than a model it is
        start = Source.of(name, key, options["revision"])
        return start, template, load_tokenizer(name, chat_template=chat_template, **options)


@contextmanager
def naming_argument(key: str, source: str | Path) -> Iterator[None]:
    """Name the argument that a model was given as where the model cannot be read."""
    try:
        yield
    except (ValueError, ManifestError) as error:
        raise ValueError(f"{key}={str(source)!r}: {error}") from error


def common_arguments(
    start: Source, *, optimizer: Optimizer | None, schedule: Schedule | None
) -> dict[str, Any]:
    """Return what all modules are given alike."""
    return {
        "optimizer": adamw if optimizer is None else optimizer,
        "schedule": Schedule() if schedule is None else schedule,
        "fingerprint": start.fingerprint,
    }


def keep_hyper_parameters(module: Any, start: Source, **given: Any) -> Any:
    """Return a module that keeps what it was built from, in `hparams` and in checkpoints.

    What has no plain form, a reward function or an optimizer of one's own, is left out and has to
    be given again.
    """
    plain: dict[str, Any] = {}
    for name, value in given.items():
        numbers = isinstance(value, list) and name == "reward_weights"
        if numbers or value is None or isinstance(value, str | int | float | bool):
            plain[name] = value
        elif hasattr(value, "__dataclass_fields__"):
            plain[name] = asdict(value)
    module.save_hyperparameters(plain)
    module.source = start
    return module


def revived(given: dict[str, Any], kinds: Mapping[str, type]) -> dict[str, Any]:
    """Return kept hyper-parameters with their dataclasses: those of `kinds`, adapters, schedule.

    Raises:
        ValueError: if they are those of another kind of module.
    """
    if not all(isinstance(given.get(name), Mapping) for name in kinds):
        held = [name for name in HPARAMS if isinstance(given.get(name), Mapping)]
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
        path: of the checkpoint.
        changes: arguments of `from_pretrained` that the caller gives.

    Raises:
        ValueError: if it holds none: its module was not built by `from_pretrained`; or if they
            would run code and the caller does not say so.
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


def restored(module: ModuleT, checkpoint: dict[str, Any]) -> ModuleT:
    """Give a module the weights and the state of a checkpoint; return it in eval mode."""
    module.configure_model()
    module.load_state_dict(checkpoint["state_dict"])
    module.on_load_checkpoint(checkpoint)
    return module.eval()
