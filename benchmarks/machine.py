"""Description of the machine of a figure: processor, versions, commit, day."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("torch", "transformers", "lightning", "accelerate", "trl", "peft", "numpy")
FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16")

_VERSIONS = """
import importlib.metadata as m, json, sys
found = {}
for name in sys.argv[1:]:
    try:
        found[name] = m.version(name)
    except m.PackageNotFoundError:
        pass
print(json.dumps({"python": sys.version.split()[0], **found}))
"""


def describe(device: str, threads: int, pythons: dict[str, str]) -> dict[str, Any]:
    """Return the machine as JSON.

    Args:
        device: "cpu" or "cuda".
        threads: that each measured process uses.
        pythons: name -> interpreter whose packages took part.
    """
    described = {
        **_processor(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "threads": threads,
        "system": f"{platform.system()} {platform.release().split('-')[0]}",
        "versions": {name: _versions(python) for name, python in pythons.items()},
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "git_commit": _git("rev-parse", "--short", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "rlhf_lightning")),
    }
    if device == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(0)
        described["gpu"] = {
            "name": properties.name,
            "memory_gib": round(properties.total_memory / 2**30, 1),
        }
    return described


def _processor() -> dict[str, Any]:
    info: dict[str, str] = {}
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            key, _, value = line.partition(":")
            info.setdefault(key.strip(), value.strip())
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return {
        "cpu": info.get("model name", platform.processor()),
        "cores": available_cores(),
        "flags": [flag for flag in FLAGS if flag in flags],
    }


def available_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _versions(python: str) -> dict[str, str]:
    done = subprocess.run(
        [python, "-c", _VERSIONS, *PACKAGES], capture_output=True, text=True, check=True
    )
    versions: dict[str, str] = json.loads(done.stdout)
    return versions


def _git(*arguments: str) -> str:
    done = subprocess.run(
        ["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return done.stdout.strip()
