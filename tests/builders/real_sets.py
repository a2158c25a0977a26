"""The real data sets, where they are: in RLHF_DATA, or in `shared/data` beside the repository."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate

from rlhf_lightning.app.config.compose import conf_dir, register

BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"
DATA = Path(os.environ.get("RLHF_DATA", BESIDE))
FILES = {
    "shell_commands": DATA / "tldr_pages" / "examples.jsonl.gz",
    "gsm8k": DATA / "gsm8k" / "train.jsonl",
}
EXPERIMENTS = {
    "shell_commands": "sft_smollm2_shell",
    "gsm8k": "sft_smollm2_gsm8k",
}


def source_of(name):
    """Return the source of a data set as its experiment composes it."""
    if not FILES[name].exists():
        pytest.skip(f"the data set is not in {FILES[name]}: set RLHF_DATA to the folder above it")
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        cfg = compose("train", [f"+experiment={EXPERIMENTS[name]}", f"dataset.path={FILES[name]}"])
    return instantiate(cfg.dataset.source)
