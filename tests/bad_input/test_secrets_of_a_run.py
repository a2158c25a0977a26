"""A secret in the configuration or in the environment stands in no file that a run writes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhf_lightning.runs import secrets
from rlhf_lightning.runs.folder import RunFolder
from tests.builders.command_lines import run_folder, small_sft, train
from tests.builders.runs import completed

pytestmark = pytest.mark.timeout(240)
KEY = "sesame-" + "open-7391"
PASSWORD = "tomato" + "-soup-5512"
LEAKY = [
    "+callbacks.extra.leaky._target_=tests.faults.leaky.Leaky",
    f"+callbacks.extra.leaky.api_key={KEY}",
]


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(secrets, "_known", set())
    monkeypatch.setenv("MY_SERVICE_PASSWORD", PASSWORD)
    monkeypatch.setenv("RLHF_ALLOWED_TARGETS", "tests.")


def leaks(folder: Path) -> Iterator[str]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 5
    for path in files:
        content = path.read_bytes()
        for secret in (KEY, PASSWORD):
            if secret.encode() in content or secret in str(path):
                yield f"{path.relative_to(folder)}: {secret}"


@pytest.mark.thorough
def test_a_run_that_fails_with_a_secret_in_its_error_writes_it_nowhere(start, tmp_path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(RuntimeError, match=KEY):  # as the callback said it
        completed(folder.path, "sft", start, *LEAKY, "logger=wandb", "logger.mode=offline")
    assert list(leaks(folder.path)) == []
    assert "api_key=<removed> / <removed>" in folder.summary.read_text()
    assert "api_key=<removed> / <removed>" in folder.traceback.read_text()
    assert "api_key: <removed>" in folder.config.read_text()
    assert list(folder.wandb.glob("offline-run-*/*.wandb"))


@pytest.mark.thorough
def test_a_run_that_ends_well_exports_none_either(start, tmp_path):
    folder = completed(tmp_path / "run", "sft", start, *LEAKY, "+callbacks.extra.leaky.fails=false")
    assert (folder.export / "training_config.yaml").is_file()
    assert list(leaks(folder.path)) == []


@pytest.mark.slow
def test_neither_do_the_files_that_hydra_writes_nor_the_terminal(start, tmp_path):
    done = train(
        tmp_path,
        *small_sft(start, *LEAKY),
        RLHF_ALLOWED_TARGETS="tests.",
        MY_SERVICE_PASSWORD=PASSWORD,
    )
    assert done.returncode == 1
    assert "asking with the key <removed>" in done.stdout + done.stderr
    assert "401: the service does not know api_key=<removed> / <removed>" in done.stderr
    assert KEY not in done.stdout + done.stderr
    assert PASSWORD not in done.stdout + done.stderr
    folder = run_folder(tmp_path)
    names = {path.name for path in folder.rglob("*")}
    assert {"config.yaml", "overrides.yaml", "hydra.yaml", "train.log"} <= names
    assert list(leaks(tmp_path)) == []
