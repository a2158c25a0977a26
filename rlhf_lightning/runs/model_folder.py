"""The files of a model's folder lie in it: a link or an index that leads elsewhere is refused.

A folder may come from someone else. Reading, copying or uploading it must not reach the user's own
files.
"""

from __future__ import annotations

import os
from pathlib import Path

from rlhf_lightning.runs.reading import read_json

ADAPTER_CONFIG = "adapter_config.json"


def check_model_folder(folder: Path | str) -> None:
    """Check that every file of a model's folder, and every shard of its index, lies in it.

    A folder in the hub's cache holds links to files beside it, which belong to it.

    Raises:
        ValueError: naming the link, or the file that an index names.
    """
    folder = Path(folder)
    whole = folder.resolve()
    of_hub = (p.parent for p in whole.parents if p.name == "snapshots")
    root = next((p for p in of_hub if p.name.startswith("models--")), whole)
    for place, folders, files in os.walk(folder):
        for path in (Path(place, name) for name in (*folders, *files)):
            if path.exists() and not (path.is_file() or path.is_dir()):
                raise ValueError(f"{path} is a pipe or a device, and no file: remove it")
            if path.is_symlink() and not path.resolve().is_relative_to(root):
                raise ValueError(
                    f"{path} is a link to {os.readlink(path)}, outside of the model's folder: put "
                    "a copy of what it names in its place, or remove it"
                )
    for index in folder.rglob("*.index.json"):
        for shard in _shards(index):
            if not (folder / shard).resolve().is_relative_to(root):
                raise ValueError(
                    f"{index} names the file {shard!r}, outside of the model's folder: name files "
                    "that lie beside it"
                )


def _shards(index: Path) -> set[str]:
    try:
        content = read_json(index)
        return {str(name) for name in content["weight_map"].values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged ({error!r}): copy the model again") from error


def is_adapter(folder: Path | str) -> bool:
    """Return whether a folder holds an adapter of PEFT and no model."""
    folder = Path(folder)
    return (folder / ADAPTER_CONFIG).is_file() and not (folder / "config.json").is_file()


def of_adapter(folder: Path) -> str:
    """Return what an adapter's folder is, and how one gets the model."""
    try:
        content = read_json(folder / ADAPTER_CONFIG)
        base, task = content.get("base_model_name_or_path"), content.get("task_type")
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{folder / ADAPTER_CONFIG} is damaged: copy it again") from error
    said = f"{folder} is an adapter on {base}, and not a model"
    export = ("config.json", "training_config.yaml")  # of one of our runs: it is in adapter/
    if (folder / "rlhf_lightning.json").is_file() and all(
        (folder.parent / f).is_file() for f in export
    ):
        return f"{said}: give {folder.parent}, where it is merged"
    of_kind = "SequenceClassification" if task == "SEQ_CLS" else "CausalLM"
    one_score = ", num_labels=1" * (task == "SEQ_CLS")
    return (
        f"{said}: merge it by `peft.AutoPeftModelFor{of_kind}.from_pretrained({str(folder)!r}"
        f"{one_score}).merge_and_unload()`, save the result and the tokenizer by "
        "save_pretrained(FOLDER), and give that folder"
    )
