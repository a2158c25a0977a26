"""The command line under torchrun, under a plain environment, and as a sweep of two processes."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from tests.builders.command_lines import FEW
from tests.builders.launch_files import LAUNCH, torchrun_words
from tests.builders.processes import fresh_python
from tests.builders.ranks import ROOT, free_port, run_ranks

TRAIN = ["-m", "rlhf_lightning.train"]
SETTINGS = [
    *FEW,
    "logger=none",
    "trainer.accelerator=cpu",
    "trainer.devices=2",
    "evaluation.num_prompts=8",
    "data.batch_size=8",
    "+dataset.source.num_texts=96",
    "+dataset.source.num_demonstrations=96",
]
TWO = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def run(command: list[str], folder: Path, timeout: float = 150) -> subprocess.CompletedProcess[str]:
    folder.mkdir(parents=True, exist_ok=True)
    env = {k: v for k, v in os.environ.items() if not k.startswith(("RLHF_AGREED", "RANK"))}
    return subprocess.run(
        [sys.executable, *command],
        cwd=folder,
        env=env | TWO | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )


def runs_below(folder: Path) -> list[Path]:
    return sorted(path.parent for path in folder.rglob("summary.json"))


def check_run(folder: Path, iterations: int = 3) -> dict[str, object]:
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "completed"
    with (folder / "metrics.csv").open() as file:
        assert [int(row["iteration"]) for row in csv.DictReader(file)] == [1, 2, 3][:iterations]
    return summary


def stray_folders(outputs: Path) -> list[Path]:
    runs = runs_below(outputs)
    made = {path.parent for path in outputs.rglob(".hydra")}
    return sorted(made - set(runs) - {outputs})


@pytest.mark.thorough
@pytest.mark.timeout(200)
def test_all_ranks_share_one_run_folder(tmp_path):
    folder = tmp_path / "work"
    folder.mkdir()
    run_ranks(
        [*TRAIN, "+experiment=base", "strategy=ddp", *SETTINGS],
        world_size=2,
        folder=tmp_path / "logs",
        working_folder=folder,
        environment={"TORCHELASTIC_RUN_ID": "none"},  # what torchrun adds to the place of a rank
    ).check()
    (run_folder,) = runs_below(folder / "outputs")
    check_run(run_folder)
    assert stray_folders(folder / "outputs") == []


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_nodes_share_one_run_and_continue_it_after_both_were_lost(tmp_path):
    """By the torchrun line of a file of `examples/launch`, on the loopback."""
    folder = tmp_path / "runs/sft"
    own = ["trainer.devices=1", "trainer.num_nodes=2", "trainer.limit_train_batches=30"]
    own += ["+dataset.source.num_texts=400", "callbacks.checkpoint.every_n_iterations=1"]
    words = [*TRAIN, "+experiment=base", "strategy=fsdp", *SETTINGS[:-2], *own]
    words += ["resume=auto", f"hydra.run.dir={folder}", f"paths.artifacts={tmp_path}/artifacts"]
    (tmp_path / "programs").mkdir()
    line = torchrun_words(LAUNCH / "jobset.yaml", tmp_path / "programs")
    options = dict(word.split("=") for word in line[: line.index("-m")])

    def log(number: int, node: int = 0) -> Path:
        return tmp_path / f"start_{number}_node_{node}.log"

    def start(number: int) -> list[subprocess.Popen[bytes]]:
        changed = {"--nproc-per-node": "1", "--master-addr": "127.0.0.1"}
        changed["--master-port"] = str(free_port())
        started = []
        for node in range(2):
            of_node = options | changed | {"--node-rank": str(node)}
            command = ["-m", "torch.distributed.run", *map("=".join, of_node.items())]
            env = {**os.environ, **TWO, "PYTHONPATH": str(ROOT)}
            started.append(fresh_python([*command, *words], tmp_path, env, log(number, node)))
        return started

    def ends(nodes: list[subprocess.Popen[bytes]]) -> list[int]:
        return [node.wait(timeout=250) for node in nodes]

    lost = start(1)
    while not list(folder.glob("checkpoints/*.ckpt/checksums.json")):
        assert all(node.poll() is None for node in lost), log(1).read_text()
        time.sleep(0.05)
    for node in lost:  # torchrun gives each rank a session of its own
        for rank in Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text().split():
            os.kill(int(rank), signal.SIGKILL)
    assert 0 not in ends(lost)
    assert json.loads((folder / "summary.json").read_text())["status"] == "running"
    assert ends(start(2)) == [0, 0], log(2).read_text()
    assert json.loads((folder / "summary.json").read_text())["status"] == "completed"
    with (folder / "metrics.csv").open() as file:
        assert [int(row["iteration"]) for row in csv.DictReader(file)] == list(range(1, 31))
    assert runs_below(tmp_path) == [folder]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_ranks_of_a_plain_environment_wait_for_what_rank_0_trains_first(tmp_path, strategy):
    folder = tmp_path / "work"
    settings = [f"paths.outputs={folder}/outputs", f"paths.artifacts={folder}/artifacts"]
    run_ranks(
        [*TRAIN, "+experiment=sft", f"strategy={strategy}", *SETTINGS, *settings],
        world_size=2,
        fresh=True,
        folder=tmp_path / "logs",
        timeout=300,
    ).check()
    base, sft = runs_below(folder / "outputs")
    assert check_run(base)["stage"] == check_run(sft)["stage"] == "sft"
    assert (folder / "artifacts/demo_seed1/sft/manifest.json").is_file()
    assert stray_folders(folder / "outputs") == []


@pytest.mark.slow
@pytest.mark.timeout(500)
@pytest.mark.parametrize("launcher", [[], ["-m", "torch.distributed.run", "--nproc-per-node=2"]])
def test_each_job_of_a_sweep_trains_its_own_configuration_on_both_ranks(tmp_path, launcher):
    # Without care rank 1 runs the whole sweep again; SameConfiguration would stop the run.
    sweep = ["-m", "+experiment=base", "strategy=ddp", *SETTINGS, "seed=3,4"]
    own = [*launcher, f"--master-port={free_port()}"] if launcher else []
    done = run([*own, *TRAIN, *sweep], tmp_path, timeout=450)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    folders = runs_below(tmp_path / "outputs")
    assert [check_run(folder)["seed"] for folder in folders] == [3, 4]
    assert {folder.name for folder in folders} == {"0", "1"}


JOBS = """
import torch.distributed as dist
from rlhf_lightning.distributed import launch
from rlhf_lightning.distributed.collectives import check_same_on_all_ranks

for job in range(3):
    with launch.own_agreements():
        launch.own_meeting_place()
        assert launch.broadcast_from_rank0("start", lambda: f"job {job}") == f"job {job}"
        dist.init_process_group("gloo")
        check_same_on_all_ranks("job", str(job))
        launch.forget_ranks()
"""


def test_ranks_meet_anew_for_each_job_of_a_sweep_under_torchrun(tmp_path):
    (tmp_path / "jobs.py").write_text(JOBS)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # as torchrun keeps
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    script = [str(tmp_path / "jobs.py")]
    run_ranks(script, world_size=2, folder=tmp_path, timeout=60, environment=agent).check()
