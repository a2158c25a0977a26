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
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForSequenceClassification, PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file

from rlhf_lightning.functional.sequences import last_token_index
from rlhf_lightning.models.building import reads_weights
from rlhf_lightning.models.loading import loading_options
from rlhf_lightning.models.whole_weights import listed, load_whole

DTYPES = ("float32", "bfloat16", "auto")
_HEADS = ("score", "classifier", "out_proj", "logits_proj")


class Float32Linear(nn.Linear):
    """A linear layer that is computed in fp32 whatever its weights and the autocast are.

    In bf16 a score of 9 could only be 9 or 9.0625.

    Args:
        layer: gives the weights, which are not copied.
    """

    keeps_dtype = True  # where the model is sharded

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(
            layer.in_features, layer.out_features, layer.bias is not None, device="meta"
        )
        self.weight, self.bias = layer.weight, layer.bias

    def forward(self, input: Tensor) -> Tensor:
        """Return fp32 `[..., out_features]`."""
        with torch.autocast(input.device.type, enabled=False):
            bias = None if self.bias is None else self.bias.float()
            return linear(input.float(), self.weight.float(), bias)


class SequenceClassifier(nn.Module):
    """A sequence classifier whose forward returns its logits, fp32.

    A decoder with a linear `score` is read at the last token that the attention mask shows.
    Transformers itself looks for the last token that is not the pad token, which is the one before
    EOS where EOS is the pad token. Every other model is called as it is.

    Args:
        model: an instance of `AutoModelForSequenceClassification`.

    Raises:
        ValueError: if the score at the last token is not what the model itself returns, or if the
            model overlooks EOS because that is its pad token.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model: Any = model
        self.reads_last_token = isinstance(getattr(model, "score", None), nn.Linear)
        _put_head_into_fp32(model)
        # What `export_scalar_model` leaves out of the head, which has no bias there.
        self.offset = float(getattr(model.config, "reward_offset", 0.0))
        _check_reading(self)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, token_type_ids: Tensor | None = None
    ) -> Tensor:
        """Return `[b, L]` logits.

        Args:
            input_ids: `[b, W]`; padded on the right where the last token is read.
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
        dtype: dtype of the weights; "auto" keeps that of the checkpoint, and for the last layer its
            own.

    Raises:
        ValueError: if `dtype` is unknown, if the checkpoint stores no classification head, or if it
            needs code from its repository, which is never run.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} of a reward model must be one of {', '.join(DTYPES)}")
    loading = loading_options(source, revision=revision)

    def not_stored(missing: list[str]) -> str | None:
        if not any(name.split(".")[-2] in _HEADS for name in missing if "." in name):
            return None
        return (
            f"{source} stores no {listed(missing)}: a reward model needs a trained classification "
            f"head, and {config.architectures} has none; give a checkpoint of "
            "AutoModelForSequenceClassification"
        )

    try:
        config = AutoConfig.from_pretrained(str(source), **loading)
        model = load_whole(
            AutoModelForSequenceClassification,
            source,
            config=config,
            dtype=dtype if dtype == "auto" else getattr(torch, dtype),
            options=loading,
            not_stored=not_stored,
        )
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        raise ValueError(
            f"{source} needs code from its own repository, which is never run: serve the model "
            "and use scorer=http"
        ) from error
    if dtype == "auto" and reads_weights():
        _restore_head(model, str(source), revision)
    return SequenceClassifier(model).eval().requires_grad_(False)


def eos_ids(model: PreTrainedModel) -> frozenset[int]:
    """Return the ids that end a text, as the model's configuration names them."""
    eos = model.config.get_text_config().eos_token_id
    return frozenset(eos if isinstance(eos, list) else [] if eos is None else [eos])


@torch.no_grad()
def reads_padding_on_left(classifier: SequenceClassifier, pad_id: int) -> bool:
    """Return on which side padding does not change the score, found by trial.

    Absolute positions and pooling at the first token need it on the right, pooling at the last
    column (XLNet) on the left. The tokenizer's setting is no guide: it may be that of generation.

    Raises:
        ValueError: if padding changes the score on both sides.
    """
    model = classifier.model
    if classifier.reads_last_token or next(model.parameters()).is_meta:
        return False
    row = _probe(model, pad_id)  # [1, W]
    eos = sorted(eos_ids(model) - {pad_id})
    row[:, -1] = eos[0] if eos else row[:, -1]
    real = torch.ones_like(row, dtype=torch.bool)
    padding = torch.full_like(row[:, :3], pad_id)
    hidden = torch.zeros_like(padding, dtype=torch.bool)
    alone = classifier(row, real)
    right = classifier(torch.cat([row, padding], 1), torch.cat([real, hidden], 1))
    left = classifier(torch.cat([padding, row], 1), torch.cat([hidden, real], 1))
    tolerance = 1e-3 if next(model.parameters()).dtype == torch.float32 else 5e-2
    if torch.allclose(right, alone, rtol=tolerance, atol=tolerance):
        return False
    if torch.allclose(left, alone, rtol=tolerance, atol=tolerance):
        return True
    raise ValueError(
        f"{type(model).__name__} scores a text differently when it is padded: {alone.tolist()} "
        f"alone, {right.tolist()} and {left.tolist()} with padding behind and before it; serve it "
        "and use scorer=http"
    )


def max_positions(model: PreTrainedModel) -> int | None:
    """Return how many tokens the model has positions for; None if it does not say."""
    for name, module in model.named_modules():
        if not (name.endswith("position_embeddings") and isinstance(module, nn.Embedding)):
            continue
        if module.padding_idx is not None:  # RoBERTa counts positions from behind its pad token
            return module.num_embeddings - module.padding_idx - 1
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    return int(positions) if positions is not None and positions > 0 else None  # XLNet says -1


def _restore_head(model: PreTrainedModel, source: str, revision: str | None) -> None:
    """Read the last layer again, as it is stored: it was rounded to the dtype of the others."""
    name, head = _head(model)
    parameters = {} if head is None else dict(head.named_parameters(prefix=name))
    for key, parameter in parameters.items():
        try:
            index = cached_file(source, SAFE_WEIGHTS_INDEX_NAME, revision=revision)
            file = json.loads(Path(str(index)).read_text(encoding="utf-8"))["weight_map"].get(key)
        except OSError:  # in one file
            file = SAFE_WEIGHTS_NAME
        with safe_open(cached_file(source, file, revision=revision), "pt") as tensors:
            parameter.data = tensors.get_tensor(key).to(parameter.device)


def _put_head_into_fp32(model: PreTrainedModel) -> None:
    name, head = _head(model)
    if head is not None:
        model.set_submodule(name, Float32Linear(head))


def _head(model: PreTrainedModel) -> tuple[str, nn.Linear | None]:
    """Return the linear layer that gives the logits, and its name."""
    heads = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear)
        and module.out_features == model.config.num_labels
        and name.rpartition(".")[2] in _HEADS
    ]
    return heads[-1] if heads else ("", None)


@torch.no_grad()
def _check_reading(classifier: SequenceClassifier) -> None:
    model = classifier.model
    parameter = next(model.parameters())
    if parameter.is_meta:
        return
    was_training = model.training
    model.eval()
    pad, eos = model.config.get_text_config().pad_token_id, eos_ids(model)
    row = _probe(model, pad)
    name = type(model).__name__
    if classifier.reads_last_token:
        expected = model(input_ids=row, use_cache=False).logits.float() + classifier.offset
        got = classifier(row, torch.ones_like(row, dtype=torch.bool))
        tolerance = 1e-3 if parameter.dtype == torch.float32 else 5e-2
        if not torch.allclose(got, expected, rtol=tolerance, atol=tolerance):
            raise ValueError(
                f"{name} does something to its score after the head: {got.tolist()} is read at the "
                f"last token, the model itself says {expected.tolist()}; serve it and use "
                "scorer=http"
            )
    elif pad in eos:
        with_eos = torch.cat([row, torch.full_like(row[:, :1], pad)], 1)
        short, long = (
            model(input_ids=i, attention_mask=torch.ones_like(i)).logits for i in (row, with_eos)
        )
        if torch.allclose(short, long, rtol=1e-5, atol=1e-6):
            raise ValueError(
                f"{name} overlooks EOS, because its pad_token_id is EOS ({pad}): set pad_token_id "
                "in its config.json to a token that no text contains"
            )
    model.train(was_training)


def _probe(model: Any, pad: int | None) -> Tensor:
    """Return one row `[1, W]` of ordinary tokens."""
    ids = [i for i in range(32) if i != pad and i not in eos_ids(model)][:8]
    return torch.tensor([ids], device=next(model.parameters()).device)
