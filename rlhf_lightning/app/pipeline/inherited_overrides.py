"""What a pipeline's evaluation and collections take over from the experiment that it trains.

They ask the prompts of that experiment's data set and load the models that its stages made, not
those of the built-in world, which are the defaults of both entry points.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_lightning.app.config.compose import ConfigError, conf_dir, describe_interpolation
from rlhf_lightning.app.config.errors import COMPOSE_ERRORS, explain

HERE = Path("<pipeline>")  # stands for its folder: what is composed to check serves the run too
_CHOICE = re.compile(r"\+{0,2}(\w+)=")
ADAPTERS = ("by_lora/lora", "by_lora/qlora")  # scorers of conf/scorer that hold no whole model
_NAME = re.compile(r"[A-Za-z_]\w*")
_UNSET = object()
Pairs = list[tuple[str, Any]]  # key and value
# Of a group all keys are taken over (None) or these alone, which the entry point reads.
_MODEL = ("chat_template_arguments", "revision", "trust_remote_code")
_ANSWERS = (
    "num_prompts", "answers_per_prompt", "batch_size", "micro_batch_size", "temperature",
    "max_new_tokens", "gold",
)  # fmt: skip
_GROUPS: dict[str, dict[str, Collection[str] | None]] = {
    "evaluate": {
        "dataset": None,
        "model": _MODEL,
        "rollout": None,
        "scorer": None,
        "safety": None,
        "gates": None,
        "evaluation": _ANSWERS,
    },
    "collect": {"dataset": None, "model": _MODEL},
}
_SINGLE = {  # key of the training stage -> key of the entry point
    "evaluate": {
        "data.max_prompt_length": "prompts.max_length",
        "trainer.precision": "trainer.precision",
    },
    "collect": {
        "data.max_prompt_length": "candidates.max_prompt_length",
        "module.sampling.max_new_tokens": "candidates.max_new_tokens",
    },
}


class Lead(NamedTuple):
    """The training step that others follow: its name and, with `HERE`, its command line."""

    name: str
    overrides: tuple[str, ...]


def evaluation_words(
    lead: Lead, folder: Path, gates: str | None, theirs: Sequence[str]
) -> tuple[str, ...]:
    """Return the words by which an evaluation asks what PPO was trained on, and of its models.

    Args:
        lead: the PPO step, or the last training step of a pipeline without PPO.
        folder: of the pipeline.
        gates: a file of conf/gates; None for the experiment's.
        theirs: the user's words for the evaluation. A group chosen there is left alone.

    Raises:
        ConfigError: if the training step does not compose, or no policy is there to evaluate.
    """
    trained = _trained(lead)
    words = _artifacts(trained, lead, ("sft", "reward"))
    if lead.name.endswith("/ppo"):
        words.append(("artifacts.ppo", _published(trained, lead)))
    elif not any(word.startswith(("policy=", "artifacts.ppo=")) for word in theirs):
        raise ConfigError(
            "evaluate=true compares the policy that PPO trains, and experiments.ppo=null leaves "
            "PPO out: use evaluate=false, or name a policy with evaluate:policy=FOLDER"
        )
    left = {*_chosen(theirs)}
    if gates is not None or not lead.name.endswith("/ppo"):
        left.add("gates")
    if trained.cfg.get("safety") is None:
        left.add("safety")  # the default looks for domains, and finds none
    if trained.choices.get("scorer") in (None, "reward_adapter", *ADAPTERS):
        left.add("scorer")  # the export of the reward stage holds the merged model
    own = [] if "gates" in _chosen(theirs) or "gates" not in left else [f"gates={gates or 'ppo'}"]
    return (*own, *_carried("evaluate", trained, lead, folder, words, left))


def collection_words(
    lead: Lead, start: Lead | None, folder: Path, theirs: Sequence[str]
) -> tuple[str, ...]:
    """Return the words by which a collection asks what the experiment is trained on.

    Args:
        lead: the PPO step, or the last training step of a pipeline without PPO.
        start: the SFT step; its base model is a candidate too. None without one.
        folder: of the pipeline.
        theirs: the user's words for the collection. A group chosen there is left alone.

    Raises:
        ConfigError: if a training step does not compose, or nothing can label that data set.
    """
    trained = _trained(lead)
    chosen = _chosen(theirs)
    dataset = trained.choices.get("dataset")
    if dataset != "demo" and not {"dataset", "annotator"} & chosen:
        raise ConfigError(
            f"{lead.name} is trained on dataset={dataset}, and annotator=demo labels answers of "
            "the built-in world alone: say who labels with collect:annotator=page or "
            "collect:annotator=reward_model, or collect nothing (collect=false rounds=1)"
        )
    words = _artifacts(trained, lead, ("sft",))
    if start is not None:
        words += _artifacts(_trained(start), start, ("base",))
    return _carried("collect", trained, lead, folder, words, chosen)


class Composed(NamedTuple):
    """A configuration, and which file of each of its groups it holds."""

    cfg: DictConfig
    choices: dict[str, str | None]


@cache
def composed(entry: str, words: tuple[str, ...]) -> Composed:
    """Return what a command line composes; it must not be changed.

    Raises:
        ConfigError: if it does not compose.
    """
    running = GlobalHydra.instance().is_initialized()  # by the command line, in the same folder
    folder = str(conf_dir())
    with nullcontext() if running else initialize_config_dir(version_base="1.3", config_dir=folder):
        try:
            cfg = compose(entry, overrides=list(words), return_hydra_config=True)
        except COMPOSE_ERRORS as error:
            raise ConfigError(explain(error, list(words), entry)) from error
    return Composed(cfg, dict(cfg.hydra.runtime.choices))


def _trained(lead: Lead) -> Composed:
    try:
        return composed("train", lead.overrides)
    except ConfigError as error:
        raise ConfigError(f"{lead.name}: {error}") from error


def _carried(
    entry: str, trained: Composed, lead: Lead, folder: Path, values: Pairs, left: Collection[str]
) -> tuple[str, ...]:
    """Return the words that turn the entry point's defaults into what the stage has.

    What only looks alike follows second: `${dataset.seed}` is the same text in both, and another
    value where `dataset.seed` is.
    """
    groups = {name: keys for name, keys in _GROUPS[entry].items() if name not in left}
    shipped = composed(entry, ())
    chosen = [
        f"{name}={choice}"
        for name in groups
        if (choice := trained.choices.get(name)) != shipped.choices.get(name) and choice is not None
    ]
    pairs = list(values)
    for key, target in _SINGLE[entry].items():
        value = _resolved(trained.cfg, key, lead)
        if value is not None and value != OmegaConf.select(shipped.cfg, target):
            pairs.append((target, value))
    seed = f"seed={trained.cfg.seed}"
    for differences in (_written_differently, _meant_differently):
        other = composed(entry, (seed, *chosen, *_words(pairs, shipped.cfg))).cfg
        for name, keys in groups.items():
            pairs += differences(trained.cfg, other, name, keys, lead)
    return (*chosen, *_words(pairs, shipped.cfg, folder))


def _written_differently(
    cfg: DictConfig, other: DictConfig, name: str, keys: Collection[str] | None, lead: Lead
) -> Iterator[tuple[str, Any]]:
    for key, value in _unequal(_raw(cfg, name, keys), _raw(other, name, keys), name):
        # What the environment holds, such as a token, goes into no command line.
        if "${oc.env:" in repr(value):
            yield key, value
        elif (meant := _resolved(cfg, key, lead)) != _or_unset(other, key):
            yield key, meant


def _meant_differently(
    cfg: DictConfig, other: DictConfig, name: str, keys: Collection[str] | None, lead: Lead
) -> Iterator[tuple[str, Any]]:
    for key, value in _leaves(_raw(cfg, name, keys), name):
        if "${" not in repr(value) or "${oc.env:" in repr(value):
            continue
        mine = _resolved(cfg, key, lead)
        if mine != _or_unset(other, key):
            yield key, mine


def _unequal(mine: Any, theirs: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(mine, dict) and isinstance(theirs, dict) and all(map(_NAME.fullmatch, mine)):
        for key, value in mine.items():
            yield from _unequal(value, theirs.get(key, _UNSET), f"{place}.{key}")
    elif mine != theirs:
        yield place, mine


def _leaves(node: Any, place: str) -> Iterator[tuple[str, Any]]:
    if isinstance(node, dict) and all(map(_NAME.fullmatch, node)):
        for key, value in node.items():
            yield from _leaves(value, f"{place}.{key}")
    else:
        yield place, node


def _raw(cfg: DictConfig, name: str, keys: Collection[str] | None) -> Any:
    node = cfg.get(name)
    found: Any = OmegaConf.to_container(node, resolve=False) if OmegaConf.is_config(node) else node
    if keys is None or not isinstance(found, dict):
        return found
    return {key: value for key, value in found.items() if key in keys}


def _resolved(cfg: DictConfig, key: str, lead: Lead) -> Any:
    try:
        return _plain(OmegaConf.select(cfg, key))
    except OmegaConfBaseException as error:
        raise ConfigError(f"{lead.name}: {describe_interpolation(error)}") from error


def _or_unset(cfg: DictConfig, key: str) -> Any:
    try:
        return _plain(OmegaConf.select(cfg, key, default=_UNSET))
    except OmegaConfBaseException:
        return _UNSET


def _plain(value: Any) -> Any:
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _artifacts(trained: Composed, lead: Lead, kinds: Sequence[str]) -> Pairs:
    keys = [f"artifacts.{kind}" for kind in kinds]
    return [(key, _resolved(trained.cfg, key, lead)) for key in keys]


def _published(trained: Composed, lead: Lead) -> str:
    """Return where the step puts its model: the artefact, or its run folder if it has none."""
    folder = _resolved(trained.cfg, "artifacts.publish", lead)
    if folder is None or not trained.cfg.paths.publish:
        return str(HERE / lead.name / "export")
    return str(folder)


def _chosen(words: Sequence[str]) -> set[str]:
    return {found.group(1) for word in words if (found := _CHOICE.match(word))}


def _words(pairs: Pairs, shipped: DictConfig, folder: Path = HERE) -> list[str]:
    """Return the pairs as words; `folder` takes the place of `HERE`."""
    found = []
    for key, value in pairs:
        plus = "++" if _or_unset(shipped, key) is _UNSET else ""
        found.append(f"{plus}{key}={_written(value, str(folder))}")
    return found


def _written(value: Any, folder: str) -> str:
    if isinstance(value, dict):
        inside = ",".join(f"{key}:{_written(one, folder)}" for key, one in value.items())
        return f"{{{inside}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(_written(one, folder) for one in value)}]"
    if isinstance(value, str):
        return quoted(value.replace(str(HERE), folder))
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else repr(value)


def quoted(text: str) -> str:
    """Return a text as Hydra reads it on a command line, whatever characters are in it."""
    # Hydra reads a backslash as itself, but before a quote as what escapes it.
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"'{escaped}'"
