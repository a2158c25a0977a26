"""Only text/ renders conversations, decodes tokens and reads chat templates."""

from __future__ import annotations

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "rlhf_lightning"
# Of a tokenizer or a processor, whatever it is called.
OF_TOKENIZERS = {
    "apply_chat_template",
    "batch_decode",
    "convert_ids_to_tokens",
    "convert_tokens_to_string",
}


def text_work(source: str) -> list[str]:
    """List where a source renders, decodes or reads a template, as `line: expression`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            name = node.func.attr
            # bytes.decode takes a name or nothing, a JSON decoder a text.
            ids = name == "decode" and node.args and not isinstance(node.args[0], ast.Constant)
            if name in OF_TOKENIZERS or (ids and ast.unparse(node.func.value) != "_DECODER"):
                found.append(f"{node.lineno}: {ast.unparse(node.func)}")
        elif isinstance(node, ast.Attribute) and node.attr == "chat_template":
            of = ast.unparse(node.value)
            if "tokenizer" in of and f"bool({of}.chat_template)" not in source:
                found.append(f"{node.lineno}: {ast.unparse(node)}")
    return found


def test_only_text_renders_decodes_and_reads_templates() -> None:
    files = [f for f in sorted(PACKAGE.rglob("*.py")) if PACKAGE / "text" not in f.parents]
    assert len(files) > 100
    found = [f"{f.relative_to(PACKAGE)}:{w}" for f in files for w in text_work(f.read_text())]
    assert not found, "\n".join(found)
