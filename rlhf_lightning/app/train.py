"""Train one stage of RLHF: `python -m rlhf_lightning.train +experiment=sft | reward | ppo`.

Heavy imports stay inside functions: `--help` and a config error answer at once.
"""

from __future__ import annotations

import json
import sys
import time
import warnings
from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.app.command_line import compose_and_check, fail, quieten
from rlhf_lightning.app.config.compose import (
    ConfigError,
    conf_dir,
    register,
)
from rlhf_lightning.app.config.help import register_help
from rlhf_lightning.app.config.save import keep_changes, keep_secrets
from rlhf_lightning.app.config.targets import trusted_targets
from rlhf_lightning.app.config.validate import check_composed, check_devices, check_run
from rlhf_lightning.app.failures import (
    exit_with,
    exits_are_failures,
    explain_failure,
    explain_lost_rank,
    record_failure,
)
from rlhf_lightning.app.prerequisites import prepare_inputs
from rlhf_lightning.app.run_claim import check_folder
from rlhf_lightning.app.stages.spec import StageSpec, find_stage
from rlhf_lightning.app.sweep import goes_on
from rlhf_lightning.distributed.launch import (
    adopt_rank,
    agree_on,
    as_single_run,
    begin,
    end_process,
    forget_agreements,
    forget_ranks,
    global_rank,
    launch_time,
)
from rlhf_lightning.distributed.process import prepare_process
from rlhf_lightning.models.cpu_kernels import cpu_kernels
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import claim_run
from rlhf_lightning.runs.resume import (
    check_checkpoint,
    config_hash,
    find_unfinished_run,
    newest_complete_checkpoint,
)
from rlhf_lightning.runs.stopping import RunStoppedError, stopping_on_signals
from rlhf_lightning.runs.summary import Summary, new_summary, read_summary, write_summary
from rlhf_lightning.runs.taken import drop_unused

register()
register_help()
prepare_process()


@exits_are_failures()
@stopping_on_signals()
def run(cfg: DictConfig, folder: RunFolder, overrides: list[str]) -> Summary:
    """Train a stage from its configuration to its report.

    Args:
        cfg: composed configuration.
        folder: of a new run; with `resume=auto` an unfinished one takes its place.
        overrides: of the command line, for stages that must be trained first.

    Returns:
        The summary, as written to the run folder.

    Raises:
        ConfigError: if the configuration cannot work.
        RunFailedError: if memory or disk ran out, with what to change.
    """
    check_run(cfg, trusted_targets())
    check_devices(cfg)
    first = global_rank() == 0
    if first:
        check_folder(cfg, folder)
    keep_secrets(cfg, folder if first else None)

    def prepared() -> str:
        prepare_inputs(cfg, overrides)
        return "ready"

    agree_on("inputs", prepared, patience=timedelta(days=1))
    digest = config_hash(OmegaConf.to_container(cfg, resolve=False))  # type: ignore[arg-type]
    folder, checkpoint = _agreed_start(cfg, folder, digest)
    summary = new_summary(find_stage(cfg.stage).name, seed=cfg.seed, config_hash=digest)
    # The first rank alone writes.
    mine = claim_run(folder.path, lambda: check_folder(cfg, folder)) if first else nullcontext()
    with mine, cpu_kernels(cfg.model.get("cpu_kernels", True)):
        try:
            if first:
                write_summary(folder, summary)
                keep_changes(cfg, folder, overrides)
            return _train(cfg, folder, checkpoint, summary)
        except BaseException as error:
            failure = explain_lost_rank(error, cfg) or explain_failure(
                error, cfg, folder, overrides
            )
            if first:
                record_failure(folder, summary, failure or error)
            if failure is not None:
                raise failure from error
            raise
        finally:
            forget_agreements()


@exits_are_failures()
def _train(
    cfg: DictConfig, folder: RunFolder, checkpoint: Path | None, summary: Summary
) -> Summary:
    started = time.perf_counter()
    quieten()
    import lightning as L

    from rlhf_lightning.app.build import assemble
    from rlhf_lightning.app.finalize import finish, finish_tracking
    from rlhf_lightning.app.fit import fit
    from rlhf_lightning.app.run_summary import start_settings
    from rlhf_lightning.callbacks.console import print_start, print_verdict
    from rlhf_lightning.reports.page import write_report

    L.seed_everything(cfg.seed, workers=True, verbose=False)
    parts = assemble(cfg, folder)
    if global_rank() == 0:
        print_start(cfg.name, folder, start_settings(cfg, parts, checkpoint, summary.config_hash))
        print(parts.data.render_summary())  # noqa: T201
    assembled = time.perf_counter()
    parts = fit(cfg, folder, parts, checkpoint, summary)
    fitted = time.perf_counter()
    findings, gates = finish(cfg, folder, parts)
    seconds = {
        "setup": assembled - started,
        "fit": fitted - assembled,
        "finish": time.perf_counter() - fitted,
        **findings.seconds,
        "total": time.perf_counter() - started,
    }
    summary = replace(
        summary,
        status="completed",
        metrics=dict(sorted(findings.metrics.items())),
        gates=gates,
        seconds=seconds,
    )
    if parts.trainer.is_global_zero:
        write_summary(folder, summary)
        write_report(folder)
        finish_tracking(cfg, folder, parts, findings, summary)
        print_verdict(read_summary(folder), folder)  # with what the doctor said
    return summary


def _agreed_start(cfg: DictConfig, folder: RunFolder, digest: str) -> tuple[RunFolder, Path | None]:
    """Return the run folder and the checkpoint to continue; rank 0 looks, the others follow."""

    def start() -> str:
        chosen, checkpoint = _where_to_start(cfg, folder, digest)
        if checkpoint is not None:
            check_checkpoint(checkpoint)
        return json.dumps([str(chosen.path), None if checkpoint is None else str(checkpoint)])

    path, checkpoint = json.loads(agree_on("start", start))
    return RunFolder(Path(path)), None if checkpoint is None else Path(checkpoint)


def _where_to_start(
    cfg: DictConfig, folder: RunFolder, digest: str
) -> tuple[RunFolder, Path | None]:
    if cfg.ckpt_path is not None:
        path = Path(cfg.ckpt_path)
        if not path.exists():
            raise ConfigError(f"ckpt_path={path} does not exist")
        return folder, path
    if cfg.resume == "never":
        return folder, None
    if cfg.resume != "auto":
        raise ConfigError(f"resume={cfg.resume} must be never or auto")
    unfinished = find_unfinished_run(Path(cfg.paths.outputs) / cfg.name, digest)
    checkpoint = newest_complete_checkpoint(unfinished) if unfinished is not None else None
    if unfinished is None or checkpoint is None:
        return folder, None
    drop_unused(folder, unfinished)
    return unfinished, checkpoint


def objective(summary: Summary, stage: StageSpec) -> float | None:
    """Return what a sweep maximises, of a summary of this stage.

    PPO: win rate by the learnt score; reward model: accuracy; SFT: minus the held-out loss.
    """
    value = summary.metrics.get(stage.objective)
    return value if value is None or stage.maximised else -value


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="train")
def _hydra_main(cfg: DictConfig) -> float | None:
    adopt_rank()  # of a job that submitit has started
    config = HydraConfig.get()
    overrides = list(config.overrides.task)
    several = config.mode == RunMode.MULTIRUN
    if several:
        as_single_run(overrides)
    folder = RunFolder(Path(config.runtime.output_dir))
    try:
        summary = run(cfg, folder, overrides)
    except (Exception, KeyboardInterrupt, RunStoppedError) as error:  # told in one line
        try:
            if isinstance(error, ConfigError):
                fail(str(error))
            exit_with(error)
        except SystemExit:
            if not goes_on(cfg, folder, error):
                raise
        return None  # which a search takes for a trial that failed
    finally:
        if several:
            forget_ranks()
    return objective(summary, find_stage(cfg.stage))


def _check_early(cfg: DictConfig) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself will warn
        check_composed(cfg, trusted_targets())


def main() -> None:
    """Run the command line."""
    begin()
    agree_on("launch time", launch_time)
    if len(sys.argv) > 1:
        compose_and_check("train", _check_early)
    _hydra_main()
    end_process()


if __name__ == "__main__":
    # By its name, by which a launcher's job finds it again; as `__main__` it would be pickled.
    from rlhf_lightning.app.train import main as run_by_name

    run_by_name()
