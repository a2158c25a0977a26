"""The README.md of an exported model: what it is, from what, and how good it was measured to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.summary import GateResult

_WHAT = {
    "sft": "A causal language model after supervised fine-tuning.",
    "reward": "A reward model: a sequence classifier with one label. Its score is the classifier's "
    "output plus `reward_offset` of config.json, read at the last token (EOS).",
    "ppo": "A causal language model after PPO against a reward model.",
}


def write_model_card(
    folder: Path,
    *,
    stage: str,
    base: str | None,
    data: str,
    run: str,
    metrics: Mapping[str, float],
    gates: Sequence[GateResult],
) -> Path:
    """Write `README.md` beside the weights.

    Args:
        folder: the exported model.
        stage: "sft", "reward" or "ppo".
        base: the model it was trained from; None for random weights.
        data: name of the data.
        run: name of the run folder.
        metrics: final metrics.
        gates: their outcome.
    """
    lines = ["---", "library_name: transformers", f"tags: [rlhf_lightning, {stage}]", "---", ""]
    what = _WHAT[stage]
    if stage == "sft" and base is None:
        what = "A causal language model trained from random weights."
    if "reward/sample_std" in metrics:
        what += " Over samples of the SFT policy it has mean 0 and standard deviation 1."
    lines += [f"# {stage}", "", what, ""]
    lines += [f"* Trained from: {base or 'random weights'}", f"* Data: {data}", f"* Run: {run}"]
    lines += ["", "The licence of the model it was trained from applies.", ""]
    if gates:
        lines += ["## Gates", "", "| gate | outcome |", "|---|---|"]
        lines += [
            f"| {g.name} | {'passed' if g.passed else 'NOT PASSED'}: {g.reason} |" for g in gates
        ]
        lines.append("")
    lines += ["## Final metrics", "", "| metric | value |", "|---|---|"]
    lines += [f"| {name} | {value:.4g} |" for name, value in sorted(metrics.items())]
    path = folder / "README.md"
    write_text(path, "\n".join(lines) + "\n")
    return path
