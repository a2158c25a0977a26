#!/usr/bin/env bash
# datasets 5.2.0: a `map` that turns a ClassLabel column into true and false leaves it a ClassLabel, whose names now lie.
#
# A column "label" has the names ["good", "bad"]. `ds.map(lambda row: {"label": row["label"] == 0})` is to say True for good. The values
# become 1 and 0, the type stays ClassLabel(names=["good", "bad"]), and True for good is now the class 1, "bad": every label is
# turned round for whoever reads the names, without a warning. The same function for a column of another name gives a plain bool.
#
# Seen: label [1, 0] with the names ['good', 'bad']; a new column: [True, False] of the type bool.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'datasets==5.2.0'
cd "$folder"
HF_HOME="$folder/hub" HF_DATASETS_OFFLINE=1 "$folder/venv/bin/python" - <<'PY'
from datasets import ClassLabel, Dataset, Features, Value, disable_progress_bars

disable_progress_bars()
features = Features({"text": Value("string"), "label": ClassLabel(names=["good", "bad"])})
rows = Dataset.from_list([{"text": "a", "label": 0}, {"text": "b", "label": 1}], features=features)
before = [features["label"].int2str(value) for value in rows["label"]]
same = rows.map(lambda row: {"label": row["label"] == 0})
after = [same.features["label"].int2str(value) for value in same["label"]]
other = rows.map(lambda row: {"is_good": row["label"] == 0})
print("before", before, "after", same["label"], same.features["label"], after)
print("a new column", other["is_good"], other.features["is_good"])
assert before == ["good", "bad"] and after == ["bad", "good"], "the behaviour has changed"
assert list(other["is_good"]) == [True, False]
PY
