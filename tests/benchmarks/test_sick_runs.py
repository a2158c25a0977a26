"""Each disease is noticed in time, and healthy runs are left in peace; see docs/doctor.md.

`RLHF_SICK_ARTIFACTS` names a folder that holds, or is to hold, the models of world 1.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from benchmarks.studies.sick.diseases import DISEASES
from benchmarks.studies.sick.run import fired, make_artifacts, run_one

# Not among those on which the thresholds were set.
SEED = 11
HEALTHY_SEED = 12
MOST_SECONDS = 90


@pytest.fixture(scope="session")
def artifacts(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    if given := os.environ.get("RLHF_SICK_ARTIFACTS"):
        folder = Path(given).absolute()
    else:
        folder = tmp_path_factory.mktemp("sick") / "artifacts"
        world = request.getfixturevalue("world_sft") / "artifacts/demo_seed1"
        for name in ("base", "sft"):
            shutil.copytree(world / name, folder / "demo_seed1" / name)
    make_artifacts(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", [name for name in DISEASES if name != "healthy"])
def test_a_disease_is_noticed_in_time(name: str, artifacts: Path) -> None:
    result, plan = run_one(name, SEED, artifacts), DISEASES[name]
    when = fired(result)
    assert set(plan.detectors) <= set(when), when
    late = {d: when[d] for d in plan.detectors if when[d] > plan.within}
    assert not late
    assert result["cpu_seconds"] <= MOST_SECONDS


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_detector_fires_on_a_healthy_run(artifacts: Path) -> None:
    assert fired(run_one("healthy", HEALTHY_SEED, artifacts)) == {}
