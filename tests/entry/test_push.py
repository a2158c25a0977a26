"""Uploading an exported folder, by the command line, to a hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from rlhf_lightning.modules.export import save_hf_model
from rlhf_lightning.runs.model_card import CardFacts, write_model_card
from tests.builders.models import EOS, tiny_policy, tiny_tokenizer
from tests.entry.hub_server import TOKEN, running_hub

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def exported(tmp_path):
    folder = tmp_path / "export"
    policy = tiny_policy("llama")
    save_hf_model(policy, tiny_tokenizer(), folder, policy.state_dict(), stop_ids=[EOS])
    facts = CardFacts("sft", "run", "org/base", "data", "mit")
    write_model_card(folder, facts)
    (folder / "manifest.json").write_text(json.dumps({"run": "/home/me/outputs/sft"}))
    adapter = folder / "adapter"
    adapter.mkdir()
    config = {"base_model_name_or_path": "/home/me/models/base", "r": 4}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    return folder


def push(folder, address, *arguments, token=TOKEN):
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    environment |= {
        "HF_ENDPOINT": address,
        "HF_HOME": str(folder.parent / "nobody_is_logged_in"),
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    if token is not None:
        environment["HF_TOKEN"] = token
    return subprocess.run(
        [sys.executable, "-m", "rlhf_lightning.export", str(folder), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


@pytest.mark.thorough
def test_a_folder_becomes_a_private_repository_with_one_commit(exported):
    with running_hub() as hub:
        done = push(exported, hub.address, "push_to_hub=me/policy")
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == f"{hub.address}/me/policy"
        repository = hub.repositories["me/policy"]
        assert repository["wanted"]["visibility"] == "private"
        assert len(repository["commits"]) == 1
        files = repository["files"]
        for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md"):
            assert files[name] == (exported / name).read_bytes(), name
        assert "manifest.json" not in files, "it names a folder of this machine"
        adapter = json.loads(files["adapter/adapter_config.json"])
        assert adapter == {"base_model_name_or_path": ".../base", "r": 4}
        assert not any(b"/home/me" in content for content in files.values())
        # What stands on this machine is as it was.
        assert "/home/me" in (exported / "adapter/adapter_config.json").read_text()
        again = push(exported, hub.address, "push_to_hub=me/policy")
        assert again.returncode == 0, again.stderr
        assert len(repository["commits"]) == 2


@pytest.mark.thorough
def test_a_public_repository_needs_its_own_word(exported):
    with running_hub() as hub:
        done = push(exported, hub.address, "push_to_hub=me/policy", "public=true")
        assert done.returncode == 0, done.stderr
        assert hub.repositories["me/policy"]["wanted"]["visibility"] == "public"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("token", "said"),
    [
        (None, "there is no login to the hub; run `hf auth login`, or set HF_TOKEN"),
        ("hf_wrong", "the hub did not take me/policy"),
    ],
)
def test_without_the_right_token_nothing_is_uploaded(exported, token, said):
    with running_hub() as hub:
        done = push(exported, hub.address, "push_to_hub=me/policy", token=token)
        assert (done.returncode, hub.repositories) == (2, {})
        assert hub.refused == (0 if token is None else 1)
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert "hf_wrong" not in done.stderr


@pytest.mark.thorough
def test_an_exported_folder_is_uploaded_only_if_asked(exported):
    with running_hub() as hub:
        done = push(exported, hub.address)
        assert (done.returncode, hub.repositories) == (2, {})
    assert "is an exported model already: give a run folder, or push_to_hub=NAME" in done.stderr
