from __future__ import annotations

import re

from rlhf_lightning.reports.samples import LONGEST, marked


def without(tag: str, page: str) -> str:
    return re.sub(r"</?(?:del|ins)>", "", page)


def test_what_went_and_what_came_is_marked_and_the_rest_is_not():
    before, after = marked("Mix flour and milk. Eat it cold.", "Mix flour and water. Eat it warm.")
    assert before == "Mix flour and <del>milk</del>. Eat it <del>cold</del>."
    assert after == "Mix flour and <ins>water</ins>. Eat it <ins>warm</ins>."


def test_marks_cannot_be_forged_and_long_texts_are_not_compared():
    before, after = marked("one two <ins>x</ins> three", "one two <b>x</b> three")
    assert "<ins>x" not in before
    assert "<b>" not in after
    assert "&lt;" in before
    long = "word " * (LONGEST + 1)
    assert marked(long, long + "more") == (long, long + "more")
