"""The stages of a pipeline on its page: what each came to, and where its own page is."""

from __future__ import annotations

import re
from typing import Any

from rlhf_lightning.reports.html import render
from rlhf_lightning.reports.pictures import pictures
from rlhf_lightning.runs.folder import RunFolder, read_metrics, read_samples
from rlhf_lightning.runs.summary import Summary, read_summary
from rlhf_lightning.runs.verdict import STAGES, verdict

_STEP = re.compile(r"round_[1-9]\d*/([a-z][a-z0-9_]*)")


def chain_section(folder: RunFolder, summary: Summary | None) -> str:
    """Return the stages that the summary of a pipeline names; "" of any other run."""
    if summary is None:
        return ""
    cards: list[dict[str, Any]] = []
    begun = ""
    for name in summary.about.get("stages", "").split(", "):
        if not (step := _STEP.fullmatch(name)):
            continue
        own = RunFolder(folder.path / name)
        card = {"word": "not run", "tone": "undecided", "picture": None, "waits": begun}
        if own.summary.is_file():
            begun, card = name, _card(own)
        cards.append(card | {"name": name, "title": STAGES.get(step[1], step[1])})
    return render("chain.html", cards=cards) if cards else ""


def _card(folder: RunFolder) -> dict[str, Any]:
    summary = read_summary(folder)
    result = verdict(summary)
    failed = [gate for gate in summary.gates if not gate.passed]
    tone = {"failed": "bad", "completed": ""}.get(summary.status, "neutral")
    word: str = summary.status
    if summary.status == "completed" and summary.gates:
        word, tone = ("✗ gates failed", "bad") if failed else ("✓ gates passed", "good")
    shown = pictures(
        read_metrics(folder.metrics), summary.metrics, read_samples(folder.distributions)
    )
    return {
        "word": word,
        "tone": tone,
        "result": result,
        "picture": shown.headline,
        "failed": failed,
        "passed": sum(gate.word == "passed" for gate in summary.gates),
        "about": summary.about,
        "seconds": summary.seconds.get("total"),
        "link": folder.report.is_file(),
    }
