"""Small tokenizers: one byte a token, one word a token, and those of known families."""

from __future__ import annotations

from collections.abc import Iterable

from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>\n\n"
    "{{ m['content'] | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n{{ m['content'] | trim }}"
    "<end_of_turn>\n{% endfor %}{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
PHI_3 = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
# Template, special tokens, BOS, EOS, and the token that ends an answer.
FAMILIES = {
    "chatml": (CHATML, ["<|im_start|>", "<|im_end|>"], None, "<|im_end|>", "<|im_end|>"),
    "chatml of a base model": (
        CHATML,
        ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        None,
        "<|endoftext|>",
        "<|im_end|>",
    ),
    "llama 3": (
        LLAMA_3,
        ["<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"],
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|eot_id|>",
    ),
    "gemma": (
        GEMMA,
        ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        "<bos>",
        "<eos>",
        "<end_of_turn>",
    ),
    "phi 3": (
        PHI_3,
        ["<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"],
        None,
        "<|endoftext|>",
        "<|end|>",
    ),
}
KINDS = ("bpe", "unigram", "sentencepiece")


def build_tokenizer(
    *,
    adds_bos: bool = False,
    adds_eos: bool = False,
    pad_is_eos: bool = True,
    template: str | None = None,
    merges: Iterable[tuple[str, str]] = (),
    eos: str | None = "<|im_end|>",
) -> PreTrainedTokenizerFast:
    """Return a byte tokenizer: every character of ASCII text is a token of its own."""
    merges = list(merges)
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(m) for m in merges)]
    core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    special = ["<s>", "<|im_start|>", "<|im_end|>", "<pad>"]
    core.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    if adds_bos or adds_eos:
        single = f"{'<s> ' if adds_bos else ''}$A{' <|im_end|>' if adds_eos else ''}"
        ids = [(token, core.token_to_id(token)) for token in ("<s>", "<|im_end|>")]
        core.post_processor = processors.TemplateProcessing(single=single, special_tokens=ids)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<s>",
        eos_token=eos,
        pad_token=("<|im_end|>" if pad_is_eos else "<pad>") if eos else None,
        chat_template=template,
    )


def word_tokenizer(
    *, token_types: bool = True, padding_side: str = "right"
) -> PreTrainedTokenizerFast:
    """An encoder's: `[CLS] text [SEP]`, `[CLS] question [SEP] answer [SEP]`."""
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *(f"w{i}" for i in range(48))]
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", 2), ("[SEP]", 3)],
    )
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        pad_token="[PAD]",
        unk_token="[UNK]",
        cls_token="[CLS]",
        sep_token="[SEP]",
        mask_token="[MASK]",
        padding_side=padding_side,
        model_input_names=names if token_types else [n for n in names if n != "token_type_ids"],
    )


def family_tokenizer(family: str, kind: str = "bpe") -> PreTrainedTokenizerFast:
    """Return a tokenizer of a family: byte-level BPE, Unigram, or BPE as SentencePiece writes it.

    In the last two the special tokens are pieces of the vocabulary too, and a space is put in
    front of a text.
    """
    template, special, bos, eos, _ = FAMILIES[family]
    core = {"bpe": _byte_level, "unigram": _unigram, "sentencepiece": _sentencepiece}[kind](special)
    core.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    if bos is not None:
        core.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, core.token_to_id(bos))]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token=bos, eos_token=eos, pad_token=eos, chat_template=template
    )


def _byte_level(special: list[str]) -> Tokenizer:
    merges = [("t", "h"), ("th", "e"), ("e", "n"), ("en", "d"), ("Ġ", "the")]
    pieces = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(m) for m in merges)]
    core = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    core.decoder = decoders.ByteLevel()
    return core


def _characters() -> list[str]:
    return ["▁", "\n", *(chr(i) for i in range(33, 127)), "é"]


def _unigram(special: list[str]) -> Tokenizer:
    pieces = ["<unk>", *special, "▁the", "end", *_characters()]
    core = Tokenizer(models.Unigram([(piece, -float(len(piece) < 2)) for piece in pieces], 0))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    core.decoder = decoders.Metaspace(prepend_scheme="first")
    return core


def _sentencepiece(special: list[str]) -> Tokenizer:
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("e", "n"), ("en", "d")]
    pieces = ["<unk>", *special, *_characters(), *("".join(m) for m in merges)]
    core = Tokenizer(
        models.BPE({piece: i for i, piece in enumerate(pieces)}, merges, unk_token="<unk>")
    )
    core.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    core.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    return core
