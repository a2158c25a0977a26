"""A trained module as a Hugging Face folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import lightning as L
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import FLOATING, PathOrName, checked
from rlhf_lightning.distributed.collectives import full_state
from rlhf_lightning.models.adapter_files import merge_adapter
from rlhf_lightning.models.export import (
    complete_config,
    export_policy,
    export_scalar_model,
    generation_settings,
)
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.loading import load_config, loading_options
from rlhf_lightning.models.lora import AdaptedPolicy, AdaptedScalarModel
from rlhf_lightning.models.rounding import base_dtype
from rlhf_lightning.models.transformers_4 import name_old_tokenizer
from rlhf_lightning.runs.atomic import follow_umask
from rlhf_lightning.runs.replaced import check_replaceable, replacing_folder
from rlhf_lightning.text.classifier_tokenizer import classifier_tokenizer
from rlhf_lightning.text.tokenizers import stop_ids


@checked
def export_model(
    module: L.LightningModule,
    folder: PathOrName,
    *,
    dtype: Annotated[torch.dtype, FLOATING] | None = None,
) -> Path:
    """Write the trained model as a folder that plain transformers loads; return it.

    Adapters are merged into their base. With several ranks every one must call it, and the first
    writes.

    Args:
        module: with its models and its tokenizer.
        folder: a new one, or one that this function has written before.
        dtype: dtype of the weights; None keeps fp32. A scalar head stays in fp32.

    Raises:
        FolderTakenError: if the folder has other content.
        ValueError: if nothing is loaded yet, or the module was not built by `from_pretrained`.
        ManifestError: if the adapter's base has been replaced by another model.
    """
    made: Any = module
    model = getattr(module, "model", None) or getattr(module, "policy", None)
    source = module.hparams.get("policy") or module.hparams.get("source")
    if model is None or getattr(module, "tokenizer", None) is None:
        raise ValueError(
            f"{type(module).__name__} has no model to export: build it by from_pretrained() and "
            "train it, or by load_from_checkpoint()"
        )
    check_replaceable(folder)
    state = full_state(model)
    if module.global_rank != 0:
        return Path(folder).expanduser()
    options = {k: module.hparams.get(k) for k in ("revision", "trust_remote_code")}
    options["trust_remote_code"] = bool(options["trust_remote_code"])
    if isinstance(model, AdaptedPolicy | AdaptedScalarModel):
        model = merge_adapter(model, state, load_policy(source, **options))
        made.source.check()  # behind the load: it may take minutes
        state = model.state_dict()
    assert isinstance(model, PolicyModel | ScalarHeadModel)
    with replacing_folder(folder) as staging:
        save_hf_model(
            model,
            made.tokenizer,
            staging,
            state,
            stop_ids=stop_ids(made.tokenizer, source, revision=options["revision"]),
            dtype=dtype or torch.float32,
            base_dtype=torch.float32
            if source is None
            else base_dtype(load_config(source, loading_options(source, **options))),
        )
    return Path(folder).expanduser()


def save_hf_model(
    model: PolicyModel | ScalarHeadModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    state: Mapping[str, Tensor],
    *,
    stop_ids: Sequence[int],
    dtype: torch.dtype = torch.float32,
    base_dtype: torch.dtype = torch.float32,
) -> None:
    """Write weights, config, tokenizer with chat template and, for a policy, its stop ids.

    Args:
        model: model whose architecture is written.
        tokenizer: the one it was trained with.
        folder: a new one, or one that this function has written before.
        state: full state dict of `model`.
        stop_ids: every id that ends a response.
        dtype: dtype of the weights; a scalar head stays in fp32.
        base_dtype: dtype of the model at the root, which config.json then names.
    """
    if isinstance(model, PolicyModel):
        generation = generation_settings(model, tokenizer, stop_ids)
        model.model.generation_config = generation
        export_policy(model, folder, state, dtype=dtype)
        generation.save_pretrained(folder)
        export_tokenizer(model, tokenizer, folder)
    else:
        pad = export_tokenizer(model, tokenizer, folder)
        export_scalar_model(model, folder, state, pad_token_id=pad, dtype=dtype)
    follow_umask(*folder.glob("*.safetensors"))
    complete_config(folder / "config.json", model, dtype, base_dtype)


def export_tokenizer(
    model: PolicyModel | ScalarHeadModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> int:
    """Write the tokenizer that goes with an exported model; return the id that it pads with."""
    if isinstance(model, ScalarHeadModel):
        embedding: Any = model.trunk.get_input_embeddings()
        tokenizer = classifier_tokenizer(tokenizer, len(embedding.weight))
    tokenizer.save_pretrained(folder)
    name_old_tokenizer(folder)
    pad: Any = tokenizer.pad_token_id
    return int(pad)
