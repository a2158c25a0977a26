"""Collect preference records or demonstrations of prompts: `python -m rlhf_lightning.collect`."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_lightning.app.build import begin_run
from rlhf_lightning.app.command_line import run_in_folder, run_job, say, started
from rlhf_lightning.app.config.commands import CollectSettings
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.saved import keep_configuration
from rlhf_lightning.app.failures import refusing
from rlhf_lightning.app.next_command import after_collecting
from rlhf_lightning.app.prerequisites import check_world, prepare_inputs
from rlhf_lightning.app.run_claim import (
    check_folder,
    hydra_log,
    nothing_to_continue,
    runs_to_continue,
)
from rlhf_lightning.app.sweep import in_sweep
from rlhf_lightning.callbacks.console import print_verdict
from rlhf_lightning.data.records import PromptRecord, first_of_each, question_key
from rlhf_lightning.data.summary import warn_of_plain_prompts
from rlhf_lightning.preferences.annotators import PeopleNeededError
from rlhf_lightning.preferences.candidates import Sampling, grid, load_candidate_policy
from rlhf_lightning.preferences.collection import Lab, RejectionSampler
from rlhf_lightning.preferences.pairing import WorstSamples
from rlhf_lightning.preferences.reliability import (
    copy_collection,
    flat_metrics,
    write_collection,
    write_demonstrations,
)
from rlhf_lightning.preferences.reward_annotator import RewardModelAnnotator
from rlhf_lightning.reports.page import write_report
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import artifact_lock, drop_unused
from rlhf_lightning.runs.summary import Summary, read_summary, write_summary
from rlhf_lightning.text.tokenizers import load_tokenizer

PEOPLE_NEEDED = 3  # exit status: people have to label before the run can continue
DATA = "data"


def run(settings: CollectSettings, folder: RunFolder, overrides: list[str]) -> Summary:
    """Collect, from the settings to the published records.

    Args:
        settings: settings of the command.
        folder: folder of a new run; with `resume=auto` an unfinished one replaces it.
        overrides: overrides of the command line, for models that must be trained first.

    Returns:
        The summary, as written to the run folder.

    Raises:
        ConfigError: if the configuration cannot work.
        PeopleNeededError: if people have to label first.
    """
    check_folder(settings, folder)
    check_world(settings, settings.candidates.policies.values())
    keep_configuration(settings, folder)
    prepare_inputs(settings, overrides)
    folder = _start(settings, folder)
    with begin_run(settings, folder, "preference collection", resumes=True) as summary:
        try:
            return _collect(settings, folder, summary, overrides)
        except PeopleNeededError as error:
            stopped = error
            told = replace(read_summary(folder), status="stopped", cause=str(error))
            write_summary(folder, told)
    raise stopped


def _collect(
    settings: CollectSettings, folder: RunFolder, summary: Summary, overrides: list[str]
) -> Summary:
    begun = time.perf_counter()
    made = _demonstrations if settings.records == "demonstrations" else _preferences
    summary, metrics, told = made(settings, folder, summary)
    published = publishing_to(settings, overrides)
    if published is not None:
        target = Path(published)
        with artifact_lock(target):
            copy_collection(folder.path / DATA, target)
    summary = replace(
        summary,
        status="completed",
        metrics=dict(sorted(metrics.items())),
        seconds={"total": time.perf_counter() - begun},
        next=after_collecting(settings, folder, overrides, folder.path / DATA),
    )
    write_summary(folder, summary)
    write_report(folder)
    print_verdict(summary, folder)
    for line in told:
        say(line)
    say(f"records: {published or folder.path / DATA}")
    return summary


def build_lab(settings: CollectSettings, folder: Path) -> Lab:
    """Return the lab of a collection; models are loaded when their turn comes.

    Raises:
        ValueError: with the key, what it got and what it wants.
    """
    annotator = settings.annotator
    named = [one.build() for one in (*(annotator.automatic or {}).values(), settings.judge) if one]
    names = [one.name for one in named]
    if len(set(names)) != len(names):
        raise ConfigError(f"annotators need different names, got {', '.join(names)}")
    return Lab(
        folder=folder,
        sampling=_sampling(settings),
        annotators=named,
        people=None if annotator.people is None else annotator.people.build(),
        budget=settings.budget.build(),
        hparams=settings.lab.build(),
        score=None if settings.score is None else settings.score.build(),
        worst=_worst(settings),
        say=say,
    )


def _worst(settings: CollectSettings) -> WorstSamples | None:
    given = settings.adversarial
    if given.run is None:
        return None
    if given.source is None:
        raise ConfigError("adversarial.run needs the misled reward model: artifacts.reward=FOLDER")
    model = _scorer(settings, given.source, given.max_length)
    return WorstSamples(Path(given.run), model.scores, given.num_pairs)


def _scorer(settings: CollectSettings, source: str, longest: int) -> RewardModelAnnotator:
    precision = settings.trainer.precision
    return RewardModelAnnotator(source, max_length=longest, precision=precision)


def _sampling(settings: CollectSettings) -> Sampling:
    candidates, precision = settings.candidates, settings.trainer.precision
    how = {**settings.model.template, **settings.model.origin, "precision": precision}
    named = {name: source for name, source in candidates.policies.items() if source is not None}
    given = candidates.model_dump(exclude={"policies", "decoding", "num_prompts", "split"})
    return Sampling(
        policies={name: partial(load_candidate_policy, one, **how) for name, one in named.items()},
        decodings=grid(candidates.decoding),
        seed=settings.seed,
        **given,
    )


def read_prompts(settings: CollectSettings) -> list[PromptRecord]:
    """Return the dataset's prompts, or a random part of them: each once, as its first row has it.

    Raises:
        ConfigError: if there is none.
    """
    source = settings.dataset.source.build()
    records = source.records("prompts", settings.candidates.split)
    prompts = first_of_each(records, question_key)
    count = settings.candidates.num_prompts
    if count is not None and count < len(prompts):
        drawn = random.Random(f"{settings.seed}/prompts").sample(range(len(prompts)), count)
        prompts = [prompts[index] for index in sorted(drawn)]
    if not prompts:
        raise ConfigError(f"dataset={settings.dataset.name} has no prompts in candidates.split")
    first = next(filter(None, settings.candidates.policies.values()), None)
    if first is not None:
        tokenizer = load_tokenizer(first, **settings.model.template, **settings.model.origin)
        warn_of_plain_prompts(prompts, tokenizer)
    return prompts


def publishing_to(settings: CollectSettings, overrides: Sequence[str]) -> str | None:
    """Return the folder that the records are published to; None for none.

    Adversarial pairs are added to a collection with `data.also`: without a separate folder they
    stay in the run folder, and do not replace the published collection.
    """
    named = any(word.lstrip("+").startswith("artifacts.publish=") for word in overrides)
    if not settings.paths.publish or (settings.adversarial.run and not named):
        return None
    return settings.artifacts.publish


def _preferences(
    settings: CollectSettings, folder: RunFolder, summary: Summary
) -> tuple[Summary, dict[str, float], list[str]]:
    """Write preference records; return the summary begun, the metrics, and lines for the end."""
    with refusing(ValueError, TypeError):
        lab = build_lab(settings, folder.path)
    prompts = [] if lab.worst else read_prompts(settings)
    given = settings.adversarial
    lines: dict[str, object] = {
        "worst responses": f"at most {given.num_pairs} of {given.run}, by {given.source}"
    }
    if not lab.worst:
        lines = _sources(settings, prompts) | {
            "candidates": f"{lab.sampling.per_prompt} for each prompt",
            "pairs": f"{lab.hparams.num_pairs or 'all'}, {lab.hparams.pairing}",
        }
    annotators = ", ".join(annotator.name for annotator in lab.annotators) or "people alone"
    lines |= {"annotators": annotators, "seed": settings.seed}
    summary = started(folder, summary, lines)
    collection = lab.run(prompts)
    gold = None if settings.dataset.gold is None else settings.dataset.gold.build()
    figures = write_collection(folder.path / DATA, collection, lab.hparams, gold=gold)
    told = [f"before: {collection.before}", f"after:  {collection.after}"]
    return summary, flat_metrics(figures), told


def _demonstrations(
    settings: CollectSettings, folder: RunFolder, summary: Summary
) -> tuple[Summary, dict[str, float], list[str]]:
    """Write the best responses as demonstrations; return as `_preferences` does."""
    candidates, gold = settings.candidates, settings.dataset.gold
    reward, longest = str(settings.artifacts.reward), candidates.max_prompt_length
    sampler = RejectionSampler(
        folder=folder.path,
        sampling=_sampling(settings),
        score=_scorer(settings, reward, longest + candidates.max_new_tokens).scores,
        keep_unfinished=settings.lab.get("keep_unfinished", False),
        gold=None if gold is None else gold.build(),
        say=say,
    )
    prompts = read_prompts(settings)
    best = f"the best of {sampler.sampling.per_prompt} for each prompt"
    lines = {"demonstrations": best, "score": reward, "seed": settings.seed}
    summary = started(folder, summary, _sources(settings, prompts) | lines)
    rows, metrics = sampler.run(prompts)
    write_demonstrations(folder.path / DATA, rows)
    return summary, metrics, []


def _sources(settings: CollectSettings, prompts: Sequence[PromptRecord]) -> dict[str, object]:
    """Return the lines of the first screen that say what answers which prompts."""
    policies = (f"{n}: {source}" for n, source in settings.candidates.policies.items() if source)
    return {
        "policies": ", ".join(policies),
        "prompts": f"{len(prompts)} of {settings.dataset.name}",
    }


def _start(settings: CollectSettings, folder: RunFolder) -> RunFolder:
    """Return the folder of the run: an unfinished one of this configuration, or the new one."""
    if settings.resume != "auto":
        return folder
    if (unfinished := next(runs_to_continue(settings, folder), None)) is None:
        say(f"resume=auto continues {nothing_to_continue(settings)}")
        return folder
    drop_unused(folder, unfinished, hydra_log(), link=in_sweep())
    return unfinished


def _job(cfg: Any) -> None:
    run_in_folder("collect", cfg, _run_or_wait)


def _run_or_wait(settings: CollectSettings, folder: RunFolder, overrides: list[str]) -> None:
    try:
        run(settings, folder, overrides)
    except PeopleNeededError as error:
        say(str(error))
        raise SystemExit(PEOPLE_NEEDED) from None


def main() -> None:
    """Run the command line."""
    run_job("collect", _job)
