"""Loading that takes long says so, in a few lines."""

from __future__ import annotations

import json
import logging
import re

from rlhf_lightning.data import progress
from rlhf_lightning.data.datamodules import DemonstrationDataModule
from tests.builders.models import tiny_tokenizer


def test_reading_and_encoding_of_a_file_are_told_with_their_rows(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(progress, "FIRST_AFTER", 1e-7)
    rows = ({"prompt": f"w{3 + n % 9}", "completion": "w5"} for n in range(3000))
    (tmp_path / "big.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level(logging.INFO, "rlhf_lightning"):
        data = DemonstrationDataModule(
            tmp_path / "big.jsonl", tiny_tokenizer(), batch_size=2, num_iterations=1
        )
        assert len(data.rows("train")) + len(data.rows("validation")) == 3000
    said = "\n".join(caplog.messages)
    assert f"reading {tmp_path / 'big.jsonl'}: " in said
    assert re.search(rf"encoding: \d+ of {len(data.rows('train'))} rows", said)
