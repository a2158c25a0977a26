"""Write the models and records of the memory benchmarks, in a process of its own.

A policy (unless there is one), a reward model of its shape with the adapter that LoRA takes, and
records whose rows are all as long as a configuration allows: a plan counts the longest.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.shapes import FIRST_WORD
from benchmarks.worker import Task, worker_main
from benchmarks.workers import models
from rlhf_lightning.hparams import LoraHparams
from rlhf_lightning.models.adapter_files import save_adapter
from rlhf_lightning.models.factory import load_scalar_model
from rlhf_lightning.modules.export import save_hf_model
from rlhf_lightning.text.tokenizers import load_tokenizer, stop_ids

LETTERS = "abcdefghijklmnopqrstuvwxyz"
PROMPT_WORDS = 300  # longer than any prompt that is measured: it is cut to what fits
NUM_RECORDS = 256


def run(task: Task) -> dict[str, Any]:
    """Write `reward/`, `sft.jsonl`, `reward.jsonl` and `ppo.jsonl` below the task's folder.

    Without a `model` in the task, `policy/` of its `shape` as well.
    """
    folder = Path(task["folder"])
    if task["model"] is None:
        models.run(task)
    policy = Path(task["model"] or folder / "policy")
    tokenizer = load_tokenizer(policy)
    reward = load_scalar_model(policy, head="reward")
    save_hf_model(
        reward,
        tokenizer,
        folder / "reward",
        reward.state_dict(),
        stop_ids=stop_ids(tokenizer, policy),
    )
    adapted: Any = load_scalar_model(policy, head="reward", lora=LoraHparams())
    save_adapter(
        adapted,
        folder / "reward" / "adapter",
        adapted.state_dict(),
        base=str(policy),
        base_fingerprint="",
    )
    # Each is one token of the vocabulary: that of a shape has words of its own.
    own = [f"w{i}" for i in range(FIRST_WORD, tokenizer.vocab_size)]
    write_records(folder, task["answers"], own if task["model"] is None else LETTERS)
    return {}


def write_records(folder: Path, answers: dict[str, int], vocabulary: Sequence[str]) -> None:
    """Write the records of each stage.

    Args:
        folder: gets `<stage>.jsonl`.
        answers: stage -> words of an answer, each a token.
        vocabulary: words to draw from.
    """
    draw = random.Random(0)

    def words(count: int) -> str:
        return " ".join(draw.choice(vocabulary) for _ in range(count))

    for stage, length in answers.items():
        rows = []
        for _ in range(NUM_RECORDS):
            row = {"prompt": words(PROMPT_WORDS) + " "}
            if stage == "sft":
                row["completion"] = words(length)
            elif stage == "reward":
                row |= {"chosen": words(length), "rejected": words(length)}
            rows.append(json.dumps(row) + "\n")
        (folder / f"{stage}.jsonl").write_text("".join(rows), encoding="utf-8")


if __name__ == "__main__":
    worker_main(run)
