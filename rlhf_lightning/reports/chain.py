"""The stages of a pipeline on its page: what each came to, and where its own page is."""

from __future__ import annotations

import re
from typing import Any

from rlhf_lightning.reports.html import render
from rlhf_lightning.reports.pictures import pictures
from rlhf_lightning.runs.folder import RunFolder, read_metrics, read_samples
from rlhf_lightning.runs.summary import Summary, read_summary, run_title
from rlhf_lightning.runs.verdict import verdict

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
        card: dict[str, Any] = {"name": name, "title": run_title(step[1])}
        card |= {"waits": begun, "picture": None, "linked": own.report.is_file()}
        if own.summary.is_file():
            begun, found = name, read_summary(own)
            lines = read_samples(own.distributions)
            metrics = found.metrics if found.judged else {}
            shown = pictures(read_metrics(own.metrics), metrics, lines)
            if step[1] == "ppo":  # whatever the objective
                card["title"] = run_title(found.stage, found.about.get("objective"))
            card |= {"summary": found, "result": verdict(found), "picture": shown.headline}
        cards.append(card)
    return render("chain.html", cards=cards) if cards else ""
