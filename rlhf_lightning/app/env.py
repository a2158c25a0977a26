"""Facts for a bug report: `rlhf-env`. Prints no secret, no name of a host and no path."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Iterator
from pathlib import Path

import torch

import rlhf_lightning
from rlhf_lightning.app.command_line import run_command
from rlhf_lightning.runs.summary import git_commit, installed_versions

PACKAGES = ("vllm", "peft", "datasets", "tokenizers", "liger-kernel", "bitsandbytes")
RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "NODE_RANK")
OTHERS = ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "HF_HUB_OFFLINE", "WANDB_MODE")
_DEVICES = ("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")


def facts() -> Iterator[tuple[str, str]]:
    """Yield what is known of this process and its machine, by name."""
    own = {"rlhf_lightning": rlhf_lightning.__version__}
    yield from (installed_versions(PACKAGES) | own).items()
    yield "system", f"{platform.system()} {platform.release()}, {platform.machine()}"
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    yield "processor", f"{os.cpu_count()} CPUs, {torch.get_num_threads()} threads, {memory:.1f} GiB"
    build = torch.version.cuda or torch.version.hip or "none, built for CPUs"
    yield "torch's CUDA", f"{build}; it sees {torch.cuda.device_count()} devices"
    yield from (("device, driver", line) for line in _devices() or ["none found by nvidia-smi"])
    for title, names in (("ranks", RANKS), ("environment", OTHERS)):
        given = (f"{name}={os.environ[name]}" for name in names if name in os.environ)
        yield title, " ".join(given) or "not set"
    checkout = Path(rlhf_lightning.__file__).parents[1]
    commit = git_commit(checkout) if (checkout / ".git").exists() else None
    yield "commit", commit or "not a checkout"


def _devices() -> list[str]:
    """Return name, memory and driver of NVIDIA's devices."""
    try:
        done = subprocess.run(_DEVICES, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.splitlines()


def main() -> None:
    """Run the command line."""
    run_command("env", lambda _: (f"{name:<15} {value}" for name, value in facts()))
