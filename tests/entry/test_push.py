"""Uploading an exported folder: what reaches the client of the hub."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError

from rlhf_lightning.app.config.commands import ExportSettings
from rlhf_lightning.app.export import run
from rlhf_lightning.runs.hub import HubError


@pytest.fixture
def exported(tmp_path: Path) -> Path:
    folder = tmp_path / "export"
    (folder / "adapter").mkdir(parents=True)
    for name in ("config.json", "model.safetensors", "README.md"):
        (folder / name).write_text("{}")
    (folder / "manifest.json").write_text(json.dumps({"run": "/home/me/outputs/sft"}))
    config = {"base_model_name_or_path": "/home/me/models/base", "r": 4}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The repositories that were asked for, with the files that were sent."""
    found: list[dict[str, Any]] = []

    def create_repo(_: HfApi, name: str, *, private: bool, **__: Any) -> Any:
        found.append({"name": name, "private": private})
        return SimpleNamespace(repo_id=name)

    def upload_folder(_: HfApi, *, repo_id: str, folder_path: Path, **__: Any) -> Any:
        files = (path for path in folder_path.rglob("*") if path.is_file())
        found[-1]["files"] = {str(p.relative_to(folder_path)): p.read_text() for p in files}
        return SimpleNamespace(repo_url=f"https://hub/{repo_id}")

    monkeypatch.setattr(HfApi, "create_repo", create_repo)
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    return found


def test_a_folder_becomes_a_private_repository_that_names_no_folder_of_the_machine(
    exported, uploads
):
    assert run(ExportSettings(run=exported, push_to_hub="me/policy")) == ["https://hub/me/policy"]
    (made,) = uploads
    assert made["private"]
    assert set(made["files"]) == {
        "config.json", "model.safetensors", "README.md", "adapter/adapter_config.json"
    }  # fmt: skip
    assert "/home/me" not in "".join(made["files"].values())
    assert "/home/me" in (exported / "adapter/adapter_config.json").read_text()
    run(ExportSettings(run=exported, push_to_hub="me/policy", public=True))
    assert not uploads[1]["private"]


def test_without_a_login_nothing_is_uploaded(exported, monkeypatch):
    def refuse(*_: Any, **__: Any) -> None:
        raise LocalTokenNotFoundError("no token")

    monkeypatch.setattr(HfApi, "create_repo", refuse)
    with pytest.raises(HubError, match="HF_TOKEN"):
        run(ExportSettings(run=exported, push_to_hub="me/policy"))
