#!/usr/bin/env bash
# gguf 0.19.0 with transformers 5.23.0: where a model folder has two chat templates, llama.cpp's converter takes the one that Transformers ignores.
#
# A checkpoint of Transformers 4 has its template in tokenizer_config.json. Somebody adds chat_template.jinja, the file of today, with
# another template, and trains with it: Transformers takes the file. gguf.SpecialVocab, through which convert_hf_to_gguf.py fills
# the GGUF file, reads chat_template.jinja only if tokenizer_config.json has no "chat_template": the served model gets the old turns.
# Neither says that there are two.
# gguf: tokenizer_config.get("chat_template", text of the file). Transformers: the file's text replaces what the config gave.
#
# Seen: Transformers "<new>hi", the GGUF file "<old>hi".
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q --no-compile 'gguf==0.19.0' 'transformers==5.23.0' 'jinja2==3.1.6' 2>/dev/null
cd "$folder"
HF_HOME="$folder/hub" HF_HUB_OFFLINE=1 "$folder/venv/bin/python" - 2>"$folder/log" <<'PY' || { cat "$folder/log"; exit 1; }
import json
from pathlib import Path

import jinja2
from gguf import GGUFReader, GGUFWriter, SpecialVocab
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoTokenizer, PreTrainedTokenizerFast

messages = [{"role": "user", "content": "hi"}]
old, new = ("<" + age + ">{{ messages[0]['content'] }}" for age in ("old", "new"))
model = Path("model")
words = WordLevel({"<unk>": 0, "</s>": 1, "hi": 2}, unk_token="<unk>")
PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="<unk>", eos_token="</s>").save_pretrained(model)
config = json.loads((model / "tokenizer_config.json").read_text())
(model / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": old}))


def shown():
    """What Transformers makes of the folder, and what stands in the GGUF file."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    writer = GGUFWriter("model.gguf", "llama")
    SpecialVocab(model).add_to_gguf(writer, quiet=True)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    template = GGUFReader("model.gguf").get_field("tokenizer.chat_template").contents()
    return tokenizer.apply_chat_template(messages, tokenize=False), jinja2.Template(template).render(messages=messages)


one = shown()
(model / "chat_template.jinja").write_text(new)
both = shown()
(model / "tokenizer_config.json").write_text(json.dumps(config))
print("config alone", one, "both", both, "file alone", shown())
assert one == ("<old>hi", "<old>hi") and shown() == ("<new>hi", "<new>hi")
assert both == ("<new>hi", "<old>hi"), "the behaviour has changed"
PY
