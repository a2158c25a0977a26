"""The data sets of the hub that `conf/dataset` names, read from folders with their columns.

The folders have the columns, splits and file names of the published sets and sentences of our own;
`datasets.load_dataset` reads them as it reads the hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from rlhf_lightning.data.records import DemonstrationRecord, PreferenceRecord
from tests.builders.command_lines import settings_of
from tests.builders.encoding import assistant, user

KINDS = {"sft": "demonstrations", "reward": "preferences", "ppo": "prompts"}


def chat_row(n: int) -> dict[str, Any]:
    turns = [user(f"question {n}"), assistant("a first answer"), user("more"), assistant(f"no {n}")]
    return {"prompt": turns[0]["content"], "prompt_id": f"id{n}", "messages": turns}


def feedback_row(n: int) -> dict[str, Any]:
    question, good = user(f"question {n}"), assistant(f"a good answer {n}")
    return {
        "prompt": f"question {n}",
        "prompt_id": f"id{n}",
        "messages": [question, good],
        "chosen": [question, good],
        "rejected": [question, assistant(f"a bad answer {n}")],
        "score_chosen": 8.5,
        "score_rejected": 3.0,
    }


def post(n: int) -> str:
    return f"SUBREDDIT: r/tests\n\nTITLE: number {n}\n\nPOST: a long story\n\nTL;DR:"


def transcript_row(n: int) -> dict[str, Any]:
    start = f"\n\nHuman: question {n}\n\nAssistant: an answer\n\nHuman: and then?\n\nAssistant:"
    return {"chosen": f"{start} I would wait.", "rejected": f"{start} I would not."}


def publish(folder: Path, rows: list[dict[str, Any]], *splits: str) -> Path:
    """Write the rows as the hub keeps a set: `data/<split>-00000-of-00001.parquet`."""
    (folder / "data").mkdir(parents=True)
    for number, split in enumerate(splits):
        table = pyarrow.Table.from_pylist(rows[number :: len(splits)])
        parquet.write_table(table, folder / "data" / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.fixture
def source_of(tmp_path, monkeypatch):
    """Build the source of a composed experiment."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def build(stage: str, dataset: str, *overrides: str) -> Any:
        words = [f"+experiment={stage}", "model=smollm2_135m", f"dataset={dataset}"]
        return settings_of(*words, *overrides).data.source.build()

    return build


def test_ultrachat_gives_demonstrations_of_its_last_answers(source_of, tmp_path):
    folder = publish(tmp_path / "set", [chat_row(n) for n in range(6)], "train_sft", "test_sft")
    source = source_of("sft", "ultrachat", f"dataset.hub_name={folder}")
    train = source.records("demonstrations", "train")
    turns = chat_row(0)["messages"]
    assert train[0] == DemonstrationRecord(tuple(turns[:3]), (turns[3],))
    assert [r.prompt[0]["content"] for r in train] == ["question 0", "question 2", "question 4"]
    assert len(source.records("demonstrations", "validation")) == 3


def test_ultrafeedback_serves_all_stages(source_of, tmp_path):
    overrides = ["dataset.source.split=train_prefs", "dataset.source.validation_split=test_prefs"]
    rows = [feedback_row(n) for n in range(4)]
    folder = publish(tmp_path / "set", rows, "train_prefs", "test_prefs")
    question = (user("question 0"),)
    good, bad = (assistant("a good answer 0"),), (assistant("a bad answer 0"),)
    pair = PreferenceRecord(question, good, bad)
    made = {"sft": DemonstrationRecord(question, good), "reward": pair}
    for stage, kind in KINDS.items():
        source = source_of(stage, "ultrafeedback", f"dataset.hub_name={folder}", *overrides)
        first, _ = source.records(kind, "train")
        assert first.prompt == question
        assert first == made.get(stage, first)
        assert len(source.records(kind, "validation")) == 2


def test_tldr_reads_summaries_for_sft_and_ppo_and_pairs_for_the_reward_model(source_of, tmp_path):
    rows = [{"prompt": post(n), "completion": f" story {n}"} for n in range(6)]
    summaries = publish(tmp_path / "tldr", rows, "train", "validation", "test")
    rows = [{"prompt": post(n), "chosen": f" story {n}", "rejected": " nothing"} for n in range(4)]
    pairs = publish(tmp_path / "pairs", rows, "train", "validation")
    folders = {"sft": summaries, "ppo": summaries, "reward": pairs}
    got: dict[str, Any] = {}
    for stage, kind in KINDS.items():
        source = source_of(stage, "tldr", f"dataset.hub_names.{stage}={folders[stage]}")
        got[stage] = source.records(kind, "train")[0]
    assert got["sft"] == DemonstrationRecord(post(0), " story 0")
    assert got["reward"] == PreferenceRecord(post(0), " story 0", " nothing")
    assert got["ppo"].prompt == post(0)
    assert got["ppo"].columns["completion"] == " story 0", "reward functions may ask for it"


def test_hh_rlhf_transcripts_become_conversations(source_of, tmp_path):
    rows = [transcript_row(n) for n in range(4)]
    rows[2]["rejected"] = "no transcript"
    folder = publish(tmp_path / "set", rows, "train", "test")
    prompt = (user("question 0"), assistant("an answer"), user("and then?"))
    for stage, kind in KINDS.items():
        source = source_of(stage, "hh_rlhf", f"dataset.hub_name={folder}")
        (first,) = source.records(kind, "train")
        assert first.prompt == prompt, "the shared words of the answers are no part of the prompt"
        if stage == "reward":
            wait, not_wait = (assistant("I would wait."),), (assistant("I would not."),)
            assert first == PreferenceRecord(prompt, wait, not_wait)
        (message,) = source.skipped_records
        assert "[train], row 2: mixed formats" in message
        assert len(source.records(kind, "validation")) == 2
