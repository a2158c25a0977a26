"""Tiny models, a tokenizer and prompts, for tests that need real ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.models.building import seeded_init
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel, scalar_head

VOCABULARY = 48
HIDDEN = 32
PAD, EOS = 0, 1
MODEL_TYPES = ("gpt2", "opt", "llama", "gpt_neox")

# Weights ten times the usual: every token matters to every later one, so that a wrong position
# or a padded column is a large error and not one of rounding.
INIT_STD = 0.2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": None,
    "eos_token_id": EOS,
    "pad_token_id": None,
}
_LAYERS: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
_LLAMA = _LAYERS | {
    "intermediate_size": 64,
    "num_key_value_heads": 1,
    "initializer_range": INIT_STD,
}
_FIELDS: dict[str, dict[str, Any]] = {
    "gpt2": {
        "n_embd": HIDDEN,
        "n_layer": 2,
        "n_head": 2,
        "n_positions": 64,
        "initializer_range": INIT_STD,
    },
    "opt": _LAYERS | {"ffn_dim": 64, "word_embed_proj_dim": HIDDEN, "init_std": INIT_STD},
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gpt_neox": _LAYERS | {"intermediate_size": 64, "initializer_range": INIT_STD},
}
# Fields of a config of the llama kind, and those that every config has.
LLAMA_LIKE = _COMMON | _LLAMA
ANY = _COMMON | {"initializer_range": INIT_STD}


def config_fields(model_type: str, **changes: Any) -> dict[str, Any]:
    return {"model_type": model_type, **_COMMON, **_FIELDS[model_type], **changes}


def tiny_policy(model_type: str = "gpt2", *, seed: int = 0, **changes: Any) -> PolicyModel:
    return load_policy(from_scratch=config_fields(model_type, **changes), seed=seed)


def tiny_scalar_model(
    model_type: str = "gpt2", *, seed: int = 1, init_std: float = 0.3, bias: float = 0.0
) -> ScalarHeadModel:
    trunk: Any = tiny_policy(model_type, seed=seed).model.base_model
    with seeded_init(seed):
        head = scalar_head(HIDDEN, init_std=init_std)
    head.to(trunk.device)
    torch.nn.init.constant_(head.bias, bias)
    return ScalarHeadModel(trunk, head).train()


def tiny_tokenizer(*, pad_is_eos: bool = False) -> PreTrainedTokenizerFast:
    """`a b c` style: id 0 is `<pad>`, id 1 is `<eos>`, id n is the word `wn`."""
    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, VOCABULARY))]
    tokenizer = Tokenizer(WordLevel({word: i for i, word in enumerate(words)}, unk_token="w2"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<eos>" if pad_is_eos else "<pad>",
        eos_token="<eos>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def prompt_rows(lengths: Sequence[int], *, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCABULARY, (n,), generator=generator).tolist() for n in lengths]


def prompt_batch(
    rows: Sequence[Sequence[int]],
    *,
    width: int | None = None,
    pad: int = PAD,
    first_row: int = 0,
    domains: Sequence[str] | None = None,
    **columns: Sequence[str],
) -> PromptBatch:
    width = width or max(len(row) for row in rows)
    return PromptBatch(
        input_ids=torch.tensor([[pad] * (width - len(row)) + list(row) for row in rows]),
        attention_mask=torch.tensor(
            [[False] * (width - len(row)) + [True] * len(row) for row in rows]
        ),
        row_ids=torch.arange(first_row, first_row + len(rows)),
        domains=tuple(domains or [""] * len(rows)),
        columns={"prompt": tuple(" ".join(f"w{i}" for i in row) for row in rows)}
        | {name: tuple(values) for name, values in columns.items()},
    )


def flat_gradients(model: torch.nn.Module) -> Tensor:
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
    )


def flat_parameters(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
