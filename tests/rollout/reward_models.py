"""Small reward models of other makers, saved as local folders with tokenizers of their own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from rlhf_lightning.batches import Generation, PromptBatch
from rlhf_lightning.rollout.scorers.base import Responses, Scores
from rlhf_lightning.rollout.scorers.text_reward_model import TextRewardModelScorer
from tests.builders.tokenizers import build_tokenizer, word_tokenizer

EOS = "<|im_end|>"
DECODERS = ("llama", "gpt2", "opt", "gpt_neox")
ENCODERS = ("bert", "deberta-v2", "roberta", "distilbert")

# Weights ten times the usual: a wrong position or a padded column is a large error.
_STD = {"initializer_range": 0.2}
_DECODER: dict[str, Any] = _STD | {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 256,
}
_ENCODER: dict[str, Any] = _DECODER | {"hidden_dropout_prob": 0.1, "max_position_embeddings": 64}
_FIELDS: dict[str, dict[str, Any]] = {
    "llama": _DECODER | {"num_key_value_heads": 1},
    "gpt_neox": _DECODER,
    "gpt2": _STD | {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256},
    "opt": _DECODER | {"ffn_dim": 64, "word_embed_proj_dim": 32, "init_std": 0.2},
    "bert": _ENCODER | {"type_vocab_size": 2},
    "deberta-v2": _ENCODER
    | {"type_vocab_size": 0, "relative_attention": True, "pos_att_type": ["p2c", "c2p"]},
    "roberta": _ENCODER | {"type_vocab_size": 1, "max_position_embeddings": 66},
    "xlnet": _STD | {"d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64},
    "distilbert": _STD | {"dim": 32, "n_layers": 2, "n_heads": 2, "hidden_dim": 64},
}


def byte_tokenizer(
    *, bos: bool = True, adds_eos: bool = False, pad: str = "<pad>", template: str | None = None
) -> PreTrainedTokenizerFast:
    """A decoder's: every ASCII character is a token; ends texts with `<|im_end|>`."""
    return build_tokenizer(
        adds_bos=bos, adds_eos=adds_eos, pad_is_eos=pad == EOS, template=template
    )


def save_reward_model(
    folder: Path,
    model_type: str,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    num_labels: int = 1,
    **fields: Any,
) -> Path:
    """Save a random sequence classifier with its tokenizer, as its makers would."""
    if tokenizer is None:
        decoder = model_type in DECODERS
        tokenizer = (
            byte_tokenizer()
            if decoder
            else word_tokenizer(token_types=model_type in ("bert", "deberta-v2"))
        )
    config = AutoConfig.for_model(
        model_type,
        **{
            "vocab_size": len(tokenizer),
            "num_labels": num_labels,
            "bos_token_id": tokenizer.bos_token_id,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            **_FIELDS[model_type],
            **fields,
        },
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def plain_model(folder: Path) -> Any:
    return AutoModelForSequenceClassification.from_pretrained(folder).eval()


@torch.no_grad()
def plain_logits(folder: Path, ids: Sequence[int]) -> torch.Tensor:
    """What transformers says about one text that is not padded, `[L]`."""
    return plain_model(folder)(input_ids=torch.tensor([list(ids)])).logits[0]


@torch.no_grad()
def plain_call(folder: Path, *texts: Sequence[str], **options: Any) -> torch.Tensor:
    """What transformers says about a padded batch of texts or pairs, `[B, L]`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(*map(list, texts), padding=True, return_tensors="pt", **options)
    return plain_model(folder)(**inputs).logits


def text_answers(
    prompts: Sequence[str],
    completions: Sequence[str],
    *,
    finished: Sequence[bool] | None = None,
    **columns: Sequence[str],
) -> Responses:
    """Answers of which only the text is known, as a scorer that reads text gets them."""
    count = len(prompts)
    finished = [True] * count if finished is None else finished
    one = torch.ones(count, 1, dtype=torch.int64)
    batch = PromptBatch(
        input_ids=one,
        attention_mask=one.bool(),
        row_ids=torch.arange(count),
        domains=("",) * count,
        columns={"prompt": tuple(prompts), **{k: tuple(v) for k, v in columns.items()}},
    )
    reason = torch.tensor([0 if done else 1 for done in finished])
    generation = Generation(one.expand(-1, 2), one.bool(), reason)
    return Responses(batch, generation, one.expand(-1, 2).bool(), tuple(completions))


def scored(folder: Path, answers: Responses, **settings: Any) -> Scores:
    return built(folder, **settings)(answers)


def built(folder: Path, **settings: Any) -> TextRewardModelScorer:
    scorer = TextRewardModelScorer(folder, **settings)
    scorer.build()
    return scorer


close = partial(torch.testing.assert_close, rtol=0, atol=1e-5)
