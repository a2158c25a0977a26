#!/usr/bin/env bash
# math-verify 0.9.0 (with latex2sympy2_extended 1.11.0): a response that corrects itself has the answer {1, 2}.
#
# "\boxed{1}. Wait, it is \boxed{2}" is read as the set of both boxes, so that neither 1 nor 2 is right. What decides is the
# punctuation between the boxes: with a comma, a full stop, "and" or "or" within 70 characters, different boxes are one answer;
# without one ("then I see that it is") the last box counts, as one would expect from a model that changes its mind.
#
# Seen: '. Wait, it is ' -> {1, 2}, right for neither; ' then I see that it is ' -> 2.
set -euo pipefail
folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
"$folder/venv/bin/pip" install -q 'math-verify[antlr4-13-2]==0.9.0' 'latex2sympy2_extended==1.11.0'
cd "$folder"
"$folder/venv/bin/python" - <<'PY'
from math_verify import parse, verify

corrected = {
    ". Wait, it is ": False,
    ", no, that is wrong, ": False,
    "\n\nWait, that is wrong. The answer is ": False,
    " then I see that it is ": True,
    " no that is wrong ": True,
}
for between, last_counts in corrected.items():
    given = parse(rf"\boxed{{1}}{between}\boxed{{2}}")
    right = [verify(parse(f"${answer}$"), given) for answer in (1, 2)]
    print(f"{between!r}: {given[0]}, equals 1: {right[0]}, equals 2: {right[1]}")
    assert right == [False, last_counts], "the behaviour has changed"
PY
