"""Loading tokenizers, and what they say about stopping."""

from __future__ import annotations

import functools
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import (
    _CACHED_NO_EXIST,
    hf_hub_download,
    is_offline_mode,
    try_to_load_from_cache,
)
from huggingface_hub.errors import RemoteEntryNotFoundError
from transformers import (
    AutoTokenizer,
    GenerationConfig,
    PretrainedConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from rlhf_lightning.arguments import RunsCode
from rlhf_lightning.models.loading import load_config, loading_options, naming_source
from rlhf_lightning.models.whole_weights import listed
from rlhf_lightning.text.template_date import DATE, leading_settings, with_fixed_date
from rlhf_lightning.text.turn_end import turn_end

logger = logging.getLogger(__name__)

# What a checkpoint calls its tokenizer that is all in tokenizer.json.
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
GENERATION_CONFIG = "generation_config.json"
_OUR_TEMPLATES = Path(__file__).with_name("chat_templates")


def load_tokenizer(
    source: str | Path,
    *,
    chat_template: str | None = None,
    chat_template_arguments: Mapping[str, Any] | None = None,
    revision: str | None = None,
    trust_remote_code: RunsCode = False,
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a folder or hub name, with a pad token and left padding.

    A tokenizer without a pad token, or with one that the model has no embedding for, pads with EOS:
    masks never come from ids, so that is safe. Tokens without an embedding are named.

    Args:
        source: folder or hub name.
        chat_template: takes the place of the checkpoint's, see `read_template`.
        chat_template_arguments: variables that the chat template reads, such as `enable_thinking`
            of Qwen3; they become part of the template, see `with_template_arguments`. Of a template
            that writes the date, `date_string` is it, else `template_date.DATE`: never today.
        revision: branch, tag or commit of a hub name.
        trust_remote_code: run the code beside the weights, see `loading_options`.

    Raises:
        ValueError: if it cannot be loaded, has no EOS token, or has template arguments and no chat
            template.
    """
    options = loading_options(source, revision=revision, trust_remote_code=trust_remote_code)
    with naming_source(source):
        tokenizer = _as_saved(str(source), options)
    tokenizer = with_template(tokenizer, chat_template)
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {source} has no EOS token: set one before training")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    _check_rows(tokenizer, str(source), options)
    tokenizer.padding_side = "left"
    with_template_arguments(tokenizer, chat_template_arguments or {})
    _change_templates(tokenizer, with_fixed_date)
    return tokenizer  # type: ignore[no-any-return]


def with_template(tokenizer: Any, chat_template: str | None) -> Any:
    """Return a tokenizer with another chat template, see `read_template`; None keeps its own."""
    if chat_template is not None:
        tokenizer.chat_template = read_template(chat_template)
    return tokenizer


def read_template(source: str) -> str:
    """Return a chat template: of a file, of another model, one of ours by its name, or as given.

    Raises:
        ValueError: if it is none of them.
    """
    if "{{" in source or "{%" in source:
        return source
    own = {file.stem: file for file in _OUR_TEMPLATES.glob("*.jinja")}
    file = own.get(source) or Path(source).expanduser()
    if file.is_file():
        return file.read_text(encoding="utf-8")
    try:
        found = _as_saved(source, loading_options(source)).chat_template
    except (OSError, ValueError):
        found = None
    if not isinstance(found, str):
        raise ValueError(
            f"model.chat_template={source!r} is no file, no model with a template, and none of "
            f"ours: give one of {', '.join(sorted(own))}, or a Jinja file"
        )
    return found


def _check_rows(tokenizer: Any, source: str, options: dict[str, Any]) -> None:
    try:
        size = load_config(source, options).get_text_config().vocab_size
    except (ValueError, AttributeError):  # a tokenizer alone
        return
    beyond = {i: token for token, i in tokenizer.get_vocab().items() if i >= size}
    if tokenizer.eos_token_id in beyond:
        raise ValueError(
            f"the EOS of {source}, {tokenizer.eos_token!r}, has id {tokenizer.eos_token_id}, and "
            f"the model has {size} embeddings: call resize_token_embeddings({len(tokenizer)}) on "
            "the model and save it"
        )
    if beyond:
        _tell_of_tokens(source, size, tuple(beyond[i] for i in sorted(beyond)))
    if tokenizer.pad_token_id in beyond:
        tokenizer.pad_token = tokenizer.eos_token


@functools.cache
def _tell_of_tokens(source: str, size: int, tokens: tuple[str, ...]) -> None:
    logger.warning(
        "the model of %s has %s embeddings and none for %s of its tokenizer: no text may hold "
        "them, and EOS takes the place of a pad token among them. resize_token_embeddings() gives "
        "them rows",
        source,
        size,
        listed(map(repr, tokens)),
    )


def with_template_arguments(
    tokenizer: PreTrainedTokenizerBase, arguments: Mapping[str, Any]
) -> PreTrainedTokenizerBase:
    """Write `arguments` into the chat template, so that an exported tokenizer renders alike.

    Rendering with the saved template gives the conversation that was trained on, and the
    stages that follow do, too. A template that has them already stays as it is. Of several named
    templates each gets them.

    Args:
        tokenizer: changed in place, and returned.
        arguments: names and plain values (truth values, numbers, texts, null).

    Raises:
        ValueError: if arguments but the date have no chat template, or it sets one of them to
            another value.
    """
    if not arguments:
        return tokenizer
    if not tokenizer.chat_template and arguments.keys() - {"date_string"}:
        raise ValueError(
            f"model.chat_template_arguments={dict(arguments)} need a chat template, and the "
            "tokenizer has none: give model.chat_template=FILE or a name, or leave them out"
        )
    _change_templates(tokenizer, lambda template: _with_settings(template, arguments))
    return tokenizer


def _with_settings(template: str, arguments: Mapping[str, Any]) -> str:
    known = leading_settings(template)
    for name, value in arguments.items():
        if known.get(name, _in_jinja(value)) != _in_jinja(value):
            raise ValueError(
                f"model.chat_template_arguments.{name}={value}, but the stage before wrote "
                f"{known[name]} into the chat template: give the same, or start from the original "
                "checkpoint"
            )
    arguments = {k: v for k, v in arguments.items() if k not in known}
    template = with_fixed_date(template, arguments.pop("date_string", DATE))
    lines = "".join(f"{{%- set {k} = {_in_jinja(v)} %}}" for k, v in sorted(arguments.items()))
    return lines + template


def _change_templates(tokenizer: Any, change: Callable[[str], str]) -> None:
    """Change the chat template, or each where a checkpoint has several by name."""
    found = tokenizer.chat_template
    if isinstance(found, Mapping):
        tokenizer.chat_template = {name: change(template) for name, template in found.items()}
    elif found is not None:
        tokenizer.chat_template = change(found)


def as_saved(source: str, options: dict[str, Any]) -> Any:
    """Return the tokenizer that the checkpoint describes, with a fixed date in its chat template.

    For models of type qwen2, AutoTokenizer (transformers 5.23) splits text by Qwen's own rules,
    also where the checkpoint says that all of its tokenizer is in tokenizer.json: text is lost
    silently. Every loader of a tokenizer uses this function.

    Args:
        source: folder or hub name.
        options: result of `loading_options`.
    """
    tokenizer = _as_saved(source, options)
    _change_templates(tokenizer, with_fixed_date)
    return tokenizer


def _as_saved(source: str, options: dict[str, Any]) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(source, **options)
    named = get_tokenizer_config(source, **options).get("tokenizer_class")
    if named in GENERIC_CLASSES and type(tokenizer).__name__ not in GENERIC_CLASSES:
        version = {k: v for k, v in options.items() if k == "revision"}
        return PreTrainedTokenizerFast.from_pretrained(source, **version)
    return tokenizer


def _in_jinja(value: Any) -> str:
    return "none" if value is None else json.dumps(value)


def check_same_tokenizer(
    tokenizer: PreTrainedTokenizerBase, source: str | Path, *, fix: str
) -> None:
    """Check that the tokenizer of `source` gives every token the same id as `tokenizer` does.

    It may know further tokens: an exported reward model has its own pad token.

    Args:
        tokenizer: the tokenizer of the policy.
        source: folder or hub name of another model that reads the policy's ids.
        fix: the fix to name if they differ.

    Raises:
        ValueError: if they differ, `source` is an adapter, or nothing can be compared.
    """
    options = loading_options(source)  # which names an adapter
    try:
        other = as_saved(str(source), options)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{source} has no tokenizer to be compared with the policy's, whose ids it would read: "
            "save its tokenizer there"
        ) from error
    theirs = other.get_vocab()
    differ = [(t, i) for t, i in tokenizer.get_vocab().items() if theirs.get(t) != i]
    if differ:
        token, index = min(differ, key=lambda item: item[1])
        raise ValueError(
            f"{source} has another tokenizer than the policy: {len(differ)} of {len(tokenizer)} "
            f"tokens differ, the first is {token!r}, id {index} of the policy's and "
            f"{theirs.get(token)} there. It would read other words than were written: {fix}"
        )
    if other.eos_token_id != tokenizer.eos_token_id:
        raise ValueError(
            f"{source} ends texts with {other.eos_token!r}, the policy with "
            f"{tokenizer.eos_token!r}: it does not know where these responses end: {fix}"
        )
    ends = [turn_end(each) for each in (tokenizer, other)]
    mine, its = (None if end is None else end.token for end in ends)
    if mine is not None and its is not None and mine != its:
        raise ValueError(
            f"the chat template of {source} ends responses with {its!r}, the policy's with "
            f"{mine!r}: it does not know where these responses end: {fix}"
        )


def vocabulary_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    """Return the fields of a model's config that its tokenizer decides."""
    return {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
    }


def stop_ids(
    tokenizer: PreTrainedTokenizerBase,
    source: str | Path | None = None,
    *,
    revision: str | None = None,
) -> tuple[int, ...]:
    """Return every id that ends a response.

    They are the tokenizer's EOS, the token with which its chat template ends a response, and the
    checkpoint's own list: of its generation_config.json, or without one of its config.json.

    Raises:
        ValueError: if the files of the checkpoint cannot be read, or the hub does not say whether
            it has a generation_config.json.
    """
    end = turn_end(tokenizer)
    template = () if end is None else (end.token_id,)
    eos = None if source is None else _generation_config(source, revision).eos_token_id
    named = eos if isinstance(eos, list) else [] if eos is None else [eos]
    return tuple(sorted({int(tokenizer.eos_token_id), *template, *named}))


def _generation_config(source: str | Path, revision: str | None) -> GenerationConfig:
    named = revision is not None and not Path(source).is_dir()
    options: dict[str, Any] = {"revision": revision} if named else {}
    with naming_source(source):
        if _has_generation_config(source, options):
            return GenerationConfig.from_pretrained(str(source), **options)
        content, _ = PretrainedConfig.get_config_dict(str(source), **options)
        return GenerationConfig.from_model_config(content)


def _has_generation_config(source: str | Path, options: Mapping[str, Any]) -> bool:
    """Return whether the checkpoint has the file; many have none."""
    if Path(source).is_dir():
        return (Path(source) / GENERATION_CONFIG).is_file()
    try:
        hf_hub_download(str(source), GENERATION_CONFIG, **options)
    except RemoteEntryNotFoundError:
        return False
    except OSError:  # else a hub that is out of order would hide where responses stop
        cached = try_to_load_from_cache(str(source), GENERATION_CONFIG, **options)
        if cached is _CACHED_NO_EXIST or is_offline_mode():
            return False
        raise
    return True
