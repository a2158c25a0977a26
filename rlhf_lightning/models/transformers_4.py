"""Old keys, for transformers 4, in folders that transformers 5 wrote.

Transformers 5 moved the base and the scaling of rotary angles into `rope_parameters`, renamed a few
sizes and the class of a tokenizer that is all in tokenizer.json. Older readers, which servers and
converters use, would silently take their defaults for them.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PretrainedConfig

from rlhf_lightning.runs.atomic import write_text

# Of model types that called them otherwise.
_OLD_NAMES = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
_BESIDE_SCALING = ("rope_theta", "partial_rotary_factor")
_FULL, _SLIDING = "full_attention", "sliding_attention"


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write the content of a configuration file as transformers does."""
    write_text(file, json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n")


def with_old_keys(content: Mapping[str, Any], config: PretrainedConfig) -> dict[str, Any]:
    """Return the content of config.json with the keys of transformers 4.

    Args:
        content: content of config.json, or the part of a model within it.
        config: the configuration that was written there.
    """
    parts = {
        name: with_old_keys(value, getattr(config, name))
        for name, value in content.items()
        if isinstance(getattr(config, name, None), PretrainedConfig)
    }
    named = {**content, **parts}
    names = {old: named[new] for old, new in config.attribute_map.items() if new in named}
    old = {**names, **_old_rope(named.get("rope_parameters") or {}, named)}
    if "dtype" in named:
        old["torch_dtype"] = named["dtype"]
    for unread in ((), ("rope_scaling",)):
        # Today's transformers prefers `rope_scaling`: it has to say the same.
        found = {k: v for k, v in old.items() if k not in unread} | named
        if _rope(type(config).from_dict(copy.deepcopy(found))) == _rope(config):
            break
    return found


def _rope(config: PretrainedConfig) -> Any:
    """Return `rope_parameters` without what a reader repeats there: the type, a known factor."""
    first = getattr(config, "original_max_position_embeddings", None)
    factor = config.max_position_embeddings / first if first else None

    def own(value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        return {
            k: own(v) for k, v in value.items() if k != "type" and (k != "factor" or v != factor)
        }

    return own(getattr(config, "rope_parameters", None))


def _old_rope(rope: Mapping[str, Any], content: Mapping[str, Any]) -> dict[str, Any]:
    if _FULL in rope:
        local = (rope.get(_SLIDING) or {}).get("rope_theta")
        full = _old_rope(rope[_FULL] or {}, content)
        return full | ({} if local is None else {"rope_local_base_freq": local})
    if "rope_theta" not in rope:  # none, or nested by layers that transformers 4 does not know
        return {}
    found: dict[str, Any] = {name: rope[name] for name in _BESIDE_SCALING if name in rope}
    if str(content.get("model_type")).startswith("gpt_neox"):
        found = {_OLD_NAMES[name]: value for name, value in found.items()}
    kind = rope.get("rope_type", "default")
    scaling = {k: v for k, v in rope.items() if k not in _BESIDE_SCALING}
    if kind == "longrope" and "original_max_position_embeddings" in content:
        # Phi 3 takes these three and no more.
        scaling = {k: scaling[k] for k in scaling if k.endswith("_factor") and "att" not in k}
        scaling["type"] = kind
    elif kind != "default":
        scaling["type"] = kind
    found["rope_scaling"] = None if kind == "default" else scaling
    return found


def name_old_tokenizer(folder: Path) -> None:
    """Give the tokenizer in `folder` the names that transformers 4 knows, which 5 reads alike."""
    file = folder / "tokenizer_config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    if content.get("tokenizer_class") == "TokenizersBackend":
        content["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(content.get("extra_special_tokens"), list):
        content["additional_special_tokens"] = content.pop("extra_special_tokens")
    for ours in ("is_local", "local_files_only"):  # of the folder that it was loaded from
        content.pop(ours, None)
    write_json(file, content)
