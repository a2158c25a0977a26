"""A trained module as a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from rlhf_lightning.distributed.collectives import full_state
from rlhf_lightning.models.adapter_files import merge_adapter
from rlhf_lightning.models.export import save_hf_model
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.loading import load_config, loading_options
from rlhf_lightning.models.lora import AdaptedPolicy, AdaptedScalarModel
from rlhf_lightning.models.rounding import base_dtype
from rlhf_lightning.models.tokenizers import stop_ids


def export_model(module: Any, folder: str | Path, *, dtype: torch.dtype | None = None) -> Path:
    """Write what a module has trained as a folder that plain transformers loads; return it.

    Adapters are merged into their base. With several ranks every one must call it, and the first
    writes.

    Args:
        module: that `from_pretrained` or `load_from_checkpoint` built, with its models.
        folder: created if missing.
        dtype: of the weights; None keeps fp32. A scalar head stays in fp32.

    Raises:
        ValueError: if nothing is loaded yet, or the module was not built by `from_pretrained`.
    """
    model = getattr(module, "model", None) or getattr(module, "policy", None)
    source = module.hparams.get("policy") or module.hparams.get("source")
    if model is None or source is None:
        raise ValueError(
            f"{type(module).__name__} has no model to export: build it by from_pretrained() and "
            "train it, or by load_from_checkpoint()"
        )
    state = full_state(model)
    if module.global_rank != 0:
        return Path(folder)
    options = {k: module.hparams[k] for k in ("revision", "trust_remote_code")}
    if isinstance(model, AdaptedPolicy | AdaptedScalarModel):
        model = merge_adapter(model, state, load_policy(source, **options))
        state = model.state_dict()
    assert isinstance(model, PolicyModel | ScalarHeadModel)
    Path(folder).mkdir(parents=True, exist_ok=True)
    save_hf_model(
        model,
        module.tokenizer,
        Path(folder),
        state,
        stop_ids=stop_ids(module.tokenizer, source, revision=options["revision"]),
        dtype=dtype or torch.float32,
        base_dtype=base_dtype(load_config(source, loading_options(source, **options))),
    )
    return Path(folder)
