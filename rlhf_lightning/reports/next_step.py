"""The recommended next step after a run: a sentence, or one and a command on a second line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import Summary
from rlhf_lightning.runs.verdict import verdict

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
    for alert in summary.alerts:
        if alert["level"] == "alarm" and alert["cleared_at"] is None:
            return f"The doctor's alarm comes first. {alert['message']}. Try: {alert['remedy']}."
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
    return undecided + (summary.next or _without_a_command(summary, folder, trained=trained))


def _without_a_command(summary: Summary, folder: RunFolder, *, trained: bool) -> str:
    """Return what to do with what no command line has made, or with no model."""
    metrics = summary.metrics
    if "stages" in summary.about:
        return "Read the samples on the page of the last stage. rounds=2 trains once more."
    if not folder.config.is_file():
        is_policy = "val/chosen_reward" in metrics or not {"val/loss", "val/accuracy"} & set(
            metrics
        )
        told = _IN_PYTHON if is_policy else ""
        if "compared by" in summary.about:
            told = "Read the samples. "
        return f"{told}export_model(module, FOLDER) exports it for the next stage."
    if trained or any(name.startswith(("benchmark/", "collect/")) for name in metrics):
        return ""
    return "Read the samples." + _who_else(metrics)


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
