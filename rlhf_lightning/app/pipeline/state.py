"""The state of a pipeline: the outcome of each step, so that calling it again goes on."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import RunFolder, to_json
from rlhf_lightning.runs.lock import is_claimed
from rlhf_lightning.runs.reading import read_json
from rlhf_lightning.runs.summary import read_summary

logger = logging.getLogger(__name__)
STATE = "pipeline.json"
RUNNING, DONE, FAILED_GATE = "running", "passed", "gate failed"
_ROUND = re.compile(r"round_(\d+)/")


@dataclass(frozen=True)
class Outcome:
    """The state of a step (`running`, `passed`, `gate failed`), and its command line."""

    step: str
    overrides: tuple[str, ...]
    status: str


def read_state(folder: Path) -> dict[str, Outcome]:
    """Return the outcome of each step that was judged; a new pipeline has none.

    Raises:
        ConfigError: if the file is damaged.
    """
    path = folder / STATE
    if not path.is_file():
        return {}
    try:
        rows = read_json(path)
        found = [Outcome(row["step"], tuple(row["overrides"]), row["status"]) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}): begin anew with resume=never") from error
    return {outcome.step: outcome for outcome in found}


def find_begun_pipeline(root: Path, config_hash: str, rounds: int) -> RunFolder | None:
    """Return the newest pipeline of this configuration if there is something left to do, or None.

    What is older than it is left alone: it was given up for the newer one. One that another process
    is writing is not gone on with either.

    Args:
        root: `outputs/<name>`.
        config_hash: of the pipeline; the rounds are no part of it.
        rounds: that are wanted now.
    """
    for path in sorted((p for p in root.glob("*") if p.is_dir()), reverse=True):
        folder = RunFolder(path)
        try:
            summary = read_summary(folder)
        except (FileNotFoundError, ValueError):
            continue
        if summary.config_hash != config_hash:
            continue
        if is_claimed(path):
            logger.warning("%s is under way in another process: beginning a new one", path)
            return None
        return folder if has_more_to_do(folder, rounds) else None
    return None


def has_more_to_do(folder: RunFolder, rounds: int) -> bool:
    """Return whether the pipeline in a folder is unfinished, or has fewer rounds than wanted."""
    if read_summary(folder).status != "completed":
        return True
    done = max((int(_ROUND.match(step)[1]) for step in read_state(folder.path)), default=0)  # type: ignore[index]
    return 0 < done < rounds


def write_state(folder: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Write the outcomes in one step."""
    rows = [asdict(outcome) for outcome in outcomes.values()]
    write_text(folder / STATE, to_json(rows, indent=2) + "\n")


def set_aside(folder: Path) -> None:
    """Give what stands in the way of a new run another name: `reward` becomes `reward_before_1`."""
    if not folder.exists():
        return
    number = 1
    while (other := folder.with_name(f"{folder.name}_before_{number}")).exists():
        number += 1
    folder.rename(other)
