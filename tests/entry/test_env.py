"""`rlhf-env`: what a bug report needs, and nothing that is the user's own."""

from __future__ import annotations

import platform
import socket

import pytest
import torch

import rlhf_lightning
from tests.builders.command_lines import environment
from tests.builders.processes import run_python


@pytest.mark.thorough
def test_versions_devices_and_ranks_fit_a_screen_without_secrets_or_paths(tmp_path):
    own = {"HOME": str(tmp_path), "WANDB_API_KEY": "s3cret", "HF_TOKEN": "hf_s3cret"}
    ranks = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "MASTER_ADDR": "10.0.0.7"}
    words = ["-m", "rlhf_lightning.env"]
    done = run_python(*words, folder=tmp_path, environment=environment(**own, **ranks))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    known = {line[:15].rstrip(): line[16:] for line in lines}
    assert known["rlhf_lightning"] == rlhf_lightning.__version__
    assert known["python"] == platform.python_version()
    assert known["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    named = {"lightning", "transformers", "hydra-core", "wandb", "device, driver", "commit"}
    assert named <= set(known)
    assert known["ranks"] == "RANK=1 WORLD_SIZE=2 LOCAL_RANK=1"
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for private in ("s3cret", "10.0.0.7", str(tmp_path), socket.gethostname(), " /"):
        assert private not in done.stdout
