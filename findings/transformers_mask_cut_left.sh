#!/usr/bin/env bash
# transformers 5.23.0: where a conversation is cut on the left behind the beginning of one answer, no token of any answer is in the mask.
#
# apply_chat_template(..., truncation=True, max_length=N, return_assistant_tokens_mask=True) with truncation_side="left" keeps the end of
# a long conversation, where the last answer stands. Guess: the mask is that of the whole conversation, cut in the same place, as
# it is with truncation_side="right", also inside an answer (4.45 had a fault there, which was mended). It is, while the cut falls
# before the first answer. Behind it the mask is all zeros, also over later answers that are there in full: long conversations, the
# ones that are cut, train nothing, without a word. Cutting ids and mask of the whole conversation oneself is right.
# The loop over the answers ends at the first whose first character has no token ("out of bounds maybe due to truncation"): where the
# end is cut off nothing can follow, where the beginning is everything does.
#
# Seen: three answers in 45 tokens: of 44 cuts on the left 36 have an empty mask (all that cut into the first answer or behind), of 44
#   on the right none differs from the mask of the whole.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile 'transformers==5.23.0' 'tokenizers==0.23.3' jinja2 2>/dev/null
cd "$folder"
HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2>"$folder/log" <<'PY' || { cat "$folder/log"; exit 1; }
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
bytes_ = Tokenizer(models.BPE(vocab=letters, merges=[]))  # a token for each byte
bytes_.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
bytes_.decoder = decoders.ByteLevel()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=bytes_)
tokenizer.chat_template = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}.{% endgeneration %}"
    "{% else %}U:{{ m.content }}.{% endif %}{% endfor %}"
)
turns = [("user", "one"), ("assistant", "first"), ("user", "two"), ("assistant", "second"), ("user", "three"), ("assistant", "third")]
messages = [{"role": role, "content": text} for role, text in turns]


def encoded(**options):
    return tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True, **options)


def learnt(ids, mask):
    return tokenizer.decode([token for token, use in zip(ids, mask, strict=True) if use])


whole = encoded()
ids, mask = whole["input_ids"], whole["assistant_masks"]
print(f"whole: {tokenizer.decode(ids)!r} learnt: {learnt(ids, mask)!r}")
nothing = {}
for side in ("right", "left"):
    tokenizer.truncation_side = side
    for length in range(1, len(ids)):
        cut = encoded(truncation=True, max_length=length)
        part = slice(length) if side == "right" else slice(-length, None)
        assert cut["input_ids"] == ids[part], "the behaviour has changed"
        if cut["assistant_masks"] != mask[part]:
            assert not any(cut["assistant_masks"]), "the behaviour has changed"
            nothing[side, length] = learnt(ids[part], mask[part])
wrong = {side: sum(at == side for at, _ in nothing) for side in ("right", "left")}
print("cuts with an empty mask:", wrong, "of", len(ids) - 1)
for length in (40, 36, 30, 20):
    text = tokenizer.decode(ids[-length:])
    print(f"left, {text!r}: learnt {'nothing' if ('left', length) in nothing else 'as expected'}")
first = mask.index(1)  # cuts that take at most so many tokens are right
assert wrong == {"right": 0, "left": len(ids) - 1 - first}, "the behaviour has changed"
assert nothing["left", 30] == "second.third.", "the behaviour has changed"
PY
