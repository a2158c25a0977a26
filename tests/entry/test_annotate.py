"""The command line of the labelling page: what it does, what it refuses, and how it ends."""

from __future__ import annotations

import json
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

from rlhf_lightning.app.annotate import main
from rlhf_lightning.preferences.annotation.store import LabelStore
from tests.builders.labels import make_pairs
from tests.preferences.page_server import Client, serving


class Said(NamedTuple):
    """How a command ended, and what it printed."""

    returncode: int
    stdout: str
    stderr: str


ROWS = [
    {"prompt": f"Q{n}", "chosen": f"good {n}", "rejected": f"bad {n}", "domain": "d"}
    for n in range(3)
]


@pytest.fixture
def annotate(working_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> Callable[..., Said]:
    """Run the command line in this process, in an empty folder."""

    def run(*arguments: str) -> Said:
        monkeypatch.setattr(sys, "argv", ["rlhf-annotate", *arguments])
        try:
            main()
            status = 0
        except SystemExit as leaving:
            status = leaving.code
        return Said(status, *capsys.readouterr())

    return run


def write_rows(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "store=outputs/annotate/labels.sqlite does not exist: add file="),
        (["action=sreve"], "action='sreve' must be 'serve', 'import', 'export'"),
        (["action=export"], "file is not set: export needs a file"),
        (
            ["action=export", "file=x"],
            "format=auto tells what is read: export needs pairs, labels,",
        ),
        (["file=none.jsonl"], "none.jsonl: there is no such file or folder. Fix: check"),
    ],
)
def test_a_mistake_is_one_line_that_names_the_key(annotate, arguments, message: str):
    result = annotate(*arguments)
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {message}"), result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_preferences_go_in_are_counted_and_come_out_as_reward_training_reads_them(
    annotate, tmp_path
):
    write_rows(tmp_path / "in.jsonl")
    taken = annotate("action=import", "file=in.jsonl")
    assert taken.returncode == 0, taken.stderr
    assert taken.stdout == ("in.jsonl: 3 new pairs of 3, 3 new labels of 3\n")
    again = annotate("action=import", "file=in.jsonl")
    assert "0 new pairs of 3, 0 new labels of 3" in again.stdout
    status = annotate("action=status")
    assert "labels.sqlite: 3 of 3 labels, pairs of in.jsonl\n" in status.stdout
    assert "in.jsonl: 3 labels" in status.stdout.splitlines()
    export = ["action=export", "file=out/chosen.jsonl", "format=trl"]
    written = annotate(*export)
    assert written.stdout == "out/chosen.jsonl: 3 rows\n", written.stderr
    rows = [json.loads(x) for x in (tmp_path / "out" / "chosen.jsonl").read_text().splitlines()]
    assert [{key: row[key] for key in ROWS[0]} for row in rows] == ROWS
    assert annotate(*export).returncode == 0  # it replaces what it has written itself
    before = (tmp_path / "in.jsonl").read_bytes()
    refused = annotate("action=export", "file=in.jsonl", "format=trl")
    assert refused.returncode == 2
    assert "file=in.jsonl is there already" in refused.stderr
    assert (tmp_path / "in.jsonl").read_bytes() == before


@pytest.fixture
def announced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server end as soon as it is up."""
    from rlhf_lightning.preferences.annotation import page

    def serve(store, *, announce, **settings) -> None:
        announce("http://here/")

    monkeypatch.setattr(page, "serve", serve)


def test_served_preferences_are_labelled_anew_and_imported_ones_are_kept(
    annotate, announced, tmp_path: Path
):
    write_rows(tmp_path / "in.jsonl")
    served = annotate("file=in.jsonl")
    assert served.stdout.splitlines() == [
        "in.jsonl: 3 new pairs of 3, 0 new labels of 0",
        "3 preferences in in.jsonl are left out: action=import keeps them as labels",
        "http://here/",
        "0 of 3 labels are there, in outputs/annotate/labels.sqlite. Control-C stops; nothing is "
        "lost.",
    ]
    kept = annotate("action=import", "file=in.jsonl", "store=x.sqlite")
    assert "3 new labels of 3\n" in kept.stdout
    assert "3 of 3 labels are there, in x.sqlite" in annotate("store=x.sqlite").stdout


@pytest.mark.thorough
def test_the_server_ends_when_it_is_told_to_and_says_what_is_kept(tmp_path: Path):
    with serving(tmp_path, make_pairs(2)) as server:
        client = Client(server.url)
        client.answer(client.sign_in("Ann").text, "left")
        client.close()
        server.process.send_signal(signal.SIGINT)
        assert server.process.stdout is not None
        said = server.process.stdout.read()
        assert server.process.wait(30) == 0
    assert said.endswith(f"stopped: 1 of 2 labels are in {server.store}\n")
    assert not server.store.with_name("labels.sqlite-wal").exists(), "closed, and in one file"


def test_a_port_that_is_taken_is_told_with_a_way_out(annotate, tmp_path: Path):
    write_rows(tmp_path / "in.jsonl")
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        result = annotate("file=in.jsonl", f"page.port={port}")
    assert result.returncode == 2
    assert f"page.port={port} cannot be listened on" in result.stderr
    assert "page.port=0 takes a free port" in result.stderr


def test_pairs_of_another_file_are_refused_by_name_unless_they_are_to_be_added(
    annotate, tmp_path: Path
):
    write_rows(tmp_path / "a.jsonl")
    other = [row | {"prompt": f"another {row['prompt']}"} for row in ROWS]
    (tmp_path / "b.jsonl").write_text("".join(json.dumps(row) + "\n" for row in other))
    assert annotate("action=import", "file=a.jsonl").returncode == 0
    refused = annotate("action=import", "file=b.jsonl")
    assert refused.returncode == 2
    for name in ("file=b.jsonl", "labels.sqlite", "3 pairs of a.jsonl", "add=true"):
        assert name in refused.stderr
    assert "3 of 3 labels, pairs of a.jsonl\n" in annotate("action=status").stdout
    assert "3 new pairs of 3" in annotate("action=import", "file=b.jsonl", "add=true").stdout
    assert "pairs of a.jsonl, b.jsonl\n" in annotate("action=status").stdout
    assert annotate("action=import", "file=b.jsonl").returncode == 0


def answered(store: Path) -> None:
    """Label one pair as the page does."""
    with LabelStore(store) as labels:
        task = labels.next_task("Ann")
        assert labels.label("Ann", task.pair.pair_id, "first")


def test_labels_that_answer_another_question_are_not_mixed_without_a_word(
    annotate, announced, tmp_path: Path
):
    other = "page.title=Which is kinder?"
    write_rows(tmp_path / "a.jsonl")
    assert annotate("file=a.jsonl").returncode == 0
    assert annotate("file=a.jsonl", other).returncode == 0, "nobody has labelled yet"
    assert annotate("page.title=Which is true?").returncode == 0
    answered(tmp_path / "outputs/annotate/labels.sqlite")
    (tmp_path / "more.jsonl").write_text(
        (tmp_path / "a.jsonl").read_text() + json.dumps(ROWS[0] | {"prompt": "more"}) + "\n"
    )
    refused = annotate("file=more.jsonl", other)
    assert refused.returncode == 2
    for name in (other.partition("=")[2], "Which is true?", "labels.sqlite", "add=true"):
        assert name in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert "1 of 3 labels" in annotate("action=status").stdout, "the file was taken in"
    assert annotate("page.title=Which is true?").returncode == 0
    assert annotate(other, "add=true").returncode == 0
    assert annotate(other).returncode == 0
