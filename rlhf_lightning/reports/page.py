"""`report.html`: one file that shows a run to somebody who has nothing but a browser."""

from __future__ import annotations

from pathlib import Path

from rlhf_lightning.reports.curves import curves_section
from rlhf_lightning.reports.html import text
from rlhf_lightning.reports.outcome import domains_section, overoptimization_section
from rlhf_lightning.reports.rounds import rounds_section
from rlhf_lightning.reports.samples import samples_section
from rlhf_lightning.reports.sections import (
    doctor_section,
    settings_section,
    times_section,
    verdict_section,
)
from rlhf_lightning.reports.style import STYLE
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.doctor_log import read_events
from rlhf_lightning.runs.folder import RunFolder, read_metrics, read_samples
from rlhf_lightning.runs.summary import Summary, read_summary
from rlhf_lightning.runs.verdict import STAGES

# Whatever slipped through the escaping: no script runs, nothing is loaded.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def write_report(folder: RunFolder) -> Path:
    """Write `report.html` of a run, finished or not, in one step and return its path.

    It has the verdict, the gates, the rounds of a pipeline, what the doctor said, the curves,
    reward over KL, the domains, samples, where the time went and the settings; a part for which
    the run has written nothing is left out.

    Raises:
        FileNotFoundError: if the folder holds neither a summary nor metrics.
    """
    write_text(folder.report, render_report(folder))
    return folder.report


def render_report(folder: RunFolder) -> str:
    """Return the page as text; see `write_report`."""
    rows = read_metrics(folder.metrics)
    summary = _summary(folder)
    if summary is None and not rows:
        raise FileNotFoundError(
            f"{folder.path} has neither summary.json nor metrics.csv: give the folder of a run, "
            "e.g. outputs/ppo/<date>_<time>"
        )
    head = f"<header><h1>{text(folder.name)}</h1></header>"
    title = folder.name
    if summary is not None:
        head = verdict_section(summary, folder)
        title = f"{STAGES.get(summary.stage, summary.stage)} {folder.name}"
    metrics = {} if summary is None else summary.metrics
    body = (
        head
        + rounds_section(metrics)
        + doctor_section(read_events(folder.doctor))
        + curves_section(rows)
        + overoptimization_section(rows, metrics)
        + domains_section(metrics)
        + samples_section(read_samples(folder.samples))
        + times_section(rows, summary)
        + settings_section(summary, folder)
    )
    return document(title, body, _place(folder))


def document(title: str, body: str, footer: str) -> str:
    """Return a whole page that needs nothing besides itself.

    Args:
        title: as text.
        body: HTML.
        footer: as text.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{text(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>{body}\n<footer>{text(footer)}</footer></main></body></html>\n"
    )


def _place(folder: RunFolder) -> str:
    # Not the whole path: a report is sent around, and the path names people and machines.
    return "rlhf_lightning · " + "/".join(folder.path.resolve().parts[-3:])


def _summary(folder: RunFolder) -> Summary | None:
    try:
        return read_summary(folder)
    except FileNotFoundError:
        return None
