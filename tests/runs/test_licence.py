from __future__ import annotations

import pytest

from rlhf_lightning.runs.licence import base_licence, hub_base, hub_snapshot


def with_card(folder, matter):
    folder.mkdir(exist_ok=True)
    (folder / "README.md").write_text(f"---\n{matter}\n---\n\n# A model\n")
    return str(folder)


def test_what_the_configuration_says_counts_first(tmp_path):
    base = with_card(tmp_path, "license: mit")
    assert base_licence("llama3.1", base).identifier == "llama3.1"
    assert base_licence(None, base).identifier == "mit"
    assert "model card" in base_licence(None, base).reason


def test_a_licence_of_its_own_name_is_named(tmp_path):
    base = with_card(tmp_path, "license: other\nlicense_name: house-rules")
    licence = base_licence(None, base)
    assert licence.identifier == "other"
    assert "house-rules" in licence.reason


@pytest.mark.parametrize(
    ("text", "word"),
    [
        (
            "                                 Apache License\n        Version 2.0, January",
            "apache-2.0",
        ),
        ("MIT License\n\nCopyright (c)", "mit"),
        ("LLAMA 3.1 COMMUNITY LICENSE AGREEMENT", "llama3.1"),
        ("META LLAMA 3 COMMUNITY LICENSE AGREEMENT", "llama3"),
        ("You may use this on Sundays.", "other"),
    ],
)
def test_without_a_card_the_licence_file_is_read(tmp_path, text, word):
    (tmp_path / "LICENSE").write_text(text)
    licence = base_licence(None, str(tmp_path))
    assert licence.identifier == word
    assert licence.reason == "as the file LICENSE of the base says"


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda folder: str(folder), "the base has no model card and no licence file"),
        (lambda folder: None, "the weights began at random: who trained them decides"),
        (lambda folder: with_card(folder, "license: unknown"), "the model card of the base does"),
        (lambda folder: with_card(folder, "license: [unclosed"), "could not be read (ParserError)"),
        (lambda folder: "nobody/nothing", "the model card of nobody/nothing could not be read"),
        (lambda folder: "no such: name", "the model card of no such: name could not be read"),
    ],
)
def test_what_nobody_says_is_unknown_and_why(tmp_path, make, reason):
    licence = base_licence(None, make(tmp_path))
    assert licence.identifier == "unknown"
    assert reason in licence.reason


def test_the_root_on_the_hub_is_handed_down_by_our_own_cards(tmp_path):
    assert hub_base("org/base") == "org/base"
    assert hub_base("gpt2") == "gpt2"
    assert hub_base(None) is None
    folder = with_card(tmp_path / "sft", "base_model: org/base")
    assert hub_base(folder) == "org/base"
    assert hub_base(with_card(tmp_path / "list", "base_model: [org/a, org/b]")) == "org/a"
    bare = tmp_path / "bare"
    bare.mkdir()
    assert hub_base(str(bare)) is None
    assert hub_base(str(bare), "org/configured") == "org/configured"
    assert hub_base(folder, "org/configured") == "org/base"
    assert hub_base(str(bare), "/home/me/base") is None
    assert hub_base("artifacts/demo/missing") is None


def test_only_of_a_folder_in_the_hubs_cache_is_it_certain_what_it_is(tmp_path):
    commit = "0123456789" * 4
    snapshot = tmp_path / "models--org--small-model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    assert hub_snapshot(snapshot) == ("org/small-model", commit)
    assert hub_snapshot(f"{snapshot}/") == ("org/small-model", commit)
    assert hub_snapshot(tmp_path / "models--gpt2" / "snapshots" / commit) == ("gpt2", commit)
    for other in (tmp_path / "small-model", snapshot.parent / "main", snapshot / "checkpoint-9"):
        assert hub_snapshot(other) is None
