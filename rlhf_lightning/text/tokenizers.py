"""Loading tokenizers, and what they say about stopping."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, is_offline_mode
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
from rlhf_lightning.models.loading import load_config, loading_options, naming_source, warn_once
from rlhf_lightning.text.render import (
    DATE,
    exchange,
    first_stop,
    leading_settings,
    turn_end,
    with_fixed_date,
)

# What a checkpoint calls its tokenizer that is all in tokenizer.json.
GENERIC_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend")
GENERATION_CONFIG = "generation_config.json"
ADDED = "<|pad|>"
# Around a template: what it writes behind the token that ends a response is left out.
_CUT = (
    "{%- set text %}",
    "{% endset -%}"
    "{{- text if add_generation_prompt or not text.endswith(ANSWER_END) "
    "else text[:text | length - BEHIND] -}}",
)
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
    masks never come from ids, so that is safe.

    Args:
        source: folder or hub name.
        chat_template: takes the place of the checkpoint's, see `read_template`.
        chat_template_arguments: variables that the chat template reads, such as `enable_thinking`
            of Qwen3; they become part of the template, see `with_template_arguments`. Of a template
            that writes the date, `date_string` is it, else `templates.DATE`: never today.
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
        known = ", ".join(sorted(own))
        raise ValueError(f"model.chat_template={source!r}: give a file, a model, or {known}")
    return found


def _check_rows(tokenizer: Any, source: str, options: dict[str, Any]) -> None:
    try:
        size = load_config(source, options).get_text_config().vocab_size
    except (ValueError, AttributeError):  # a tokenizer alone
        return
    if tokenizer.eos_token_id >= size:
        found = f"the EOS of {source} has id {tokenizer.eos_token_id}, and the model {size} rows"
        raise ValueError(f"{found}: call resize_token_embeddings({len(tokenizer)}) and save it")
    if tokenizer.pad_token_id >= size:
        tokenizer.pad_token = tokenizer.eos_token


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
        fix = "give model.chat_template=FILE or a name, or leave them out"
        raise ValueError(f"model.chat_template_arguments={dict(arguments)} need a template: {fix}")
    _change_templates(tokenizer, lambda template: _with_settings(template, arguments))
    return tokenizer


def _with_settings(template: str, arguments: Mapping[str, Any]) -> str:
    known = leading_settings(template)
    written = {k: "none" if v is None else json.dumps(v) for k, v in arguments.items()}
    for name, value in written.items():
        if known.get(name, value) != value:
            told = f"model.chat_template_arguments.{name}={arguments[name]}, but the stage before"
            wrote = f"wrote {known[name]} into the chat template"
            raise ValueError(f"{told} {wrote}: give the same, or take the original checkpoint")
    new = sorted(arguments.keys() - known - {"date_string"})
    template = with_fixed_date(template, arguments.get("date_string", DATE))
    return "".join(f"{{%- set {k} = {written[k]} %}}" for k in new) + template


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


def check_same_tokenizer(
    tokenizer: PreTrainedTokenizerBase, source: str | Path, *, fix: str
) -> None:
    """Check that the tokenizer of `source` gives every token the same id as `tokenizer` does.

    It may know further tokens: an exported reward model has its own pad token. Another chat
    template is a warning.

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
        told = f"{source} has no tokenizer to be compared with the policy's"
        raise ValueError(f"{told}: save its tokenizer there") from error
    theirs = other.get_vocab()
    differ = [(t, i) for t, i in tokenizer.get_vocab().items() if theirs.get(t) != i]
    if differ:
        token, index = min(differ, key=lambda item: item[1])
        ids = f"{token!r} has id {index} of the policy's and {theirs.get(token)} there"
        found = f"{source} has another tokenizer than the policy: {len(differ)} tokens differ"
        raise ValueError(f"{found}, {ids}: {fix}")
    (text, behind), (their_text, their_behind) = exchange(tokenizer), exchange(other)
    end, their_end = first_stop(behind, tokenizer), first_stop(their_behind, other)
    mine, its = end and end.token, their_end and their_end.token
    if (end and their_end and mine != its) or other.eos_token_id != tokenizer.eos_token_id:
        told = f"{source} ends texts with {other.eos_token!r} and responses with {its!r}"
        raise ValueError(f"{told}, the policy with {tokenizer.eos_token!r} and {mine!r}: {fix}")
    if not end or not their_end:
        return
    text += behind.removesuffix(end.behind)
    if text != their_text + their_behind.removesuffix(their_end.behind):
        warn_once(
            f"{source} has another chat template than the policy, and reads conversations as the "
            "policy's writes them: give both one (model.chat_template=), or, of a reward model, "
            "use scorer=text_reward_model, which reads them by its own"
        )


def tokenizer_difference(tokenizer: Any, other: Any) -> str | None:
    """Return in words what gives records other tokens, or responses another end; None if equal."""
    if tokenizer.get_vocab() != other.get_vocab():
        return "other tokens"
    if tokenizer.eos_token_id != other.eos_token_id:
        return "another EOS"
    return None if tokenizer.chat_template == other.chat_template else "another chat template"


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
    template = () if (end := turn_end(tokenizer)) is None else (end.token_id,)
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
        if is_offline_mode():
            return False
        raise
    return True


def classifier_tokenizer(tokenizer: PreTrainedTokenizerBase) -> PreTrainedTokenizerBase:
    """Return a copy with a pad token that is not EOS and a chat template that ends responses.

    The classifiers of transformers read a row's score at its last token that is not the pad token.
    That must be the one that ends the response, where the reward was trained. It is another one if
    the response ends with the pad token, or if a chat template writes something behind the end, as
    ChatML does with a newline and Phi 3 with EOS.

    No id of a token changes. The pad token is the tokenizer's own, else a new token `<|pad|>`,
    which may need a row more than the model has (`with_row_for` of models/export.py). Padding is on
    the right: models with absolute positions count columns.
    """
    own: Any = copy.deepcopy(tokenizer)
    own.padding_side = "right"
    end = turn_end(own)
    if isinstance(own.chat_template, str) and end is not None and end.behind:
        # Jinja drops the newline at the end of a template; inside of another it would stay.
        body = own.chat_template.removesuffix("\n")
        closing = _CUT[1].replace("ANSWER_END", json.dumps(end.token + end.behind))
        own.chat_template = _CUT[0] + body + closing.replace("BEHIND", str(len(end.behind)))
    if own.pad_token_id in {None, own.eos_token_id, None if end is None else end.token_id}:
        own.add_special_tokens({"pad_token": ADDED})
    return own
