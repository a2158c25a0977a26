"""Errors of what does not compose, in one line: key, got, wanted, nearest key, fix."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from hydra.errors import HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from rlhf_lightning.app.config.compose import (
    ConfigError,
    choices,
    composed,
    describe_interpolation,
    dotted_keys,
)
from rlhf_lightning.app.config.targets import listed
from rlhf_lightning.misfit import did_you_mean

COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, ValueError, TypeError)
OF_TRAINING = ("logger=", "logger.", "debug=")  # how words begin that training alone takes
ADDED = ("experiment", "preset", "sweeps")  # groups that are in no defaults list

# Names of Lightning, TRL and other trainers; * is the stage.
_THEIRS = {
    "module.*.learning_rate": "lr learning_rate actor_lr policy_lr",
    "module.*.max_grad_norm": "max_grad_norm gradient_clip_val gradient_clipping clip_grad",
    "module.*.micro_batch_size": "micro_batch_size micro_batch per_device_train_batch_size "
    "accumulate_grad_batches gradient_accumulation_steps",
    "module.*.kl_coef": "kl_coef beta init_kl_coef kl_loss_coef",
    "module.*.beta": "beta dpo_beta",
    "module.*.cliprange": "cliprange clip_range epsilon clip_ratio eps_clip",
    "module.*.num_ppo_epochs": "num_ppo_epochs ppo_epochs",
    "module.sampling.max_new_tokens": "max_new_tokens max_completion_length response_length",
    "module.sampling.temperature": "temperature",
    "data.num_epochs": "max_epochs num_epochs epochs num_train_epochs total_epochs",
    "data.num_iterations": "num_iterations max_steps max_iterations total_steps",
    "data.batch_size": "batch_size train_batch_size global_batch_size",
    "data.num_generations": "num_generations group_size",
    "data.max_length": "max_length max_seq_length max_seq_len cutoff_len",
    "data.max_prompt_length": "max_prompt_length",
    "optimizer.weight_decay": "weight_decay",
    "scheduler.warmup_fraction": "warmup_fraction warmup_ratio warmup_steps",
    "scheduler.name": "lr_scheduler_type lr_scheduler",
    "trainer.precision": "precision bf16 fp16 dtype torch_dtype",
    "trainer.devices": "devices gpus num_gpus num_processes",
    "trainer.validations": "val_check_interval check_val_every_n_epoch eval_steps eval_strategy",
    "callbacks.checkpoint.every_n_iterations": "save_steps save_freq every_n_train_steps",
    "lora.r": "lora_r lora_rank",
    "lora.alpha": "lora_alpha",
    "lora.target_modules": "lora_target_modules",
    "paths.outputs": "output_dir default_root_dir save_path",
    "ckpt_path": "resume_from_checkpoint",
    "logger.project": "wandb_project",
    "logger.kind": "report_to",
    "dataset.path": "dataset_path data_path train_file",
    "dataset.hub_name": "dataset_name",
}


def composition(entry: str, overrides: Sequence[str]) -> DictConfig:
    """Return what a command line composes, with the node `hydra`.

    Raises:
        ConfigError: if it does not, with what can be written.
    """
    try:
        return composed(entry, list(overrides))
    except COMPOSE_ERRORS as error:
        raise ConfigError(explain(error, list(overrides), entry)) from error


def explain(error: Exception, overrides: list[str], config_name: str = "train") -> str:
    """Return a composition error in one line, with a did-you-mean for mistyped names.

    Args:
        error: what `hydra.compose` raised, one of `COMPOSE_ERRORS`.
        overrides: overrides of the command line.
        config_name: name of the composed configuration.
    """
    if (file := _a_file(overrides)) is not None:
        return file
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        known = sorted(error.options or choices(group))
        return f"{group}={name} is none of {listed(known)}{did_you_mean(name, known)}"
    text = str(error).strip()
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override, text)
    for pattern, answer in _ANSWERS:
        found = re.search(pattern, text)
        if found is not None:
            return answer(found, overrides)
    found = re.search(r"Could not override '([\w./@]+)'", text)
    if found is not None:
        return _unknown(found.group(1), overrides, config_name)
    if isinstance(error, OmegaConfBaseException):
        return describe_interpolation(error)
    return text.partition("\n")[0] or type(error).__name__


def _a_file(overrides: list[str]) -> str | None:
    """Explain how to give a file of records, if one is in the place of a dataset's name."""
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if key == "dataset" and Path(value).is_file():
            return (
                f"{override}: a file of records is given by dataset=files dataset.path={value} "
                "dataset.name=NAME, where NAME is what its models are kept under"
            )
    return None


def _unreadable(override: str, text: str) -> str:
    if override.startswith("-") or ("=" not in override and not override.startswith("~")):
        return f"{override!r} sets nothing: write KEY=VALUE, such as seed=2"
    reason = text.removeprefix(f"Error parsing override '{override}'").strip().partition("\n")[0]
    override = " ".join(override.split())
    return (
        f"{override} cannot be read ({reason or 'a blank, a comma or a bracket'}): close what is "
        f"opened, and quote a text that holds such signs, as in "
        f"'{override.partition('=')[0]}=\"a, b\"'"
    )


def _several(found: re.Match[str], overrides: list[str]) -> str:
    override = found.group(1)
    key, _, value = override.partition("=")
    return (
        f"{override} gives several values: -m runs a sweep over them; one text with commas is "
        f"quoted, as in '{key}=\"{value}\"', and a list is [{value}]"
    )


def _twice(found: re.Match[str], overrides: list[str]) -> str:
    group = found.group(1)
    given = [o.lstrip("+") for o in overrides if o.lstrip("+").startswith(f"{group}=")]
    return f"{' and '.join(given) or group}: give {group} once"


def _no_name(found: re.Match[str], overrides: list[str]) -> str:
    for override in overrides:
        key, _, value = override.lstrip("+").partition("=")
        if not key:
            return f"{override!r} names no key: write KEY=VALUE, such as seed=2"
        known = choices(key) if "." not in key else []
        if known and value not in known:
            return f"{key}={value} is none of {listed(known)}{did_you_mean(value, known)}"
    return found.group(0)


_ANSWERS = (
    (r"Ambiguous value for argument '([^']+)'", _several),
    (r"Sweep parameters '([^']+)'", _several),
    (r"Multiple values for ([\w/]+)", _twice),
    (r"Config group override must be a string or a list\. Got \w+", _no_name),
    (r"argument of type '\w+' is not iterable", _no_name),
)


def _unknown(path: str, overrides: list[str], config_name: str) -> str:
    given = next((o for o in overrides if o.split("=")[0].lstrip("+~") == path), path)
    if path in ADDED:
        return f"{given} would replace a choice that is not there: add it with +{given}"
    if given.startswith(OF_TRAINING):
        return f"{given} is for training, and rlhf-{config_name} does not train: leave it out"
    kept = [o for o in overrides if o != given]
    try:
        keys = list(dotted_keys(composed(config_name, kept)))
    except COMPOSE_ERRORS:  # it is not the only mistake
        keys = []
    if ours := _ours(path, keys):
        return f"unknown key {path}: here it is {' or '.join(ours)}"
    length = "data.num_iterations"
    if length in keys and path.rpartition(".")[2].lower() in _THEIRS["data.num_epochs"].split():
        return f"unknown key {path}: here {length} is the length, in batches of data.batch_size"
    return f"unknown key {path}{did_you_mean(path, keys)}"


def _ours(path: str, keys: Sequence[str]) -> list[str]:
    """Return the keys of ours for a key that other trainers have."""
    name = path.rpartition(".")[2].lower()
    wanted = [
        ours.replace(".", r"\.").replace("*", r"\w+")
        for ours, theirs in _THEIRS.items()
        if name in theirs.split()
    ]
    return [key for key in keys if any(re.fullmatch(one, key) for one in wanted)]
