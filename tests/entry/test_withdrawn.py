"""Each setting, call and form that was withdrawn is refused with what is written instead."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import rlhf_lightning
from rlhf_lightning.app.command_line import check_command_line
from rlhf_lightning.app.config.errors import WITHDRAWN
from rlhf_lightning.data.files import read_rows, split_files
from rlhf_lightning.data.sources.given import GivenRows
from rlhf_lightning.preferences.exchange import read_collection
from rlhf_lightning.preferences.records import Pair
from rlhf_lightning.rollout.scorers.base import FunctionScorer
from rlhf_lightning.rollout.scorers.text_reward_model import TextRewardModelScorer
from rlhf_lightning.text.tokens import prompt_ids
from tests.builders.tokenizers import build_tokenizer

CHAT = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]


def rows(**row: object) -> Callable[[Path], object]:
    """Return the reading of one row, as the demonstrations of a set."""
    return lambda _: GivenRows([row], validation_fraction=0).records("demonstrations", "train")


def file(name: str, content: str = "{}\n{}\n") -> Callable[[Path], object]:
    """Return the reading of a file, or of the folder that holds it."""

    def read(folder: Path) -> object:
        (folder / name).write_text(content)
        return split_files(folder) if name == "state.json" else list(read_rows(folder / name))

    return read


def label_studio(folder: Path) -> object:
    (folder / "a.json").write_text('[{"data": {"prompt": "Q", "text1": "a", "text2": "b"}}]')
    return read_collection(folder / "a.json", format="auto", known="labels", now="")


# What is called, and a part of the error: the line to write. A row a withdrawn call or form.
CALLS: list[tuple[str, Callable[[Path], object], str]] = [
    ("Pair(gold=)", lambda _: Pair.make("q", "a", "b", gold="first"), "gold"),
    ("Label Studio's text1", lambda path: label_studio(path), "prompt, answer1 and answer2"),
    ("LabelledTextSource", lambda _: rlhf_lightning.LabelledTextSource, "examples.datasets"),
    ("TranscriptSource", lambda _: rlhf_lightning.TranscriptSource, "HubSource(NAME)"),
    ("on_template_loss", lambda _: GivenRows([], on_template_loss="warn"), "on_template_loss"),
    ("<|im_end|> as text", lambda _: prompt_ids("<|im_end|>", build_tokenizer()), "rendered=true"),
    (
        "VllmServerGenerator",
        lambda _: rlhf_lightning.VllmServerGenerator,
        "VllmGenerator(..., pyth",
    ),
    (
        "rlhf-study",
        lambda _: __import__("rlhf_lightning.study").study.main(),
        "rlhf-train -m (seed=1,2 KEY=A,B, or +sweeps=NAME)",
    ),
    ("timeout_seconds", lambda _: FunctionScorer(len, timeout_seconds=1.0), "timeout_seconds"),
    (
        "a template for a reward model",
        lambda _: TextRewardModelScorer("m", chat_template="plain"),
        "chat_template",
    ),
    ("lambda p, c", lambda _: FunctionScorer(lambda p, c: []), "def NAME(prompts, completions"),
    (
        "verl's form",
        lambda _: FunctionScorer(lambda solution_str=None, **k: []),
        "def NAME(prompts",
    ),
    ("1 for good", rows(prompt="p", completion="c", label=1), "label_good="),
    ("history", rows(messages=CHAT, history=[["a", "b"]]), "columns={history: null}"),
    ("messages in Python", rows(messages=str(CHAT)), "json.dumps"),
    ("Orca", rows(question="q", chosen="a", rejected="b"), "columns={prompt: question}"),
    ("Dolly", rows(instruction="q", response="a"), "{prompt: instruction, completion: response}"),
    ("WildChat", rows(conversation=CHAT), "columns={messages: conversation}"),
    (
        "UltraInteract",
        rows(trajectory=CHAT[:1], chosen="a", rejected="b"),
        '"chosen": the preferred response',
    ),
    ("PKU-SafeRLHF", rows(prompt="q", response_0="a", response_1="b"), '"chosen": the preferred'),
    ("Feather", file("rows.feather"), ".parquet, .arrow"),
    ("bzip2", file("rows.jsonl.bz2"), "with .gz"),
    ("lines in .json", file("rows.json"), "end with .jsonl"),
    ("save_to_disk", file("state.json"), "to_parquet"),
]


@pytest.mark.parametrize("gone", WITHDRAWN)
def test_a_withdrawn_setting_is_refused_with_its_replacement(gone, monkeypatch, capsys):
    word = gone.replace("*", "any") if "=" in gone else f"{gone.replace('*', 'any')}=1"
    monkeypatch.setattr(sys, "argv", ["rlhf-train", "+experiment=ppo", word])
    with pytest.raises(SystemExit) as caught:
        check_command_line("train")
    assert caught.value.code == 2
    assert f"{word} was withdrawn: {WITHDRAWN[gone]}" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "call", "instead"), CALLS, ids=[name for name, *_ in CALLS])
def test_a_withdrawn_call_or_form_is_refused_with_its_replacement(name, call, instead, tmp_path):
    with pytest.raises((TypeError, ValueError, AttributeError, SystemExit)) as caught:
        call(tmp_path)
    assert instead in str(caught.value)
