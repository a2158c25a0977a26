from __future__ import annotations

import pytest

from rlhf_lightning.runs.hub import base_licence, hub_base, hub_snapshot


def with_card(folder, matter):
    folder.mkdir(exist_ok=True)
    (folder / "README.md").write_text(f"---\n{matter}\n---\n\n# A model\n")
    return str(folder)


@pytest.mark.parametrize(
    ("configured", "matter", "licence"),
    [
        ("llama3.1", "license: mit", "llama3.1"),
        (None, "license: mit", "mit"),
        (None, "license: [mit, gpl]", "mit"),
        (None, "language: en", "unknown"),
        (None, "license: [unclosed", "unknown"),
    ],
)
def test_the_licence_is_that_of_the_configuration_else_of_the_card(
    tmp_path, configured, matter, licence
):
    assert base_licence(configured, with_card(tmp_path, matter)) == licence


@pytest.mark.parametrize("base", [None, "nobody/nothing", "no such: name"])
def test_without_a_card_the_licence_is_unknown(base):
    assert base_licence(None, base) == "unknown"


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
