"""Rewards that can be checked: the number at the end of a response, or a shell command."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Literal

from rlhf_lightning.arguments import checked
from rlhf_lightning.text.messages import as_text
from rlhf_lightning.text.thoughts import answer_in, opened_by

# A sign and a currency sign in either order, then 1,234.50 or 1234.50 or .5. The start of a longer
# thing is no number: 1/2, 12:30, 1,23, 24 + 48, 2 1/2, 1 000, 1_000, 10^6, 0x10, 5!, 2x, 5\sqrt{2}.
NUMBER = re.compile(
    r"(?<!\w)"
    r"(?P<sign>[$\u20ac\u00a3][ ]?[-+\u2212]|[-+\u2212]?(?:[$\u20ac\u00a3][ ]?)?)"
    r"(?P<digits>(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?=\W|$|(?![xyznkKMBeEi]\b)[A-Za-z\u00b5]+(?![\w^]))"  # a unit may follow at once
    r"(?![\^!{\u221a]|\([0-9]|[.,:;'\u2019][0-9]|[^\S\n]*\\(?![]%$)]|text)"
    r"|[^\S\n]+[0-9\u00bc-\u00be\u2150-\u215e]"
    r"|[^\S\n]*(?:\*\*|[-+*/=^xX\u00d7\u00f7\u00b7\u22c5])[^\S\n]*[0-9$])"
)
# Text in front of a number that is only the end of something longer.
_BEGUN = re.compile(
    r"(?:[0-9)}][^\S\n]*[-+*/^xX\u00d7\u00f7\u00b7\u22c5]+[^\S\n]*|[0-9](?:[.,/:;'\u2019]|[^\S\n]+)"
    r"|[}^\u221a\u00b1]|(?:[}^_]|frac|sqrt)\{)$"
)


@checked
@dataclass(frozen=True)
class NumberReward:
    """Rewards a response whose number after a marker equals the right one.

    The number is the first thing after the first `marker`: a second attempt does not count. It may
    have a sign, a currency sign, commas between thousands and decimals, and a percent sign, a unit,
    words or a full stop after it; numbers are compared by value, so 72 is 72.00. Anything longer is
    no number: 1/2, 2 1/2, 1 000, 1_000, 10^6, 1e6, 0x10, 5!, 2x, 5k. A reward function: it is given
    the column named `column`, whose text holds the right number behind the same marker, or nothing
    but the number. Of a response that thinks only what is behind its thoughts is read.

    `strict` is verl's rule for GSM8K instead: a number is a run of digits, commas and points,
    perhaps with a minus, one space behind the marker, and it is right if it is the same text but
    for commas. So $72 is not read, and 72.00 or "72." at the end of a sentence is not 72.

    Args:
        marker: text before the number, such as GSM8K's "####".
        strict: which of several such numbers counts: "first" (verl until June 2025) or "last"
            (since); None is the rule above.
        fallback: what counts in a response without the marker: "none" - nothing does; "last_number"
            - its last number. The latter rewards right responses in any form, so a policy has no
            reason to learn the form.
        right: reward of the right number.
        wrong: reward of everything else.
        answered: added to `wrong` where some number was read, to reward the form alone.
        column: column of the right answers.

    Raises:
        ValueError: if `marker` is empty, `strict` or `fallback` is unknown or both are given, or a
            wrong number would be worth as much as the right one.

    Source: Cobbe et al. 2021, "Training verifiers to solve math word problems", for the marker;
    verl, `verl/utils/reward_score/gsm8k.py`, for `strict`.
    """

    marker: str = "####"
    strict: Literal["first", "last"] | None = None
    fallback: Literal["none", "last_number"] = "none"
    right: float = 1.0
    wrong: float = 0.0
    answered: float = 0.0
    column: str = "answer"

    def __post_init__(self) -> None:
        """Check the arguments."""
        if not self.marker.strip():
            raise ValueError("marker is empty: give what stands before the number, such as '####'")
        if self.strict is not None and self.fallback != "none":
            raise ValueError(
                f"strict={self.strict} reads numbers behind the marker alone: use fallback=none"
            )
        if not self.right > self.wrong + max(self.answered, 0.0):
            told = f"right={self.right:g} must be more than wrong={self.wrong:g} plus "
            raise ValueError(f"{told}answered={self.answered:g}: a wrong number is worth as much")

    def __call__(
        self, prompts: Sequence[str], completions: Sequence[str], **columns: Sequence[Any]
    ) -> list[float]:
        """Return one reward a completion.

        Raises:
            ValueError: if the column of right answers is missing, or holds one without a number.
        """
        found = map(self.extract, with_opened_thoughts(prompts, completions))
        return [
            self.right if number == wanted else self.wrong + self.answered * (number is not None)
            for number, wanted in zip(found, self.references(columns), strict=True)
        ]

    def extract(self, text: str) -> Decimal | str | None:
        """Return the number that a response gives, None if it gives none; as text if `strict`."""
        if self.strict is not None:
            found = re.findall(f"{re.escape(self.marker)} (-?[0-9.,]+)", text)
            return found[0 if self.strict == "first" else -1].replace(",", "") if found else None
        text = answer_in(text)
        before, marker, after = ("" if "<think>" in text else text).partition(self.marker)
        if marker:
            match = NUMBER.match(after.lstrip())
            return None if match is None else _value(match)
        if self.fallback == "none":
            return None
        begins = [match.start() for match in re.finditer(r"(?<!\w)[0-9]", before)]
        matches = [m for m in NUMBER.finditer(before) if begins and m.end() > begins[-1]]
        whole = bool(matches) and _BEGUN.search(before[: matches[-1].start()]) is None
        return _value(matches[-1]) if whole else None

    def references(self, columns: Mapping[str, Sequence[Any]]) -> list[Decimal | str]:
        """Return the right numbers.

        Raises:
            ValueError: if the column is missing, or a text in it gives no number.
        """
        if self.column not in columns:
            told = f"the prompts have no column {self.column!r}, only {sorted(columns)}"
            raise ValueError(f"{told}: name the one of right answers by column=")
        numbers: list[Decimal | str] = []
        for value in columns[self.column]:
            # A table may have whole numbers as floats.
            text = as_text(value).removesuffix(".0" if isinstance(value, float) else "")
            number = self.extract(text)
            if number is None:
                if (match := NUMBER.fullmatch(text.strip())) is None:
                    raise ValueError(f"the right answer {text!r} holds no number")
                number = _value(match) if self.strict is None else match[0].replace(",", "")
            numbers.append(number)
        return numbers


def math_reward(
    prompts: Sequence[str], completions: Sequence[str], *, answer: Sequence[Any], **_: object
) -> list[float]:
    r"""Return 1.0 where a response's answer equals the right one as mathematics, else 0.0.

    The package `math-verify` reads and compares them: numbers, fractions, formulas and sets, in
    LaTeX or plain. Not all is read as it is meant: docs/your_model_and_data.md has a table. Of a
    response that thinks only what is behind its thoughts is read. Reading and comparing end after 5
    seconds each, in the main thread: its timer works in no other one.

    Args:
        prompts: the prompts; one may end with the mark that opens the thoughts.
        completions: the responses.
        answer: the right answers: each nothing else, or in `$...$` or `\boxed{...}`.

    Raises:
        ImportError: if `math-verify` is not installed.
        ValueError: if it can read nothing in a right answer.
    """
    try:
        from math_verify import parse, verify
    except ImportError as error:
        raise ImportError("math_reward needs math-verify: pip install '.[math]'") from error
    seconds = 5 if threading.current_thread() is threading.main_thread() else None
    rewards = []
    for prompt, text, right in zip(prompts, completions, map(as_text, answer), strict=True):
        bare = "$" not in right and "\\boxed" not in right
        wanted = parse(f"\\boxed{{{right}}}" if bare else right, parsing_timeout=seconds)
        if not wanted:
            raise ValueError(f"the right answer {right!r} holds nothing that math-verify reads")
        given = parse(answer_in(text, prompt), parsing_timeout=seconds)
        rewards.append(float(verify(wanted, given, timeout_seconds=seconds)))
    return rewards


def command_reward(
    prompts: Sequence[str], completions: Sequence[str], *, completion: Sequence[Any], **_: object
) -> list[float]:
    """Return 0.5 for the right program, and 0.5 times the F1 of its arguments, as words.

    Args:
        prompts: ignored by this reward.
        completions: commands of one line.
        completion: the right ones, such as those of `dataset=shell_commands`.
    """
    rewards = []
    for text, right in zip(completions, map(as_text, completion), strict=True):
        words, wanted = text.split(), right.split()
        both = 2 * (Counter(words[1:]) & Counter(wanted[1:])).total()
        total = len(words[1:]) + len(wanted[1:])
        is_right = bool(wanted) and words[:1] == wanted[:1]
        rewards.append(0.5 + 0.5 * (both / total if total else 1.0) if is_right else 0.0)
    return rewards


def with_opened_thoughts(prompts: Sequence[str], completions: Sequence[str]) -> list[str]:
    """Return the completions, with what opens thoughts in front where the prompt ends with it."""
    return [opened_by(p) + text for p, text in zip(prompts, completions, strict=True)]


def _value(match: re.Match[str]) -> Decimal:
    number = Decimal(match["digits"].replace(",", ""))
    return -number if {"-", "\u2212"} & set(match["sign"]) else number
