"""`rlhf-chat`: what it answers, scores, saves and refuses, and how it looks in a real terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console

from rlhf_lightning import SFTModule
from rlhf_lightning.app.chat import HELP, Chat, Response, load_side
from rlhf_lightning.app.config.commands import ChatSettings
from rlhf_lightning.app.config.saved import write_settings
from rlhf_lightning.app.prerequisites import write_untrained
from rlhf_lightning.chat import main
from rlhf_lightning.data.demo.vocabulary import demo_tokenizer
from rlhf_lightning.data.sources.base import FileSource
from rlhf_lightning.models.factory import load_scalar_model
from rlhf_lightning.models.forward import sequence_scores
from rlhf_lightning.modules.reward import RewardModule
from rlhf_lightning.runs.folder import RunFolder
from tests.builders.command_lines import environment, overrides_of, settings_of
from tests.builders.runs import make_start
from tests.builders.tokenizers import build_tokenizer

TURNS = "{% for m in messages %}{{ m['content'] }} <eos> {% endfor %}"
WIDTH, HEIGHT = 80, 24


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A policy that writes words of the built-in world, and ends most responses itself."""
    return make_start(tmp_path_factory.mktemp("models") / "model", eos_scale=8.0)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory) -> Path:
    """The same with a chat template."""
    tokenizer = demo_tokenizer()
    tokenizer.chat_template = TURNS
    folder = tmp_path_factory.mktemp("models") / "chat"
    return make_start(folder, eos_scale=8.0, tokenizer=tokenizer)


@pytest.fixture
def talk(working_folder, monkeypatch, capsys) -> Callable[..., str]:
    """Run the command in this process with lines on its input; return what it prints."""

    def run(*words: object, lines: str) -> str:
        monkeypatch.setattr(sys, "argv", ["rlhf-chat", *map(str, words)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
        main()
        return capsys.readouterr().out

    return run


def responses_of(said: str) -> list[str]:
    """Return the responses in what a session with one policy prints."""
    return re.findall(r"^> (.*)\n\d+ tokens?", said, re.M)


def saved(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "preferences.jsonl").read_text().splitlines()]


def test_a_response_is_the_one_that_the_module_generates_and_a_session_repeats_itself(model, talk):
    said = talk(model, "seed=3", "max_new_tokens=12", lines="who\nname a tool\nwho\n")
    first, _, again = responses_of(said)
    module = SFTModule.from_pretrained(str(model))
    assert [first] == module.generate(["who"], max_new_tokens=12, seed=3)
    assert again != first
    assert talk(model, "seed=3", "max_new_tokens=12", lines="who\nname a tool\nwho\n") == said


def test_a_conversation_goes_on_with_the_better_response_and_pairs_are_records(chat_model, talk):
    lines = "what is a tool\nwho\n/save\n2\nname a tool\n/save\n1\n/new\nwho\n/save\n\n/quit\nwho\n"
    said = talk(chat_model, lines=lines)
    first, second = saved(Path())
    assert [m["role"] for m in first["prompt"]] == ["user", "assistant", "user"]
    assert second["prompt"] == [
        *first["prompt"],
        *first["chosen"],
        {"role": "user", "content": "name a tool"},
    ]
    records = FileSource("preferences.jsonl", validation_fraction=0).records("preferences", "train")
    assert [list(r.chosen) for r in records] == [first["chosen"], second["chosen"]]
    assert said.count("saved in preferences.jsonl") == 2
    assert said.endswith("Enter saves nothing: \n> ")  # nothing follows /quit


def test_what_is_no_preference_is_not_saved(model, talk):
    said = talk(model, "max_new_tokens=2", "temperature=0", lines="/save\n/sav\nwho\n/save\n")
    assert "there is nothing to save" in said
    assert "/sav is no command" in said
    assert "not saved: the responses are equal" in said
    assert not Path("preferences.jsonl").exists()


@pytest.fixture
def chat(model) -> Chat:
    """Return a chat with two policies of long names, on a screen of 80 columns."""
    runs = ["outputs/grpo_mymodel/2026-11-29_07-55-35", "a/" + "b" * 80]
    side = load_side(str(model))
    chat = Chat(ChatSettings.model_construct(run=runs, max_new_tokens=4), [side, side], None)
    screen = {"force_terminal": True, "color_system": "standard"}
    chat.console = Console(width=80, file=io.StringIO(), **screen)
    return chat


CUT = "cut off at max_new_tokens=4: "
CUT += "ask for a shorter one, or talk to one policy alone, which responds twice"


@pytest.mark.parametrize(
    ("first", "second", "fault"),
    [
        (Response(" ", "", True), Response("b", "", True), "response 1 is empty"),
        (Response("a", "", True), Response("", "", True), "response 2 is empty"),
        (Response("", "", True), Response("", "", True), "both responses are empty"),
        (Response("a", "", True), Response("a", "", True), "the responses are equal"),
        (Response("a", "", True), Response("b"), f"response 2 is {CUT}"),
        (Response("a"), Response("b"), f"both responses are {CUT}"),
        (
            Response("a", "", True),
            Response("<unk>", "", True),
            "a response has the special token '<unk>'",
        ),
    ],
)
def test_the_one_reason_is_told_why_a_pair_is_not_saved(first, second, fault, chat, capsys):
    chat.last = "who", [first, second]
    chat.save()
    assert capsys.readouterr().out.endswith(f"not saved: {fault}\n")


def test_an_answer_but_1_or_2_saves_nothing_and_says_so(model, talk):
    said = talk(model, model, "seed=4", lines="name a tool\n/save\n5\n")
    assert "Enter saves nothing: not saved: 1 or 2\n" in said
    assert not Path("preferences.jsonl").exists()


def test_an_empty_response_is_shown_as_such_below_a_name_that_fits(chat):
    chat.console.print(chat._table([Response("", "1 token"), Response("b")], alone=False))
    name, text, note, *_ = chat.console.file.getvalue().splitlines()
    assert re.search("1  grpo_mymodel/2026-11-29_07-55-35 +.*2  a/b+[.]{3}b+", name)
    assert re.search(r"^\x1b\[2m\(empty\)\x1b\[0m +b", text)
    assert "1 token" in note


def test_a_conversation_goes_on_behind_a_response_that_spells_a_special_token(chat_model, capsys):
    side = load_side(str(chat_model))
    with torch.no_grad():  # it writes <unk> as often as it ends
        side.policy.model.model.get_output_embeddings().weight[2] *= 8
    chat = Chat(ChatSettings(run=[str(chat_model)], max_new_tokens=4), [side], None)
    for _ in range(6):
        chat.take("who")
    chat.take("what is <unk>")
    said = capsys.readouterr().out
    assert re.search("^<unk>", said, re.M)
    assert said.endswith("not sent: the model reads '<unk>' as a special token: leave it out\n")
    assert len(chat.messages) == 12
    written = [str(message["content"]) for message in chat.messages]
    assert any("< unk>" in text for text in written)
    assert not any("<unk>" in text for text in written)


def test_help_lists_the_commands_and_a_terminal_gets_no_broken_word(model, talk, monkeypatch):
    said = talk(model, lines="/help\n")
    assert said.count(HELP) == 2
    assert "no command" not in said
    for name, value in {"TTY_COMPATIBLE": "1", "COLUMNS": "30", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    _, _, lines = talk(model, lines="/sav\n").partition("> ")
    assert " ".join(lines.split()) == f"/sav is no command: {HELP} >"
    assert max(map(len, lines.splitlines())) <= 30


def test_two_policies_answer_one_conversation_and_the_first_as_if_alone(model, talk):
    (alone,) = responses_of(talk(model, "seed=4", lines="name a tool\n"))
    said = talk(model, model, "seed=4", lines="name a tool\n/save\n2\n")
    (row,) = saved(Path())
    assert row["prompt"] == "name a tool"
    assert row["rejected"] == alone
    assert row["chosen"] != alone
    assert f"\n{row['rejected']:<40}{row['chosen']:<40}\n" in said


def run_folder(folder: Path, start: Path, *words: str) -> Path:
    """Write a run as a training leaves it, with `start` as what it has trained."""
    settings = settings_of(*words, "artifacts.publish=null", "logger=none")
    made = RunFolder(folder)
    made.config.parent.mkdir(parents=True)
    write_settings(made.config, settings)
    shutil.copytree(start, made.export)
    return folder


@pytest.mark.parametrize("adapters", [(), ("lora=lora",)])
def test_the_reward_model_of_a_run_scores_its_responses(adapters, model, talk):
    reward = f"artifacts.reward={Path('r').absolute()}"
    words = ("+experiment=ppo", f"artifacts.sft={model}", reward, *adapters)
    write_untrained(RewardModule, Path("r"), settings_of(*words))
    run = run_folder(Path("outputs/ppo/1"), model, *words)
    said = talk(run, lines="who\n")
    response, score = re.findall(r"^> (.*)\nscore (\S+), \d+ tokens$", said, re.M)[0]
    tokenizer = demo_tokenizer()
    ids = torch.tensor([tokenizer(f"who {response} <eos>")["input_ids"]])
    expected = sequence_scores(load_scalar_model("r"), ids, torch.ones_like(ids).bool())
    assert float(score) == pytest.approx(expected.item(), abs=0.006)


def test_a_reward_function_of_a_run_is_not_called_until_it_is_named_again(model, talk):
    run = run_folder(Path("outputs/ppo/1"), model, *overrides_of("ppo", model))
    said = talk(run, lines="who\n")
    assert "no scores: the run has scorer.function=" in said
    (text,) = responses_of(said)
    said = talk(run, "--reward", f"{model.parent}/reward.py:score", lines="who\n")
    assert f"> {text}\nscore {len(text) / 10:.2f}, " in said


def test_a_run_without_a_policy_or_export_and_a_template_on_one_side_are_refused(
    model, chat_model, talk, capsys
):
    of_reward = run_folder(Path("1"), model, "+experiment=reward", f"artifacts.sft={model}")
    unexported = run_folder(Path("2"), model, *overrides_of("sft", model))
    shutil.rmtree(unexported / "export")
    for words, told in (
        ([of_reward], "give the run of a policy"),
        ([unexported], "rlhf-export 2"),
        ([model, chat_model], "one has a chat template"),
    ):
        with pytest.raises(SystemExit) as ended:
            talk(*words, lines="")
        assert ended.value.code == 2
        assert told in capsys.readouterr().err


def test_no_part_of_a_character_is_shown(tmp_path):
    folder = make_start(tmp_path / "bytes", tokenizer=build_tokenizer(), initializer_range=0.02)
    chat = Chat(ChatSettings(run=[str(folder)], max_new_tokens=60), [load_side(str(folder))], None)
    shown: list[str] = []
    response = chat._write("who", 0, chat.sides[0], shown.append)
    assert len(set(shown)) > 20
    assert not any(text.endswith("\ufffd") for text in shown)
    assert all(response.text.startswith(text) for text in shown)
    assert any(len(text.encode()) > len(text) for text in shown)  # some have two bytes


def test_a_conversation_that_is_too_long_is_an_error_that_ends_nothing(chat_model, talk):
    said = talk(chat_model, "max_new_tokens=100", lines=f"{'who ' * 40}\nwho\n")
    assert "error: the conversation has more than 28 tokens: /new starts over" in said
    assert len(responses_of(said)) == 1


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_in_a_terminal_a_response_grows_and_ctrl_d_ends(model, tmp_path):
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (HEIGHT, WIDTH))
    process = subprocess.Popen(
        [sys.executable, "-m", "rlhf_lightning.chat", str(model)],
        cwd=tmp_path, env=environment(TERM="xterm"), start_new_session=True,
        stdin=slave, stdout=slave, stderr=slave,
    )  # fmt: skip
    os.close(slave)
    output, end = "", time.monotonic() + 200

    def read(wanted: str) -> str:
        """Return the output up to what is wanted, which is taken from it."""
        nonlocal output
        while wanted not in output:
            assert time.monotonic() < end, f"no {wanted!r} in {output!r}"
            if select.select([master], [], [], 1)[0]:
                output += os.read(master, 1 << 16).decode(errors="replace")
        before, _, output = output.partition(wanted)
        return before

    try:
        read("> ")
        os.write(master, b"name a tool\n")
        said = read(" tokens")
        words = said.splitlines()[-2].split()
        frames = [len(frame.split()) for frame in said.split("\x1b[2K")]
        assert len(frames) > len(words) > 3  # at least a frame for each word
        read("> ")
        os.write(master, b"\x04")
        assert process.wait(60) == 0
    finally:
        process.kill()
        os.close(master)
