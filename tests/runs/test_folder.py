from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlhf_lightning.runs.folder import (
    MetricsAppender,
    SamplesAppender,
    read_metrics,
    read_samples,
    to_json,
)
from tests.builders.processes import killed_after


def test_a_metric_that_appears_later_gets_a_column_and_leaves_older_cells_empty(tmp_path):
    path = tmp_path / "metrics.csv"
    MetricsAppender(path).append(1, {"a": 1.5})
    MetricsAppender(path).append(2, {"val/b, with comma": 2.5})
    assert read_metrics(path) == [
        {"iteration": 1, "a": 1.5},
        {"iteration": 2, "val/b, with comma": 2.5},
    ]
    assert path.read_text().splitlines()[2] == "2,,2.5"


def test_cutting_back_leaves_what_a_run_stopped_there_would_have_written(tmp_path):
    short, cut = MetricsAppender(tmp_path / "short.csv"), MetricsAppender(tmp_path / "cut.csv")
    for iteration in range(1, 4):
        short.append(iteration, {"a": iteration / 3})
    for iteration in range(1, 6):
        late = {"late": 1.0} if iteration > 3 else {}
        cut.append(iteration, {"a": iteration / 3} | late)
    cut.truncate(3)
    assert cut.path.read_bytes() == short.path.read_bytes()
    cut.append(4, {"a": 1.0})
    assert [row["iteration"] for row in read_metrics(cut.path)] == [1, 2, 3, 4]
    cut.truncate(0)
    assert read_metrics(cut.path) == []
    cut.append(1, {"z": 1.0})
    assert read_metrics(cut.path) == [{"iteration": 1, "z": 1.0}]


def test_a_line_cut_short_by_a_kill_is_no_row(tmp_path):
    path = tmp_path / "metrics.csv"
    appender = MetricsAppender(path)
    for iteration in (1, 2):
        appender.append(iteration, {"a": 12.5, "b": 1.25})
    whole = path.read_text()
    # The last cell reads 1.2 or 1 when its end is missing: as wrong as it is plausible.
    for cut in range(1, 10):
        path.write_text(whole[:-cut])
        assert read_metrics(path) == [{"iteration": 1, "a": 12.5, "b": 1.25}]
    again = MetricsAppender(path)
    again.truncate(2)
    again.append(2, {"a": 12.5, "b": 1.25})
    assert path.read_text() == whole


def test_samples_keep_any_text_and_are_cut_back(tmp_path):
    appender = SamplesAppender(tmp_path / "samples.jsonl")
    texts = ["plain", 'quote " and \\', "line\nbreak", "line\u2028separator", "emoji 🙂", "\x00"]
    for iteration, text in enumerate(texts, start=1):
        appender.append(iteration, [{"response": text, "score": math.nan}])
    samples = read_samples(appender.path)
    assert [s["response"] for s in samples] == texts
    assert all(s["score"] is None for s in samples)
    assert [s["iteration"] for s in samples] == [1, 2, 3, 4, 5, 6]
    appender.path.write_text(appender.path.read_text()[:-5])
    assert len(read_samples(appender.path)) == 5
    appender.truncate(4)
    assert [s["iteration"] for s in read_samples(appender.path)] == [1, 2, 3, 4]


def test_json_is_strict_and_takes_numbers_of_numpy_and_torch():

    value = {"a": np.float32(0.5), "b": torch.tensor(2), "c": [math.inf, (1, None)], 4: "x"}
    assert json.loads(to_json(value)) == {"a": 0.5, "b": 2, "c": [None, [1, None]], "4": "x"}


def _widen_for_ever(path: Path, done: Any) -> None:
    appender = MetricsAppender(path)
    for n in itertools.count(1):
        appender.append(n, {"same": n / 7, f"column {n % 40}": float(n)})
        done.value = n


def test_rows_survive_a_kill_even_while_the_table_is_being_widened(tmp_path):
    for wait in (0.0, 0.003):
        path = tmp_path / f"{wait}.csv"
        written = killed_after(12, _widen_for_ever, path, wait=wait)
        rows = read_metrics(path)
        assert len(rows) >= written >= 12
        assert [row["iteration"] for row in rows] == list(range(1, len(rows) + 1))
        assert all(row["same"] == row["iteration"] / 7 for row in rows)
