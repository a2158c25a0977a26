"""Settings and choices that are gone, with what is written instead: an error names it.

A key ends a word's name (`rollout.restart`), or is a choice (`rollout=vllm_server`). A `*` at its
end stands for every key below.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

_EXAMPLE = (
    "in a checkout, set RLHF_ALLOWED_TARGETS=examples. in the environment and add "
    "--config-dir=examples/conf"
)
WITHDRAWN: dict[str, str] = {
    # a key, or a choice: what is written instead
    "preferences.formats": "write preferences.exchange",
    "rollout=cuda_graphs": "write rollout=auto, which captures by default",
    "rollout=vllm_server": "write rollout=vllm, which generates in server processes",
    "scorer.backoff": "waits double from 0.5 s; scorer.max_retries=N ends them",
    "scorer.chat_template": "save the template with a tokenizer; write scorer.tokenizer=FOLDER",
    "scorer.deadline": "scorer.timeout=SECONDS of a request and scorer.max_retries=N bound a call",
    "scorer.max_backoff": "waits double from 0.5 to 30 s; scorer.max_retries=N ends them",
    **{f"dataset={name}": _EXAMPLE for name in ("arguments", "questions", "sentiment")},
    "experiment=reward_smollm2_arguments": _EXAMPLE,
    "experiment=sft_smollm2_sentiment": _EXAMPLE,
    "experiment=sft_smollm2_sentiment_lora": _EXAMPLE,
    "experiment=reward_smollm2_sentiment": _EXAMPLE,
    "experiment=reward_smollm2_sentiment_lora": _EXAMPLE,
    "experiment=ppo_smollm2_sentiment": _EXAMPLE,
    "experiment=ppo_smollm2_sentiment_lora": _EXAMPLE,
    "references": "the dataset's responses are no third side; from Python, gold_scores scores them",
    "dataset.source.on_template_loss": "set model.chat_template=FILE or NAME, or "
    "dataset.source.on_bad_record=skip",
    "scorer.timeout_seconds": "bound the time inside the function; a call of 30 s is named",
    "judge.requests_per_minute": "lower judge.concurrency; the client waits as the service asks",
    "ratings_per_pair": "write labels_per_pair=N",
    "known=gold": "write known=labels, or known=ignore to have the pairs labelled again",
    "sharing.*": "pairs with a known answer are asked like all others",
    "labels": "format=labels and label_studio export every label, format=trl one verdict a pair",
    "page.host": "the page listens on 127.0.0.1: ssh -L 8000:127.0.0.1:8000 HOST reaches it",
    "page.hosts": "the page listens on 127.0.0.1: ssh -L 8000:127.0.0.1:8000 HOST reaches it",
    "page.token": "the page prints its address with the token of the store",
    **{f"module.{name}.*": "write module.KEY" for name in ("models", "model", "policy")},
    "plan.reward_model": "write artifacts.reward=FOLDER: its config.json is read",
    "plan.teacher": "write artifacts.teacher=FOLDER: its config.json is read",
}


def withdrawn(words: Sequence[str]) -> str | None:
    """Return the error of the first word of a command line that is no longer read, or None."""
    has_examples = any(word.startswith("--config-dir") for word in words)
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        for gone, instead in WITHDRAWN.items():
            below = gone.endswith("*") and key.startswith(gone[:-1])
            if instead == _EXAMPLE and has_examples:
                continue
            if below or gone in (key, f"{key}={value}"):
                return f"{word} was withdrawn: {instead}"
    return None


def refuse_study() -> NoReturn:
    """End the withdrawn command `rlhf-study` with what is written instead."""
    raise SystemExit(
        "error: rlhf-study was withdrawn: run a matrix with rlhf-train -m (seed=1,2 KEY=A,B, or "
        "+sweeps=NAME) and compare runs with rlhf-report RUN RUN; the studies of the docs are "
        "python -m benchmarks.studies.NAME"
    )
