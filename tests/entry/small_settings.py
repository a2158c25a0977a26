"""The command line of a run of a few iterations on the built-in world; light, as no torch is."""

from __future__ import annotations

from pathlib import Path

SMALL = [
    "debug=fast",
    "logger=none",
    "data.batch_size=4",
    "callbacks.checkpoint.every_n_iterations=1",
    "callbacks.checkpoint.keep_last=3",
    "evaluation.num_prompts=8",
    "artifacts.publish=null",
    "+dataset.source.num_texts=24",
    "+dataset.source.num_demonstrations=24",
    "+dataset.source.num_preferences=24",
    "+dataset.source.num_validation_preferences=16",
]
LENGTH_REWARD = "def score(prompts, completions):\n    return [len(c) / 10 for c in completions]\n"


def overrides_of(stage: str, start: Path) -> list[str]:
    """Return the command line of a run of a few iterations."""
    key = {"base": None, "sft": "artifacts.base"}.get(stage, "artifacts.sft")
    own = [] if key is None else [f"{key}={start}"]
    if stage == "ppo":
        (start.parent / "reward.py").write_text(LENGTH_REWARD)
        own += [
            "scorer=function",
            f"scorer.function={start.parent}/reward.py:score",
            "module.models.value=null",
            "module.models.value_head=zero",
            "module.ppo.num_minibatches=1",
            "module.ppo.num_ppo_epochs=1",
            "module.sampling.max_new_tokens=4",
        ]
    return [f"+experiment={stage}", *SMALL, *own]
