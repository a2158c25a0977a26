"""The library on several ranks: FSDP2 from Python trains and exports what one process does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.builders.ranks import ROOT, run_ranks
from tests.builders.record_files import write_material


@pytest.mark.timeout(300)
def test_ppo_under_fsdp2_exports_the_policy_of_one_process(tmp_path):
    write_material(tmp_path / "material")
    exported = {}
    for devices in (1, 2):
        run = tmp_path / f"run_{devices}"
        run_ranks(
            ["-m", "tests.multiprocess.library_stage", tmp_path / "material", run, str(devices)],
            world_size=devices,
            folder=tmp_path / f"logs_{devices}",
            environment={"PYTHONPATH": str(ROOT)},
            timeout=250,
        ).check()
        exported[devices] = load_file(Path(run) / "export/model.safetensors")
        assert len((run / "metrics.csv").read_text().splitlines()) == 3
    start = load_file(tmp_path / "material/policy/model.safetensors")
    assert exported[1].keys() == exported[2].keys()
    for name, value in exported[1].items():
        torch.testing.assert_close(exported[2][name], value, rtol=0, atol=2e-4)
    moved = max((exported[1][name] - start[name]).abs().max() for name in start)
    assert moved > 1e-3, "or ranks that train nothing would pass"
