"""The forms of a module's `reward`: a scorer, a function, a model's name, or a list of these."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import lightning as L
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from rlhf_lightning.arguments import PathOrName, fitting
from rlhf_lightning.misfit import shown
from rlhf_lightning.models.factory import load_scalar_model
from rlhf_lightning.models.loading import loading_options, naming_source
from rlhf_lightning.rollout.scorers.base import (
    FunctionScorer,
    NoReward,
    RewardModelScorer,
    Scorer,
    WeightedScorer,
)
from rlhf_lightning.rollout.scorers.text_reward_model import TextRewardModelScorer
from rlhf_lightning.text.tokenizers import as_saved, check_same_tokenizer

CLIP_OF_NORMALIZED = 5.0  # standard deviations of the score


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
            or `path.py:name` of a function; or a list of these, whose sum is the score. False is
            no reward.
        policy: folder or hub name of the policy.
        tokenizer: of the policy.
        weights: of a list, one each; 1 by default.

    Raises:
        TypeError: if it is none of these.
        ValueError: if there is no such function, or the model's tokenizer cannot be loaded.
    """
    if reward is False:
        return NoReward()
    if isinstance(reward, list | tuple):
        return _weighted([as_scorer(one, policy, tokenizer) for one in reward], weights)
    if weights is not None:
        raise ValueError(f"reward_weights={list(weights)} needs a list: give reward=[...]")
    if isinstance(reward, str | Path):
        source = str(fitting("reward", reward, PathOrName))
        if _names_function(source):
            return FunctionScorer(source)
        try:
            with naming_source(source):
                as_saved(source, loading_options(source))
        except ValueError as error:
            why = f"{error}; a function in a file is given as path.py:name"
            raise ValueError(f"reward={source!r} has no tokenizer: {why}") from error
        try:
            check_same_tokenizer(tokenizer, source, fix="")
        except ValueError:
            return TextRewardModelScorer(source)
        return RewardModelScorer(lambda: load_scalar_model(source), policy=policy, source=source)
    if hasattr(reward, "build") and callable(reward) and not inspect.isclass(reward):
        return reward  # type: ignore[no-any-return]
    forward = getattr(type(reward), "forward", None)
    is_model = isinstance(reward, PreTrainedModel) or forward is L.LightningModule.forward
    if callable(reward) and not is_model:
        return FunctionScorer(reward)
    told = f"reward={shown(reward)} is {type(reward).__name__}"
    fix = "give a function (prompts, completions, **columns), a scorer, or the name of a model"
    raise TypeError(f"{told}: {fix}")


def score_clip_of(clip: float | str | None, scorer: Scorer) -> float | None:
    """Return the clip of the scores; "auto" clips those of a scorer that is normalized.

    Args:
        clip: that of the hyper-parameters.
        scorer: once it is built: a model that is loaded may say that it is normalized.
    """
    if not isinstance(clip, str):
        return clip
    return CLIP_OF_NORMALIZED if getattr(scorer, "normalized", False) else None


def parts_of(scorer: Scorer) -> Iterator[Scorer]:
    """Yield the scorers of a weighted sum, however deep; another scorer is its own only part."""
    if not isinstance(scorer, WeightedScorer):
        yield scorer
        return
    for part in scorer.scorers.values():
        yield from parts_of(part)


def _weighted(scorers: Sequence[Scorer], weights: Sequence[float] | None) -> WeightedScorer:
    given = [1.0] * len(scorers) if weights is None else list(weights)
    if not scorers or len(given) != len(scorers):
        counts = f"reward has {len(scorers)} entries and reward_weights {len(given)}"
        raise ValueError(f"{counts}: give as many, and at least one")
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


def named_reward(reward: Any) -> str | bool | None:
    """Return the name that a reward was given by, or that gives the same one; None without one.

    It scores alike; how many rows go through it at once may differ. False is no reward.
    """
    if reward is False or isinstance(reward, NoReward):
        return False
    if isinstance(reward, str | Path):
        return str(reward)
    if type(reward) is RewardModelScorer:
        return reward.source
    name = reward.function_name if isinstance(reward, FunctionScorer) else None
    return name if _names_function(name) else None


def check_reward(path: str | Path, reward: Any, *, is_given: bool) -> None:
    """Check that the reward of a checkpoint is known, and is code only where the user gives it.

    Raises:
        ValueError: if not.
    """
    is_model = isinstance(reward, str) and not _names_function(reward)
    if reward is None or not (is_given or is_model or reward is False):
        why = "no checkpoint can hold" if reward is None else "is code, which no checkpoint runs"
        named = "function" if reward is None else repr(reward)
        fix = f"give load_from_checkpoint(path, reward={named})"
        raise ValueError(f"{path} was trained with a reward that {why}: {fix}")


def check_objects(path: str | Path, kept: Mapping[str, Any]) -> None:
    """Check that what a checkpoint has only in words was given again.

    Raises:
        ValueError: if not, with the argument.
    """
    for key, value in kept.items():
        if isinstance(value, str):
            told = f"{path} was trained with {key}={value}, which no checkpoint can hold"
            raise ValueError(f"{told}: give load_from_checkpoint(path, {key}={value})")
