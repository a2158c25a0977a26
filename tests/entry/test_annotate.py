"""The command line of the labelling page: what it does and what it refuses."""

from __future__ import annotations

import json
import socket
import sys
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from rlhf_lightning.app.annotate import main
from rlhf_lightning.preferences.annotation.store import LabelStore

ROWS = [
    {"prompt": f"Q{n}", "chosen": f"good {n}", "rejected": f"bad {n}", "domain": "d"}
    for n in range(3)
]


@pytest.fixture
def annotate(working_folder, monkeypatch, capsys):
    """Run the command line in this process, in an empty folder."""

    def run(*arguments: str) -> CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", ["rlhf-annotate", *arguments])
        try:
            main()
            status = 0
        except SystemExit as leaving:
            status = leaving.code
        return CompletedProcess(arguments, status, *capsys.readouterr())

    return run


def write_rows(path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


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


def test_labels_that_answer_another_question_are_not_mixed_without_a_word(
    annotate, announced, tmp_path: Path
):
    other = "page.title=Which is kinder?"
    write_rows(tmp_path / "a.jsonl")
    assert annotate("file=a.jsonl").returncode == 0
    assert annotate("file=a.jsonl", other).returncode == 0, "nobody has labelled yet"
    assert annotate("page.title=Which is true?").returncode == 0
    with LabelStore(tmp_path / "outputs/annotate/labels.sqlite") as labels:
        assert labels.label("Ann", labels.next_task("Ann").pair.pair_id, "first")
    refused = annotate("file=a.jsonl", other)
    assert refused.returncode == 2
    for name in (other.partition("=")[2], "Which is true?", "labels.sqlite", "add=true"):
        assert name in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert annotate("page.title=Which is true?").returncode == 0
    assert annotate(other, "add=true").returncode == 0
    assert annotate(other).returncode == 0
