"""Loading from a folder or a hub name: in safetensors, whole, at a commit, without its code.

What a checkpoint lacks would be drawn at random: weights are loaded whole or not at all.
"""

from __future__ import annotations

import copy
import functools
import logging
import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import AutoConfig, GenerationConfig, PretrainedConfig

from rlhf_lightning.runs.hub import check_on_hub
from rlhf_lightning.runs.manifest import (
    ADAPTER_CONFIG,
    MANIFEST,
    ManifestError,
    ModelError,
    has_manifest,
    is_adapter,
    of_adapter,
    read_manifest,
)

if TYPE_CHECKING:  # a tokenizer is loaded without them
    import torch
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)

NAMED = 4  # of the tensors that are not as they should be
# Where transformers looks for an adapter to apply.
_NO_ADAPTER = {"subfolder": "no-adapter"}
Exempt = Callable[["PreTrainedModel"], Collection[str]]
NOTHING: Exempt = lambda model: ()  # noqa: E731
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
            warn_once(f"{source} holds an adapter too, which is not applied: merge or remove it")
    if trust_remote_code and not local and not COMMIT.fullmatch(revision or ""):
        told = f"model.trust_remote_code=true runs code of {source}, which can change"
        fix = f"read it, and set model.revision=COMMIT (40 hex digits), not {revision}"
        raise ValueError(f"{told}: {fix}")
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    if revision is not None and not local:
        options["revision"] = revision
    if trust_remote_code:
        version = options.get("revision", "main")
        with naming_source(source):
            content, _ = PretrainedConfig.get_config_dict(str(source), revision=version)
        for name, place in (content.get("auto_map") or {}).items():
            if "--" in str(place):
                fix = "copy it beside the weights, and point auto_map to it"
                raise ValueError(f"{source} takes the code of {name} from {place}: {fix}")
    return options


def load_config(source: str | Path, options: dict[str, Any]) -> PretrainedConfig:
    """Return the configuration of a folder or hub name.

    Raises:
        ModelError: if there is none that can be read.
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
        fix = "give numbers, std above 0, or set normalize_reward to false there"
        raise ValueError(f"{source}: mean={mean!r} and std={std!r} in its config.json: {fix}")
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
            fix = "read it, then set model.trust_remote_code=true, with model.revision=COMMIT"
            raise ModelError(f"cannot load {source}: it needs Python code: {fix}") from error
        wanted = "Wanted is a folder or hub name of transformers, in safetensors"
        raise ModelError(f"cannot load {source}: {reason[:LONGEST_REASON]}. {wanted}") from error


def load_whole(
    cls: Any,
    source: str | Path,
    *,
    dtype: torch.dtype | str,
    options: dict[str, Any],
    not_read: Exempt = NOTHING,
    not_stored: Callable[[list[str]], str | None] = lambda missing: None,
    **extra: Any,
) -> Any:
    """Return what `cls.from_pretrained` returns, after checking that all of it was stored.

    Transformers draws what a checkpoint lacks at random. What it computes or ties is not missing,
    and what it ignores for an architecture is not unexpected. What has no place is a warning.

    Args:
        cls: an auto class of transformers.
        source: folder or hub name, in safetensors; a folder with a `manifest.json` is checked
            against it.
        dtype: dtype of the weights, or "auto".
        options: which version, and whose code runs.
        not_read: model -> names of tensors that are not used, so that they may be missing, or be
            unexpected.
        not_stored: names of missing tensors -> a better message than that they are missing.
        **extra: further arguments of `from_pretrained`.

    Raises:
        ModelError: if a tensor is missing or has another shape than the configuration says.
        ManifestError: if an artifact is not what its manifest says.
    """
    from rlhf_lightning.models.building import reads_weights

    if not reads_weights() and "quantization_config" not in extra:
        return _without_weights(cls, source, dtype, options, extra["config"])
    check_artifact(source)
    with naming_source(source):
        model, info = cls.from_pretrained(
            str(source),
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # refused below, with their names
            adapter_kwargs=_NO_ADAPTER,
            **options,
            **extra,
        )
    spare = set(not_read(model))
    missing = sorted(set(info["missing_keys"]) - spare)
    shapes = sorted(entry for entry in info["mismatched_keys"] if entry[0] not in spare)
    unexpected = listed(sorted(set(info["unexpected_keys"]) - spare))
    if missing:
        held = f" (it holds {unexpected})" if unexpected else ""
        found = f"cannot load {source}: its weights lack {listed(missing)}{held}"
        found += ", which would be random: give a complete checkpoint"
        raise ModelError(not_stored(missing) or found)
    if shapes:
        told = (f"{name} is {list(got)} and not {list(want)}" for name, got, want in shapes)
        raise ModelError(
            f"cannot load {source}: {listed(told)}: the weights are not those of its config.json"
        )
    if unexpected:
        warn_once(f"{type(model).__name__} has no place for {unexpected} of {source}: not loaded")
    return model


def _without_weights(
    cls: Any,
    source: str | Path,
    dtype: torch.dtype | str,
    options: dict[str, Any],
    config: PretrainedConfig,
) -> Any:
    """Return the model on the meta device; its dtypes are those of the rank that has read it."""
    import torch

    held, code = torch.float32 if dtype == "auto" else dtype, options["trust_remote_code"]
    with naming_source(source), torch.device("meta"):
        return cls.from_config(config, dtype=held, trust_remote_code=code)


def check_artifact(source: str | Path) -> None:
    """Check that the files of an artifact of ours are intact; other sources pass.

    Raises:
        ManifestError: if they are not those that its manifest was written for.
    """
    if has_manifest(source):
        read_manifest(source)


@contextmanager
def not_replaced(source: str | Path) -> Iterator[None]:
    """Refuse an artifact that another takes the place of while it is read inside.

    Raises:
        ManifestError: then: the config would be that of one, and the weights those of the other.
    """
    path = Path(source) / MANIFEST
    before = path.read_bytes() if path.is_file() else None
    yield
    if before is not None and path.read_bytes() != before:
        raise ManifestError(f"{source} was published anew while it was loaded: start again")


def outside_trunk(model: PreTrainedModel) -> list[str]:
    """Return the names of tensors that are not in the decoder: of its heads, old and new.

    A new scalar head is put onto the decoder, so the language model's head is not used; `score` is
    that of a reward model.
    """
    trunk: Any = model.base_model
    path = next(name for name, module in model.named_modules() if module is trunk)
    if not path:
        return ["score.weight"]
    own = [name for name in model.state_dict() if not name.startswith(f"{path}.")]
    return ["score.weight", *own]


def listed(names: Iterable[str]) -> str:
    """Return the first few names, and how many more there are."""
    all_names = list(names)
    more = len(all_names) - NAMED
    return ", ".join(all_names[:NAMED]) + (f" and {more} more" if more > 0 else "")
