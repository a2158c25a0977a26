"""Several processes of one run: who is first, and what they agree on before they can talk.

Must not import torch where this process starts the others: keeps config errors fast.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta

PREFIX = "RLHF_AGREED_"
TIME_FORMAT = "%Y-%m-%d_%H-%M-%S"
# What torchrun, Slurm and Lightning set for a rank; an independent process must not inherit it.
RANK_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "NODE_RANK",
    "GROUP_RANK",
    "ROLE_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)
_MEETING = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "SUBMITIT_", PREFIX)
PATIENCE = timedelta(minutes=10)
_HOSTS = re.compile(r"^([^\[,]*)\[([^\],-]+)[^\]]*\]")
_STARTED = PREFIX + "STARTED_AT"  # seconds since 1970


def global_rank(environment: Mapping[str, str] = os.environ) -> int:
    """Return this process's number, from 0, before any process group exists."""
    return int(environment.get("RANK", environment.get("LOCAL_RANK", "0")))


def started_by_others(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher such as torchrun has started all processes of the run."""
    named = all(name in environment for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"))
    return named and int(environment["WORLD_SIZE"]) > 1


def launch_time() -> str:
    """Return when the run was started: of this process, or of the first one of its run."""
    return os.environ.get(_variable("launch time")) or datetime.now().strftime(TIME_FORMAT)


def begin() -> None:
    """Note when the command was started and which rank this is; later processes inherit it.

    Raises:
        ValueError: if the environment names a rank of a run and not how to meet the others.
    """
    os.environ.setdefault(_STARTED, str(time.time()))
    adopt_rank()
    _check_rank(os.environ)


def _check_rank(environment: Mapping[str, str]) -> None:
    found = {name: environment[name] for name in _MEETING if name in environment}
    told = " ".join(f"{name}={value}" for name, value in found.items())
    fix = f"set all of {', '.join(_MEETING)}, as torchrun does, or unset RANK and WORLD_SIZE"
    try:
        rank, size = int(found.get("RANK", "0")), int(found.get("WORLD_SIZE", "1"))
    except ValueError as error:
        raise ValueError(f"{told} in the environment is no number: {fix}") from error
    started_by_lightning = "RANK" not in found and "LOCAL_RANK" in environment
    if started_by_lightning or (rank == 0 and size == 1):
        return
    if len(found) < len(_MEETING) or not 0 <= rank < size:
        raise ValueError(
            f"{told} in the environment names one of several processes, and this one would train "
            f"alone on all data: {fix}"
        )


def started() -> float:
    """Return when the run was started, in seconds since 1970; of a Slurm job its start."""
    return float(os.environ.get(_STARTED, time.time()))


def adopt_rank() -> None:
    """Take over the place that Slurm's `srun`, or submitit, has given to this process.

    It is written into the variables that torchrun sets, which are left alone if they are there.
    A batch script has the number of tasks too, but is none of them: only a step counts.
    """
    environment = os.environ
    if any(name in environment for name in ("RANK", "LOCAL_RANK")):
        return
    task = _local_task(environment) or _slurm_task(environment)  # one may be inside the other
    if task is None:
        if "SLURM_NTASKS" in environment:  # Lightning would take it for a task of `srun`
            environment["SLURM_JOB_NAME"] = "interactive"
        return
    environment[_STARTED] = environment.get("SLURM_JOB_START_TIME", str(time.time()))
    if int(task["WORLD_SIZE"]) > 1:
        environment.update(task)


def _slurm_task(environment: Mapping[str, str]) -> dict[str, str] | None:
    if "SLURM_STEP_NUM_TASKS" not in environment or "SLURM_PROCID" not in environment:
        return None
    nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
    return {
        "RANK": environment["SLURM_PROCID"],
        "LOCAL_RANK": environment["SLURM_LOCALID"],
        "NODE_RANK": environment["SLURM_NODEID"],
        "WORLD_SIZE": environment["SLURM_STEP_NUM_TASKS"],
        "MASTER_ADDR": environment.get("MASTER_ADDR") or first_host(nodes),
        "MASTER_PORT": environment.get("MASTER_PORT") or _port(environment["SLURM_JOB_ID"]),
    }


def _local_task(environment: Mapping[str, str]) -> dict[str, str] | None:
    if "SUBMITIT_LOCAL_GLOBALID" not in environment:
        return None
    return {
        "RANK": environment["SUBMITIT_LOCAL_GLOBALID"],
        "LOCAL_RANK": environment["SUBMITIT_LOCAL_LOCALID"],
        "NODE_RANK": environment["SUBMITIT_LOCAL_NODEID"],
        "WORLD_SIZE": environment["SUBMITIT_LOCAL_NTASKS"],
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": _port(environment["SUBMITIT_LOCAL_JOB_ID"]),
    }


def first_host(nodes: str) -> str:
    """Return the first of Slurm's list of nodes, such as `gpu[003-007,9],login1`."""
    return _HOSTS.sub(r"\1\2", nodes, count=1).partition(",")[0]


def _port(job: str) -> str:
    """Return a port that all tasks of a job know; the one after it must be free too."""
    digits = int(re.sub(r"\D", "", job) or "0")
    return str(20_000 + 2 * (digits % 10_000))


def broadcast_from_rank0(
    what: str, make: Callable[[], str], *, patience: timedelta = PATIENCE
) -> str:
    """Return what rank 0's `make` returned, on every process of the run.

    Processes that a launcher started agree through the store that torchrun keeps, or through one
    that rank 0 keeps for that long at the master's port. Processes that Lightning starts later
    inherit it with the environment.

    Args:
        what: name of the value, in the store and in messages.
        make: called on rank 0 alone.
        patience: how long others wait for rank 0.

    Raises:
        RuntimeError: on other ranks, if rank 0 fails or is too late.
    """
    variable = _variable(what)
    if variable not in os.environ:
        shared = _exchanged if started_by_others() else _alone
        os.environ[variable] = shared(what, make, patience)
    return os.environ[variable]


def _alone(what: str, make: Callable[[], str], patience: timedelta) -> str:
    return make()


def _exchanged(what: str, make: Callable[[], str], patience: timedelta) -> str:
    from rlhf_lightning.distributed.collectives import value_of_rank_0

    return value_of_rank_0(what, make, patience)


def _variable(what: str) -> str:
    return PREFIX + what.upper().replace(" ", "_")


def own_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment for a process that is no rank of this run."""
    return {
        name: value
        for name, value in environment.items()
        if name not in RANK_VARIABLES and not name.startswith(_OF_LAUNCHERS)
    }


def as_single_run(overrides: Sequence[str]) -> None:
    """Rewrite the command line that Lightning repeats for the other ranks of a sweep's job.

    It repeats `sys.argv`. In a multirun that is the whole sweep, which every child would run again
    from the start: rank 1 would train another configuration than rank 0, without an error.

    Args:
        overrides: those of this job.
    """
    if "LOCAL_RANK" in os.environ:
        return
    kept = [a for a in sys.argv[1:] if a.startswith(("--config-dir=", "--config-name="))]
    sys.argv = [sys.argv[0], *kept, *overrides]


@contextmanager
def own_agreements() -> Iterator[None]:
    """Drop what the processes of a run agreed on, also of one that was refused before it began."""
    try:
        yield
    finally:
        forget_agreements()


def forget_agreements() -> None:
    """Drop what one run's processes agreed on, so that the next run in this process has its own."""
    for name in [name for name in os.environ if name.startswith(PREFIX)]:
        # The folder of the whole sweep has its name from it, and its job's time counts from it.
        if name not in (_variable("launch time"), _STARTED):
            del os.environ[name]


def forget_ranks() -> None:
    """End this job's process group and agreements, so that the next job of a sweep has its own."""
    forget_agreements()
    if "torch" in sys.modules:
        from rlhf_lightning.distributed.collectives import leave_process_group

        leave_process_group()
    if not started_by_others():
        for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)


def end_process() -> None:
    """End this process in order if it is one of several ranks; else return."""
    if "torch" in sys.modules:
        from rlhf_lightning.distributed.collectives import end_rank

        end_rank()
