"""Several processes of one run: who is first, and what they agree on before they can talk.

Must not import torch where this process starts the others: keeps config errors fast.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta

PREFIX = "RLHF_AGREED_"
TIME_FORMAT = "%Y-%m-%d_%H-%M-%S"
# What torchrun, Slurm and Lightning set for a rank; an independent process must not inherit it.
RANK_VARIABLES = (
    *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK", "WORLD_SIZE"),
    *("LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
)
_OF_LIGHTNING = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_OF_LAUNCHERS = ("TORCHELASTIC_", "SLURM_", "SUBMITIT_", PREFIX)
# Names of torchrun, submitit's local executor (which may run inside of a Slurm job) and `srun`.
_TASK = (
    ("RANK", "SUBMITIT_LOCAL_GLOBALID", "SLURM_PROCID"),
    ("LOCAL_RANK", "SUBMITIT_LOCAL_LOCALID", "SLURM_LOCALID"),
    ("NODE_RANK", "SUBMITIT_LOCAL_NODEID", "SLURM_NODEID"),
    ("WORLD_SIZE", "SUBMITIT_LOCAL_NTASKS", "SLURM_STEP_NUM_TASKS"),
)
PATIENCE = timedelta(minutes=10)


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


def _is_task(environment: Mapping[str, str], launcher: str) -> bool:
    """Return whether it is one: a batch script has the number of tasks too, and no step."""
    return all(names[1 + (launcher == "SLURM")] in environment for names in _TASK)


def adopt_rank() -> None:
    """Take over the place that Slurm's `srun`, or submitit, has given to this process.

    It is written into the variables that torchrun sets, which are left alone if they are there.
    """
    environment = os.environ
    if any(name in environment for name in ("RANK", "LOCAL_RANK")):
        return
    if _is_task(environment, "SUBMITIT"):
        task = {names[0]: environment[names[1]] for names in _TASK}
        job, host = environment["SUBMITIT_LOCAL_JOB_ID"], "127.0.0.1"
    elif _is_task(environment, "SLURM"):
        task = {names[0]: environment[names[2]] for names in _TASK}
        # brings torch, which every task of `srun` needs
        from lightning.fabric.plugins.environments import SLURMEnvironment

        nodes = environment.get("SLURM_STEP_NODELIST") or environment["SLURM_JOB_NODELIST"]
        job, host = environment["SLURM_JOB_ID"], SLURMEnvironment.resolve_root_node_address(nodes)
    else:
        if "SLURM_NTASKS" in environment:  # Lightning would take it for a task of `srun`
            environment["SLURM_JOB_NAME"] = "interactive"
        return
    if int(task["WORLD_SIZE"]) > 1:
        environment.update(task)
        environment.setdefault("MASTER_ADDR", host)
        # All tasks of a job know it; the one after it must be free too.
        port = 20_000 + 2 * (int(re.sub(r"\D", "", job) or "0") % 10_000)
        environment.setdefault("MASTER_PORT", str(port))


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
        if started_by_others():
            from rlhf_lightning.distributed.collectives import value_of_rank_0

            os.environ[variable] = value_of_rank_0(what, make, patience)
        else:
            os.environ[variable] = make()
    return os.environ[variable]


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


def own_meeting_place() -> None:
    """Let the ranks of a launcher meet for this job of a sweep at a port of its own.

    A store has the addresses of the job before for as long as it lives: torchrun's for the sweep.
    """
    if started_by_others():
        from lightning.fabric.plugins.environments.lightning import find_free_network_port

        from rlhf_lightning.distributed.collectives import value_of_rank_0

        port = value_of_rank_0("port", lambda: str(find_free_network_port()), PATIENCE)
        os.environ |= {"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"}


@contextmanager
def own_agreements() -> Iterator[None]:
    """Drop what a run's processes agreed on, so that the next run in this process has its own."""
    try:
        yield
    finally:
        for name in [name for name in os.environ if name.startswith(PREFIX)]:
            if name != _variable("launch time"):  # the folder of a whole sweep has its name from it
                del os.environ[name]


def forget_ranks() -> None:
    """End this job's process group, so that the next job of a sweep has its own."""
    if "torch" in sys.modules:
        from rlhf_lightning.distributed.collectives import leave_process_group

        leave_process_group()
    if not started_by_others():
        for name in _OF_LIGHTNING:
            os.environ.pop(name, None)


def tell_torchrun(error: BaseException) -> None:
    """Write the error with which this rank ends where torchrun looks for it; else do nothing."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        get_error_handler().record_exception(error)


def end_process(code: int = 0) -> None:
    """End this process in order if it is one of several ranks; else return."""
    if "torch" in sys.modules:
        from rlhf_lightning.distributed.collectives import end_rank

        end_rank(code)
