"""The stages of a pipeline on its page: what each came to, and where its own page is."""

from __future__ import annotations

import re
from typing import Any

from rlhf_lightning.reports.html import render
from rlhf_lightning.reports.pictures import pictures
from rlhf_lightning.runs.folder import RunFolder, read_metrics, read_samples
from rlhf_lightning.runs.summary import Summary, read_summary
from rlhf_lightning.runs.verdict import verdict

_STEP = re.compile(r"round_[1-9]\d*/[a-z][a-z0-9_]*")


def stages_of(summary: Summary | None) -> list[str]:
    """Return the `round_<k>/<stage>` of a pipeline in their order; none of any other run."""
    named = "" if summary is None else summary.about.get("stages", "")
    return [name for name in named.split(", ") if _STEP.fullmatch(name)]


def chain_section(folder: RunFolder, summary: Summary | None) -> str:
    """Return the stages that the summary of a pipeline names; "" of any other run."""
    cards: list[dict[str, Any]] = []
    begun = ""
    for name in stages_of(summary):
        own = RunFolder(folder.path / name)
        card: dict[str, Any] = {"name": name, "title": name.partition("/")[2]}
        card |= {"waits": begun, "picture": None, "linked": own.report.is_file()}
        if own.summary.is_file():
            begun, found = name, read_summary(own)
            lines = read_samples(own.distributions)
            metrics = found.metrics if found.judged else {}
            shown = pictures(read_metrics(own.metrics), metrics, lines)
            card["title"] += f": {found.title}"
            card |= {"summary": found, "result": verdict(found), "picture": shown.headline}
        cards.append(card)
    return render("chain.html", cards=cards) if cards else ""
