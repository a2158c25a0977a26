"""Weights are loaded whole or not at all: what a checkpoint lacks would be drawn at random."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from rlhf_lightning.models.building import reads_weights
from rlhf_lightning.models.loading import naming_source, warn_once
from rlhf_lightning.runs.manifest import has_manifest, read_manifest

NAMED = 4  # of the tensors that are not as they should be
# Where transformers looks for an adapter to apply.
_NO_ADAPTER = {"subfolder": "no-adapter"}
Exempt = Callable[[PreTrainedModel], Collection[str]]
NOTHING: Exempt = lambda model: ()  # noqa: E731


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
        ValueError: if a tensor is missing or has another shape than the configuration says.
        ManifestError: if an artifact is not what its manifest says.
    """
    if not reads_weights() and "quantization_config" not in extra:
        # On the meta device; its dtypes are those of the rank that has read it.
        held = torch.float32 if dtype == "auto" else dtype
        with naming_source(source), torch.device("meta"):
            code = options["trust_remote_code"]
            return cls.from_config(extra["config"], dtype=held, trust_remote_code=code)
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
        others = f" It holds {unexpected} instead." if unexpected else ""
        raise ValueError(
            not_stored(missing)
            or f"cannot load {source}: {listed(missing)} {'is' if len(missing) == 1 else 'are'} "
            f"missing from its weights, and would be random numbers.{others} Give a complete "
            "checkpoint whose names are those of transformers"
        )
    if shapes:
        told = (f"{name} is {list(got)} and not {list(want)}" for name, got, want in shapes)
        raise ValueError(
            f"cannot load {source}: {listed(told)}: the weights are not those of its config.json"
        )
    if unexpected:
        warn_once(f"{type(model).__name__} has no place for {unexpected} of {source}: not loaded")
    return model


def check_artifact(source: str | Path) -> None:
    """Check that the files of an artifact of ours are intact; other sources pass.

    Raises:
        ManifestError: if they are not those that its manifest was written for.
    """
    if has_manifest(source):
        read_manifest(source)


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
