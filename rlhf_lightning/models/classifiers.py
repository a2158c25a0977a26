"""Sequence classifiers of Hugging Face, loaded as they are, as frozen models that score texts.

Legend: b rows of a micro-batch, W their padded width, L labels, H hidden size.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from rlhf_lightning.functional.sequences import last_token_index
from rlhf_lightning.models.building import reads_weights
from rlhf_lightning.models.heads import PolicyModel, ScalarHead
from rlhf_lightning.models.loading import listed, load_whole, loading_options

_HEADS = ("score", "classifier", "out_proj", "logits_proj")


class SequenceClassifier(nn.Module):
    """A sequence classifier whose forward returns its logits, fp32.

    A decoder with a linear `score` is read at the last token that the attention mask shows.
    Transformers itself looks for the last token that is not the pad token, which is the one before
    EOS where EOS is the pad token. Every other model is called as it is.

    Args:
        model: an instance of `AutoModelForSequenceClassification`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model: Any = model
        self.reads_last_token = isinstance(getattr(model, "score", None), nn.Linear)
        for head in _heads(model).values():
            head.float().__class__ = ScalarHead
        # What `export_scalar_model` leaves out of the head, which has no bias there.
        self.offset = float(getattr(model.config, "reward_offset", 0.0))

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Return `[b, L]` logits.

        Args:
            input_ids: `[b, W]`, padded on the right.
            attention_mask: `[b, W]` bool, True on real tokens.
            token_type_ids: `[b, W]`, for models whose tokenizer makes them.
        """
        mask = attention_mask.long()
        if self.reads_last_token:
            trunk = self.model.base_model
            output = trunk(input_ids=input_ids, attention_mask=mask, use_cache=False)
            rows = torch.arange(len(input_ids), device=input_ids.device)
            last = output.last_hidden_state[rows, last_token_index(attention_mask)]  # [b, H]
            logits: Tensor = self.model.score(last)
        else:
            types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
            logits = self.model(input_ids=input_ids, attention_mask=mask, **types).logits
        return logits.float() + self.offset


def load_classifier(
    source: str | Path, *, revision: str | None = None, dtype: str = "float32"
) -> SequenceClassifier:
    """Return a frozen sequence classifier of a folder or hub name, in safetensors.

    Args:
        source: folder or hub name.
        revision: branch, tag or commit of a hub name.
        dtype: of the weights, as torch names it; "auto" is that of the checkpoint, and for the head
            its own.

    Raises:
        ValueError: if the checkpoint stores no classification head, or needs code from its
            repository, which is never run.
    """
    loading = loading_options(source, revision=revision)

    def not_stored(missing: list[str]) -> str | None:
        if not any(name.split(".")[-2] in _HEADS for name in missing if "." in name):
            return None
        fix = "a reward model needs a trained head (AutoModelForSequenceClassification)"
        return f"{source} stores no {listed(missing)}: {fix}"

    try:
        model = load_whole(
            AutoModelForSequenceClassification,
            source,
            config=AutoConfig.from_pretrained(str(source), **loading),
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            options=loading,
            not_stored=not_stored,
        )
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        fix = "serve the model and use scorer=http"
        raise ValueError(f"{source} needs code of its own, which is never run: {fix}") from error
    if dtype == "auto" and reads_weights():
        _restore_heads(model, str(source), revision)
    return SequenceClassifier(model).eval().requires_grad_(False)


def _heads(model: PreTrainedModel) -> dict[str, nn.Linear]:
    """Return the linear layers that give the logits, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module.out_features == model.config.num_labels
        and name.rpartition(".")[2] in _HEADS
    }


def _restore_heads(model: PreTrainedModel, source: str, revision: str | None) -> None:
    """Read the head again, as it is stored: it was rounded to the dtype of the others."""
    for name, head in _heads(model).items():
        for key, parameter in head.named_parameters(prefix=name):
            try:
                index = cached_file(source, SAFE_WEIGHTS_INDEX_NAME, revision=revision)
                file = json.loads(Path(str(index)).read_text(encoding="utf-8"))["weight_map"][key]
            except OSError:  # in one file
                file = SAFE_WEIGHTS_NAME
            with safe_open(cached_file(source, file, revision=revision), "pt") as tensors:
                parameter.data = tensors.get_tensor(key).to(parameter.device)


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids that end a text, as the model's configuration names them."""
    eos = model.config.get_text_config().eos_token_id
    return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])


@torch.no_grad()
def check_reading(classifier: SequenceClassifier, pad_id: int) -> None:
    """Check that a row has the score that the model itself gives it, alone and padded.

    Raises:
        ValueError: if it has another one: the model pools at the last column, or does something to
            its score after the head.
    """
    model = classifier.model
    parameter = next(model.parameters())
    if parameter.is_meta:  # another rank reads the weights
        return
    eos = eos_ids(model) - {pad_id}
    plain = [i for i in range(32) if i not in {pad_id, *eos_ids(model)}][:8]
    ends = [] if classifier.reads_last_token else sorted(eos)[:1]
    row = torch.tensor([[*plain, *ends]], device=parameter.device)  # [1, W]
    real = torch.ones_like(row, dtype=torch.bool)
    padding = torch.full_like(row[:, :3], pad_id)
    mask = torch.cat([real, torch.zeros_like(padding, dtype=torch.bool)], 1)
    own = model(input_ids=row, attention_mask=real.long()).logits.float() + classifier.offset
    tolerance = 1e-3 if parameter.dtype == torch.float32 else 5e-2
    alone, padded = classifier(row, real), classifier(torch.cat([row, padding], 1), mask)
    for found in (alone, padded):
        if not torch.allclose(found, own, rtol=tolerance, atol=tolerance):
            told = f"{type(model).__name__} gives a text {own.tolist()}, {alone.tolist()} read here"
            behind = f"and {padded.tolist()} with padding behind it"
            raise ValueError(f"{told} {behind}: serve it and use scorer=http")


def max_positions(model: PreTrainedModel) -> int | None:
    """Return how many tokens the model has positions for; None if it does not say."""
    for name, module in model.named_modules():
        if not (name.endswith("position_embeddings") and isinstance(module, nn.Embedding)):
            continue
        if module.padding_idx is not None:  # RoBERTa counts positions from behind its pad token
            return module.num_embeddings - module.padding_idx - 1
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(positions) if positions is not None and positions > 0 else None  # XLNet says -1


def prompt_room(policy: PolicyModel, wanted: int, max_new_tokens: int) -> int:
    """Return the longest prompt, at most `wanted`, that leaves room for a response, in tokens.

    Raises:
        ValueError: if no prompt leaves room.
    """
    limit = max_positions(policy.model)
    if limit is not None and max_new_tokens >= limit:
        told = f"max_new_tokens={max_new_tokens} leaves no room for a prompt"
        raise ValueError(f"{told} in the {limit} positions of the policy")
    return wanted if limit is None else min(wanted, limit - max_new_tokens)
