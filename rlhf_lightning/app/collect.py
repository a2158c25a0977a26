"""From prompts to preference records, within a budget: `python -m rlhf_lightning.collect`.

Heavy imports stay inside functions: `--help` and a config error answer at once.
"""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.app.collect_parts import build_lab, check_collection, read_prompts
from rlhf_lightning.app.command_line import compose_and_check, fail, say
from rlhf_lightning.app.config.compose import ConfigError, conf_dir, register
from rlhf_lightning.app.config.save import keep_secrets
from rlhf_lightning.app.config.targets import trusted_targets
from rlhf_lightning.app.failures import exit_with, exits_are_failures, record_failure
from rlhf_lightning.app.prerequisites import prepare_inputs
from rlhf_lightning.app.run_claim import check_folder
from rlhf_lightning.distributed.launch import agree_on, launch_time
from rlhf_lightning.distributed.process import prepare_process
from rlhf_lightning.models.cpu_kernels import cpu_kernels
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import artifact_lock, claim_run
from rlhf_lightning.runs.resume import config_hash, find_unfinished_run
from rlhf_lightning.runs.summary import Summary, new_summary, write_summary
from rlhf_lightning.runs.taken import drop_unused

register()
prepare_process()
PEOPLE_NEEDED = 3  # exit status: people have to label before the run can go on
WAITING = "PeopleNeededError"  # by name: what raises it is imported late
DATA = "data"


@exits_are_failures()
def run(cfg: DictConfig, folder: RunFolder, overrides: list[str]) -> Summary:
    """Collect preferences from the configuration to the published records.

    Args:
        cfg: composed configuration.
        folder: of a new run; with `resume=auto` an unfinished one takes its place.
        overrides: of the command line, for models that must be trained first.

    Returns:
        The summary, as written to the run folder.

    Raises:
        ConfigError: if the configuration cannot work.
        PeopleNeededError: if people have to label first.
    """
    trusted = trusted_targets()
    check_collection(cfg, trusted)
    check_folder(cfg, folder)
    keep_secrets(cfg, folder)
    prepare_inputs(cfg, overrides)
    digest = config_hash(OmegaConf.to_container(cfg, resolve=False))  # type: ignore[arg-type]
    folder = _start(cfg, folder, digest)
    summary = new_summary("collect", seed=cfg.seed, config_hash=digest)
    kernels = cpu_kernels(cfg.model.get("cpu_kernels", True))
    with claim_run(folder.path, lambda: check_folder(cfg, folder)), kernels:
        try:
            write_summary(folder, summary)
            return _collect(cfg, folder, summary, trusted)
        except BaseException as error:
            if type(error).__name__ == WAITING:
                write_summary(folder, replace(summary, status="stopped", cause=str(error)))
            else:
                record_failure(folder, summary, error)
            raise


@exits_are_failures()
def _collect(
    cfg: DictConfig, folder: RunFolder, summary: Summary, trusted: tuple[str, ...]
) -> Summary:
    started = time.perf_counter()
    from rlhf_lightning.app.command_line import quieten
    from rlhf_lightning.callbacks.console import print_start, print_verdict
    from rlhf_lightning.preferences.publishing import (
        copy_collection,
        flat_metrics,
        write_collection,
    )
    from rlhf_lightning.reports.page import write_report

    quieten()
    lab = replace(build_lab(cfg, folder.path, trusted), say=say)
    prompts = [] if lab.worst else read_prompts(cfg)
    print_start("collect", folder, _settings(cfg, lab, len(prompts)))
    collection = lab.run(prompts)
    gold = OmegaConf.select(cfg, "dataset.gold")
    truth = None if gold is None else hydra.utils.instantiate(gold)
    figures = write_collection(folder.path / DATA, collection, lab.hparams, gold=truth)
    if cfg.artifacts.publish is not None:
        target = Path(cfg.artifacts.publish)
        with artifact_lock(target):
            copy_collection(folder.path / DATA, target)
    summary = replace(
        summary,
        status="completed",
        metrics=dict(sorted(flat_metrics(figures).items())),
        seconds={"total": time.perf_counter() - started},
    )
    write_summary(folder, summary)
    write_report(folder)
    print_verdict(summary, folder)
    say(f"before: {collection.before}")
    say(f"after:  {collection.after}")
    say(f"records: {cfg.artifacts.publish or folder.path / DATA}")
    return summary


def _start(cfg: DictConfig, folder: RunFolder, digest: str) -> RunFolder:
    """Return the folder of the run: an unfinished one of this configuration, or the new one."""
    if cfg.resume != "auto":
        return folder
    unfinished = find_unfinished_run(Path(cfg.paths.outputs) / cfg.name, digest)
    if unfinished is None:
        return folder
    drop_unused(folder, unfinished)
    return unfinished


def _settings(cfg: DictConfig, lab: Any, num_prompts: int) -> dict[str, object]:
    sampled: dict[str, object] = {
        "policies": ", ".join(f"{n}: {s}" for n, s in cfg.candidates.policies.items() if s),
        "candidates": f"{lab.sampling.per_prompt} for each of {num_prompts} prompts",
        "pairs": f"{lab.hparams.num_pairs or 'all'}, {lab.hparams.pairing}",
    }
    again: dict[str, object] = {
        "worst answers": f"of {cfg.adversarial.run}, by {cfg.adversarial.source}",
        "pairs": f"at most {cfg.adversarial.num_pairs}",
    }
    return (again if lab.worst else sampled) | {
        "annotators": ", ".join(annotator.name for annotator in lab.annotators) or "people alone",
        "seed": cfg.seed,
    }


@hydra.main(version_base="1.3", config_path=str(conf_dir()), config_name="collect")
def _hydra_main(cfg: DictConfig) -> None:
    config = HydraConfig.get()
    folder = RunFolder(Path(config.runtime.output_dir))
    try:
        run(cfg, folder, list(config.overrides.task))
    except ConfigError as error:
        fail(str(error))
    except (Exception, KeyboardInterrupt) as error:  # told in one line, and kept in the folder
        if type(error).__name__ == WAITING:
            say(str(error))
            raise SystemExit(PEOPLE_NEEDED) from None
        exit_with(error)


def main() -> None:
    """Run the command line."""
    agree_on("launch time", launch_time)
    compose_and_check("collect", lambda cfg: check_collection(cfg, trusted_targets()))
    _hydra_main()


if __name__ == "__main__":
    main()
