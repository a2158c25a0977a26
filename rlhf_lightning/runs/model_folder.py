"""Folders of adapters, which are no models."""

from __future__ import annotations

from pathlib import Path

from rlhf_lightning.runs.reading import read_json

ADAPTER_CONFIG = "adapter_config.json"


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
