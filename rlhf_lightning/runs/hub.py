"""The Hugging Face hub: what a base is called and licensed there, and upload on request."""

from __future__ import annotations

import functools
import json
import logging
import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import huggingface_hub
from huggingface_hub import HfApi, ModelCard, constants, get_session, is_offline_mode
from huggingface_hub.errors import LocalTokenNotFoundError

from rlhf_lightning.runs.public_config import without_folders
from rlhf_lightning.runs.reading import read_json

logger = logging.getLogger(__name__)

# For later stages on this machine; it names the run's folder.
_LEFT_HERE = ("manifest.json", ".*")
# JSON files of an adapter, which name its base.
_NAMING_THE_BASE = ("adapter_config.json", "rlhf_lightning.json")
_BASE_KEYS = ("base", "base_model_name_or_path")


UNKNOWN = "unknown"  # licence
_SNAPSHOT = re.compile(r"/models--([\w.-]+)/snapshots/([0-9a-f]{40})/?$")
_HUB_NAME = re.compile(r"[\w.-]+(/[\w.-]+)?")


@functools.cache
def unreachable_hub() -> str | None:
    """Return why the hub cannot be reached, None where it can or nobody asks for it.

    It is asked once, in ten seconds at most; its client would ask twelve times in a minute for each
    file. From then on the process goes by the files that were loaded before.
    """
    if is_offline_mode():
        return None
    try:
        get_session().head(constants.ENDPOINT, timeout=10)
    except Exception as error:  # of whichever HTTP client the library has
        constants.HF_HUB_OFFLINE = True
        os.environ["HF_HUB_OFFLINE"] = "1"  # of `datasets`, and of child processes
        return f"the hub ({constants.ENDPOINT}) cannot be reached ({' '.join(str(error).split())})"
    return None


@functools.cache
def check_on_hub(name: str, revision: str | None = None) -> None:
    """Check that a model of the hub can be loaded: that it is asked, or that it was.

    In the latter case it says so, once.

    Raises:
        ValueError: if the hub cannot be reached, and the model is not in its cache.
    """
    if (reason := unreachable_hub()) is None:
        return
    if hub_commit(name, revision) is None:
        raise ValueError(f"{name} is no folder here, and was not loaded before: {reason}")
    logger.warning("%s: %s is what was loaded before", reason, name)


def hub_commit(name: str, revision: str | None = None) -> str | None:
    """Return the commit of a model of the hub that is loaded now; None where none can be."""
    try:
        unreachable_hub()
        config = huggingface_hub.hf_hub_download(name, "config.json", revision=revision)
    except Exception:  # of whichever HTTP client the library has; loading says what is wrong
        return None
    found = hub_snapshot(Path(config).parent)
    return None if found is None else found[1]


class HubError(RuntimeError):
    """The hub did not take the folder."""


def push_folder(folder: Path, repository: str, *, private: bool = True) -> str:
    """Upload a model folder as one commit; return its address.

    Only the token of `hf auth login` or HF_TOKEN is used. The repository is made if there is none;
    one that exists keeps its visibility.

    Args:
        folder: folder of an exported model.
        repository: name on the hub, `name` or `organisation/name`.
        private: visibility of a new repository.

    Raises:
        HubError: without a login, or if the hub refuses.
    """
    api = HfApi(library_name="rlhf_lightning")
    with tempfile.TemporaryDirectory() as temporary:
        staged = Path(temporary) / "model"
        shutil.copytree(folder, staged, ignore=shutil.ignore_patterns(*_LEFT_HERE))
        for path in (path for name in _NAMING_THE_BASE for path in staged.rglob(name)):
            content = read_json(path)
            named = {k: content[k] for k in _BASE_KEYS if isinstance(content.get(k), str)}
            content |= {key: without_folders(value) for key, value in named.items()}
            path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        try:
            made = api.create_repo(repository, private=private, exist_ok=True, token=True)
            commit = api.upload_folder(
                repo_id=made.repo_id, folder_path=staged, commit_message="Upload model", token=True
            )
        except LocalTokenNotFoundError as error:
            raise HubError(f"{repository}: run `hf auth login`, or set HF_TOKEN") from error
        except Exception as error:  # the hub's HTTP library has another name in every major version
            raise HubError(f"{repository}: {type(error).__name__}: {error}") from error
    return str(commit.repo_url)


def base_licence(configured: str | None, base: str | None) -> str:
    """Return the hub's word for the licence of the model that training started from.

    Args:
        configured: `model.license` of the configuration, which counts first.
        base: folder or hub name, whose model card is asked; None for random weights.
    """
    found = configured or (_card(base).get("license") if base is not None else None) or UNKNOWN
    return str(found[0] if isinstance(found, list) else found)


def hub_base(base: str | None, configured: str | None = None) -> str | None:
    """Return the hub name of the model at the root of `base`, or None if it is not known.

    Args:
        base: folder or hub name; a folder's model card may name it.
        configured: `model.source` of the configuration, for a folder whose card does not.
    """
    if base is None:
        return None
    named: Any = base
    if Path(base).is_dir():
        named = _card(base).get("base_model") or configured
        named = named[0] if isinstance(named, list) else named
    is_name = bool(named) and _HUB_NAME.fullmatch(str(named)) and not Path(str(named)).is_dir()
    return str(named) if is_name else None


def hub_snapshot(folder: str | Path) -> tuple[str, str] | None:
    """Return hub name and commit of a folder in the hub's cache, None for any other folder.

    Only in the cache is a folder sure to equal the hub's: a copy elsewhere may have been trained
    further.
    """
    found = _SNAPSHOT.search(Path(folder).expanduser().absolute().as_posix())
    return None if found is None else (found.group(1).replace("--", "/"), found.group(2))


def _card(base: str) -> dict[str, Any]:
    """Return the front matter of a model card; nothing where it cannot be read."""
    try:
        card = Path(base) / "README.md" if Path(base).is_dir() else base
        return ModelCard.load(card, ignore_metadata_errors=True).data.to_dict()
    except Exception:  # of the hub, the disk or the YAML: it must not end a finished training
        return {}
