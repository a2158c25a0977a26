"""Memory of log-probabilities, forward and backward, over vocabulary x length.

python -m benchmarks.logprob_memory
"""

from __future__ import annotations

import statistics
import sys
from typing import Any

from benchmarks.command import Setting, finish, gib, parser, table
from benchmarks.processes import Side, alternate
from benchmarks.shapes import SHAPES

# Width of the smallest published models with 152k words (Qwen2.5-0.5B), one small decoder layer.
SHAPE = SHAPES["tiny"] | {
    "hidden_size": 896,
    "num_hidden_layers": 1,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 896,
    "tie_word_embeddings": False,
}
# (words, tokens, head): "trunk" asks for 16 positions only, "full" builds all logits.
CASES = (
    (151_936, 4096, "chunked"),
    (151_936, 1024, "chunked"),
    (37_984, 4096, "chunked"),
    (151_936, 4096, "trunk"),
    (151_936, 1024, "full"),
)
QUICK = ((512, 64, "chunked"), (512, 64, "trunk"), (512, 64, "full"))
HEADS = {
    "chunked": "rlhf_lightning",
    "trunk": "rlhf_lightning, 16 positions: the decoder's share",
    "full": "all logits, log-softmax in fp32",
}


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Measure, write the JSON, print the table."""
    made = parser(__doc__.splitlines()[0], repeats=1, shape=None)
    made.add_argument("--precisions", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    setting = Setting("logprob_memory", made.parse_args(arguments))
    quick = {"hidden_size": 56, "intermediate_size": 56} if setting.options.quick else {}
    sides = [
        Side(
            f"{head} {words} {tokens} {precision}",
            "logprobs",
            setting.task(
                shape=SHAPE | quick | {"vocab_size": words},
                tokens=tokens,
                head=head,
                precision=precision,
            ),
        )
        for precision in setting.options.precisions
        for words, tokens, head in (QUICK if setting.options.quick else CASES)
    ]
    runs = alternate(sides, setting.options.repeats, lock=setting.lock)
    summary = {
        name: {
            "added": statistics.median(run["added"] for run in taken),
            "seconds": statistics.median(run["seconds"] for run in taken),
            "gradients": taken[0]["gradients"],
        }
        for name, taken in runs.items()
    }
    return finish(setting, runs, summary, render, settings={"shape": SHAPE | quick})


def render(result: dict[str, Any]) -> str:
    """Return the result as Markdown."""
    rows = []
    for name, case in result["summary"].items():
        head, words, tokens, precision = name.split()
        rows.append(
            [
                HEADS[head],
                f"{int(words):,}",
                f"{int(tokens):,}",
                precision,
                gib(case["added"]),
                gib(case["gradients"]),
                f"{case['seconds']:.1f} s",
            ]
        )
    head = ["", "words", "tokens", "", "memory beyond weights and gradients", "gradients", "time"]
    return table(head, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
