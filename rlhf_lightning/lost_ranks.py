"""Why a run of several processes ended: what the others say, or which of them say nothing.

Light on purpose: torch is imported only where there are several processes.
"""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any

from omegaconf import DictConfig

from rlhf_lightning.failures import RunFailedError, cause_of, record_failure
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import Summary

PATIENCE = timedelta(seconds=6)  # for the others to say why they end
LOST = "lost contact"  # what a rank says that knows no cause of its own
_CONTACT = re.compile(
    r"gloo.*(connection|timed out|timeout|broken pipe|read error|write error)"
    r"|nccl.*(abort|timeout|timed out|remote|unhandled system error)"
    r"|watchdog caught collective",
    re.IGNORECASE | re.DOTALL,
)
_PLACE = re.compile(r"^\[/\S+\] ")  # in the sources of gloo
_LATE = re.compile(r"timed out|timeout", re.IGNORECASE)
RESUME = "Start all ranks again with resume=auto"


def explain_lost_rank(error: BaseException, cfg: DictConfig) -> RunFailedError | None:
    """Tell the other ranks why this one ends; return what they said if that is the cause.

    Args:
        error: what ended this rank.
        cfg: of the run.

    Returns:
        An error that names the rank that failed, was killed or does not answer; None in a single
        process, or where `error` is a cause of its own.
    """
    if "torch" not in sys.modules:
        return None
    from rlhf_lightning.distributed import rank, roll_call, world_size

    ours, size = rank(), world_size()
    if size == 1:
        return None
    lost = is_lost_contact(error)
    heard = roll_call(LOST if lost else cause_of(error), PATIENCE)
    if not lost:
        return None
    causes = {r: said for r, said in heard.items() if said != LOST}
    silent = [r for r in range(size) if r != ours and r not in heard]
    return RunFailedError(describe_loss(causes, silent, size, error, cfg.strategy.timeout_minutes))


def is_lost_contact(error: BaseException) -> bool:
    """Return whether `error` says that another process no longer answers."""
    seen: BaseException | None = error
    while seen is not None:
        distributed = any(base.__name__ == "DistError" for base in type(seen).__mro__)
        if distributed or (isinstance(seen, RuntimeError) and _CONTACT.search(str(seen))):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def describe_loss(
    causes: Mapping[int, str],
    silent: Iterable[int],
    size: int,
    error: BaseException,
    minutes: float,
) -> str:
    """Return which rank ended the run and what to do.

    Args:
        causes: by rank, of those that had a cause of their own.
        silent: ranks that did not answer.
        size: number of ranks.
        error: how this rank lost contact.
        minutes: how long a rank waits for the others.
    """
    if causes:
        first = min(causes)
        return f"rank {first} of {size} stopped: {causes[first]}"
    gone = ", ".join(map(str, silent))
    text = _PLACE.sub("", " ".join(str(error).split()))
    how = f"({text.partition('. ')[0][:160]})"
    if not gone:
        return (
            f"the ranks lost contact with each other, though all {size} are there {how}: the "
            f"network between them failed. {RESUME}"
        )
    if _LATE.search(text):
        return (
            f"rank {gone} of {size} did not answer within strategy.timeout_minutes={minutes:g} "
            f"{how}: it hangs, or needs longer than that for its share; its own output says where "
            f"it is. {RESUME}"
        )
    return (
        f"rank {gone} of {size} is gone {how}: it was killed, or its machine is down; its own "
        f"output and the system's log (out of memory?) say why. {RESUME}"
    )


def watch_children(trainer: Any, folder: RunFolder, summary: Summary) -> None:
    """Have it written down when a process that Lightning started ends early.

    Args:
        trainer: of the run.
        folder: of the run.
        summary: of the run, as it stands while it is under way.
    """
    from rlhf_lightning.callbacks.children import WatchChildren

    trainer.callbacks.insert(0, WatchChildren(_teller(folder, summary)))


def _teller(folder: RunFolder, summary: Summary) -> Callable[[dict[int, int]], None]:

    def tell(failed: dict[int, int]) -> None:
        from rlhf_lightning.distributed import heard_so_far, world_size

        causes = {r: said for r, said in heard_so_far().items() if said != LOST}
        if causes:
            text = describe_loss(causes, (), world_size(), RuntimeError(), 0)
        else:
            ends = ", ".join(f"rank {r} {_ended(code)}" for r, code in failed.items())
            text = f"{ends}, and the others hang while they wait for it. {RESUME}"
        error = RunFailedError(text)
        record_failure(folder, summary, error)
        sys.stderr.write(f"error: {cause_of(error)}\n")
        sys.stderr.flush()

    return tell


def _ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
