"""The words of the built-in world and a tokenizer that knows each of them."""

from __future__ import annotations

from collections.abc import Iterator

from tokenizers import Tokenizer, normalizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from rlhf_lightning.data.demo import facts, grammar, questions

PAD, EOS, UNK = "<pad>", "<eos>", "<unk>"


def world_words() -> list[str]:
    """Return every word that a text of the world can hold, sorted."""
    return sorted({word for text in _texts() for word in text.split()})


def demo_tokenizer() -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer of the world, padding on the left, without a BOS.

    Text is lower-cased and split at spaces; `decode(encode(text)) == text` for every text of the
    world. Ids 0, 1 and 2 are `<pad>`, `<eos>` and `<unk>`.
    """
    vocabulary = {word: index for index, word in enumerate((PAD, EOS, UNK, *world_words()))}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token=UNK))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNK,
        padding_side="left",
        clean_up_tokenization_spaces=False,
    )


def _texts() -> Iterator[str]:
    """Yield texts that hold every word between them."""
    yield ". , and"
    yield from (question.prompt for question in questions.all_questions())
    for forms in grammar.CORE_FORMS.values():
        yield from (form.format("", "") for form in forms)
    for phrases in (
        grammar.LIST_PREFIXES,
        grammar.POLITE_OPENERS,
        grammar.RUDE_OPENERS,
        grammar.POLITE_CLOSERS,
        grammar.RUDE_CLOSERS,
        grammar.FILLERS,
        grammar.REMARKS,
        facts.NUMBERS,
        *facts.CATEGORIES.values(),
    ):
        yield from phrases
    for table in (facts.TOOLS, *facts.RELATIONS.values()):
        yield from table.values()
