"""A policy against a baseline on held-out prompts: `python -m rlhf_lightning.evaluate`."""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from rlhf_lightning.app.build import begin_run
from rlhf_lightning.app.command_line import (
    check_command_line,
    ended_in_one_line,
    run_in_folder,
    run_job,
    say,
    started,
)
from rlhf_lightning.app.config.commands import EvaluateSettings
from rlhf_lightning.app.config.compose import ConfigError, keys_of, texts
from rlhf_lightning.app.config.groups import MODELS
from rlhf_lightning.app.config.saved import keep_configuration
from rlhf_lightning.app.evaluation import comparison_arguments, gates_of
from rlhf_lightning.app.failures import refusing
from rlhf_lightning.app.prerequisites import check_world, prepare_inputs
from rlhf_lightning.app.run_claim import check_folder
from rlhf_lightning.app.training_data import training_runs, trainings_on
from rlhf_lightning.callbacks.console import print_verdict
from rlhf_lightning.data.encode import OVER_LONG
from rlhf_lightning.data.records import Split
from rlhf_lightning.data.sources.base import FileSource, RowSource
from rlhf_lightning.data.sources.given import WholeSource, files_of
from rlhf_lightning.data.summary import warn_of_plain_prompts
from rlhf_lightning.evaluation import human
from rlhf_lightning.evaluation.benchmarks import score_candidates
from rlhf_lightning.evaluation.generate import PolicyAnswers, Sampling
from rlhf_lightning.evaluation.held_out import (
    BAD,
    NOT_DRAWN,
    REPEATED,
    HeldOutComparison,
    held_out_comparison,
)
from rlhf_lightning.evaluation.lm_eval_tasks import LmEvalBenchmark
from rlhf_lightning.models.classifiers import prompt_room
from rlhf_lightning.models.precision import MIXED_BF16, in_precision
from rlhf_lightning.preferences.annotation.store import StoreError
from rlhf_lightning.preferences.candidates import LoadedPolicy, load_candidate_policy
from rlhf_lightning.reports.page import write_report
from rlhf_lightning.runs.folder import RunFolder, run_behind
from rlhf_lightning.runs.manifest import ManifestError, read_manifest
from rlhf_lightning.runs.stopping import stopping_on_signals
from rlhf_lightning.runs.summary import Summary, read_summary, write_summary
from rlhf_lightning.text.tokenizers import load_tokenizer

PEOPLE = "human"  # folder of what raters see, and of its key
UNLIMITED = 1 << 30
_MISFITS = (StoreError, OSError, ValueError, TypeError, ImportError)  # of files, models, settings
_SCORED_BY = re.compile(r"(^|\.)sources?(\.\w+)?$")  # settings that name reward models
_LEARNT = "{0} was trained on {1}: name what was held out from it, or write prompts.split=all"


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
    evaluate = _compare if settings.benchmark is None else _measure_benchmark
    with begin_run(settings, folder, "evaluation", resumes=False) as summary:
        return evaluate(settings, folder, summary)


def prepare_sides(settings: EvaluateSettings, overrides: list[str]) -> EvaluateSettings:
    """Make sure that the models which are used exist; the built-in ones are trained if need be.

    Returns:
        The settings, in which the scorer compares its tokenizer with that of the policy.

    Raises:
        ConfigError: for a missing path that the user gave.
    """
    settings.check_sides()
    scorer, models = settings.scorer, settings.artifacts.models()
    sides = {"policy": settings.policy, "baseline": settings.baseline}
    sides = sides if settings.compares_policies else {}
    check_world(settings, sides.values())
    used: set[str | None] = set(sides.values())
    if scorer is not None and (settings.benchmark is None or not sides):
        used.add(scorer.get("source"))
    kinds = [kind for kind in MODELS if models.get(kind) in used and kind in models]
    prepare_inputs(settings, overrides, kinds=kinds)
    if scorer is not None and "policy" in scorer.arguments:
        return settings.updated({"scorer.policy": settings.policy if sides else None})
    return settings


def choose_prompts(settings: EvaluateSettings, overrides: Sequence[str]) -> EvaluateSettings:
    """Return the settings with the part of the dataset whose prompts are asked.

    A file or a set of the hub that the command line names is asked whole, unless it has a held-out
    part of its own or a policy was trained on it.
    """
    if settings.prompts.split is not None:
        return settings
    _check_benchmark(settings)
    keys = keys_of(overrides)
    is_named = bool(keys & {"dataset.path", "dataset.hub_name"})
    is_other = is_named or any(key.startswith("dataset.source.") for key in keys)
    is_held_out = is_other and _has_held_out_part(settings)
    if is_held_out or not is_named:
        return settings.updated({"prompts.split": "validation"})
    whole = {"evaluation.num_prompts": UNLIMITED, "prompts.max_length": None}
    free = {key: value for key, value in whole.items() if key not in keys}
    return settings.updated({"prompts.split": "all"} | free)


def _has_held_out_part(settings: EvaluateSettings) -> bool:
    """Return whether the data have a part that no policy was trained on, as far as is known.

    Raises:
        ConfigError: if a policy was trained on that part, or on all of the data.
    """
    source, hub = settings.dataset.source.build(), settings.dataset.hub_name
    is_file = isinstance(source, FileSource)
    own = source.files("validation") if is_file else getattr(source, "validation_split", None)
    files = own if is_file and own else files_of(source)
    part = None if hub is None else (hub, str(own or getattr(source, "split", "all")))
    runs = [] if settings.run is None else [RunFolder(Path(settings.run))]
    runs += training_runs([settings.policy, settings.baseline])
    found = bool(own)
    for one in trainings_on(files, part, runs):
        if one.is_whole or own:
            data = f"all of {one.data}" if one.is_whole else one.data
            raise ConfigError(_LEARNT.format(one.run.path, data))
        by_prompt = isinstance(source, RowSource) and one.seed is not None
        if by_prompt and (source.seed != one.seed or source.validation_fraction > one.fraction):
            keys = f"source.seed={one.seed} dataset.source.validation_fraction={one.fraction}"
            told = f"{one.run.path} was trained on {one.data}, and held out another part"
            raise ConfigError(f"{told}: write dataset.{keys}")
        found = True
    return found


def _check_benchmark(settings: EvaluateSettings) -> None:
    """Refuse pairs that the reward model which they are to measure was trained on.

    Raises:
        ConfigError: with its run and the pairs.
    """
    path = None if settings.benchmark is None else settings.benchmark.get("path")
    if path is None or settings.scorer is None:
        return
    with refusing(*_MISFITS):
        files = FileSource(path).files("train")
    named = texts(settings.scorer.arguments)
    models = [model for key, model in named if _SCORED_BY.search(key)]
    for one in trainings_on(files, None, training_runs(models)):
        raise ConfigError(_LEARNT.format(one.run.path, one.data))


def _compare(settings: EvaluateSettings, folder: RunFolder, summary: Summary) -> Summary:
    begun = time.perf_counter()
    policy, baseline, comparison, lines = build_comparison(settings)
    summary = started(folder, summary, lines)
    built = time.perf_counter()
    best_of: dict[str, float] = {}
    with in_precision(settings.trainer.precision, policy.model.device):
        mine = comparison.ask_policy(policy.model, baseline.model)
        theirs = comparison.ask_baseline(baseline.model)
        findings = comparison.findings(mine, theirs)
        if counts := sorted(set(settings.best_of.n)):
            size = settings.best_of.pool
            best_of = comparison.best_of(policy.model, theirs, counts, size=size)
    if not comparison.same_tokenizer:
        say("The tokenizers differ: the KL between the two is not measured.")
    answered = time.perf_counter()
    judged = _judged(settings, folder, mine, theirs)
    findings.write(folder, 0)
    now = time.perf_counter()
    seconds = {"setup": built - begun, "answers": answered - built, "judges": now - answered}
    seconds |= {"total": now - begun}
    summary = replace(summary, status="completed", seconds=seconds)
    summary = _tell(settings, folder, summary, findings.metrics | best_of | judged)
    if settings.human == "export":
        command = f"python -m rlhf_lightning.evaluate human=import people.run={folder.path}"
        say(f"People: {human.labelling_command(folder.path / PEOPLE)}")
        say(f"then  {command}  adds their verdict here")
    return summary


def build_comparison(
    settings: EvaluateSettings,
) -> tuple[LoadedPolicy, LoadedPolicy, HeldOutComparison, dict[str, object]]:
    """Return both policies, the comparison between them, and the lines of the first screen.

    Raises:
        ConfigError: with the key, what it got and what it wants.
    """
    scorer = settings.scorer
    with refusing(*_MISFITS):
        built = None if scorer is None else scorer.build()
        asked = comparison_arguments(settings)
        source = settings.dataset.source.build()
        source = WholeSource(source) if settings.prompts.split == "all" else source
        # Of all, the source's own parts are one.
        part: Split = "train" if settings.prompts.split == "train" else "validation"
        records: Any = source.records("prompts", part)
        if not records:
            name, split = settings.dataset.name, settings.prompts.split
            raise ConfigError(f"dataset={name} has no prompts in {split}")
        how = {**settings.model.template, **settings.model.origin}
        how["precision"] = settings.trainer.precision
        sides = (settings.policy, settings.baseline)
        policy, baseline = (load_candidate_policy(one, **how) for one in sides)
        models, count = (policy.model, baseline.model), settings.evaluation.max_new_tokens
        room = min(prompt_room(model, UNLIMITED, count) for model in models)
        longest = settings.prompts.max_length or room
        comparison = held_out_comparison(
            records,
            [_sampling(settings, side) for side in (policy, baseline)],
            scorer=built,
            max_prompt_length=longest,
            seed=settings.seed,
            setting="prompts.max_length",
            **asked,
        )
    if comparison is None:
        raise ConfigError(f"prompts.max_length={longest} has no room for any prompt: raise it")
    if scorer is not None and "policy" in scorer.arguments and not comparison.same_tokenizer:
        raise ConfigError(
            f"scorer reads tokens of policy={settings.policy}, baseline={settings.baseline} has "
            f"others: use scorer=text_reward_model scorer.source={settings.artifacts.reward}"
        )
    for model in [] if comparison.scorer is None else comparison.scorer.build():
        model.to(policy.model.device)
    warn_of_plain_prompts(comparison.records, policy.tokenizer)
    lines = _start_lines(settings, comparison, source, len(records), longest)
    return policy, baseline, comparison, lines


def _sampling(settings: EvaluateSettings, side: LoadedPolicy) -> Sampling:
    engine = settings.rollout.build()(side.stop_ids, side.tokenizer.pad_token_id)
    return Sampling(engine, side.tokenizer, **settings.evaluation.decoding)


def _start_lines(
    settings: EvaluateSettings, comparison: HeldOutComparison, source: Any, count: int, longest: int
) -> dict[str, object]:
    evaluation, unused, num_rows = settings.evaluation, Counter[str](), count
    if isinstance(source, WholeSource):
        num_rows, bad = source.num_rows(), len(getattr(source.source, "skipped_records", ()))
        unused += Counter({BAD: bad, REPEATED: num_rows - bad - count})
    unused += Counter(comparison.unused)
    words = {
        BAD: "bad (dataset.source.on_bad_record=skip)",
        OVER_LONG: f"of more than prompts.max_length={longest} tokens",
        NOT_DRAWN: f"not drawn (evaluation.num_prompts={evaluation.num_prompts})",
    }
    part = {"all": "all {:,}", "train": "the {:,} training"}.get(str(settings.prompts.split))
    rows = f"{part or 'the {:,} held-out'} rows of {settings.dataset.name}".format(num_rows)
    path = settings.dataset.source.get("path") or settings.dataset.hub_name
    not_asked = [f"{number:,} {words.get(why, why)}" for why, number in unused.items()]
    best_of, scorer, judge = settings.best_of, settings.scorer, settings.judge
    numbers = ", ".join(map(str, best_of.n))
    lines = {
        **named_sides(settings),
        "prompts": f"{len(comparison.records):,} of {rows}" + (f" ({path})" if path else ""),
        "not asked": ", ".join(not_asked) or None,
        "responses": f"{evaluation.answers_per_prompt} a side to each prompt, of at most "
        f"{evaluation.max_new_tokens} tokens",
        "temperature": evaluation.temperature,
        "seed": settings.seed,
        "best of": f"{numbers} of {best_of.pool} to each prompt" if numbers else None,
        "score": scorer and (scorer.get("source") or scorer.get("function") or scorer.path),
        "judge": judge and (judge.get("model") or judge.class_name),
    }
    return {name: value for name, value in lines.items() if value is not None}


def named_sides(settings: EvaluateSettings) -> dict[str, object]:
    """Return policy and baseline as the user named them: the run, not where its model is."""
    policy, run = str(settings.policy), Path(settings.run or "")
    with suppress(ManifestError):  # of an artifact
        made = Path(read_manifest(policy, verify=False).run).resolve()
        policy = str(run) if made == run.resolve() else policy
    return {"policy": run_behind(policy), "baseline": run_behind(str(settings.baseline))}


def _judged(
    settings: EvaluateSettings, folder: RunFolder, mine: PolicyAnswers, theirs: PolicyAnswers
) -> dict[str, float]:
    """Return the figures of the judge, if there is one; write the pairs for people."""
    if settings.human == "export":
        count, scored = settings.people.num_pairs, settings.scorer is not None
        blind = human.blind_pairs(mine, theirs, num_pairs=count, scored=scored, seed=settings.seed)
        human.write_blind(folder.path / PEOPLE, *blind)
    if settings.judge is None:
        return {}
    (where := folder.path / "judge").mkdir(exist_ok=True)
    return human.judge_measures(settings.judge.build(), mine, theirs, where, seed=settings.seed)


def _measure_benchmark(settings: EvaluateSettings, folder: RunFolder, summary: Summary) -> Summary:
    begun = time.perf_counter()
    scorer, target = settings.scorer, settings.benchmark
    assert target is not None
    lines = named_sides(settings)
    if not settings.compares_policies:
        lines = {"scorer": scorer and (scorer.get("source") or scorer.path)}
    lines |= {key: value for key, value in target.arguments.items() if value is not None}
    summary = started(folder, summary, lines)
    with refusing(*_MISFITS):
        metrics = _benchmark_figures(settings, target.build())
    seconds = {"total": time.perf_counter() - begun}
    summary = replace(summary, status="completed", seconds=seconds)
    return _tell(settings, folder, summary, metrics)


def _benchmark_figures(settings: EvaluateSettings, benchmark: Any) -> dict[str, float]:
    """Return `benchmark/...`."""
    precision, target = settings.trainer.precision, settings.scorer
    if isinstance(benchmark, LmEvalBenchmark):
        rounded = {"mixed_precision_dtype": "bfloat16"} if precision == MIXED_BF16 else {}
        origin = {key: value for key, value in settings.model.origin.items() if value is not None}
        model, policy, baseline = settings.model, settings.policy, settings.baseline
        with TemporaryDirectory() as folder:
            tokenizers = [str(Path(folder, side)) for side in ("policy", "baseline")]
            for source, kept in zip((policy, baseline), tokenizers, strict=True):
                load_tokenizer(source, **model.template, **model.origin).save_pretrained(kept)
            more: dict[str, Any] = rounded | origin
            return benchmark.measure(policy, baseline, tokenizers=tokenizers, **more)
    if target is None:
        raise ConfigError("benchmark: name the reward model to measure, scorer=NAME")
    members = target.get("sources")
    source = members[0] if members else target.get("source") or settings.policy
    if members:  # to be compared with the others
        target = settings.updated({"scorer.policy": source}).scorer or target
    tokenizer = load_tokenizer(source, **settings.model.template)
    candidates = benchmark.candidates(chat=bool(tokenizer.chat_template))  # before a model is read
    scorer = target.build()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for model in scorer.build():
        model.to(device)
    with in_precision(precision, device):
        scored = score_candidates(
            candidates,
            scorer,
            tokenizer,
            max_prompt_length=settings.prompts.max_length or UNLIMITED,
            batch_size=settings.evaluation.batch_size,
            device=device,
        )
    return benchmark.measure(scored)  # type: ignore[no-any-return]


def import_labels(settings: EvaluateSettings) -> Summary:
    """Add people's labels to the evaluation that exported its pairs; return its new summary.

    Raises:
        ConfigError: if there is no such evaluation, or no label.
    """
    folder = RunFolder(Path(str(settings.people.run)))
    file = None if settings.people.labels is None else Path(settings.people.labels)
    with refusing(*_MISFITS):
        summary = read_summary(folder)
        where = folder.path / PEOPLE
        key, labels = human.read_key(where), human.read_labels(where, file)
        found = human.human_measures(key, labels)
    kept = {k: v for k, v in summary.metrics.items() if not k.startswith("val/human_")}
    return _tell(settings, folder, summary, kept | found)


def _tell(
    settings: EvaluateSettings, folder: RunFolder, summary: Summary, metrics: dict[str, Any]
) -> Summary:
    """Write and print what was measured, with the verdict of the gates; return its summary."""
    gates = gates_of(settings, metrics) if settings.gates else summary.gates
    summary = replace(summary, metrics=dict(sorted(metrics.items())), gates=gates)
    write_summary(folder, summary)
    write_report(folder)
    print_verdict(summary, folder)
    return summary


def _job(cfg: Any) -> None:
    run_in_folder("evaluate", cfg, run)


def main() -> None:
    """Run the command line."""
    settings = check_command_line("evaluate")
    if settings is None or settings.human != "import":
        run_job("evaluate", _job)
        return
    with ended_in_one_line(), stopping_on_signals():
        import_labels(settings)  # into the folder of another run
