from __future__ import annotations

import os
import time

import pytest
from huggingface_hub import constants

from rlhf_lightning import SFTModule
from rlhf_lightning.data.sources.base import HubSource
from rlhf_lightning.models.loading import loading_options
from rlhf_lightning.runs.hub import check_on_hub, hub_snapshot, unreachable_hub
from rlhf_lightning.runs.manifest import source_fingerprint


@pytest.fixture
def away(tmp_path, monkeypatch):
    """Have the hub at a port where nobody listens."""
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    for asked in (unreachable_hub, check_on_hub):
        asked.cache_clear()
    yield tmp_path
    for asked in (unreachable_hub, check_on_hub):
        asked.cache_clear()


def test_a_hub_that_cannot_be_reached_is_known_at_once(away):
    begun = time.monotonic()
    with pytest.raises(ValueError, match=r"me/m is no folder here.* the hub .* cannot be reached"):
        SFTModule.from_pretrained("me/m")
    assert time.monotonic() - begun < 5  # its client would try for 45 s
    with pytest.raises(ValueError, match=r"'me/d' .*could not be loaded: the hub .* be reached"):
        HubSource("me/d").records("prompts", "train")


def test_without_the_hub_a_model_that_was_loaded_before_is_used_and_named(away, caplog):
    cached = away / "models--me--m"
    (cached / "refs").mkdir(parents=True)
    for commit in ("0" * 40, "1" * 40):
        (cached / "snapshots" / commit).mkdir(parents=True)
        (cached / "snapshots" / commit / "config.json").write_text("{}")
        (cached / "refs" / "main").write_text(commit)
        assert source_fingerprint("me/m") == commit
    for _ in range(2):
        assert loading_options("me/m") == {"trust_remote_code": False}
    assert [r.message.endswith("me/m is what was loaded before") for r in caplog.records] == [True]


def test_only_of_a_folder_in_the_hubs_cache_is_it_certain_what_it_is(tmp_path):
    commit = "0123456789" * 4
    snapshot = tmp_path / "models--org--small-model" / "snapshots" / commit
    snapshot.mkdir(parents=True)
    assert hub_snapshot(snapshot) == ("org/small-model", commit)
    assert hub_snapshot(f"{snapshot}/") == ("org/small-model", commit)
    assert hub_snapshot(tmp_path / "models--gpt2" / "snapshots" / commit) == ("gpt2", commit)
    for other in (tmp_path / "small-model", snapshot.parent / "main", snapshot / "checkpoint-9"):
        assert hub_snapshot(other) is None
