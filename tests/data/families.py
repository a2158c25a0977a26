"""Small tokenizers with the special tokens and chat templates of known families."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from tests.data.conftest import CHATML

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


def family_tokenizer(family: str, kind: str = "bpe") -> PreTrainedTokenizerFast:
    """Return a tokenizer of a family: byte-level BPE, Unigram, or BPE as SentencePiece writes it.

    In the last two the special tokens are pieces of the vocabulary too, and a space is put in
    front of a text.
    """
    template, special, bos, eos, _ = FAMILIES[family]
    core = {"bpe": _byte_level, "unigram": _unigram, "sentencepiece": _sentencepiece}[kind](special)
    core.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    if bos is not None:
        core.post_processor = TemplateProcessing(
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
