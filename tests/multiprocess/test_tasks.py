"""Ranks that Slurm's srun or submitit has started."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hydra.types import RunMode
from lightning.pytorch.plugins.environments import SLURMEnvironment

from rlhf_lightning.app.config.compose import composed, register
from rlhf_lightning.distributed import launch as launching
from rlhf_lightning.distributed.launch import adopt_rank, own_environment
from tests.builders.processes import fresh_python
from tests.builders.ranks import ROOT, free_port
from tests.multiprocess.test_launching import SETTINGS, TRAIN, check_run, run, runs_below

STEP = {
    "SLURM_JOB_ID": "8812345",
    "SLURM_NTASKS": "16",
    "SLURM_STEP_NUM_TASKS": "16",
    "SLURM_STEP_NODELIST": "gpu[012-013]",
    "SLURM_PROCID": "9",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """An environment of its own, which the code under test may change."""
    kept = {"PATH": os.environ["PATH"]}
    monkeypatch.setattr(launching.os, "environ", kept)
    return kept


def test_a_task_of_srun_is_a_rank(environment):
    environment.update(STEP)
    adopt_rank()
    assert {k: environment[k] for k in ("RANK", "LOCAL_RANK", "NODE_RANK", "WORLD_SIZE")} == {
        "RANK": "9",
        "LOCAL_RANK": "1",
        "NODE_RANK": "1",
        "WORLD_SIZE": "16",
    }
    assert environment["MASTER_ADDR"] == "gpu012"
    assert 20_000 <= int(environment["MASTER_PORT"]) < 40_000


def test_a_batch_script_a_single_task_and_a_shell_inside_salloc_are_no_ranks(environment):
    shell = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_JOB_NAME": "salloc"}
    path = environment["PATH"]
    for job in (
        {k: v for k, v in STEP.items() if "STEP" not in k},
        STEP | {"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"},
        shell | {"SLURM_PROCID": "0", "SLURM_LOCALID": "0"},
    ):
        environment.clear()
        environment.update(job, PATH=path)
        adopt_rank()
        assert "RANK" not in environment
    assert not SLURMEnvironment.detect()


def test_what_torchrun_says_inside_of_a_job_is_left_alone(environment):
    environment.update(STEP | {"RANK": "3", "WORLD_SIZE": "4"})
    adopt_rank()
    assert (environment["RANK"], environment["WORLD_SIZE"]) == ("3", "4")
    assert "MASTER_ADDR" not in environment


def test_a_task_of_submitit_is_a_rank(environment):
    environment.update(
        SUBMITIT_LOCAL_JOB_ID="77",
        SUBMITIT_LOCAL_NTASKS="2",
        SUBMITIT_LOCAL_GLOBALID="1",
        SUBMITIT_LOCAL_LOCALID="1",
        SUBMITIT_LOCAL_NODEID="0",
    )
    adopt_rank()
    assert (environment["RANK"], environment["MASTER_ADDR"]) == ("1", "127.0.0.1")


def test_a_process_of_its_own_inherits_no_place(environment):
    environment.update(STEP | {"SUBMITIT_VERSION": "1", "HOME": "/root"})
    adopt_rank()
    left = {k: v for k, v in own_environment(environment).items() if not k.startswith("PYTEST_")}
    assert left == {"PATH": environment["PATH"], "HOME": "/root"}


def test_slurm_is_asked_for_a_task_and_a_gpu_for_each_device(environment, monkeypatch):
    monkeypatch.undo()
    register()
    asked = ["+experiment=ppo", "launcher=slurm", "trainer.devices=8", "trainer.num_nodes=2"]
    hydra = composed("train", asked).hydra
    assert hydra.launcher._target_.endswith("SlurmLauncher")
    assert hydra.mode == RunMode.MULTIRUN, "without -m too"
    numbers = {k: hydra.launcher[k] for k in ("nodes", "tasks_per_node", "gpus_per_node")}
    assert numbers == {"nodes": 2, "tasks_per_node": 8, "gpus_per_node": 8}
    assert hydra.launcher.signal_delay_s == 300


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_submitit_runs_a_sweep_of_jobs_with_two_tasks_each(tmp_path, monkeypatch):
    monkeypatch.undo()
    settings = ["-m", "+experiment=base", "strategy=ddp", *SETTINGS, "seed=3,4", "launcher=local"]
    done = run([*TRAIN, *settings], tmp_path, timeout=800)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folders = runs_below(tmp_path / "outputs")
    assert {folder.name: check_run(folder)["seed"] for folder in folders} == {"0": 3, "1": 4}
    logs = list(tmp_path.glob("outputs/multirun/*/.submitit/*/*_log.out"))
    assert len(logs) == 4, "two jobs of two tasks"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_tasks_of_srun_share_one_run(tmp_path, monkeypatch):
    monkeypatch.undo()
    folder = tmp_path / "work"
    folder.mkdir()
    tasks = []
    port = str(free_port())
    for task in range(2):
        step = STEP | {
            "SLURM_NTASKS": "2",
            "SLURM_NTASKS_PER_NODE": "2",
            "SLURM_STEP_NUM_TASKS": "2",
            "SLURM_STEP_NODELIST": "127.0.0.1",
            "SLURM_PROCID": str(task),
            "SLURM_LOCALID": str(task),
            "SLURM_NODEID": "0",
            "SLURM_JOB_NAME": "train",
            "MASTER_PORT": port,
        }
        own = {"PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        command = [*TRAIN, "+experiment=base", "strategy=fsdp", *SETTINGS]
        variables = {**os.environ, **own, **step}
        tasks.append(fresh_python(command, folder, variables, tmp_path / f"task_{task}.log"))
    try:
        codes = [task.wait(timeout=800) for task in tasks]
    finally:
        for process in tasks:
            process.kill()
    assert codes == [0, 0], [(tmp_path / f"task_{t}.log").read_text()[-2000:] for t in range(2)]
    (made,) = runs_below(folder / "outputs")
    check_run(made)
    assert json.loads((made / "summary.json").read_text())["status"] == "completed"
    assert Path(made / "checkpoints/last.ckpt").exists()
