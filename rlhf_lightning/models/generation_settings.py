"""The generation settings of a checkpoint, mended so that its export can be written and used.

Transformers loads settings that contradict each other, ignores some of them, and refuses to save
them: after training that would be too late. What is wrong by itself it refuses to load.
"""

from __future__ import annotations

import copy
import functools
import logging
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedModel

logger = logging.getLogger(__name__)

# What decides which other settings have an effect.
_MODES = ("do_sample", "num_beams", "use_cache", "return_dict_in_generate")
# What `generate` computes with: the modes first, because the others depend on them.
_COMPUTED = (
    *_MODES,
    *("temperature", "top_k", "top_p", "top_h", "min_p", "typical_p"),
    *("epsilon_cutoff", "eta_cutoff", "length_penalty", "repetition_penalty"),
    *("encoder_repetition_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size"),
    *("exponential_decay_length_penalty", "min_length", "min_new_tokens", "num_return_sequences"),
    *("suppress_tokens", "begin_suppress_tokens", "bad_words_ids", "sequence_bias"),
    *("forced_bos_token_id", "forced_eos_token_id", "guidance_scale"),
)


def mended_settings(model: PreTrainedModel, source: object) -> GenerationConfig:
    """Return the model's settings without those that have no effect, or cannot have one.

    A model that decodes greedily stays greedy. It does so at temperature 0, and without
    `do_sample: true`, whatever temperature or top_k it names.

    Args:
        model: as its checkpoint was loaded; its settings are left as they are.
        source: name of the checkpoint, for messages.

    Raises:
        ValueError: if no text can be generated with the settings.
    """
    found: Any = copy.deepcopy(model.generation_config)
    if found.temperature == 0:
        found.do_sample = False
    wrong = _without_effect(found)
    for name in wrong:
        setattr(found, name, getattr(GenerationConfig(), name))
    if wrong:
        _tell(str(source), ", ".join(f"{k}={v!r}" for k, v in wrong.items()))
    _check_generates(found, model.config.get_text_config().vocab_size, source)
    return found  # type: ignore[no-any-return]


def check_read(source: object, options: Mapping[str, Any]) -> None:
    """Check that transformers reads the settings of a checkpoint, if it has some.

    Args:
        source: folder or hub name.
        options: its revision, as `loading_options` returns it.

    Raises:
        ValueError: if it refuses them.
    """
    try:
        GenerationConfig.from_pretrained(str(source), revision=options.get("revision", "main"))
    except OSError:  # there are none
        return
    except Exception as error:
        reason = " ".join(str(error).split())
        raise ValueError(
            f"cannot load {source}: transformers refuses its generation settings ({reason}). "
            "Correct generation_config.json, or remove it"
        ) from error


def _check_generates(settings: GenerationConfig, vocab_size: int, source: object) -> None:
    """Refuse settings with which a small model of the same vocabulary cannot generate."""
    tried = GenerationConfig(max_new_tokens=2, eos_token_id=0, pad_token_id=0)
    changed = [k for k in _COMPUTED if getattr(settings, k, None) != getattr(tried, k, None)]
    if not changed:
        return
    size = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    # As if it had not been: no number is drawn, and no warning repeats what the export's will say.
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small: Any = LlamaForCausalLM(
            LlamaConfig(vocab_size=vocab_size, num_hidden_layers=1, **size)  # type: ignore[arg-type]
        )
        for name in changed:
            value = getattr(settings, name)
            setattr(tried, name, value)
            try:
                small.eval().generate(torch.zeros(1, 3, dtype=torch.long), generation_config=tried)
            except Exception as error:
                reason = " ".join(str(error).split())
                raise ValueError(
                    f"cannot load {source}: no text can be generated with {name}={value!r} of its "
                    f"generation settings ({reason}). Correct generation_config.json, or remove it"
                ) from error


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
