"""`rlhf-train --help` on a terminal of 80 columns."""

from __future__ import annotations

import os
import subprocess
import sys

from rlhf_lightning.app.config.compose import choices


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
