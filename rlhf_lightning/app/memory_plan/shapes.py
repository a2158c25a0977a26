"""The shape of a model: the fields of its Hugging Face config, and how many layers it repeats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from rlhf_lightning.models.factory import set_dropout


class ShapeError(ValueError):
    """A shape is missing or is none that transformers knows."""


@dataclass(frozen=True)
class Shape:
    """A model's config fields, `model_type` among them."""

    fields: Mapping[str, Any]

    def __post_init__(self) -> None:
        """Check that transformers can make a config of the fields."""
        missing = [str(key) for key, value in self.fields.items() if value == "???"]
        if "model_type" not in self.fields or missing:
            what = missing[0] if missing else "model_type"
            raise ShapeError(
                f"the shape of the model lacks {what}: model.shape needs the fields of its "
                "config.json, model_type among them"
            )
        try:
            self.config()
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            raise ShapeError(f"model.shape makes no config: {error}") from error

    @property
    def num_layers(self) -> int:
        """Decoder layers."""
        return int(self.config().num_hidden_layers)

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.config().vocab_size)

    def config(self, num_layers: int | None = None) -> PretrainedConfig:
        """Return the config without dropout, with another number of layers if one is given."""
        fields = dict(self.fields)
        config = AutoConfig.for_model(**fields)
        if num_layers is not None:
            config.num_hidden_layers = num_layers
            for name, value in vars(config).items():
                # Some architectures list a kind for each layer.
                if name.endswith("layer_types") and isinstance(value, list):
                    setattr(config, name, value[:num_layers])
        return set_dropout(config, 0.0)


def read_shape(folder: Path) -> Shape:
    """Return the shape of a model in a local folder.

    Raises:
        ShapeError: if it has no readable config.json.
    """
    file = folder / "config.json"
    try:
        fields = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ShapeError(f"no config.json can be read in {folder}: {error}") from error
    if not isinstance(fields, dict):
        raise ShapeError(f"{file} holds no JSON object")
    return Shape(fields)
