"""The generation settings of a checkpoint, mended so that its export can be written and used.

Transformers loads settings that contradict each other, ignores some of them, and refuses to save
them: after training that would be too late. What is wrong by itself it refuses to load.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Mapping
from typing import Any

from transformers import GenerationConfig

logger = logging.getLogger(__name__)

# What decides which other settings have an effect.
_MODES = ("do_sample", "num_beams", "use_cache", "return_dict_in_generate")


def mended_settings(settings: GenerationConfig, source: object) -> GenerationConfig:
    """Return the settings without those that have no effect, or cannot have one.

    A model that decodes greedily stays greedy. It does so at temperature 0, and without
    `do_sample: true`, whatever temperature or top_k it names.

    Args:
        settings: of a checkpoint, left as they are.
        source: its name, for messages.
    """
    found: Any = copy.deepcopy(settings)
    if found.temperature == 0:
        found.do_sample = False
    wrong = _without_effect(found)
    for name in wrong:
        setattr(found, name, getattr(GenerationConfig(), name))
    if wrong:
        _tell(str(source), ", ".join(f"{k}={v!r}" for k, v in wrong.items()))
    return found  # type: ignore[no-any-return]


def _without_effect(settings: GenerationConfig) -> Mapping[str, Any]:
    """Return the settings that transformers refuses beside the modes alone."""
    modes = GenerationConfig(**{name: getattr(settings, name) for name in _MODES})
    default = modes.to_dict()
    wrong = {}
    for name, value in settings.to_dict().items():
        if name in _MODES or name not in default or value == default[name]:
            continue
        alone = copy.deepcopy(modes)
        setattr(alone, name, getattr(settings, name))
        try:
            alone.validate(strict=True)
        except ValueError:
            wrong[name] = value
    return wrong


@functools.cache
def _tell(source: str, dropped: str) -> None:
    """Warn once of what policy and reference of one source do not take over."""
    logger.warning("the generation settings of %s are exported without %s", source, dropped)
