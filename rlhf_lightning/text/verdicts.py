r"""The verdict in a judge's reply: which of two responses it prefers.

JSON, `\boxed{B}` and `<answer>B</answer>` are rewritten to `[[B]]`; one grammar reads it and words.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterator
from typing import Any

from rlhf_lightning.text.letters import LABEL, NOUN, NUMBERED, any_of, letter_of, letter_of_key
from rlhf_lightning.text.ratings import SCORE, TOTAL, by_ratings, is_doubted, is_number, rating_of
from rlhf_lightning.text.thoughts import without_thoughts

LETTERS = ("A", "B", "C")
MOST_READ = 20_000  # characters of a reply, from its end

_COMPARISON = r"\s*(>+|<+|=|[≈≻≺≫≪])\s*"
_TIE = (
    r"(?:(?i:it'?s\s+|it\s+is\s+)?(?i:an?\s+)?"
    + any_of(
        r"tied? draw toss-?up neither(?:_is_better)? (?:none|both)(?:_of_them)? equal equally_\w+ "
        "same unentschieden gleichstand égalité empate pareggio ничья"
    )
    + r"|平局|平手|和局|不分上下|一样好|同样好|都不)(?![-\w])"
)
# Behind a letter that is named. "A good response" names none, nor does a list "A, B or C".
_JOIN = "because since as for with by due over and but although though while which is was wins than"
_AFTER = (
    r"(?!\s*(?:,\s*(?:or\s+|and\s+)?|/|\||or\s+)[ABC]\s*(?:,|or\b|and\b|[.)\]]*\s*(?:$|\n)))"
    rf"(?!\s*[><=≈≻≺≫≪]+\s*{LABEL})"
    rf"(?!\s+(?:for|in|on)\s+(?:\w+\s+){{0,2}}\w+,?\s+(?:and\s+|but\s+)?{LABEL}\s+(?:for|in|on|if)\b)"
    r"(?!\+|(?:\s*[:=(|\u2013\u2014\u2212-])*\s*\d)(?!\s+if\b|\s+for\s+an?\s+tie)"
    rf"(?! +(?!{any_of(_JOIN + ' on in')}\b)[a-z])"
)
_KEYWORD = (
    r"(?:\b"
    + any_of(
        r"verdict winner winning_\w+ choice answer decision preference judge?ment result selection "
        r"conclusion vote pick edge nod overall final "
        r"(?:better|best|superior|stronger|preferred|selected|chosen)"
        rf"(?:_(?:one|of_the_two|choice|{NOUN}))?"
    )
    + r"(?:\s+of\s+(?:\w+\s+){0,3}?\w+)?(?:\s*\((?i:overall|final)\))?\]?\"?'?|"
    + any_of(
        "结论 答案是? 回答 选项 选择 判断 裁决 胜者 获胜者 结果 评判 更好的 判定 勝者 結論 "
        "승자 정답 ответ antwort réponse respuesta risposta resposta urteil veredicto"
    )
    + ")"
)
_SEPARATOR = (
    rf"(?:\s*(?:[:=|→>-]++"
    rf"|\s{any_of('is was are goes_to would_be must_be es_la est(?:_la)? ist')}\b"
    r"(?:\s+(?:the\s+one|that)\s+(?:by|of|from)\b|\s+(?:clear|definite|obvious|certain)ly\b)?"
    r"|为|是)|\s*\n|(?<=\])|(?<=结论))+\s*"
)
_FITTER = "(?:好|优|[准正明精]确|清[晰楚]|全面|完整|详细|有用|合理)"
_CHOOSES = (
    rf"(?:\b{any_of('prefer choose chose pick select vote_for go_with going_with favou?r')}\s+"
    rf"|\b{any_of('recommend opt_for side_with lean_to lean_towards? preference_(?:is_)?for')}\s+"
    rf"|\b{any_of('go(?:ing)?_for lean (?:edge|nod|advantage)_to advantage winner')}\s+"
    rf"|(?:\b{any_of('recommendation assessment')}:|{_KEYWORD}\s*[\u2013\u2014])"
    rf" *(?={LABEL}[.!]?\s*(?:$|\n))"
    rf"|\b(?i:not)\s+{LABEL}[,;]?\s+{any_of('but it_is')}\s+"
    rf"|\b{any_of('gewinnt préfère bevorzuge prefiero choisis elijo wähle лучше')}\s+(?:la\s+)?"
    rf"|(?:\b(?:{any_of('scratch_that correction edit sorry no wait rather')}\s*[,:]"
    rf"|(?i:actually),?)\s*(?:I\s+meant?\s+)?|\bI\s+meant?\s+)(?={LABEL}\s*(?:$|[.!\n]))"
    rf"|[与跟和]\s*{LABEL}\s*相比,?\s*(?={LABEL}[^\n,.;不]{{0,4}}?{_FITTER})"
    r"|(?:选择?|喜欢|偏好|倾向于?)\s*)"
)
_VERB = any_of(
    "is was 's does did serves? answers? addresses responds? performs? follows? provides? offers? "
    "gives? has better ist est es è é jest är er"
)
_FILLER = (
    rf"(?!{any_of('not no never than but while whereas though although could would might may')}\b"
    rf"|{any_of('hardly scarcely rarely seldom far_from nicht kein keineswegs kaum niet')}\b"
    rf"|{any_of('allerminst inte ikke pas não не')}\b"
    rf"|{any_of('should can if however first second former latter other')}\b|[ABC]\b)"
    r"\(?[\w'-]+\)?\s+"
)
_BAD = r"[^\n,.;。]{0,6}?(?:悪|劣|不|低|弱|差|糟|錯|错|間違|나[쁘쁜쁩빠]|못|부[족정]|약|틀|낮|불)"
_GOOD = any_of(
    "better best superior stronger strongest preferable preferred winner "
    "my_(?:choice|pick) "
    "bessere? meilleure? mejor migliore melhor beter bättre bedre lepsz[aey] préférable"
)
_IS_GOOD = rf"(?:'?s\s+{NOUN})?\s+{_VERB}\s+(?:{_FILLER}){{0,5}}?{_GOOD}\b"
_WINS = any_of(
    r"wins? beats out(?:performs|shines|classes|does|ranks|scores|weighs) edges_out surpasses "
    r"gets_my_vote better_(?:answers|addresses|serves|follows|fits|meets) "
    r"(?:has|takes|gets)_the_(?:\w+_)?(?:edge|win|nod|advantage) "
    r"takes_it(?=[.!]|\s*$) (?:deutlich_|etwas_)?besser "
    r"wählen(?=[.!]|\s*$) meilleure?_que mejor_que"
)
_SEEMS_GOOD = (
    rf"\s+{any_of('is was does has provides gives seems appears looks sounds')}\s+"
    rf"(?:{_FILLER}){{0,5}}?(?:{_GOOD}|(?i:more)\s+"
    + any_of("accurate helpful correct relevant complete useful informative precise convincing")
    + rf")\b|\s*更(?!{_BAD})"
)
_THAN = "(?:相?比|相?较[于之]?|相对于)"
_ELSEWHERE = (
    r"\s*(?:(?:(?!не |không|chưa)[^\n,.;ABC不]){0,8}?"
    r"(?:更好|更优|更佳|较好|较优|胜出|获胜|优于|胜过|略好|略优"
    r"|лучше|daha\s+iyi(?!\s+değil)|tốt\s+hơn|胜(?=[\s.,]|$))"
    rf"|比[^\n,.;不]{{1,8}}?(?:好|优|佳|强)"
    rf"|(?:{_THAN}\s*{LABEL}|[与跟和]\s*{LABEL}\s*相?比)[^\n,.;不]{{0,6}}?{_FITTER}"
    rf"|(?:の(?:方|ほう)が|(?:가|이)\s*더)(?!{_BAD}))"
)
# "Better written" and "better in tone" are praise; they count where nothing else is said.
_OUTRIGHT = (
    r"(?=\s*(?:$|[\n.,;:!)\]\"'\u2013\u2014-]|"
    rf"(?:{any_of('than because since as and overall here for by due of to so one choice')}"
    rf"|in\s+(?:every|all|general|my)|{NOUN})\b))"
    rf"(?!\s+than\s+(?:{LABEL}|the\s+other)\s+(?:in|at|on|only|when|if)\b)"
)
_NEITHER = (
    rf"(?i:neither|none)(?:\s+of\s+(?:the\s+)?\w+|\s+(?:{NOUN}|one|side)"
    rf"|\s+{LABEL}\s+nor\s+{LABEL}){{0,3}}"
    r"\s+(?:is|are|was)\s+(?:\w+\s+){0,2}?(?:better|superior|best|preferable)"
    rf"|(?i:neither)\s+{LABEL}\s+nor\s+{LABEL}(?=\s*(?:[.;,!]|$))"
    rf"|\b{any_of('its? it_is call_it call_this this_is ends?_in is declare')}"
    r"\s+an?\s+(?:\w+\s+)?(?i:tie|draw)(?![-\w])|平局|平手"
)
_PICKED = any_of(r"winner verdict choice preference (?:better|best|preferred)_\w+")
_WORSE = "(?:worse|weaker|inferior|lesser)"
_IS_BAD = (
    rf"{_VERB}\s+{any_of('schlechter pire peor pior peggiore slechter sämre dårligere')}\b|хуже"
)
_FLAWED = any_of(
    "bad wrong poor weak flawed vague verbose wordy biased harmful confusing misleading repetitive "
    "generic inaccurate incorrect redundant problematic terrible awkward dry"
)
_EXPLICIT = re.compile(
    r"\[\[\s*(?P<marked>[^\[\]\n]{1,40}?)\s*\]\](?!\s*(?:if|or|would|could|might|may|is\s+w\w+|for\s+an?\s+tie|means)\b)"
    r"(?<!\]\] or \[\[[ABC]\]\])"
    rf"|(?P<compared>{LABEL}{_COMPARISON}{LABEL})(?!\s*[<>=])"
    rf"|(?P<neither>{_NEITHER})"
    rf"|(?P<loser>{LABEL})\s+(?:loses(?:\s+to\b|(?=[.!]|\s*$))|(?:is|was)\s+"
    rf"(?:{_FILLER}){{0,2}}?(?:the\s+{_WORSE}\b|(?:worse|weaker|inferior)\s+(?:than|to)|(?:out\w+ed|beaten|surpassed)\s+by)\b|{_IS_BAD})"
    rf"|\b{any_of('loser worse worst rejected')}\s*[:=]\s*(?P<lost>{LABEL}){_AFTER}"
    rf"|{_KEYWORD}{_SEPARATOR}(?P<named>{LABEL}|{_TIE}){_AFTER}(?!\s+(?:is|was)\s+(?!less\s+{_FLAWED}\b)(?:{_FILLER})?(?:{_WORSE}|worst|not|less|false|rejected|{_FLAWED})\b)"
    rf"|{_CHOOSES}(?P<chosen>{LABEL}|(?i:neither|none)\b){_AFTER}"
    rf"|(?P<better>{LABEL})(?:{_IS_GOOD}{_OUTRIGHT}|\s*:?\s+(?:\w+ly\s+)?{_WINS}\b|{_ELSEWHERE})"
    rf"|\b(?:(?i:ranking)\s*[:=-]\s*(?:1[.)]\s*)?|1st\W{{1,3}})(?P<ranked>{LABEL})"
    r"(?!\s*[<=≈≺≪]|\s+(?:is|ties)\b|[^\n]*worst\s+to\s+best)"
    rf"|\b{_PICKED}\s*[:=]\s*(?P<numbered>[12])(?=\s*(?:$|[\n;!]|[.,](?!\d)))"
)
_ALIKE = (
    r"identical [eé]quivalent\w* gleichwertig se_valent (?:are|were)_tied they_tie gleich_gut "
    r"igual_de_\w+ (?:the_same|equal|similar)_quality "
    r"equally_(?:good|bad|well|strong|weak|helpful|valid|correct|matched|accurate) "
    r"(?:are_equal|both_are_(?:\w+_)?(?:bad|wrong|poor|good|fine))(?=\W*$) "
    r"(?:no|(?:n't|not)_(?:see|have|find)_an?)_(?:\w+_)?(?:winner|preference|difference)"
)
_PRAISE = re.compile(
    rf"(?P<loser>{LABEL})\s+(?:is|was)\s+(?:{_FILLER}){{0,2}}?"
    rf"less\s+(?!{_FLAWED}\b)\w+\s+than\b"
    rf"|(?P<better>{LABEL})(?:{_IS_GOOD}|{_SEEMS_GOOD}|:?\s?[✅✔✓👍])"
    rf"|(?P<neither>{any_of(_ALIKE)}(?!\s+in\b)|一样好|同样好|不分上下|都不好|都很差|都好|равны)"
    r"(?![^.!?\n]*\b(?:but|however|yet|although)\b)"
)
_DECLINES = re.compile(
    r"(?i:\W*(?:(?:i'?m|i am|i|unfortunately)\W+)*"
    r"(?:as an? (?:\w+ )?(?:ai|model)\b|sorry\b|apologi[sz]e))"
)
# Before what is no verdict: a negation, a condition, or what another text says.
_UNSAID = re.compile(
    r"(?:(?i:\bnot|n't|\bnever|\bunlikely|\bnor|\bif|\bwhether|\bunless|\bhad|\balthough|\bthough|\bwhile"
    r"|\bwhereas|\binitial(?:ly)?|\boriginal(?:ly)?|\bearlier|\bprevious(?:ly)?"
    r"|\bnicht|\bpas|\bnão|\b\u043d\u0435|不)[^,:]{0,40}$|\b"
    + any_of(
        "(?:say|tell|contain|instruct|demand|claim|spell|ask|end)(?:s|ing) said told asked_me "
        "writ(?:es?|ing) wrote includ(?:es?|ing) quot(?:es?|ing|ed)"
    )
    + r"\b[^,:]{0,40}:?\s*[\"'(]*$"
    r"|\b(?i:(?:no|little)\s+(?:\w+\s+){0,2}?(?:reason|evidence|basis|grounds|proof)\s+(?:to|that|for|why)"
    r"|fail\s+to\s+see|no\s+way|tempted\s+to|might\s+think|hardly\s+any\w*|disagree|wrong\s+to|see\s+why\s+(?:one|some\w*|people|others|you|users)"
    r"|(?:some|one|someone|others|few)(?!\s+I\b)\s+(?:\w+\s+){0,2}?(?:would|could|might|may)"
    r")\b(?:(?!\b(?:so|but)\b)[^,:]){0,40}$"
    r"|\b(?:I (?:\w+ )?doubt|(?i:nobody|no one) (?:would|could|can)|(?:false|untrue) that"
    r"|impossible to say|imposible decir)\b[^,:]{0,40}$"
    rf"|\b(?:than|over)\s+$|{_THAN}\s*(?:{NOUN}\s*)?$|^\W*(?i:if)\s+{LABEL}[^,]*,\s*$"
    r"|\b(?:answer|state|argue|conclude|respond|suggest|recommend)s:[^,]{0,40}$)"
)
# "Grammar: A is better." is said of a part.
_OF_PART = re.compile(
    rf"(?<![^\s*])(?!{_KEYWORD}|{any_of('total summary correction edit update')}\b)"
    rf"[A-Z][\w ]{{1,30}}:\s(?P<better>{LABEL}){_IS_GOOD}"
)
# A sentence on one criterion: "Style winner: A", "In style, A is better", "A wins on style".
_CRITERION = (
    r"(?!(?i:fairness|business)\b)"
    + any_of(
        r"\w+ness clarity brevity simplicity creativity originality readability sensitivity safety "
        "specificity factuality objectivity accuracy relevance coherence fluency honesty "
        r"styles? tone contents? details? depth format\w* structure length grammar wording writing "
        "efficiency presentation humou?r speed language"
    )
    + r"\b"
)
_ON = rf"{any_of('in on for at by with regarding concerning as_for')}\s+(?:\w+\s+){{0,2}}?"
_PART = re.compile(
    rf"(?![^\n]*{any_of('but overall so hence thus therefore final(?:ly)? however')}\b)"
    rf"[\W\d]*(?:{_ON}{_CRITERION}|(?i:if)\s+(?:\w+\s+){{0,3}}?{_CRITERION}[^,]*,"
    rf"|(?:\w+\s+){{0,2}}?{_CRITERION}(?:\s+\w+)?\s*:"
    rf"|{LABEL}\s+(?:is|was)\s+the\s+{_CRITERION}\s+\w+\W*$"
    rf"|(?:(?i:the)\s+)?{_CRITERION}\s+of\b|{LABEL}'s\s+{_CRITERION}"
    rf"|(?:[\w,]+\s+){{0,3}}?{LABEL}(?:{_IS_GOOD}|\s+(?:\w+ly\s+)?{_WINS})\s+{_ON}{_CRITERION}\W*$)"
)
_SENTENCE = re.compile(r"[^.;!\n]+(?:[.;!\n]+|$)")
_ASKED = r"[^.!?\n]{0,60}\?"
_LOST = re.compile(rf"{any_of('worse worst weaker weakest inferior losing')}\s+$")
_ALONE = re.compile(rf"({LABEL}|[12]|(?:{NOUN}[\s_:-]*)?(?i:[abc]))(?:\s*\([^()]*\))?")
_COMPARED = re.compile(rf"({LABEL}){_COMPARISON}({LABEL})")
_ENDING = re.compile(
    r"(?:(?<!\d)(?<!vs)[.!?\n]\s*|[a-z]{3},\s(?:but\s)?|\b(?i:think|believe|say|so|thus|hence|therefore)\s|^\w+ly\s)"
    rf"({LABEL})[.!\s\"')]*$"
)
_LEADING = re.compile(
    rf"[\W_]*(?!(?i:first|second)\s*,)({LABEL}|[12](?=\s*(?:\n|$))|{_TIE}(?=\s*(?:$|[\n.:,;]))){_AFTER}"
    r"(?=\s*(?:$|[\n.:,;)\](\"\u2013\u2014-])|\s+(?:because|since|as|for|by\s+(?:far|a))\b)(?!\s*\?)"
)
# "A: wrong, B: right" goes through the letters, and "A: wrong" is no vote for A.
_BESIDE = re.compile(
    rf"(?:[,/|:!)\]\u2013]|\s(?=[^\w\s]*{LABEL}\s?[:=(\u2013-]))[^\w\n]*({LABEL})"
    r"(?=\s*(?:$|[:=(,)|\u2013-])|\s+for\b)"
)
_BELITTLED = re.compile(
    r"[\s:=(\[|\u2013\u2014-]*(?:[❌✗✘✖👎]|(?:\w+ly\s+|too\s+)?(?:"
    + any_of(
        "worse worst wrong bad poor weak weaker inferior incorrect inaccurate false unhelpful "
        "terrible awful harmful unsafe lacks misses nope "
        r"vague lose[rs]? losing fail(?:s|ed|ure)? reject(?:ed)? last "
        r"(?<!\()(?:second|2nd) (?:not|less)_(?:as_|so_|very_)?"
        "(?:good|helpful|correct|right|accurate|clear|useful)"
    )
    + r"\b|(?i:no)(?=\s*(?:$|[.,;)\n]))))"
)
# A heading such as "### A", "Answer A", "A:" or "A" above a list is no verdict of a cut-off reply.
_HEADED = re.compile(
    rf"\s*(?:#|\w\)\s*\n)|[^\w\n]*(?:(?:(?i:the)\s+)?{NOUN}\b|\w[^\w\n]*:|\w\W*\n\s*(?:[-*+•]|\d+[.)])\s)"
)
_NO_WINNER = re.compile(  # keys
    any_of("loser worse reject second least worst error grade model (?:section|class|status)$")
)
_NO_ARTICLE = rf"\s*(?:$|[\n.:;,!)\]=<>|]|{_VERB}\b|{_WINS}\b)"  # behind the letter a
_TABLE = re.compile(r"(?:^|\n)\|.*\|(?:\n\|.*\|)+")
_LOOKALIKES = str.maketrans("АВСΑΒ🅰🅱", "ABCABAB")
_MARKS = str.maketrans("【】「」『』《》。、“”\u2018\u2019", "[][][][].,\"\"''")


def parse_verdict(reply: str, *, cut_off: bool = False) -> str | None:
    r"""Return the verdict of a reply: A, B or C (neither); None if it has none.

    Only the text behind the thinking is read. The last explicit verdict counts: `[[A]]`, `[[A>B]]`,
    `\boxed{A}`, JSON, "verdict: A", "I prefer A", "A is better", a last line that is a letter.
    Without one: a letter that the reply begins with, then ratings of both ("A: 8/10, B: 6": the
    higher one; of one response alone they are no vote), then praise that is all for one side. What
    is negated, asked, conditional or quoted from a response is no verdict; A as an article is none.
    A sentence on one criterion ("in style, A is better") counts only where nothing else does.

    Args:
        reply: what the judge wrote.
        cut_off: it was cut at its limit of tokens: explicit verdicts alone count, if they agree.
    """
    behind = without_thoughts(reply[-MOST_READ:])
    if behind is None:
        return None
    text = _plain(behind)
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    if len(set(_verdicts(_OF_PART, text))) > 1:
        text = _OF_PART.sub("", text)
    sentences = _SENTENCE.findall(text)
    parts = [each for each in sentences if _PART.match(each)]
    whole = "".join(each for each in sentences if each not in parts)
    if cut_off:
        begun = None if _HEADED.match(behind) else _value(lines[0])
        said = re.sub(r"(?<!\w)\w+'s?$", "", whole.rstrip())
        said = re.sub(r"\s(?:for|but|only|when|in|on)$", " if", said)
        return _only({*_verdicts(_EXPLICIT, said), begun} - {None})
    explicit = list(_verdicts(_EXPLICIT, whole if parts else text))
    alone = set(map(_value, lines))
    if not explicit and len(alone) > 1 and None not in alone:
        return None  # "Answer A\nAnswer B" names both
    if last := _value(lines[-1]):
        explicit.append(last)
    elif ending := _ENDING.search(text):
        explicit.append(letter_of(ending.group(1)))
    if explicit:
        return explicit[-1]
    found = _leading(text) or by_ratings(lines)
    found = found or _only(set(_verdicts(_EXPLICIT, "".join(parts))))
    return found or (None if _DECLINES.match(text) else _only(set(_verdicts(_PRAISE, text))))


def _plain(text: str) -> str:
    """Return the text without markup, what is structured as `[[verdict]]`."""
    text = re.sub(r"(\d*)([¼-¾⅐-⅞])", _decimal, _without_json(text))
    text = re.sub(r"[★⭐]+", lambda m: str(len(m.group())), text)
    text = unicodedata.normalize("NFKC", text).translate(_MARKS)
    text = "".join(c for c in text if unicodedata.category(c) != "Cf" and c != "\ufe0f")
    text = re.sub(r"(?<!\w)[АВСΑΒ🅰🅱](?!\w)", lambda m: m.group().translate(_LOOKALIKES), text)
    text = re.sub(r" ?\n[ \n]*", "\n", re.sub(r"[^\S\n]+", " ", text))
    text = re.sub(
        r"<\|[^|>\n]*\|>|</?s>|~~.*?~~|[*`#$\\](?=\W|_)|[*`#]|(?<!\w)__|__(?!\w)", "", text
    )
    text = re.sub(r"\\(?:text|math)\w*\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\?\bboxed\s*\{([^{}]*)\}", r" [[\1]] ", text)
    text = re.sub(r"<(\w+)>\s*([^<>\n]{1,30}?)\s*</\1>", _tagged, text)
    text = re.sub(
        r"^[12](?= is better\W*$)|(?<=I prefer )[12](?=\W*$)",
        lambda found: found.group().translate(NUMBERED),
        text,
    )
    if not re.search(r"(?<![A-Za-z0-9])[AB](?![A-Za-z0-9])", text):  # all in lower case
        text = re.sub(
            rf"(?<![\w'])(?:b(?![\w'])|a(?={_NO_ARTICLE}))",
            lambda found: found.group().upper(),
            text,
        )
    return _TABLE.sub(_without_table, text)


def _decimal(found: re.Match[str]) -> str:
    return f"{int(found.group(1) or 0) + unicodedata.numeric(found.group(2)):g}"


def _tagged(found: re.Match[str]) -> str:
    tag, said = found.groups()
    letter = letter_of_key(tag) if said.isdigit() else None
    return f" {letter}: {rating_of(tag, said)}, " if letter else f" [[{said}]] "


def _without_table(table: re.Match[str]) -> str:
    """Return a table's rows as lines such as "Total: A: 14, B: 16" or "A: 14"."""
    rows = [
        [c.strip() for c in line.strip()[1:-1].split("|")] for line in table.group().split("\n")
    ]
    head, lines = rows[0], []
    named = [(i, _value(cell)) for i, cell in enumerate(head) if _value(cell) in ("A", "B")]
    for row in (row for row in rows[1:] if any(re.search(r"\w", cell) for cell in row)):
        cells = [f"{letter}: {row[i]}" for i, letter in named if i < len(row)]
        rated = [i for i in range(1, len(row)) if _value(row[0]) and re.fullmatch(SCORE, row[i])]
        if not named and len(rated) > 1:
            lines += [f"{head[i]}: {row[0]}: {row[i]}" for i in rated if i < len(head)]
        else:
            lines.append(": ".join([row[0], ", ".join(cells)] if cells else row))
    return "\n" + "\n".join(lines)


def _without_json(text: str) -> str:
    text = re.sub(r"(?<=[{\[,:])(\s*)'([^'\n]*)'(?=\s*[,:}\]])", r'\1"\2"', text)  # of Python
    kept, end = "", 0
    for start in (found.start() for found in re.finditer(r"\{|\[(?=\s*\{)", text)):
        if start < end:
            continue
        try:
            node, stop = json.JSONDecoder().raw_decode(text, start)
            verdict = _of_json(node)
        except ValueError:
            continue
        except RecursionError:
            break
        kept, end = kept + text[end:start] + (f" [[{verdict}]] " if verdict else " "), stop
    return kept + text[end:]


def _of_json(node: Any) -> str | None:
    """Return the verdict in JSON: of a key that is named like one, of ratings, of a bare letter."""
    weighed = list(_items(node))
    items = [(key, value) for key, value, _ in weighed]
    listed = [key for key, _ in items if key in ("choices", "options")]
    named = []
    for key, value, weight in weighed:
        words = key.replace("_", " ")
        if key in listed or (isinstance(value, int) and (listed or re.search("index|idx", key))):
            continue  # a place may be counted from 0 or 1
        if isinstance(value, str):
            words = re.sub(rf"^{TOTAL.pattern} ", "", words)
        if re.fullmatch(rf"\W*\w*{_KEYWORD}\w*\W*", words) or "winner" in key:
            exact = re.fullmatch(_KEYWORD, words) is not None
            named.append(((weight > 0, exact, weight), value))
    named.sort(key=lambda each: each[0])
    for _, value in reversed(named):
        if value is not None and (
            found := _value(str(value)) or (isinstance(value, str) and parse_verdict(value))
        ):
            return found
    true = {letter_of_key(key) for key, value in items if value is True and "better" in key}
    if better := _only(true):
        return better
    rated = [
        f"{letter_of_key(key)}: {rating_of(key, value)}"
        for key, value in items
        if letter_of_key(key) and (is_number(value) or re.fullmatch(r"[\d./ ]+", str(value)))
    ]
    for key, each in node.items() if isinstance(node, dict) else ():
        if key.lower() in ("scores", "ratings") and isinstance(each, list) and len(each) == 2:
            rated += [f"{letter}: {value}" for letter, value in zip("AB", each, strict=True)]
    if isinstance(node, list):
        rated += [line for each in node if isinstance(each, dict) for line in _of_entry(each)]
    if rated:
        return by_ratings(rated)
    texts = [
        v for k, v in items if isinstance(v, str) and k not in listed and not _NO_WINNER.match(k)
    ]
    bare = [found for text in texts if (found := _value(text))]
    first = any("rank" in key.lower() for key, _ in items)  # the best one leads
    return (
        bare[0 if first else -1] if bare else parse_verdict(texts[0]) if len(texts) == 1 else None
    )


def _items(node: Any, key: str = "", weight: int = 0) -> Iterator[tuple[str, Any, int]]:
    """Yield every value that is no container, with its keys; the overall one weighs most."""
    if isinstance(node, dict):
        if any(isinstance(each, str) and TOTAL.fullmatch(each) for each in node.values()):
            weight = 1
        for name, value in node.items():
            nested = f"{key} {name}" if key and isinstance(value, int | float) else str(name)
            overall = weight > 0 or TOTAL.search(str(name))
            yield from _items(value, nested, 1 if overall else weight - 1)
    elif isinstance(node, list):
        for value in node:
            yield from _items(value, key, weight)
    else:
        yield key, node, weight


def _of_entry(entry: dict[str, Any]) -> Iterator[str]:
    """Yield the rating of an entry such as {"model": "A", "rank": 1}."""
    letters = [
        found for value in entry.values() if isinstance(value, str) and (found := _value(value))
    ]
    for key, value in entry.items():
        if letters and is_number(value):
            yield f"{letters[0]}: {rating_of(key, value)}"


def _value(text: str) -> str | None:
    """Return the verdict that a text is, and nothing else."""
    text = text.strip(" \t\"'.,:;!-_")
    while text[:1] + text[-1:] in ("()", "[]", "{}"):
        text = text[1:-1].strip(" \"'")
    if re.fullmatch(_TIE, text):
        return "C"
    if re.fullmatch(r"[12]\s*[<>=]+\s*[12]", text):
        text = text.translate(NUMBERED)
    if found := _COMPARED.fullmatch(text):
        return _compared(found)
    found = _ALONE.fullmatch(text)
    belittled = found and _BELITTLED.match(text, found.end(1))
    return letter_of(found.group(1)) if found and not belittled else None


def _compared(found: re.Match[str]) -> str | None:
    first, second = letter_of(found.group(1)), letter_of(found.group(3))
    if first == second or "C" in (first, second):
        return None
    return first if found.group(2)[0] in ">≻≫" else second if found.group(2)[0] in "<≺≪" else "C"


def _verdicts(grammar: re.Pattern[str], text: str) -> Iterator[str]:
    for found in grammar.finditer(text):
        before = re.split(r"[.!?;\n]", text[max(0, found.start() - 80) : found.start()])[-1]
        after = text[found.end() :]
        if _UNSAID.search(before) or is_doubted(before, after) or re.match(_ASKED, after):
            continue
        kind = str(found.lastgroup)
        verdict = "C" if kind == "neither" else _value(found.group(kind))
        if kind in ("loser", "lost") or (kind == "named" and _LOST.search(before)):
            verdict = {"A": "B", "B": "A"}.get(str(verdict))
        if verdict:
            yield verdict


def _leading(text: str) -> str | None:
    """Return the letter that a reply begins with, unless its lines go through the letters."""
    if marked := re.match(r"\W*\[\[([^\[\]]{1,40})\]\](?!\s*or\b)", text):
        return _value(marked.group(1))
    found = _LEADING.match(text)
    if found is None:
        return None
    letter, said = _value(found.group(1)), text[found.end(1) :]
    first, *parts = re.split(r"[.;]\s|\n", said)
    others = {_value(each.group(1)) for part in parts if (each := _LEADING.match(part))}
    others |= {letter_of(each) for each in _BESIDE.findall(first)}
    return None if others - {letter} or _BELITTLED.match(said) else letter


def _only(found: set[Any]) -> str | None:
    return found.pop() if len(found) == 1 else None
