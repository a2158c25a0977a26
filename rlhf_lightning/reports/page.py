"""`report.html`: one self-contained file that shows a run in a browser."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from markupsafe import Markup

from rlhf_lightning.doctor.catalog import DETECTORS
from rlhf_lightning.reports import sections
from rlhf_lightning.reports.charts import Figure, Rows, curves, render
from rlhf_lightning.runs import doctor_log
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import ITERATION, RESOLVED, RunFolder, read_metrics, read_samples
from rlhf_lightning.runs.metric_catalog import counted, duration, percent, quantity
from rlhf_lightning.runs.public_config import public_config, public_words
from rlhf_lightning.runs.reading import read_yaml
from rlhf_lightning.runs.summary import Summary, read_summary
from rlhf_lightning.runs.verdict import pairs_of, verdict

_STAGE_OF_A_PIPELINE = re.compile(r"round_[1-9]\d*/[a-z][a-z0-9_]*")
# Of `seconds` of a summary, what is outside of the iterations.
_PHASES = {"setup": "loading", "measure": "final evaluation", "export": "exporting"}
_PHASES |= {"answers": "answering", "judges": "judging"}
_MAX_PARTS, _LEAST_SHARE = 6, 0.005


def write_report(folder: RunFolder) -> Path:
    """Write `report.html` of a run, finished or not, in one step and return its path.

    It has the verdict, the gates, the rounds of a pipeline, the doctor's alerts, the curves,
    reward over KL, the domains, samples, where the time went and the settings; a part for which
    the run has written nothing is left out.

    Raises:
        FileNotFoundError: if the folder has no summary.
    """
    write_text(folder.report, render_report(folder))
    return folder.report


def render_report(folder: RunFolder) -> str:
    """Return the page as text; see `write_report`."""
    summary, rows = read_summary(folder), read_metrics(folder.metrics)
    metrics = summary.metrics if summary.judged else {}
    lines = read_samples(folder.distributions)
    shown = pictures(rows, metrics, lines)
    chain = chain_section(folder, summary)
    parts: list[str] = [_verdict(summary, folder, shown, chain), _trained(summary, rows)]
    if chain:  # the page of its last stage has the figures that the pipeline takes from it
        parts += [chain, sections.rounds_section(metrics, stages_of(summary))]
    else:
        parts += [
            render("gates.html", gates=summary.gates),
            doctor_section(doctor_log.read_events(folder.doctor)),
            render("figures.html", shown=shown, trained=bool(rows)),
            sections.pairs_section(lines),
            render("curves.html", shown=shown, rows=rows),
            sections.overoptimization_section(rows, _of_the_way(metrics, lines))
            if summary.judged
            else "",
            render("best_of.html", charts=shown.best_of),
            sections.domains_section(metrics),
            sections.samples_section(read_samples(folder.samples)),
        ]
    parts.append(_times(rows, summary.seconds))
    body = Markup().join([*parts, _settings(summary, folder)])
    title = f"{summary.title} {folder.name}"
    # Only the end of the path: a report is sent around, and the rest names people and machines.
    footer = f"rlhf_lightning · {'/'.join(folder.path.resolve().parts[-3:])}"
    return str(render("page.html", title=title, body=body, footer=footer))


@dataclass(frozen=True)
class Pictures:
    """The figures of a run, each in one place.

    Args:
        headline: the one beside the number, None where there is none.
        answers: of wins, and of responses before and after; `answers_of` says of how many.
        best_of: of the best of n.
        curves, more_curves: over iterations; those that one looks at first, and the others.
    """

    headline: Figure | None
    answers: list[Figure]
    answers_of: str
    best_of: list[Figure]
    curves: list[Figure]
    more_curves: list[Figure]


def _of_the_way(metrics: sections.Metrics, lines: sections.Lines) -> sections.Metrics:
    """Return the metrics unless they are against another baseline than the start of the curves."""
    compared = [line for line in lines if line.get("held_out") == "answers"]
    return metrics if all(line[ITERATION] for line in compared) else {}


def pictures(rows: Rows, metrics: sections.Metrics, lines: sections.Lines) -> Pictures:
    """Return the figures of a run from its rows, final metrics and distributions."""
    first, more = curves(rows, _of_the_way(metrics, lines))
    answers, of = sections.answers_figures(lines)
    answers = [*sections.wins_figures(metrics), *answers]
    best_of = sections.best_of_figures(metrics)
    places = best_of or first or answers
    headline = places.pop(0) if places else None
    shown = (first, more) if first else (more, [])
    return Pictures(headline, answers, of, best_of, *shown)


def stages_of(summary: Summary) -> list[str]:
    """Return the `round_<k>/<stage>` of a pipeline in their order; none of any other run."""
    named = summary.about.get("stages", "").split(", ")
    return [name for name in named if _STAGE_OF_A_PIPELINE.fullmatch(name)]


def chain_section(folder: RunFolder, summary: Summary) -> str:
    """Return the stages that the summary of a pipeline names; "" of any other run."""
    cards: list[dict[str, Any]] = []
    begun = ""
    stages = stages_of(summary)
    several = any(not name.startswith("round_1/") for name in stages)
    for name in stages:
        own = RunFolder(folder.path / name)
        part, _, title = name.partition("/")
        title = f"{part.replace('_', ' ')}, {title}" if several else title
        card: dict[str, Any] = {"name": name, "waits": begun, "picture": None}
        card["linked"] = own.report.is_file()
        if own.summary.is_file():
            found = read_summary(own)
            begun = "" if found.status == "completed" and found.passed else name
            lines = read_samples(own.distributions)
            metrics = found.metrics if found.judged else {}
            shown = pictures(read_metrics(own.metrics), metrics, lines)
            title += f": {found.title}"
            card |= {"summary": found, "result": verdict(found), "picture": shown.headline}
        cards.append(card | {"title": title})
    return render("chain.html", cards=cards) if cards else ""


def _verdict(summary: Summary, folder: RunFolder, shown: Pictures, chain: str) -> Markup:
    """Return the top of the page; with a `chain` of stages below it, these name failed gates."""
    short = replace(summary, gates=(), cause=None) if chain else summary
    return render(
        "verdict.html",
        summary=summary,
        result=verdict(short),
        stage=summary.title,
        name=folder.name,
        picture=shown.headline,
        next=summary.cause if chain and summary.cause else next_step(summary, folder),
    )


def next_step(summary: Summary, folder: RunFolder) -> str:
    """Return what to do next: a sentence, or one and a command on a second line; "" while it runs.

    A pipeline's gates are named with their stage.
    """
    if summary.status == "running":
        return ""
    if summary.status != "completed":
        if not folder.last_checkpoint.exists():
            return "It left no checkpoint: mend the cause and run it again."
        way = "the same command with resume=auto" if folder.config.is_file() else "fit(ckpt_path=)"
        return f"Mend the cause; {way} goes on from the last checkpoint."
    if not summary.judged:
        return "The same command without debug=fast trains."
    for alert in summary.alerts:
        if alert["level"] == "alarm" and alert["cleared_at"] is None:
            return f"The doctor's alarm comes first. {alert['message']}. Try: {alert['remedy']}."
    for gate in summary.gates:
        if not gate.passed:
            told = f"{gate.name}: {gate.reason}" if "stages" in summary.about else gate.reason
            return f"{told}. Read the samples, change one setting and run it again."
    if summary.warning:
        return "Train longer before you build on it."
    if verdict(summary).number_tone == "bad":
        return "Do not build on it: read the samples, change one setting and run it again."
    return summary.next or "Read the samples."


def _trained(summary: Summary, rows: Sequence[Mapping[str, float]]) -> Markup:
    """Return from what, on what, against what and on how many prompts; "" where nobody said it."""
    if not summary.about:
        return Markup()
    facts = dict(summary.about)
    if rows:
        facts["trained for"] = counted(rows[-1][ITERATION], "iteration")
    prompts = summary.metrics.get("val/num_prompts")
    if prompts is not None and "prompts" not in facts:
        facts["measured on"] = counted(prompts, "held-out prompt")
    elif summary.metrics.get("val/num_pairs") is not None:
        facts["measured on"] = pairs_of(summary.metrics, kind="held-out ")
    return render("trained.html", facts=facts)


def doctor_section(events: Sequence[doctor_log.DoctorEvent]) -> str:
    """Return alerts with cause and remedy, actions and the preflight; "" without a doctor."""
    if not events:
        return ""
    alerts, coverage = doctor_log.alerts_of(events), doctor_log.coverage_of(events)
    lead = "The run did not begin."
    if coverage is not None:
        found = sorted({alert["detector"] for alert in alerts})
        known = [DETECTORS[name].title.lower() if name in DETECTORS else name for name in found]
        watched = coverage.describe()
        told = f", alerts of {', '.join(known)}" if known else ", none found anything"
        lead = f"{watched}." if watched.startswith("None") and not known else f"{watched}{told}."
    checks = [event for event in events if event.kind == "check"]
    actions = doctor_log.actions_of(events)
    context = {"checks": checks, "alerts": alerts, "actions": actions, "coverage": coverage}
    return render("doctor.html", lead=lead, **context)


def _times(rows: Sequence[Mapping[str, float]], seconds: Mapping[str, float]) -> str:
    """Return where the time went, "" if no phase was timed."""
    times: dict[str, float] = defaultdict(float)
    for row in rows:
        for name, value in row.items():
            if name.startswith("time/") and math.isfinite(value):
                times[quantity(name).label] += value
    times |= {label: seconds[key] for key, label in _PHASES.items() if key in seconds}
    times |= {key: value for key, value in seconds.items() if "/" in key}  # stages of a pipeline
    known = sum(times.values())
    if known <= 0:
        return ""
    # A run that was resumed has the iterations of every process, and the clock of the last one.
    whole = max(known, seconds.get("total", 0.0))
    longest = sorted(times.items(), key=lambda part: -part[1])[:_MAX_PARTS]
    shown = [(label, value) for label, value in longest if value > _LEAST_SHARE * whole]
    parts = [(f"t{index}", *part) for index, part in enumerate(shown)]
    label = "reading data, checkpoints, logs" if "fit" in seconds else "everything else"
    parts.append(("rest", label, whole - sum(value for _, value in shown)))
    kept = [part for part in parts if part[2] > _LEAST_SHARE * whole]
    told = [(css, of, s / whole, f"{duration(s)} · {percent(s / whole)}") for css, of, s in kept]
    return render("times.html", whole=whole, parts=told)


def _settings(summary: Summary, folder: RunFolder) -> str:
    """Return what the user has set, seed, versions and commit, and the configuration.

    The configuration is folded, without interpolations and without its secrets.
    """
    facts = {
        "seed": summary.seed,
        "commit": (summary.git_commit or "")[:12],
        "configuration": summary.config_hash,
        "versions": ", ".join(f"{k} {v}" for k, v in summary.versions.items()),
    }
    facts = {name: value for name, value in facts.items() if value not in (None, "")}
    words = [] if "command" in summary.about else saved_words(folder)
    config = saved_config(folder)
    whole = yaml.safe_dump(config, sort_keys=False, allow_unicode=True).strip() if config else ""
    return render("settings.html", facts=facts, words=words, whole=whole)


def saved_config(folder: RunFolder, *, public: bool = True) -> dict[str, Any]:
    """Return the configuration of a run as it was written, {} if unreadable.

    If public without secrets, and without interpolations where the run has saved it so.
    """
    resolved = _saved(folder.config.with_name(RESOLVED)) if public else None
    if isinstance(resolved, dict):
        return resolved
    content = _saved(folder.config)
    if not isinstance(content, dict):
        return {}
    return public_config(content, content) if public else content


def saved_words(folder: RunFolder) -> list[str]:
    """Return the overrides of a run's command line, without secrets and folders."""
    words = _saved(folder.config.with_name("overrides.yaml")) or ()
    return public_words([str(word) for word in words])


def _saved(file: Path) -> Any:
    """Return what a YAML file holds, None if it is missing or damaged."""
    try:
        return read_yaml(file)
    except (OSError, ValueError):
        return None
