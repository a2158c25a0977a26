"""A policy against a baseline on held-out prompts: `python -m rlhf_lightning.evaluate`.

Heavy imports stay inside functions: `--help` and a config error answer at once.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.app.command_line import compose_and_check, fail, say
from rlhf_lightning.app.config.compose import (
    ConfigError,
    conf_dir,
    plain,
    register,
)
from rlhf_lightning.app.config.save import keep_secrets
from rlhf_lightning.app.config.targets import trusted_targets
from rlhf_lightning.app.evaluate_parts import (
    SPREAD,
    Sides,
    build_sides,
    check_evaluation,
    prepare_sides,
    reward_spread,
)
from rlhf_lightning.app.failures import exit_with, exits_are_failures, record_failure
from rlhf_lightning.app.run_claim import check_folder
from rlhf_lightning.distributed.launch import agree_on, launch_time
from rlhf_lightning.distributed.process import prepare_process
from rlhf_lightning.evaluation.gates import check_gates
from rlhf_lightning.models.cpu_kernels import cpu_kernels
from rlhf_lightning.runs.folder import RunFolder, SamplesAppender
from rlhf_lightning.runs.lock import claim_run
from rlhf_lightning.runs.resume import config_hash
from rlhf_lightning.runs.summary import (
    GateResult,
    Summary,
    new_summary,
    read_summary,
    write_summary,
)

if TYPE_CHECKING:
    from rlhf_lightning.evaluation.held_out import SideAnswers

register()
prepare_process()
PEOPLE = "human"  # folder of what raters see, and of its key


@exits_are_failures()
def run(cfg: DictConfig, folder: RunFolder, overrides: list[str]) -> Summary:
    """Evaluate from the configuration to the report.

    Args:
        cfg: composed configuration.
        folder: of the run; of `human=import` that of the evaluation that exported takes its place.
        overrides: of the command line, for models that must be trained first.

    Returns:
        The summary, as written to the run folder.

    Raises:
        ConfigError: if the configuration cannot work.
    """
    trusted = trusted_targets()
    check_evaluation(cfg, trusted)
    if cfg.human == "import":
        return import_labels(cfg)
    check_folder(cfg, folder)
    keep_secrets(cfg, folder)
    prepare_sides(cfg, overrides)
    digest = config_hash(OmegaConf.to_container(cfg, resolve=False))  # type: ignore[arg-type]
    summary = new_summary("evaluate", seed=cfg.seed, config_hash=digest)
    kernels = cpu_kernels(cfg.model.get("cpu_kernels", True))
    with claim_run(folder.path, lambda: check_folder(cfg, folder)), kernels:
        try:
            write_summary(folder, summary)
            return _evaluate(cfg, folder, summary, trusted)
        except KeyboardInterrupt:
            write_summary(folder, replace(summary, status="stopped", cause="it was interrupted"))
            raise
        except Exception as error:
            record_failure(folder, summary, error)
            raise


@exits_are_failures()
def _evaluate(
    cfg: DictConfig, folder: RunFolder, summary: Summary, trusted: tuple[str, ...]
) -> Summary:
    started = time.perf_counter()
    from rlhf_lightning.app.command_line import quieten
    from rlhf_lightning.callbacks.console import print_start
    from rlhf_lightning.evaluation.generate import side_by_side
    from rlhf_lightning.evaluation.human import labelling_command
    from rlhf_lightning.models.precision import in_precision

    quieten()
    sides = build_sides(cfg, trusted)
    print_start("evaluate", folder, _settings(cfg, len(sides.records)))
    built = time.perf_counter()
    precision = in_precision(cfg.trainer.precision, sides.policy.model.device)
    with precision:
        mine, theirs = _answers(sides)
    metrics = sides.comparison.measure(mine, theirs)
    if not sides.same_tokenizer:
        for name in ("val/kl_per_token", "val/kl_per_response"):
            del metrics[name]
        say("The tokenizers differ: the KL between the two is not measured.")
    answered = time.perf_counter()
    with precision:
        metrics |= _against_references(cfg, sides, mine, theirs)
    metrics |= _judged(cfg, folder, mine, theirs) | reward_spread(cfg)
    if cfg.human == "export":
        _export(cfg, folder, mine, theirs)
    SamplesAppender(folder.samples).append(
        0, side_by_side(mine.main, theirs.main, len(mine.main.prompts))
    )
    now = time.perf_counter()
    seconds = {"setup": built - started, "answers": answered - built, "judges": now - answered}
    summary = replace(
        summary,
        status="completed",
        metrics=dict(sorted(metrics.items())),
        gates=_gates(cfg, metrics) if cfg.gates else (),
        seconds=seconds | {"total": now - started},
    )
    _tell(folder, summary)
    if cfg.human == "export":
        where = folder.path / PEOPLE
        say(f"People: {labelling_command(where)}")
        say(
            f"then  python -m rlhf_lightning.evaluate human=import people.run={folder.path}  adds "
            "their verdict here"
        )
    return summary


def _answers(sides: Sides) -> tuple[SideAnswers, SideAnswers]:
    """Return the answers of policy and baseline."""
    baseline = sides.baseline.model
    return (
        sides.comparison.ask_policy(sides.policy.model, baseline if sides.same_tokenizer else None),
        sides.comparison.ask_baseline(baseline, sides.baseline_questions, sides.baseline_sampling),
    )


def import_labels(cfg: DictConfig) -> Summary:
    """Add people's labels to the evaluation that exported its pairs; return its new summary.

    Raises:
        ConfigError: if there is no such evaluation, or nobody has labelled.
    """
    from rlhf_lightning.data.errors import BadRecordError
    from rlhf_lightning.evaluation.human import human_measures, read_key, read_labels
    from rlhf_lightning.preferences.annotation.database import StoreError

    folder = RunFolder(Path(cfg.people.run))
    file = None if cfg.people.labels is None else Path(cfg.people.labels)
    try:
        summary = read_summary(folder)
        where = folder.path / PEOPLE
        key, labels = read_key(where), read_labels(where, file)
        found = human_measures(key, labels, score_scale=summary.metrics.get(SPREAD))
    except (OSError, ValueError, BadRecordError, StoreError) as error:
        raise ConfigError(str(error)) from error
    kept = {k: v for k, v in summary.metrics.items() if not k.startswith("val/human_")}
    metrics = kept | found
    known = {name: value for name, value in metrics.items() if value is not None}
    gates = _gates(cfg, known) if cfg.gates else summary.gates
    summary = replace(summary, metrics=dict(sorted(metrics.items())), gates=gates)
    _tell(folder, summary)
    return summary


def _gates(cfg: DictConfig, metrics: dict[str, float]) -> tuple[GateResult, ...]:
    from rlhf_lightning.evaluation.safety import required_measures

    required = required_measures(OmegaConf.select(cfg, "safety.prompts"))
    return check_gates(plain(cfg.gates), metrics, required=required)


def _against_references(
    cfg: DictConfig, sides: Sides, mine: SideAnswers, theirs: SideAnswers
) -> dict[str, float]:
    """Return the win rates of both sides against the data set's own answers, where it has some."""
    if not cfg.references:
        return {}
    from rlhf_lightning.evaluation.reference_answers import against_references, find_references

    source = hydra.utils.instantiate(cfg.dataset.source)
    found = find_references(source, sides.records, cfg.prompts.split)
    if not found:
        say("The data set has no answers of its own to these prompts: no win rate against them.")
        return {}
    return against_references(
        sides.comparison,
        sides.policy,
        sides.records,
        found,
        {"": mine.main, "baseline_": theirs.main},
        max_prompt_length=cfg.prompts.max_length,
        batch_size=cfg.evaluation.batch_size,
    )


def _judged(
    cfg: DictConfig, folder: RunFolder, mine: SideAnswers, theirs: SideAnswers
) -> dict[str, float]:
    if cfg.judge is None:
        return {}
    from rlhf_lightning.evaluation.human import judge_measures

    judge = hydra.utils.instantiate(cfg.judge, _convert_="all")
    where = folder.path / "judge"
    where.mkdir(exist_ok=True)
    return judge_measures(judge, mine.main, theirs.main, where, seed=cfg.seed)


def _export(cfg: DictConfig, folder: RunFolder, mine: SideAnswers, theirs: SideAnswers) -> None:
    from rlhf_lightning.evaluation.human import blind_pairs, write_blind

    pairs, key = blind_pairs(
        mine.main,
        theirs.main,
        num_pairs=cfg.people.num_pairs,
        scored=cfg.scorer is not None,
        seed=cfg.seed,
    )
    write_blind(folder.path / PEOPLE, pairs, key)


def _tell(folder: RunFolder, summary: Summary) -> None:
    from rlhf_lightning.callbacks.console import print_verdict
    from rlhf_lightning.reports.page import write_report

    write_summary(folder, summary)
    write_report(folder)
    print_verdict(summary, folder)


def _settings(cfg: DictConfig, num_prompts: int) -> dict[str, object]:
    settings: dict[str, Any] = {
        "policy": cfg.policy,
        "baseline": cfg.baseline,
        "prompts": f"{num_prompts} of {cfg.dataset.name}, {cfg.evaluation.answers_per_prompt} "
        "answers a side to each",
        "temperature": cfg.evaluation.temperature,
        "seed": cfg.seed,
    }
    if cfg.scorer is not None:
        settings["score"] = OmegaConf.select(cfg, "scorer.source") or cfg.scorer._target_
    return settings


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="evaluate")
def _hydra_main(cfg: DictConfig) -> None:
    config = HydraConfig.get()
    folder = RunFolder(Path(config.runtime.output_dir))
    try:
        run(cfg, folder, list(config.overrides.task))
    except ConfigError as error:
        fail(str(error))
    except (Exception, KeyboardInterrupt) as error:  # told in one line, and kept in the folder
        exit_with(error)


def main() -> None:
    """Run the command line."""
    agree_on("launch time", launch_time)
    cfg = compose_and_check("evaluate", lambda cfg: check_evaluation(cfg, trusted_targets()))
    if cfg is None or cfg.human != "import":
        _hydra_main()
        return
    try:
        import_labels(cfg)  # into the folder of another run
    except ConfigError as error:
        fail(str(error))


if __name__ == "__main__":
    main()
