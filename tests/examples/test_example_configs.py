"""The experiments of `examples/conf` compose by `--config-dir`, and their classes are found."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_lightning.app.config.errors import withdrawn
from tests.builders.command_lines import settings_of

CONF = Path(__file__).resolve().parents[2] / "examples/conf"
WORD = f"--config-dir={CONF}"
EXPERIMENTS = sorted(file.stem for file in (CONF / "experiment").glob("*.yaml"))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_an_experiment_of_the_examples_composes(experiment, monkeypatch):
    words = [f"+experiment={experiment}"]
    assert "--config-dir=examples/conf" in str(withdrawn(words))
    assert withdrawn([WORD, *words]) is None
    monkeypatch.setattr("sys.argv", ["rlhf-train", WORD])
    monkeypatch.setenv("RLHF_ALLOWED_TARGETS", "examples.")
    if experiment.endswith("arguments"):
        words.append("dataset.path=x")
    else:
        words += ["dataset.positive=a", "dataset.negative=b"]
    settings = settings_of(WORD, *words)
    assert "examples.datasets." in repr(settings.dataset.source)
