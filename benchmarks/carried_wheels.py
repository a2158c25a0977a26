"""Wheels that a machine with CUDA's torch and no network lacks: fetched here, installed there.

    python -m benchmarks.carried_wheels --have FILE --python-version 3.12

FILE is what `python3 -m pip list --format=freeze` prints on that machine. Run this where the
project is installed (`make install`): its packages say what they need.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks.machine import ROOT

WHEELS = ROOT / "benchmarks/.gpu_day/wheels"
SITE = WHEELS.with_name("site")
# Of the tests, of TRL's PPO iteration, and what is used where it is installed.
BESIDE = ("pytest", "pytest-timeout", "pytest-xdist", "trl", "liger-kernel")
PINNED = {"trl": "1.12.0"}  # the last release with a PPO trainer
LEFT_OUT = ("wandb", "hf-xet")  # large, and without a network of no use; the first is imported
LARGEST = 64  # MiB, with what git knows of this checkout
THERE = re.compile(r"^(torch|triton|nvidia-.*|cuda-.*)$")  # torch's own
PLATFORMS = [f"manylinux_2_{n}_x86_64" for n in (39, 35, 34, 31, 28, 27, 24, 17, 12, 5)]
PLATFORMS += [f"manylinux{year}_x86_64" for year in (2014, 2010, 1)]


def main(arguments: list[str] | None = None) -> None:
    """Download the wheels; print their number and size."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    made.add_argument("--have", type=Path, help="packages of the machine, as pip freezes them")
    made.add_argument("--python-version", default="3.12", help="of that machine")
    made.add_argument("--to", type=Path, default=WHEELS, help="folder")
    options = made.parse_args(arguments)
    have = pinned(options.have.read_text(encoding="utf-8")) if options.have else {}
    wanted = needed(have, options.python_version)
    options.to.mkdir(parents=True, exist_ok=True)
    for name, version in wanted.items():
        fetch(f"{name}=={version}" if version else name, options.python_version, options.to)
    sizes = {wheel.name: wheel.stat().st_size / 2**20 for wheel in options.to.glob("*.whl")}
    carried, tree = sum(sizes.values()), _tree_mebibytes()
    sys.stdout.write(f"{len(wanted)} packages, {carried:.0f} MiB, in {options.to}\n")
    if carried + tree > LARGEST:
        largest = sorted(sizes, key=sizes.__getitem__)[-5:]
        raise SystemExit(
            f"with {tree:.0f} MiB of this checkout that is more than {LARGEST} MiB: give --have, "
            f"or install there what is largest: {', '.join(largest)}"
        )


def _tree_mebibytes() -> float:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    files = (ROOT / name for name in listed.split("\0") if name)
    return sum(file.stat().st_size for file in files if file.is_file()) / 2**20


def pinned(text: str) -> dict[str, str]:
    """Return name -> version of lines `name==version`."""
    pairs = (line.split("#")[0].split(";")[0].strip().split("==") for line in text.splitlines())
    return {_canonical(pair[0]): pair[1] for pair in pairs if len(pair) == 2}


def needed(have: Mapping[str, str], python_version: str) -> dict[str, str]:
    """Return name -> version of the packages to carry; "" where no version is pinned.

    Args:
        have: packages of the machine; one whose version is new enough is not carried.
        python_version: of the machine.
    """
    from packaging.requirements import Requirement

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    versions = pinned((ROOT / "constraints.txt").read_text(encoding="utf-8"))
    # Its bounds are those of the extra `gpu` and `dev`; all else comes from the packages.
    asked: dict[str, list[Requirement]] = {}
    waiting = [Requirement(line) for line in (*project["dependencies"], *BESIDE)]
    target = {
        "python_version": python_version,
        "python_full_version": f"{python_version}.0",
        "platform_system": "Linux",
        "sys_platform": "linux",
        "platform_machine": "x86_64",
    }
    while waiting:
        requirement = waiting.pop()
        name = _canonical(requirement.name)
        if THERE.match(name) or name in LEFT_OUT:
            continue
        known = name in asked
        asked.setdefault(name, []).append(requirement)
        if not known or requirement.extras:
            waiting += _requirements(name, requirement.extras, target)
    return {
        name: PINNED.get(name) or versions.get(name, "")
        for name, requirements in sorted(asked.items())
        if name not in have or not all(r.specifier.contains(have[name]) for r in requirements)
    }


def _requirements(name: str, extras: Iterable[str], target: Mapping[str, str]) -> list[object]:
    from packaging.requirements import Requirement

    try:
        lines = importlib.metadata.requires(name) or []
    except importlib.metadata.PackageNotFoundError:  # it is for GPUs alone, and needs torch
        return []
    found = []
    for requirement in map(Requirement, lines):
        marker = requirement.marker
        places = [dict(target, extra=extra) for extra in ("", *extras)]
        if marker is None or any(marker.evaluate(place) for place in places):
            found.append(requirement)
    return found


def _canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def fetch(requirement: str, python_version: str, folder: Path) -> None:
    """Download one wheel, or build it where only its source is published.

    Raises:
        SystemExit: if there is neither.
    """
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    platforms = [f"--platform={name}" for name in PLATFORMS]
    binary = ["--only-binary=:all:", f"--python-version={python_version}", "--implementation=cp"]
    commands = (
        [*pip, "download", "--no-deps", *binary, *platforms, "-d", str(folder), requirement],
        [*pip, "wheel", "--no-deps", "-w", str(folder), requirement],
    )
    for command in commands:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
    raise SystemExit(f"{requirement} cannot be fetched:\n{done.stderr[-1000:]}")


def install(wheels: Path = WHEELS, site: Path = SITE) -> Path | None:
    """Install the carried wheels for this interpreter; return their folder, None without any.

    Raises:
        subprocess.CalledProcessError: if a wheel is of another Python.
    """
    found = sorted(map(str, wheels.glob("*.whl")))
    if not found:
        return None
    if not site.exists():
        options = ["--no-index", "--no-deps", "--no-compile", "--target", str(site)]
        pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, *options, *found], check=True)
        stand_in = site / "wandb/__init__.py"
        if not stand_in.parent.exists():
            stand_in.parent.mkdir()
            stand_in.write_text('"""Stands in for a package that was not carried."""\n')
    return site


if __name__ == "__main__":
    main()
