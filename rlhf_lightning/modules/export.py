"""A trained module as a Hugging Face folder."""

from __future__ import annotations

import logging
import os
import shutil
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
    weights_by_file_name,
)
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.loading import load_config, loading_options
from rlhf_lightning.models.lora import AdaptedPolicy, AdaptedScalarModel
from rlhf_lightning.models.ppo_models import ADAPTER
from rlhf_lightning.models.rounding import Rounding, base_dtype, measure_rounding
from rlhf_lightning.models.transformers_4 import name_old_tokenizer
from rlhf_lightning.runs.atomic import follow_umask
from rlhf_lightning.runs.hub import hub_snapshot
from rlhf_lightning.runs.manifest import Source
from rlhf_lightning.runs.publish import check_replaceable, replacing_folder
from rlhf_lightning.text.tokenizers import classifier_tokenizer, stop_ids

logger = logging.getLogger(__name__)
LEAST_KEPT = 0.9  # of what training changed, that rounding must keep


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
        raise ValueError(
            f"{type(module).__name__} has no model to export: build it by from_pretrained() and "
            "train it, or by load_from_checkpoint()"
        )
    check_replaceable(folder)
    state = full_state(model)
    if module.global_rank == 0:
        trained = Trained(
            model,
            module.tokenizer,  # type: ignore[arg-type]
            dict(state),
            getattr(module, "source", None),
            trust_remote_code=bool(module.hparams.get("trust_remote_code")),
        )
        with replacing_folder(folder) as staging:
            trained.write(staging, dtype=dtype or torch.float32)
    return Path(folder).expanduser()


@dataclass(frozen=True)
class Trained:
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

    @property
    def origin(self) -> dict[str, Any]:
        """Options with which the start is loaded."""
        revision = None if self.source is None else self.source.revision
        return {"revision": revision, "trust_remote_code": self.trust_remote_code}

    def write(
        self, folder: Path, *, dtype: torch.dtype | Literal["auto"], full: Path | None = None
    ) -> Rounding | None:
        """Write a Hugging Face folder; an adapter is merged, and stands by itself in `adapter/`.

        Args:
            folder: a new one.
            dtype: of the weights; "auto" is that of the start, or fp32 where rounding would lose
                more than a tenth of what training changed.
            full: gets the same in fp32, if `folder` is not.

        Returns:
            The cost of rounding, if the weights were rounded.

        Raises:
            ManifestError: if another model than the adapter's base is in its place by now.
        """
        model, state = self.model, self.state
        if isinstance(model, AdaptedPolicy | AdaptedScalarModel):
            self.write_adapter(folder / ADAPTER)
            # The base is read again, as what was trained on may be rounded.
            model = merge_adapter(model, state, load_policy(self._start, **self.origin))
            state = model.state_dict()
            self.source.check()  # type: ignore[union-attr]  # behind the load: it may take minutes
        base, cost = torch.float32, None
        if (start := self._start) is not None:
            base = base_dtype(load_config(start, loading_options(start, **self.origin)))
        chosen = base if dtype == "auto" else dtype
        if chosen != torch.float32:
            weights = weights_by_file_name(model, state)
            revision = self.origin["revision"]
            cost = measure_rounding(weights, self._start, chosen, revision=revision)
            if _loses_much(cost, insists=dtype != "auto"):
                chosen, cost = torch.float32, None
        stops = stop_ids(self.tokenizer, self._start, revision=self.origin["revision"])
        options: dict[str, Any] = {"stop_ids": stops, "base_dtype": base}
        save_hf_model(model, self.tokenizer, folder, state, dtype=chosen, **options)
        if full is not None and chosen != torch.float32:
            save_hf_model(model, self.tokenizer, full, state, dtype=torch.float32, **options)
            if (folder / ADAPTER).is_dir():
                shutil.copytree(folder / ADAPTER, full / ADAPTER)
        return cost

    def write_adapter(self, folder: Path, *, alone: bool = False) -> None:
        """Write the adapter with its tokenizer; `alone` if the base is still in its place.

        Raises:
            ValueError: if the whole model was trained.
            ManifestError: if another model than the adapter's base is in its place by now.
        """
        model = self.model
        if not isinstance(model, AdaptedPolicy | AdaptedScalarModel) or self.source is None:
            raise ValueError("the run trained the whole model and no adapter (lora: null)")
        base, revision = base_of_adapter(self.source.name, self.source.revision)
        named = {"base_fingerprint": self.source.fingerprint, "base_revision": revision}
        save_adapter(model, folder, self.state, base=base, **named)
        export_tokenizer(model, self.tokenizer, folder)
        if alone:
            self.source.check()

    @property
    def _start(self) -> str | None:
        return None if self.source is None else self.source.name


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


def base_of_adapter(start: str, revision: str | None) -> tuple[str, str | None]:
    """Return how an adapter names its base: on the hub with its commit, else a whole path.

    A relative one would lead elsewhere from another working folder.
    """
    if found := hub_snapshot(start):
        return found
    if Path(start).is_dir():
        return os.path.abspath(start), None
    return start, revision


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
        tokenizer = classifier_tokenizer(tokenizer)
    tokenizer.save_pretrained(folder)
    name_old_tokenizer(folder)
    pad: Any = tokenizer.pad_token_id
    return int(pad)
