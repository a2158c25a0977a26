"""Configuration: where it lies, its defaults, and what of it is refused.

Light on purpose: no torch, so that `--help` and a config error answer at once.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, cast

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.hparams import (
    LoraHparams,
    PPOHparams,
    RewardHparams,
    SamplingHparams,
    SFTHparams,
)
from rlhf_lightning.launching import launch_time
from rlhf_lightning.rollout.score_settings import check_scorer

HPARAMS = {
    "lora": LoraHparams,
    "ppo": PPOHparams,
    "reward": RewardHparams,
    "sampling": SamplingHparams,
    "sft": SFTHparams,
}
HPARAMS_BY_NAME = {cls.__name__: cls for cls in HPARAMS.values()}
GET_METHOD = "hydra.utils.get_method"
ALLOWED_TARGETS = (
    "rlhf_lightning.",
    "lightning.",
    "torch.optim.",
    "torch.nn.",
    "transformers.",
    "peft.",
    "torchmetrics.",
)


class ConfigError(Exception):
    """The configuration asks for something that does not exist or is not allowed."""


def conf_dir() -> Path:
    """Return the folder of configurations: inside the package in a wheel, else beside it."""
    here = Path(__file__).resolve().parent
    for folder in (here / "conf", here.parent / "conf"):
        if (folder / "train.yaml").is_file():
            return folder
    raise FileNotFoundError(f"no conf/train.yaml in {here} or beside it: the package is incomplete")


def register() -> None:
    """Make hyper-parameter defaults and `sweeps/` known to Hydra; call before composing.

    Defaults live once, in `hparams.py`: this turns them into the config group `hparams`.
    """
    sweeps = f"file://{conf_dir().parent}"
    OmegaConf.register_new_resolver("rlhf_sweeps", lambda: sweeps, replace=True)
    OmegaConf.register_new_resolver("rlhf_now", launch_time, replace=True)
    store = ConfigStore.instance()
    for name, cls in HPARAMS.items():
        defaults = {f.name: f.default for f in fields(cls) if f.default is not MISSING}
        target = f"{cls.__module__}.{cls.__qualname__}"
        store.store(group="hparams", name=name, node={"_target_": target, **defaults})


def did_you_mean(word: str, known: list[str]) -> str:
    """Return "; did you mean ...?" for the closest known words, or ""."""
    close = difflib.get_close_matches(word, known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(close)}?" if close else ""


def check_config(cfg: DictConfig, extra_targets: tuple[str, ...] = ()) -> None:
    """Refuse unknown top-level keys, a missing experiment and targets off the allowlist.

    Raises:
        ConfigError: with what was found and what to write.
    """
    known = list(OmegaConf.load(conf_dir() / "train.yaml").keys())  # type: ignore[union-attr]
    known += [next(iter(group)) for group in _default_groups()]
    known = [str(key) for key in known if key not in ("defaults", "hydra")]
    for key in map(str, cfg):
        if key not in known:
            groups = ["experiment", "preset", "sweeps"]
            raise ConfigError(
                f"unknown top-level key {key!r}{did_you_mean(key, known + groups)} "
                f"(+experiment=, +preset= and +sweeps= take what stands in conf/ and sweeps/: "
                f"{', '.join(choices('experiment'))})"
            )
    if cfg.stage not in ("sft", "reward", "ppo"):
        raise ConfigError(
            f"stage={cfg.stage}: choose what to train with +experiment=NAME, one of "
            f"{', '.join(choices('experiment'))}"
        )
    _check_gates(cfg)
    for where, target in _targets(OmegaConf.to_container(cfg, resolve=False)):
        if not target.startswith((*ALLOWED_TARGETS, *extra_targets)):
            raise ConfigError(
                f"{where}._target_={target} is not allowed; allowed are "
                f"{', '.join(ALLOWED_TARGETS)} and what "
                "RLHF_ALLOWED_TARGETS lists (prefixes, separated by commas)"
            )


def plain(node: DictConfig) -> dict[str, Any]:
    """Return the node as plain dicts and lists, interpolations resolved."""
    return cast(dict[str, Any], OmegaConf.to_container(node, resolve=True))


def check_hparams(cfg: DictConfig) -> None:
    """Build the hyper-parameters of the stage, so that a wrong one fails before anything runs.

    Raises:
        ConfigError: with the key, what it got and what it wants.
    """
    for node in (cfg.lora, *cfg.module.values()):
        target = node.get("_target_", "") if isinstance(node, DictConfig) else ""
        if not target.startswith("rlhf_lightning.hparams."):
            continue
        values = {k: v for k, v in node.items() if k != "_target_"}
        try:
            HPARAMS_BY_NAME[target.rpartition(".")[2]](**values)
        except (TypeError, ValueError) as error:
            raise ConfigError(str(error)) from error
    if cfg.stage == "ppo":
        _check_batch_arithmetic(cfg)
        _check_scorer(cfg)
        if cfg.lora is not None and cfg.lora.dropout:
            raise ConfigError(
                f"lora.dropout={cfg.lora.dropout}: PPO needs 0, or the ratio does not start at 1"
            )


def _check_scorer(cfg: DictConfig) -> None:
    if cfg.get("scorer") is None:
        raise ConfigError(f"PPO needs a scorer: scorer=NAME, one of {', '.join(choices('scorer'))}")
    missing = sorted(OmegaConf.missing_keys(cfg.scorer))
    if missing:
        raise ConfigError(f"{missing[0]} is not set: add {missing[0]}=...")
    try:
        check_scorer(plain(cfg.scorer))
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error


def _check_batch_arithmetic(cfg: DictConfig) -> None:
    rows, ppo = int(cfg.data.batch_size), cfg.module.ppo
    if rows % ppo.num_minibatches:
        divisors = [n for n in range(1, 17) if rows % n == 0]
        raise ConfigError(
            f"module.ppo.num_minibatches={ppo.num_minibatches} must divide data.batch_size={rows}: "
            f"use one of {divisors}"
        )
    if ppo.kl_target is not None and ppo.kl_horizon * 5 <= rows:
        raise ConfigError(
            f"module.ppo.kl_horizon={ppo.kl_horizon} is too small for data.batch_size={rows}: the "
            f"KL coefficient would change its sign; use more than {rows // 5}"
        )


def choices(group: str) -> list[str]:
    """Return the names of a config group."""
    return sorted(path.stem for path in (conf_dir() / group).glob("*.yaml"))


def explain(error: Exception, overrides: list[str]) -> str:
    """Return Hydra's composition error in one line, with a did-you-mean for a mistyped key."""
    text = str(error).strip().splitlines()[0]
    found = re.search(r"Could not override '([\w./@]+)'", str(error))
    if found is None:
        return text
    path = found.group(1)
    from hydra import compose

    kept = [o for o in overrides if o.split("=")[0].lstrip("+~") != path]
    keys = list(_paths(compose("train", overrides=kept)))
    return f"unknown key {path}{did_you_mean(path, keys)}"


def _default_groups() -> list[dict[str, Any]]:
    defaults = OmegaConf.to_container(OmegaConf.load(conf_dir() / "train.yaml"))["defaults"]  # type: ignore[index,call-overload]
    return [item for item in defaults if isinstance(item, dict)]


def _check_gates(cfg: DictConfig) -> None:
    for name, gate in cfg.gates.items():
        bounds = [key for key in ("at_least", "at_most") if gate.get(key) is not None]
        if not gate.get("metric") or len(bounds) != 1:
            raise ConfigError(
                f"gates.{name}={OmegaConf.to_container(gate)} needs metric and exactly one of "
                "at_least and at_most"
            )


def _targets(node: Any, where: str = "") -> Iterator[tuple[str, str]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            path = f"{where}.{key}" if where else str(key)
            if key == "_target_" and value != GET_METHOD:
                yield where, str(value)
            elif key == "_target_":  # what it names is the real target
                yield where, str(node.get("path"))
            yield from _targets(value, path)
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _targets(value, f"{where}[{index}]")


def _paths(node: Any, where: str = "") -> Iterator[str]:
    if isinstance(node, DictConfig):
        for key in map(str, node):
            path = f"{where}.{key}" if where else str(key)
            yield path
            if not OmegaConf.is_missing(node, key) and not OmegaConf.is_interpolation(node, key):
                yield from _paths(node[key], path)
