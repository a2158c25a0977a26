"""The torchrun lines of `examples/launch`, as bash makes them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import yaml

from tests.builders.ranks import ROOT

LAUNCH = ROOT / "examples/launch"
# Programs and variables of the clusters, which are not here.
PROGRAMS = {
    "torchrun": """printf '%s\\n' "$@" """,
    "srun": """exec "$@" """,
    "scontrol": "printf 'gpu012\\ngpu013\\n'",
}
VARIABLES = {
    "SLURM_NNODES": "2",
    "SLURM_JOB_ID": "8812345",
    "SLURM_JOB_NODELIST": "gpu[012-013]",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
    "JOB_COMPLETION_INDEX": "1",
}


def shell_text(file: Path) -> str:
    """Return the part of a file that bash runs."""
    if file.suffix == ".sbatch":
        return file.read_text()
    content = yaml.safe_load(file.read_text())
    if "run" in content:
        return str(content["run"])
    (job,) = content["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    assert container["command"] == ["bash", "-c"]
    (text,) = container["args"]
    return str(text)


def torchrun_words(file: Path, folder: Path, *arguments: str) -> list[str]:
    """Return the words that torchrun is given; `folder` gets the programs of the clusters."""
    for name, body in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    environment = {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}", **VARIABLES}
    done = subprocess.run(
        ["bash", "-c", shell_text(file), "bash", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()
