"""Loading from a folder or a hub name: in safetensors, at a commit, and without its code."""

from __future__ import annotations

import copy
import functools
import logging
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from rlhf_lightning.runs.hub import check_on_hub
from rlhf_lightning.runs.model_folder import (
    ADAPTER_CONFIG,
    is_adapter,
    of_adapter,
)

logger = logging.getLogger(__name__)

COMMIT = re.compile(r"[0-9a-f]{40}")
LONGEST_REASON = 300
NORMALIZATION = ("mean", "std", "normalize_reward")  # keys of config.json
# Generation settings that decide which others have an effect.
_MODES = ("do_sample", "num_beams", "use_cache", "return_dict_in_generate")


@functools.cache
def warn_once(text: str) -> None:
    """Warn once of what policy, reference and value model of one source share."""
    logger.warning("%s", text)


def loading_options(
    source: str | Path, *, revision: str | None = None, trust_remote_code: bool = False
) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that say which version, and whose code runs.

    A folder is checked first: whether it is a model.

    Args:
        source: folder or hub name.
        revision: branch, tag or commit of a hub name; a folder has none.
        trust_remote_code: run the Python code that lies beside the weights.

    Raises:
        ValueError: if code is trusted that can still change: of a hub name without a commit, or of
            another repository that the configuration points to; if a folder is an adapter; or if
            the hub cannot be reached for a name.
    """
    local = Path(source).is_dir()
    if not local:
        check_on_hub(str(source), revision)
    else:
        if is_adapter(source):
            raise ValueError(of_adapter(Path(source)))
        if (Path(source) / ADAPTER_CONFIG).is_file():
            warn_once(
                f"{source} holds a model and an adapter ({ADAPTER_CONFIG}), which is not applied: "
                "merge it with peft if the adapted model is meant, else remove it"
            )
    if trust_remote_code and not local and not COMMIT.fullmatch(revision or ""):
        raise ValueError(
            f"model.trust_remote_code=true runs Python code of {source}, which can change: read "
            f"it and pin it with model.revision=COMMIT (40 hex digits), not {revision}"
        )
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if revision is not None and not local:
        options["revision"] = revision
    if trust_remote_code:
        _refuse_code_from_elsewhere(source, options.get("revision", "main"))
    return options


def _refuse_code_from_elsewhere(source: str | Path, revision: str) -> None:
    with naming_source(source):
        content, _ = PretrainedConfig.get_config_dict(str(source), revision=revision)
    for name, place in (content.get("auto_map") or {}).items():
        if "--" in str(place):
            raise ValueError(
                f"{source} takes the code of {name} from {str(place).partition('--')[0]}, which "
                "no revision pins: copy that code beside the weights, and point auto_map to it"
            )


def load_config(source: str | Path, options: dict[str, Any]) -> PretrainedConfig:
    """Return the configuration of a folder or hub name.

    Raises:
        ValueError: if there is none that can be read.
    """
    with naming_source(source):
        config: PretrainedConfig = AutoConfig.from_pretrained(str(source), **options)
    return config


def reward_normalization(config: Any, source: str | Path) -> tuple[float, float] | None:
    """Return mean and standard deviation that a reward model's own code takes its scores by.

    OpenRLHF writes them into config.json, and plain transformers does not read them.

    Raises:
        ValueError: if they are no numbers, or the deviation is not above 0.
    """
    mean, std = (getattr(config, name, None) for name in NORMALIZATION[:2])
    if mean is None or std is None or not getattr(config, NORMALIZATION[2], True):
        return None
    numbers = all(type(value) in (int, float) and math.isfinite(value) for value in (mean, std))
    if not numbers or std <= 0:
        raise ValueError(
            f"{source}: mean={mean!r} and std={std!r} in its config.json normalize no score: they "
            "are to be numbers, std above 0; or set normalize_reward to false there"
        )
    return float(mean), float(std)


def mended_settings(found: GenerationConfig, source: str | Path) -> GenerationConfig:
    """Return generation settings without those that transformers loads and refuses to save.

    A model that decodes greedily stays greedy: at temperature 0, and beside any temperature
    without `do_sample: true`.
    """
    settings: Any = copy.deepcopy(found)
    if settings.temperature == 0:
        settings.do_sample = False
    modes = GenerationConfig(**{name: getattr(settings, name) for name in _MODES})
    default, wrong = modes.to_dict(), []
    for name, value in settings.to_dict().items():
        if name in _MODES or value == default.get(name, value):
            continue
        alone = copy.deepcopy(modes)
        setattr(alone, name, getattr(settings, name))
        try:
            alone.validate(strict=True)
        except ValueError:
            wrong.append(f"{name}={value!r}")
            setattr(settings, name, getattr(GenerationConfig(), name))
    if wrong:
        warn_once(f"the generation settings of {source} are exported without {', '.join(wrong)}")
    return settings  # type: ignore[no-any-return]


@contextmanager
def naming_source(source: str | Path) -> Iterator[None]:
    """Turn what a library says of a checkpoint that it cannot load into one line that names it."""
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split()).rstrip(".")
        full = any(words in reason for words in ("out of memory", "allocate memory"))
        if isinstance(error, MemoryError) or full:
            raise
        if "custom code" in reason:
            raise ValueError(
                f"cannot load {source}: it needs Python code of its repository, which is not run. "
                "Read it, then set model.trust_remote_code=true, and model.revision=COMMIT for a "
                "hub name"
            ) from error
        if len(reason) > LONGEST_REASON:
            reason = reason[:LONGEST_REASON] + "..."
        raise ValueError(
            f"cannot load {source}: {reason}. Wanted is a folder or hub name in the format of "
            "transformers, its weights in safetensors"
        ) from error
