"""A trained module as a Hugging Face folder."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import lightning as L
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import FLOATING, PathOrName, checked
from rlhf_lightning.distributed.collectives import full_state
from rlhf_lightning.models.adapter_files import merge_adapter, save_adapter
from rlhf_lightning.models.export import (
    complete_config,
    export_policy,
    export_scalar_model,
    generation_settings,
    name_old_tokenizer,
    weights_by_file_name,
)
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.loading import load_config, loading_options
from rlhf_lightning.models.lora import AdaptedPolicy, AdaptedScalarModel
from rlhf_lightning.models.ppo_models import ADAPTER
from rlhf_lightning.models.precision import LEAST_KEPT, Rounding, base_dtype, measure_rounding
from rlhf_lightning.runs.atomic import follow_umask
from rlhf_lightning.runs.hub import hub_snapshot
from rlhf_lightning.runs.lock import check_replaceable, replacing_folder
from rlhf_lightning.runs.manifest import Source
from rlhf_lightning.text.tokenizers import classifier_tokenizer, stop_ids

logger = logging.getLogger(__name__)


@checked
def export_model(
    module: L.LightningModule,
    folder: PathOrName,
    *,
    dtype: Annotated[torch.dtype, FLOATING] | None = None,
) -> Path:
    """Write the trained model as a folder that plain transformers loads; return it.

    Adapters are merged into their base, and stand by themselves in `adapter/`. With several ranks
    every one must call it, and the first writes.

    Args:
        module: with its models and its tokenizer.
        folder: a new one, or one that this function has written before.
        dtype: dtype of the weights; None keeps fp32. A scalar head stays in fp32.

    Raises:
        FolderTakenError: if the folder has other content.
        ValueError: if nothing is loaded yet, or the module was not built by `from_pretrained`.
        ManifestError: if the adapter's base has been replaced by another model.
    """
    model = getattr(module, "model", None) or getattr(module, "policy", None)
    if model is None or getattr(module, "tokenizer", None) is None:
        told = f"{type(module).__name__} has no model to export"
        raise ValueError(f"{told}: train it, or use load_from_checkpoint()")
    check_replaceable(folder)
    trained = TrainedModel(
        model,
        module.tokenizer,  # type: ignore[arg-type]
        full_state(model),
        getattr(module, "source", None),
        trust_remote_code=bool(module.hparams.get("trust_remote_code")),
    )
    if module.global_rank == 0:
        with replacing_folder(folder) as staging:
            trained.write(staging, dtype=dtype or torch.float32)
    return Path(folder).expanduser()


@dataclass(frozen=True)
class TrainedModel:
    """A trained model, and the model that it started from.

    Args:
        model: whole, or an adapter on its base.
        tokenizer: the one it was trained with.
        state: full state dict of `model`, on the CPU.
        source: the model that training started from; None for random weights.
        trust_remote_code: run the code beside that model's weights.
    """

    model: PolicyModel | ScalarHeadModel
    tokenizer: PreTrainedTokenizerBase
    state: dict[str, Tensor]
    source: Source | None
    trust_remote_code: bool = False

    def write(self, folder: Path, *, dtype: torch.dtype | Literal["auto"]) -> Rounding | None:
        """Write a Hugging Face folder; an adapter is merged, and stands by itself in `adapter/`.

        Args:
            folder: a new one.
            dtype: of the weights; "auto" is that of the start, or fp32 where rounding would lose
                more than a tenth of what training changed.

        Returns:
            The cost of rounding; None where the weights are in fp32.

        Raises:
            ManifestError: if another model than the adapter's base is in its place by now.
        """
        model, state, start, revision = self.model, self.state, None, None
        base, cost, kept = torch.float32, None, None
        if self.source is not None:
            start, revision = self.source.name, self.source.revision
            origin: dict[str, Any] = {
                "revision": revision,
                "trust_remote_code": self.trust_remote_code,
            }
            base = base_dtype(load_config(start, loading_options(start, **origin)))
            if isinstance(model, AdaptedPolicy | AdaptedScalarModel):
                self.write_adapter(folder / ADAPTER)
                # The base is read again, as what was trained on may be rounded.
                model = merge_adapter(model, state, load_policy(start, **origin))
                state = model.state_dict()
                self.source.check()  # behind the load: it may take minutes
                merged = weights_by_file_name(model, state)
                kept = measure_rounding(merged, start, torch.bfloat16, revision=revision).kept
        chosen = base if dtype == "auto" else dtype
        if chosen != torch.float32:
            weights = weights_by_file_name(model, state)
            cost = measure_rounding(weights, start, chosen, revision=revision)
            if _loses_much(cost, insists=dtype != "auto"):
                chosen, cost = torch.float32, None
        stops = stop_ids(self.tokenizer, start, revision=revision)
        dtypes: Any = {"dtype": chosen, "base_dtype": base, "kept": kept}
        save_hf_model(model, self.tokenizer, folder, state, stop_ids=stops, **dtypes)
        return cost

    def write_adapter(self, folder: Path) -> None:
        """Write the adapter alone, with its tokenizer, as a folder that PEFT loads onto the base.

        Raises:
            ValueError: if the whole model was trained.
            ManifestError: if another model than the adapter's base is in its place by now.
        """
        model, source = self.model, self.source
        if not isinstance(model, AdaptedPolicy | AdaptedScalarModel) or source is None:
            raise ValueError("the run trained the whole model and no adapter (lora: null)")
        source.check()
        # By its whole path: a relative one would lead elsewhere from another working folder.
        place = os.path.abspath(source.name) if Path(source.name).is_dir() else source.name
        base, revision = hub_snapshot(source.name) or (place, source.revision)
        named = {"base_fingerprint": source.fingerprint, "base_revision": revision}
        save_adapter(model, folder, self.state, base=base, **named)
        export_tokenizer(model, self.tokenizer, folder)


def _loses_much(cost: Rounding, *, insists: bool) -> bool:
    """Return whether the weights stay in fp32, because rounding would lose what was learnt."""
    if cost.kept is None or cost.kept >= LEAST_KEPT:
        return False
    logger.warning(
        "bf16 keeps %.0f %% of what training changed: the export %s",
        100 * cost.kept,
        "loses the rest; export.dtype=fp32 keeps it"
        if insists
        else "stays in fp32 (export.dtype=bf16 insists)",
    )
    return not insists


def save_hf_model(
    model: PolicyModel | ScalarHeadModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    state: Mapping[str, Tensor],
    *,
    stop_ids: Sequence[int],
    dtype: torch.dtype = torch.float32,
    base_dtype: torch.dtype = torch.float32,
    kept: float | None = None,
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
        kept: the part of a merged adapter that bf16 keeps, likewise.
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
    complete_config(folder / "config.json", model, dtype, base_dtype, kept)


def export_tokenizer(
    model: PolicyModel | ScalarHeadModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> int:
    """Write the tokenizer that goes with an exported model; return the id that it pads with."""
    if isinstance(model, ScalarHeadModel):
        tokenizer = classifier_tokenizer(tokenizer)
    tokenizer.save_pretrained(folder)
    name_old_tokenizer(folder)
    pad: Any = tokenizer.pad_token_id
    return int(pad)
