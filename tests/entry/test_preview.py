"""`rlhf-data`: what is read of a file, at once and without weights."""

from __future__ import annotations

import json

import pytest

from rlhf_lightning.data.demo.source import DemoSource
from rlhf_lightning.data.demo.vocabulary import demo_tokenizer
from tests.builders.command_lines import environment
from tests.builders.processes import timed_python

LIMIT_SECONDS = 5.0  # of user and system time
MISTAKE_SECONDS = 3.0


def rlhf_data(folder, *words, limit=LIMIT_SECONDS):
    command = ("-m", "rlhf_lightning.preview", *map(str, words))
    return timed_python(*command, folder=folder, environment=environment(), limit=limit)


@pytest.fixture
def model(tmp_path):
    """A folder without weights: none are loaded."""
    demo_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def pairs(tmp_path):
    few = {f"num_{kind}": 24 for kind in ("texts", "demonstrations", "preferences")}
    source = DemoSource(seed=1, num_validation_preferences=16, **few)
    records = source.records("preferences", "train")[:20]
    rows = [
        {"question": r.prompt, "chosen": r.chosen, "rejected": r.rejected, "<b>": n}
        for n, r in enumerate(records)
    ]
    del rows[3]["rejected"]
    file = tmp_path / "pairs.jsonl"
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows) + "no json\n")
    return file


@pytest.mark.thorough
def test_a_file_of_pairs_is_shown_on_the_screen_and_on_a_page(model, pairs, tmp_path):
    words = ("pairs.jsonl", "--model", model, "columns={prompt: question}", "html=page.html")
    done = rlhf_data(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert "preferences: 19 train\n" in done.stdout
    assert "refused, 1: pairs.jsonl, line 4: the key 'rejected'" in done.stdout
    assert "refused, 1: pairs.jsonl, line 21: it cannot be read as JSON" in done.stdout
    assert "<b> 19" in done.stdout
    examples = [line for line in done.stdout.splitlines() if line.startswith("example ")]
    assert len(examples) == 10
    assert all("<eos>]]" in line for line in examples)
    assert "in the loss: [[...]]\nexample 1, chosen" in done.stdout
    assert done.stderr == ""
    page = (tmp_path / "page.html").read_text()
    assert "<h1>pairs.jsonl, read by rlhf-data</h1>" in page
    assert "&lt;b&gt; 19" in page
    assert "<b>" not in page
    assert page.count("example 5, ") == 2
    for more in ("num_examples=0", "kind=prompts"):
        assert "in the loss" not in rlhf_data(tmp_path, *words, more).stdout


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("pairs.jsonl model=M kidn=prompts", "did you mean kind"),
        ("pairs.jsnol model=org/m", "Fix: did you mean pairs.jsonl?\n"),
        ("pairs.jsonl model=./modle", "error: model=./modle does not exist: add model=FOLDER, or"),
        ("pairs.jsonl model=modle", "on the hub; did you mean model?"),
        ("pairs.jsonl model=org/m --kind prompts", "sets nothing: write KEY=VALUE"),
    ],
)
def test_mistakes_are_answered_at_once(pairs, words, told):
    (pairs.parent / "model").mkdir()
    (pairs.parent / "transformers.py").write_text("raise SystemExit(9)")  # nothing imports it
    done = rlhf_data(pairs.parent, *words.split(), limit=MISTAKE_SECONDS)
    assert told in done.stderr
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
