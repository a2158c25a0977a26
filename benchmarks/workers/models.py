"""Write the models of a benchmark: policy, reward model and tokenizer, as Hugging Face folders.

A process of its own, so that making them does not count as memory of a measured one.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    PreTrainedTokenizerFast,
)

from benchmarks.shapes import EOS, FIRST_WORD, PAD, UNKNOWN
from benchmarks.worker import Task, worker_main


def run(task: Task) -> dict[str, Any]:
    """Write `policy/`, `reward/` and `tokenizer/` below the task's folder."""
    folder = Path(task["folder"])
    torch.manual_seed(0)
    config = AutoConfig.for_model(**task["shape"])
    with torch.device(task["device"]):  # a CPU draws a billion numbers in a minute
        policy = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        policy.save_pretrained(folder / "policy")
        config.num_labels = 1
        reward: Any = AutoModelForSequenceClassification.from_config(config, dtype=torch.float32)
    torch.nn.init.normal_(reward.score.weight, std=(config.hidden_size + 1) ** -0.5)
    reward.save_pretrained(folder / "reward")
    for name in ("policy", "reward", "tokenizer"):
        tokenizer(task["shape"]["vocab_size"]).save_pretrained(folder / name)
    return {"parameters": sum(p.numel() for p in reward.parameters())}


def tokenizer(vocabulary: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer whose word `wn` is id n, made without a download."""
    special = {"<pad>": PAD, "<eos>": EOS, "<unk>": UNKNOWN}
    words = special | {f"w{i}": i for i in range(FIRST_WORD, vocabulary)}
    core = Tokenizer(WordLevel(words, unk_token="<unk>"))
    core.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


if __name__ == "__main__":
    worker_main(run)
