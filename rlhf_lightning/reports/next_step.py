"""The recommended next step after a run, in a sentence."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import Summary
from rlhf_lightning.runs.verdict import verdict

_COMPARE = (
    "Read the samples. rlhf-evaluate run={run} compares it on other prompts, also by a language "
    "model (judge=) or by people (human=export)."
)
_IN_PYTHON = (
    "Read the samples. compare(module, BASELINE, PROMPTS, reward=...) says whether its responses "
    "are better, on this page too. "
)
_BAD = "Do not build on it: read the samples{doctor}, change one setting and run it again."


def next_step(summary: Summary, folder: RunFolder) -> str:
    """Return what to do next; "" while it is under way."""
    if summary.status == "running":
        return ""
    if summary.status != "completed":
        if not folder.last_checkpoint.exists():
            return "It left no checkpoint: mend the cause and run it again."
        by_command = folder.config.is_file()
        way = "the same command with resume=auto" if by_command else 'fit(..., ckpt_path="last")'
        return f"Mend the cause; {way} goes on from the last checkpoint."
    if not summary.judged:
        return "The same command without debug=fast trains."
    stages = "stages" in summary.about
    failed = [
        f"{gate.name}: {gate.reason}" if stages else gate.reason
        for gate in summary.gates
        if not gate.passed
    ]
    if failed:
        return f"{failed[0]}. Read the samples, change one setting and run it again."
    tone = verdict(summary).number_tone
    if tone == "bad":
        return _BAD.format(doctor=" and the doctor's findings" * folder.doctor.is_file())
    trained = folder.metrics.is_file() or stages
    more = "held-out rows or a longer run" if trained else "held-out prompts or pairs"
    undecided = f"More {more} may decide it. " * (tone == "undecided")
    template = _what_takes_it(summary, folder)
    if not folder.config.is_file():
        told = _IN_PYTHON if template == _COMPARE else ""
        if "compared by" in summary.about:
            told = "Read the samples. "
        return f"{undecided}{told}export_model(module, FOLDER) exports it for the next stage."
    made = next((p for p in (folder.export, folder.path / "data") if p.is_dir()), folder.path)
    return undecided + template.format(place_of(made), run=place_of(folder.path))


def _what_takes_it(summary: Summary, folder: RunFolder) -> str:
    """Return the command that takes what a run has made: records, a policy or a reward model."""
    metrics = summary.metrics
    if "collect/score_best" in metrics:
        return "rlhf-train +experiment=sft data.path={} fine-tunes on them."
    if "collect/train_records" in metrics:
        return "rlhf-train +experiment=reward data.path={} trains a reward model on the pairs."
    if "stages" in summary.about:
        return "Read the samples on the page of the last stage. rounds=2 trains once more."
    if not folder.metrics.is_file():  # nothing was trained
        if any(name.startswith("benchmark/") for name in metrics):
            return ""
        return "Read the samples." + _who_else(metrics)
    if "val/accuracy" in metrics and "val/chosen_reward" not in metrics:
        return "rlhf-train +experiment=ppo artifacts.reward={} trains a policy against it."
    if "val/loss" not in metrics or "val/accuracy" in metrics:
        return _COMPARE
    if "baseline" not in summary.about and "val/baseline_loss" not in metrics:
        return "rlhf-train +experiment=sft artifacts.base={} fine-tunes it on demonstrations."
    return "rlhf-train +experiment=reward artifacts.sft={} trains a reward model from it."


def _who_else(metrics: Mapping[str, float | None]) -> str:
    """Return how those who were not asked are asked to compare the responses."""
    ways = {
        "human": "human=export asks people",
        "judge": "judge=local judge.model=NAME asks a language model",
    }
    left = [way for judge, way in ways.items() if f"val/{judge}_win_rate" not in metrics]
    return f" The same command with {', with '.join(left)}." if left else ""


def place_of(path: Path) -> str:
    """Return the end of a path: a report is sent around, and the rest names people and machines."""
    return "/".join(path.resolve().parts[-3:])
