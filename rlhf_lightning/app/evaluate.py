"""A policy against a baseline on held-out prompts: `python -m rlhf_lightning.evaluate`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlhf_lightning.app.build import computing
from rlhf_lightning.app.command_line import (
    check_command_line,
    ended_in_one_line,
    run_in_folder,
    run_job,
    say,
    started,
)
from rlhf_lightning.app.config.commands import EvaluateSettings
from rlhf_lightning.app.config.compose import ConfigError, register
from rlhf_lightning.app.config.saved import keep_configuration
from rlhf_lightning.app.evaluate_parts import (
    SPREAD,
    UNLIMITED,
    Sides,
    build_sides,
    choose_prompts,
    load_side,
    measured_best_of,
    prepare_sides,
    reward_spread,
)
from rlhf_lightning.app.evaluation import gates_of
from rlhf_lightning.app.failures import record_failure
from rlhf_lightning.app.run_claim import check_folder
from rlhf_lightning.callbacks.console import print_verdict
from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.records import PromptRecord
from rlhf_lightning.distributed.launch import broadcast_from_rank0, launch_time
from rlhf_lightning.distributed.process import prepare_process
from rlhf_lightning.evaluation.benchmarks import (
    Candidates,
    LmEvalBenchmark,
    RewardBenchmark,
    Scored,
    offsets,
)
from rlhf_lightning.evaluation.generate import side_by_side, values_of
from rlhf_lightning.evaluation.held_out import written_responses
from rlhf_lightning.evaluation.human import (
    blind_pairs,
    human_measures,
    judge_measures,
    labelling_command,
    read_key,
    read_labels,
    write_blind,
)
from rlhf_lightning.models.precision import in_precision, set_matmul_precision
from rlhf_lightning.models.quiet import quieten
from rlhf_lightning.preferences.annotation.store import StoreError
from rlhf_lightning.reports.page import write_report
from rlhf_lightning.runs.folder import RunFolder, SamplesAppender
from rlhf_lightning.runs.lock import claim_run
from rlhf_lightning.runs.model_card import add_figures
from rlhf_lightning.runs.public_config import without_folders
from rlhf_lightning.runs.stopping import stopping_on_signals
from rlhf_lightning.runs.summary import Summary, new_summary, read_summary, write_summary
from rlhf_lightning.text.tokenizers import load_tokenizer

register()
prepare_process()
PEOPLE = "human"  # folder of what raters see, and of its key


def run(settings: EvaluateSettings, folder: RunFolder, overrides: list[str]) -> Summary:
    """Evaluate, from the settings to the report.

    Args:
        settings: settings of the command.
        folder: folder of the run; with `human=import` that of the exporting evaluation replaces it.
        overrides: overrides of the command line, for models that must be trained first.

    Returns:
        The summary, as written to the run folder.

    Raises:
        ConfigError: if the configuration cannot work.
    """
    if settings.human == "import":
        return import_labels(settings)
    check_folder(settings, folder)
    keep_configuration(settings, folder)
    settings = prepare_sides(choose_prompts(settings, overrides), overrides)
    summary = new_summary(
        "evaluate", seed=settings.seed, config_hash=settings.config_hash, title="evaluation"
    )
    summary = replace(summary, judged=not settings.only_runs)
    claimed = claim_run(folder.path, lambda: check_folder(settings, folder))
    with claimed, computing(**settings.model.computing):
        try:
            write_summary(folder, summary)
            return _evaluate(settings, folder, summary)
        except BaseException as error:
            record_failure(folder, summary, error, resumes=False)
            raise


def _evaluate(settings: EvaluateSettings, folder: RunFolder, summary: Summary) -> Summary:
    begun = time.perf_counter()
    quieten()
    set_matmul_precision(settings.trainer.matmul_precision)
    if settings.benchmark is not None:
        return _benchmarked(settings, folder, summary)
    sides = build_sides(settings)
    summary = started(folder, summary, _start_lines(settings, sides))
    built = time.perf_counter()
    one, other = sides.policy.model, sides.baseline.model
    with in_precision(settings.trainer.precision, one.device):
        comparison = sides.comparison
        mine = comparison.ask_policy(one, other if sides.same_tokenizer else None)
        theirs = comparison.ask_baseline(other, sides.baseline_questions, sides.baseline_sampling)
        best_of, pool = measured_best_of(settings, sides, theirs)
    metrics = sides.comparison.measure(mine, theirs) | best_of
    if not sides.same_tokenizer:
        metrics = {k: v for k, v in metrics.items() if not k.startswith("val/kl_per_")}
        say("The tokenizers differ: the KL between the two is not measured.")
    answered = time.perf_counter()
    if settings.judge is not None:
        (folder.path / "judge").mkdir(exist_ok=True)
        judge, where = settings.judge.build(), folder.path / "judge"
        metrics |= judge_measures(judge, mine.main, theirs.main, where, seed=settings.seed)
    metrics |= reward_spread(settings)
    if settings.human == "export":
        pairs, key = blind_pairs(
            mine.main,
            theirs.main,
            num_pairs=settings.people.num_pairs,
            scored=settings.scorer is not None,
            seed=settings.seed,
        )
        write_blind(folder.path / PEOPLE, pairs, key)
    SamplesAppender(folder.samples).append(
        0, side_by_side(mine.main, theirs.main, len(mine.main.prompts))
    )
    SamplesAppender(folder.distributions).append(0, [values_of(mine.main, theirs.main), *pool])
    now = time.perf_counter()
    seconds = {"setup": built - begun, "answers": answered - built, "judges": now - answered}
    seconds |= {"total": now - begun}
    summary = _tell(settings, folder, summary, metrics, status="completed", seconds=seconds)
    if settings.human == "export":
        command = f"python -m rlhf_lightning.evaluate human=import people.run={folder.path}"
        say(f"People: {labelling_command(folder.path / PEOPLE)}")
        say(f"then  {command}  adds their verdict here")
    return summary


def _benchmarked(settings: EvaluateSettings, folder: RunFolder, summary: Summary) -> Summary:
    begun = time.perf_counter()
    card = _card_folder(settings) if settings.card else None
    lines = _benchmark_lines(settings)
    summary = started(folder, summary, lines)
    metrics = measured_benchmark(settings)
    seconds = {"total": time.perf_counter() - begun}
    summary = _tell(settings, folder, summary, metrics, status="completed", seconds=seconds)
    if card is not None:
        about = "; ".join(f"{key}: {value}" for key, value in lines.items())
        title = _benchmark_title(settings)
        try:
            say(f"added to {add_figures(card, title, without_folders(about), metrics)}")
        except (OSError, UnicodeError) as error:
            say(f"not added to the card of {card}: {error}")
    return summary


def measured_benchmark(settings: EvaluateSettings) -> dict[str, float]:
    """Return `benchmark/...`.

    Args:
        settings: settings of the command, with a benchmark.

    Raises:
        ConfigError: if files, tasks or scorer do not fit.
    """
    assert settings.benchmark is not None
    try:
        benchmark = settings.benchmark.build()
        if isinstance(benchmark, LmEvalBenchmark):
            sides = [load_side(settings, one) for one in (settings.policy, settings.baseline)]
            with in_precision(settings.trainer.precision, sides[0].model.device):
                return benchmark.measure(*sides)
        return benchmark.measure(_scored(settings, benchmark))
    except (BadRecordError, OSError, ValueError, TypeError, ImportError) as error:
        raise ConfigError(str(error)) from error


def _scored(settings: EvaluateSettings, benchmark: RewardBenchmark) -> list[Scored]:
    """Return the scorer's scores of all responses."""
    target = settings.scorer
    if target is None:
        raise ConfigError("benchmark: name the reward model to measure, scorer=NAME")
    members = target.get("sources")
    source = members[0] if members else target.get("source") or settings.policy
    if members:  # to be compared with the others
        target = settings.updated({"scorer.policy": source}).scorer or target
    tokenizer = load_tokenizer(source, **settings.model.template)
    candidates = benchmark.candidates(chat=bool(tokenizer.chat_template))
    if not candidates:
        raise ConfigError("benchmark: the file holds no rows")
    scorer = target.build()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for model in scorer.build():
        model.to(device)
    records = _records(candidates)
    with in_precision(settings.trainer.precision, device):
        answers = written_responses(
            records,
            [answer for one in candidates for answer in one.answers],
            tokenizer,
            max_prompt_length=settings.prompts.max_length or UNLIMITED,
            batch_size=settings.evaluation.batch_size,
            device=device,
            scorer=scorer,
        )
    if len(answers.scores) < len(records):
        raise ConfigError(
            f"benchmark: {len(records) - len(answers.scores)} of {len(records)} responses have a "
            f"prompt of more than prompts.max_length={settings.prompts.max_length} tokens, or of "
            "none: raise it. None is left out, or the figure would be of another set"
        )
    unknown, ids = tokenizer.unk_token_id, answers.token_ids
    if unknown is not None and (rows := sum(unknown in one[:-1] for one in ids)):
        say(f"{rows} of {len(ids)} responses have words that the tokenizer does not know.")
    lengths = answers.lengths
    return [
        Scored(one, answers.scores[begin:end], lengths[begin:end])
        for one, (begin, end) in zip(candidates, offsets(candidates), strict=True)
    ]


def _records(candidates: Sequence[Candidates]) -> list[PromptRecord]:
    """Return the prompt of each response."""
    return [
        PromptRecord(
            one.prompt,
            domain="" if one.record is None else one.record.domain,
            rendered=one.record is not None and one.record.rendered,
            variables={} if one.record is None else one.record.variables,
        )
        for one in candidates
        for _ in one.answers
    ]


def _benchmark_title(settings: EvaluateSettings) -> str:
    """Return such as `Pairs held_out.jsonl` or `LmEval gsm8k, hellaswag`."""
    assert settings.benchmark is not None
    asked, file = settings.benchmark.get("tasks") or [], settings.benchmark.get("path")
    of = ", ".join(asked) if asked else Path(file).name if file else ""
    return f"{settings.benchmark.class_name.removesuffix('Benchmark')} {of}".strip()


def _card_folder(settings: EvaluateSettings) -> Path:
    """Return the folder of the model that is measured, before anything is.

    Raises:
        ConfigError: if it has no model card.
    """
    model = settings.measured_model
    if model is None or not (Path(model) / "README.md").is_file():
        raise ConfigError(
            f"card=true: {model} is no folder with a model card (README.md): give an exported "
            "folder, or leave card=true out"
        )
    return Path(model)


def _benchmark_lines(settings: EvaluateSettings) -> dict[str, object]:
    assert settings.benchmark is not None
    given = {key: value for key, value in settings.benchmark.arguments.items() if value is not None}
    if settings.compares_policies:
        return {"policy": settings.policy, "baseline": settings.baseline, **given}
    scorer = settings.scorer
    return {"scorer": None if scorer is None else scorer.get("source") or scorer.path, **given}


def import_labels(settings: EvaluateSettings) -> Summary:
    """Add people's labels to the evaluation that exported its pairs; return its new summary.

    Raises:
        ConfigError: if there is no such evaluation, or no label.
    """
    folder = RunFolder(Path(str(settings.people.run)))
    file = None if settings.people.labels is None else Path(settings.people.labels)
    try:
        summary = read_summary(folder)
        where = folder.path / PEOPLE
        key, labels = read_key(where), read_labels(where, file)
        found = human_measures(key, labels, score_scale=summary.metrics.get(SPREAD))
    except (OSError, ValueError, BadRecordError, StoreError) as error:
        raise ConfigError(str(error)) from error
    kept = {k: v for k, v in summary.metrics.items() if not k.startswith("val/human_")}
    return _tell(settings, folder, summary, kept | found)


def _tell(
    settings: EvaluateSettings,
    folder: RunFolder,
    summary: Summary,
    metrics: Mapping[str, float | None],
    **changes: Any,
) -> Summary:
    """Write and print what was measured, with the verdict of the gates; return its summary."""
    gates = gates_of(settings, metrics) if settings.gates else summary.gates
    metrics = dict(sorted(metrics.items()))
    summary = replace(summary, metrics=metrics, gates=gates, **changes)
    write_summary(folder, summary)
    write_report(folder)
    print_verdict(summary, folder)
    return summary


def _start_lines(settings: EvaluateSettings, sides: Sides) -> dict[str, object]:
    part = {"all": "all {:,}", "train": "the {:,} training"}.get(str(settings.prompts.split))
    rows = f"{part or 'the {:,} held-out'} rows of {settings.dataset.name}".format(sides.num_rows)
    path = settings.dataset.source.get("path") or settings.dataset.hub_name
    lines: dict[str, object] = {
        "policy": settings.policy,
        "baseline": settings.baseline,
        "prompts": f"{len(sides.records):,} of {rows}" + (f" ({path})" if path else ""),
        "not asked": ", ".join(f"{n:,} {why}" for why, n in sides.unused.items() if n) or "none",
        "responses": f"{settings.evaluation.answers_per_prompt} a side to each prompt, of at most "
        f"{settings.evaluation.max_new_tokens} tokens",
        "temperature": settings.evaluation.temperature,
        "seed": settings.seed,
    }
    if settings.best_of.n:
        numbers = ", ".join(map(str, settings.best_of.n))
        lines["best of"] = f"{numbers} of {settings.best_of.pool} to each prompt"
    scorer = settings.scorer
    if scorer is not None:
        lines["score"] = scorer.get("source") or scorer.get("function") or scorer.path
    if settings.judge is not None:
        lines["judge"] = settings.judge.get("model") or settings.judge.class_name
    return lines


def _job(cfg: Any) -> None:
    run_in_folder("evaluate", cfg, run)


def main() -> None:
    """Run the command line."""
    broadcast_from_rank0("launch time", launch_time)
    settings = check_command_line("evaluate")
    if settings is None or settings.human != "import":
        run_job("evaluate", _job)
        return
    with ended_in_one_line(), stopping_on_signals():
        import_labels(settings)  # into the folder of another run


if __name__ == "__main__":
    main()
