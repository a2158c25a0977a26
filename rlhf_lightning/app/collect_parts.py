"""From the configuration of a collection to its parts: checks first, then prompts and the lab."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.app.config.compose import ConfigError, conf_dir, plain
from rlhf_lightning.app.config.targets import TargetError, check_names, check_targets, did_you_mean

if TYPE_CHECKING:
    from rlhf_lightning.data.records import PromptRecord
    from rlhf_lightning.preferences.annotators import Annotator
    from rlhf_lightning.preferences.candidates import LoadedPolicy
    from rlhf_lightning.preferences.collection import Lab
    from rlhf_lightning.preferences.pairing import WorstSamples

SPLITS = ("train", "validation")


def check_collection(cfg: DictConfig, trusted: tuple[str, ...] = ()) -> None:
    """Refuse what nothing reads and what may not be built; imports nothing heavy.

    Raises:
        ConfigError: with what was found and what to write.
    """
    written: Any = OmegaConf.load(conf_dir() / "collect.yaml")
    groups = [next(iter(item)) for item in written.defaults if isinstance(item, DictConfig)]
    known = sorted({*map(str, written), *map(str, groups)} - {"defaults", "hydra"})
    for key in map(str, cfg):
        if key not in known and key != "hydra":
            raise ConfigError(f"unknown top-level key {key!r}{did_you_mean(key, known)}")
    for group in ("candidates", "lab", "adversarial"):
        keys = list(map(str, written[group]))
        for key in map(str, cfg[group]):
            if key not in keys:
                raise ConfigError(f"unknown key {group}.{key}{did_you_mean(key, keys)}")
    if cfg.resume not in ("never", "auto"):
        raise ConfigError(f"resume={cfg.resume} must be never or auto")
    if cfg.candidates.split not in SPLITS:
        raise ConfigError(f"candidates.split={cfg.candidates.split} must be train or validation")
    # A model that is made from scratch waits for its tokenizer; none is made here.
    missing = sorted(key for key in OmegaConf.missing_keys(cfg) if not key.startswith("model."))
    if missing:
        raise ConfigError(f"{missing[0]} is not set: add {missing[0]}=...")
    try:
        check_names(OmegaConf.to_container(cfg, resolve=False), trusted)
    except TargetError as error:
        raise ConfigError(str(error)) from error


def build_lab(cfg: DictConfig, folder: Path, trusted: tuple[str, ...] = ()) -> Lab:
    """Return the lab of a configuration; models are loaded when their turn comes.

    Raises:
        ConfigError: with the key, what it got and what it wants.
    """
    from rlhf_lightning.preferences.candidates import Sampling
    from rlhf_lightning.preferences.collection import Lab, LabHparams
    from rlhf_lightning.preferences.decoding import grid

    container = plain(cfg)
    candidates, model = container["candidates"], container["model"]
    try:
        check_targets(container, trusted)
        policies = {
            name: _policy(source, model)
            for name, source in candidates["policies"].items()
            if source is not None
        }
        sampling = Sampling(
            policies=policies,
            decodings=grid(candidates["decoding"]),
            num_samples=candidates["num_samples"],
            max_new_tokens=candidates["max_new_tokens"],
            max_prompt_length=candidates["max_prompt_length"],
            batch_size=candidates["batch_size"],
            seed=cfg.seed,
        )
        hparams = LabHparams(**container["lab"], seed=cfg.seed)
        annotators = _annotators(cfg)
        return Lab(
            folder=folder,
            sampling=sampling,
            annotators=annotators,
            people=instantiate(cfg.annotator.people, _convert_="all"),
            budget=instantiate(cfg.budget),
            hparams=hparams,
            score=None if cfg.score is None else instantiate(cfg.score, _convert_="all"),
            worst=_worst(container["adversarial"]),
        )
    except (TargetError, ValueError, TypeError, InstantiationException) as error:
        raise ConfigError(str(_inner(error))) from error


def read_prompts(cfg: DictConfig) -> list[PromptRecord]:
    """Return the data set's prompts, each once; a random part of them in the order of the source.

    Raises:
        ConfigError: if there is none.
    """
    from rlhf_lightning.data.records import prompt_key

    source = instantiate(cfg.dataset.source)
    records = source.records("prompts", cfg.candidates.split)
    found = {prompt_key(record): record for record in records}
    prompts = list(found.values())
    count = cfg.candidates.num_prompts
    if count is not None and count < len(prompts):
        if count < 1:
            raise ConfigError(f"candidates.num_prompts={count} must be at least 1")
        drawn = random.Random(f"{cfg.seed}/prompts").sample(range(len(prompts)), count)
        prompts = [prompts[index] for index in sorted(drawn)]
    if not prompts:
        raise ConfigError(f"dataset={cfg.dataset.name} has no prompts in candidates.split")
    return prompts


def _inner(error: BaseException) -> BaseException:
    """Return the error inside those that Hydra puts around it."""
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    return error


def _annotators(cfg: DictConfig) -> list[Annotator]:
    nodes = [*(cfg.annotator.automatic or {}).values(), cfg.judge]
    annotators = [instantiate(node, _convert_="all") for node in nodes if node is not None]
    names = [annotator.name for annotator in annotators]
    if len(set(names)) != len(names):
        raise ConfigError(f"annotators need names of their own, got {', '.join(names)}")
    return annotators


def _worst(values: dict[str, Any]) -> WorstSamples | None:
    from rlhf_lightning.preferences.pairing import WorstSamples
    from rlhf_lightning.preferences.reward_annotator import RewardModelAnnotator

    if values["run"] is None:
        return None
    if values["source"] is None:
        raise ConfigError(
            "adversarial.run needs the reward model that was misled: artifacts.reward=..."
        )
    model = RewardModelAnnotator(values["source"], max_length=values["max_length"])
    return WorstSamples(Path(values["run"]), model.scores, values["num_pairs"])


def _policy(source: str, model: dict[str, Any]) -> Callable[[], LoadedPolicy]:
    from rlhf_lightning.preferences.candidates import load_candidate_policy

    return partial(
        load_candidate_policy,
        source,
        chat_template_arguments=model.get("chat_template_arguments"),
        revision=model.get("revision"),
        trust_remote_code=bool(model.get("trust_remote_code")),
    )
