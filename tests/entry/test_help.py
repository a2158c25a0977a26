"""`rlhf-train --help` on a terminal of 80 columns."""

from __future__ import annotations

import os
import subprocess
import sys

import yaml

from rlhf_lightning.app.config.compose import choices, conf_dir
from rlhf_lightning.app.config.help import GROUPS, choices_text

# Of one choice, or chosen by the experiment.
NOT_LISTED = {"paths", "trainer", "callbacks", "evaluation", "module", "data"}


def test_help_fits_80_columns_and_names_every_experiment():
    done = subprocess.run(
        [sys.executable, "-m", "rlhf_lightning.train", "--help"],
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    lines = done.stdout.rstrip().splitlines()
    assert max(map(len, lines)) <= 80
    words = set(done.stdout.replace(",", " ").split())
    for name in choices("experiment"):
        assert name in words or name.partition("_")[2] in words, name
    assert 'eval "$(rlhf-train -sc install=bash)"' in lines[-1]


def test_help_lists_every_group_of_training_that_leaves_a_choice():
    defaults = yaml.safe_load((conf_dir() / "train.yaml").read_text())["defaults"]
    groups = {next(iter(item)) for item in defaults if isinstance(item, dict)}
    listed_groups = {group for group, _ in GROUPS}
    assert listed_groups == (groups | {"preset"}) - NOT_LISTED
    assert all(len(line) < 60 for line in choices_text(60).splitlines())
