"""Upload of a model folder to the Hugging Face hub, on request only."""

from __future__ import annotations

import json
import shutil
import tempfile
from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import LocalTokenNotFoundError

from rlhf_lightning.runs.model_folder import check_model_folder
from rlhf_lightning.runs.public_config import without_folders
from rlhf_lightning.runs.reading import read_json

# For later stages on this machine; it names the run's folder.
_LEFT_HERE = ("manifest.json", ".*")
# JSON files of an adapter, which name its base.
_NAMING_THE_BASE = ("adapter_config.json", "rlhf_lightning.json")


class HubError(RuntimeError):
    """The hub did not take the folder."""


def push_folder(folder: Path, repository: str, *, private: bool = True) -> str:
    """Upload a model folder as one commit; return its address.

    The token is the one of `hf auth login` or HF_TOKEN, and of nowhere else. The repository is
    made if there is none; one that exists keeps its visibility.

    Args:
        folder: an exported model.
        repository: `name` or `organisation/name`.
        private: of a new repository.

    Raises:
        HubError: without a login, if the hub refuses, or if the folder has a link that leaves it.
    """
    try:
        check_model_folder(folder)
    except ValueError as error:
        raise HubError(f"nothing was pushed to {repository}: {error}") from error
    api = HfApi(library_name="rlhf_lightning")
    with tempfile.TemporaryDirectory() as temporary:
        staged = Path(temporary) / "model"
        shutil.copytree(folder, staged, ignore=shutil.ignore_patterns(*_LEFT_HERE))
        for name in _NAMING_THE_BASE:
            for path in staged.rglob(name):
                _cut_folders(path)
        try:
            made = api.create_repo(repository, private=private, exist_ok=True, token=True)
            commit = api.upload_folder(
                repo_id=made.repo_id, folder_path=staged, commit_message="Upload model", token=True
            )
        except LocalTokenNotFoundError as error:
            raise HubError(
                f"cannot push to {repository}: there is no login to the hub; run "
                "`hf auth login`, or set HF_TOKEN"
            ) from error
        except Exception as error:  # the hub's HTTP library has another name in every major version
            raise HubError(
                f"the hub did not take {repository}: {type(error).__name__}: {error}"
            ) from error
    return str(commit.repo_url)


def _cut_folders(path: Path) -> None:
    content = read_json(path)
    for key in ("base", "base_model_name_or_path"):
        if isinstance(content.get(key), str):
            content[key] = without_folders(content[key])
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
