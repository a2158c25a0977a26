"""A reward that reads a number: what is read, what is not, and what each is worth."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal

import pytest

from rlhf_lightning.evaluation.gold_rewards import NumberGold
from rlhf_lightning.rollout.scorers.verifiable import NumberReward, math_reward

READ = {
    "it is 8.\n#### 72": "72",
    "####72.": "72",
    "#### 72 clips": "72",
    "#### $1,234.50": "1234.5",
    "#### -$5": "-5",
    "#### $-5": "-5",
    "#### \u22125": "-5",
    "#### .5": "0.5",
    "#### 72%": "72",
    "#### \u20ac 7": "7",
    "#### 5 #### 6": "5",
    "#### 72\n#### 3": "72",
    "#### 72\n- 3 more": "72",
    "#### 72\n\n2. And then": "72",
    "#### 10\\%": "10",
    "#### 72)": "72",
    "#### 72kg": "72",
    "#### 72, so 72": "72",
    "<think>#### 5, no</think>#### 72": "72",
    "Is it #### 5? No.\n</think>\n\n#### 72": "72",
}
NOT_READ = (
    "72", "", "#### **72**", "#### is 72", "### 72",
    "#### 1/2", "#### 12:30", "#### 1,23", "#### 24+48", "#### 3 x 4", "#### 5(3+2)", "#### 5!",
    "#### 2 1/2", "#### 2\u00bd", "#### 10^6", "#### 10**6", "#### 10\u00b2", "#### 5m^2",
    "#### 7e3", "#### 1E+6", "#### 0x10", "#### 2x", "#### 5k", "#### 5\\sqrt{2}", "#### 5\u221a2",
    "#### 1 000", "#### 1_000", "#### 1'000", "#### 1{,}000",
    "<think>It is #### 72", "<think>It is #### 72</think>", "It is #### 72</think>So seven.",
)  # fmt: skip


@pytest.mark.parametrize(("text", "number"), READ.items())
def test_the_number_after_the_first_marker_is_read(text, number):
    assert NumberReward().extract(text) == Decimal(number)


@pytest.mark.parametrize("text", NOT_READ)
def test_what_is_not_one_number_after_the_marker_is_not_read(text):
    assert NumberReward().extract(text) is None


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("first 3, then 48-24=24.", "24"),
        ("10 - 5", None),
        ("in all 24 + 48", None),
        ("18, which is 1 000", None),
        ("18, which is 2 1/2", None),
        ("18, which is 1{,}000", None),
        ("so \\frac{1}{2}", None),
        ("so 2^{10}", None),
        ("so \\sqrt{5}", None),
        ("so \\boxed{72}.", "72"),
        ("so \\(72\\), as H2O", "72"),
        ("**72**", "72"),
        ("Step 2: 72 clips", "72"),
        ("she has -3", "-3"),
        ("it costs $ 1,500 in all", "1500"),
        ("x2 and nothing else", None),
        ("", None),
        ("9 then #### nothing", None),
    ],
)
def test_the_last_number_counts_only_where_it_is_asked_for_and_no_marker_stands(text, number):
    wanted = None if number is None else Decimal(number)
    assert NumberReward(fallback="last_number").extract(text) == wanted
    assert NumberReward().extract(text) is None


# What verl's pattern "#### (\\-?[0-9\\.\\,]+)" finds, commas taken out: first and last.
STRICT = {
    "so it is\n#### 72": ("72", "72"),
    "#### -5": ("-5", "-5"),
    "#### 72.00": ("72.00", "72.00"),
    "#### 72.": ("72.", "72."),
    "#### ...": ("...", "..."),
    "#### 0072": ("0072", "0072"),
    "#### 5 #### 6": ("5", "6"),
    "#### 1/2": ("1", "1"),
    "##### 72": ("72", "72"),
    "#### $72": None,
    "#### $1,234.50": None,
    "####72": None,
    "72": None,
    "": None,
}


@pytest.mark.parametrize(("text", "numbers"), STRICT.items())
def test_the_strict_rule_reads_what_verl_reads(text, numbers):
    first, last = numbers or (None, None)
    assert NumberReward(strict="first").extract(text) == first
    assert NumberReward(strict="last").extract(text) == last


def test_the_strict_rule_compares_text_but_for_commas():
    answers = ["#### 72", "#### 72.00", "#### 72.", "#### $72", "#### 1,072", "#### 1072"]
    reward = NumberReward(strict="last")
    assert reward(["p"] * 6, answers, answer=["so\n#### 72"] * 6) == [1, 0, 0, 0, 0, 0]
    assert reward(["p"] * 6, answers, answer=["so\n#### 1,072"] * 6) == [0, 0, 0, 0, 1, 1]
    for right in ("1,072", 1072, 1072.0):  # tables have whole numbers as floats
        assert reward(["p"] * 6, answers, answer=[right] * 6) == [0, 0, 0, 0, 1, 1]
    assert NumberReward()(["p"] * 4, answers[:4], answer=["#### 72"] * 4) == [1, 1, 1, 1]


def test_right_wrong_and_missing_answers_are_worth_what_was_set():
    reward = NumberReward(right=2.0, wrong=-1.0, answered=0.25)
    completions = ["#### 1,000.0", "#### 999", "I do not know"]
    assert reward(["p"] * 3, completions, answer=["#### 1000"] * 3) == [2.0, -0.75, -1.0]


def test_the_plain_function_pays_1_for_the_number_of_the_column_answer():
    answers = ["a\n#### 3", "4"]
    assert NumberReward()(["p"] * 2, ["#### 3", "#### 3"], answer=answers) == [1.0, 0.0]


def test_a_wrong_number_may_not_be_worth_as_much_as_the_right_one():
    with pytest.raises(ValueError, match="worth as much"):
        NumberReward(right=1.0, wrong=0.5, answered=0.5)
    with pytest.raises(ValueError, match="fallback='first'"):
        NumberReward(fallback="first")
    with pytest.raises(ValueError, match=r"^strict='all'"):
        NumberReward(strict="all")
    with pytest.raises(ValueError, match="use fallback=none"):
        NumberReward(strict="last", fallback="last_number")
    with pytest.raises(ValueError, match="marker is empty"):
        NumberReward(marker=" ")


@pytest.mark.parametrize("wanted", ["10^6", "2 1/2", "#### 1 000", "\\frac{1}{2}", "5k"])
def test_a_right_answer_that_is_more_than_a_number_is_an_error(wanted):
    for fallback in ("none", "last_number"):
        with pytest.raises(ValueError, match="holds no number"):
            NumberReward(fallback=fallback)(["p"], ["#### 3"], answer=[wanted])


def test_a_missing_column_and_a_right_answer_without_a_number_are_errors():
    with pytest.raises(ValueError, match=r"no column 'answer'.*\['solution'\]"):
        NumberReward()(["p"], ["#### 3"], solution=["#### 3"])
    with pytest.raises(ValueError, match="'about three' holds no number"):
        NumberReward()(["p"], ["#### 3"], answer=["about three"])


@pytest.mark.parametrize("rule", [{}, {"fallback": "last_number"}])
@pytest.mark.parametrize("mark", [("<think>", "</think>"), ("[THINK]", "[/THINK]")])
def test_a_number_in_thoughts_that_the_prompt_opens_is_none(rule, mark):
    prompts = [f"2*36?<|Assistant|>{mark[0]}\n"] * 2
    completions = ["So 72, #### 72, but", f"So 71, #### 71.{mark[1]}#### 72"]
    reward = NumberReward(**rule)
    assert reward(prompts, completions, answer=["72", "72"]) == [0.0, 1.0]
    gold = NumberGold(reward)
    assert gold(prompts, completions, [False, True], answer=["72", "72"]) == [0.0, 1.0]


BOXES = r"\boxed{1}, so it is \boxed{2}"
# response -> right answers that it equals, and others that it does not, by math-verify.
MATH = {
    "72 clips": (["72", "72.00"], ["7"]),
    "1,000": (["1000"], ["1"]),
    "1 000": (["1000"], ["1"]),
    "10%": (["10", "0.1"], ["1"]),
    "1/2": (["0.5", r"\frac{1}{2}"], ["1", "2"]),
    r"$2\frac{1}{2}$": (["2.5"], ["2"]),
    "1e6": (["1"], ["1000000"]),
    "$1e6$": ([], ["1", "1000000"]),
    "B": ([], ["B"]),
    r"\boxed{B}": (["B"], ["A"]),
    BOXES: ([r"\{1,2\}"], ["1", "2"]),
    r"\boxed{1} then I see that it is \boxed{2}": (["2"], ["1", r"\{1,2\}"]),
    r"<think>\boxed{71}</think>\boxed{72}": (["72"], ["71"]),
    r"<think>\boxed{72}": ([], ["72"]),
    "": ([], ["72"]),
}


@pytest.mark.parametrize(("text", "answers"), MATH.items())
def test_math_verify_reads_what_the_table_says(text, answers):
    pytest.importorskip("math_verify")
    right, wrong = answers
    both = [*right, *wrong]
    found = math_reward(["p"] * len(both), [text] * len(both), answer=both)
    assert found == [1.0] * len(right) + [0.0] * len(wrong)


def test_math_reward_works_in_a_thread_and_names_an_answer_that_it_cannot_read():
    pytest.importorskip("math_verify")
    with ThreadPoolExecutor(1) as pool:
        given = (["p<think>"], [r"</think>It is $\frac{1}{2}$."])
        assert pool.submit(math_reward, *given, answer=[0.5]).result() == [1.0]
    with pytest.raises(ValueError, match="holds nothing that math-verify reads"):
        math_reward(["p"], ["72"], answer=[""])


def test_math_reward_says_what_it_needs(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match="pip install"):
        math_reward(["p"], ["72"], answer=["72"])
