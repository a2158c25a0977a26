"""Talk to a policy, or to two side by side: `python -m rlhf_lightning.chat RUN [RUN]`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import takewhile
from pathlib import Path
from textwrap import TextWrapper
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.live import Live
from rich.segment import SegmentLines
from rich.table import Table
from rich.text import Text as Shown

from rlhf_lightning.app.command_line import run_command, say
from rlhf_lightning.app.config.commands import ChatSettings
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.groups import MODELS, Target
from rlhf_lightning.app.config.inherit import models_of, read_training
from rlhf_lightning.app.config.targets import nodes
from rlhf_lightning.callbacks.console import printable
from rlhf_lightning.data.collate import PromptCollator
from rlhf_lightning.data.encode import encode_prompt
from rlhf_lightning.data.records import PromptRecord
from rlhf_lightning.evaluation.generate import Sampling, sample_batches
from rlhf_lightning.models.classifiers import max_positions, prompt_room
from rlhf_lightning.models.factory import load_scalar_model
from rlhf_lightning.models.precision import in_precision
from rlhf_lightning.models.quiet import quieten
from rlhf_lightning.preferences.candidates import LoadedPolicy, load_candidate_policy
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.scorers.base import RewardModelScorer, Scorer
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import is_available
from rlhf_lightning.runs.metric_catalog import counted
from rlhf_lightning.text.decode import response_texts
from rlhf_lightning.text.messages import Messages, Text
from rlhf_lightning.text.tokens import ControlTokens

with suppress(ImportError):  # a Python may be built without it
    import readline  # noqa: F401  `input` then edits lines and recalls earlier ones

UNLIMITED = 1 << 30
NUM_TOKENS = 512  # of a response at most, where the command line does not say
HELP = "/save keeps which response is better, /new starts over, /quit or Ctrl-D ends"


def tell(text: str) -> None:
    """Write lines that are seen at once; a terminal gets them broken between words."""
    if (console := Console()).is_terminal:
        lines = TextWrapper(console.width, break_long_words=False, break_on_hyphens=False)
        text = "\n".join(map(lines.fill, text.splitlines()))
    say(text)


class Side(NamedTuple):
    """A policy: its model's folder or hub name, the loaded model, and the scorer of its run."""

    source: str
    policy: LoadedPolicy
    precision: Any
    scorer: Target | None


class Response(NamedTuple):
    """A response as it is shown: its text, a note, and whether it ended by itself."""

    text: str
    note: str = ""
    finished: bool = False


def load_side(name: str) -> Side:
    """Return the policy of a run, a folder or a hub name.

    Raises:
        ConfigError: if the run trained none, or has not exported it.
    """
    folder, source, scorer = RunFolder(Path(name)), name, None
    precision: Any = "bf16-mixed" if torch.cuda.is_available() else "32-true"
    if folder.config.is_file():
        trained = read_training(folder)
        if not trained.spec.trains_policy:
            raise ConfigError(f"run={name} trained a {trained.title}: give the run of a policy")
        models, precision = models_of(trained, folder), trained.compute_precision
        source = models[trained.stage]
        if not is_available(source):
            raise ConfigError(f"run={name} has no export/: make it with  rlhf-export {name}")
        moved = {f"artifacts.{kind}": models[kind] for kind in MODELS if kind in models}
        scorer = trained.updated(moved | {"trainer.precision": precision}).scorer
    tell(f"loading {name}")
    hub: dict[str, Any] = {"revision": None, "trust_remote_code": False}
    policy = load_candidate_policy(source, chat_template_arguments=None, precision=precision, **hub)
    return Side(source, policy, precision, scorer)


def load_scorer(settings: ChatSettings, sides: Sequence[Side]) -> Scorer | None:
    """Return what scores the responses: that of the settings, or of the first run that has one.

    It prints why nothing does.
    """
    side = next((side for side in sides if side.scorer is not None), sides[0])
    reward, target = settings.reward, settings.scorer
    if reward is None and target is None and (target := side.scorer) is not None:
        node = target.read("scorer")
        code = [f"{key}={at}" for one in nodes(node) for key, at in one.named_again.items()]
        if code:
            tell(f"no scores: the run has {', '.join(code)}: name it again, --reward FILE.py:NAME")
            return None
        if getattr(node.call, "holds", None) == "adapter":  # the artifact has it merged
            reward, target = target.get("source"), None
    if reward is None and target is None:
        return None
    vocabularies = [one.policy.tokenizer.get_vocab() for one in sides]
    if vocabularies[0] != vocabularies[-1]:
        tell("no scores: the two have different tokenizers")
        return None
    load = partial(load_scalar_model, source=reward, precision=side.precision)
    of_model = partial(RewardModelScorer, load, policy=side.source, source=reward)
    scorer: Scorer = target.build() if target is not None and reward is None else of_model()
    for model in scorer.build():
        model.to(side.policy.model.device)
    return scorer


class Chat:
    """A conversation with one or two policies, which answer the same messages.

    It continues with the first one's response, or with the better one after `/save`.

    Raises:
        ConfigError: if one of them takes conversations and the other plain text.
    """

    def __init__(self, settings: ChatSettings, sides: list[Side], scorer: Scorer | None) -> None:
        self.settings, self.sides, self.scorer = settings, sides, scorer
        self.console = Console(highlight=False)
        templates = {bool(side.policy.tokenizer.chat_template) for side in sides}
        if len(templates) > 1:
            raise ConfigError(f"run={settings.run}: one has a chat template, the other has none")
        (self.has_turns,) = templates
        limits = [max_positions(side.policy.model.model) or UNLIMITED for side in sides]
        self.length = settings.max_new_tokens or min(NUM_TOKENS, min(limits) // 2)
        self.messages: Messages = ()
        self.last: tuple[Text, list[Response]] | None = None
        self.controls = [ControlTokens(side.policy.tokenizer) for side in sides]
        self.turn = -1  # number of the last prompt, of which the noise is a function

    def take(self, line: str) -> None:
        """Do what a line of the user's says: a command, or a prompt to respond to."""
        if line == "/save":
            self.save()
        elif line == "/new":
            self.messages, self.last = (), None
            tell("a new conversation")
        elif line == "/help":
            tell(HELP)
        elif line.startswith("/") and " " not in line:
            tell(f"{line} is no command: {HELP}")
        elif token := self._special(line):
            tell(f"not sent: the model reads {token!r} as a special token: leave it out")
        elif line:
            self.turn += 1
            said = (*self.messages, {"role": "user", "content": line})
            prompt: Text = said if self.has_turns else line
            responses = self._respond(prompt, self.sides, [])
            text = responses[0].text
            for control in self.controls:  # a message that spells control tokens is refused
                text = control.disarmed(text)
            self.messages = (*said, _message(text))
            self.last = prompt, responses

    def save(self) -> None:
        """Append the last two responses to the file of preferences, once told which is better."""
        if self.last is None:
            tell("there is nothing to save: ask something first")
            return
        prompt, responses = self.last
        if len(responses) == 1:
            responses = self._respond(prompt, self.sides, responses)
            self.last = prompt, responses
        if fault := self._fault(responses):
            tell(f"not saved: {fault}")
            return
        better = input("Which is better, 1 or 2? Enter saves nothing: ").strip()
        if better not in ("1", "2"):
            if better:
                tell("not saved: 1 or 2")
            return
        texts = [one.text for one in responses]
        pair = texts if better == "1" else texts[::-1]
        written = [[_message(text)] for text in pair] if self.has_turns else pair
        row = {"prompt": prompt, "chosen": written[0], "rejected": written[1]}
        with self.settings.save.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
        self.messages, self.last = (*self.messages[:-1], _message(pair[0])), None
        tell(f"saved in {self.settings.save}")

    def _special(self, *texts: str) -> str | None:
        """Return the first special token of a policy's that a text spells, or None."""
        found = (control.spelled_in(*texts) for control in self.controls)
        return next(filter(None, found), None)

    def _fault(self, responses: Sequence[Response]) -> str:
        """Return why two responses are no preference; "" if they are one."""
        texts = [one.text for one in responses]
        empty = [not text.strip() for text in texts]
        cut = [not one.finished for one in responses]
        if any(empty):
            return f"{_which(empty)} empty"
        if texts[0] == texts[1]:
            return "the responses are equal"
        if any(cut):
            fix = "ask for a shorter one, or talk to one policy alone, which responds twice"
            return f"{_which(cut)} cut off at max_new_tokens={self.length}: {fix}"
        token = self._special(*texts)
        return f"a response has the special token {token!r}" if token else ""

    def _respond(self, prompt: Text, asked: list[Side], known: list[Response]) -> list[Response]:
        """Return `known` and a response of each policy, shown side by side while it is written."""
        responses, console = [*known], self.console
        alone = len(known) + len(asked) == 1
        with Live(console=console, transient=True, auto_refresh=False) as live:

            def show(text: str) -> None:
                if not text.strip():  # it has only begun
                    return
                table = self._table([*responses, Response(text)], alone=alone)
                end = console.render_lines(table, pad=False)[-(console.height - 2) :]
                live.update(SegmentLines(end, new_lines=True), refresh=True)

            for side in asked:
                responses.append(self._write(prompt, len(responses), side, show))
        console.print(self._table(responses, alone=alone), soft_wrap=alone)
        return responses

    def _table(self, responses: Sequence[Response], *, alone: bool) -> Shown | Table:
        cells = [Shown.assemble(printable(one.text), "\n", (one.note, "dim")) for one in responses]
        if alone:
            return cells[0]
        table = Table(box=None, expand=True, padding=(0, 2, 0, 0))
        for number, name in enumerate((*self.settings.run, "")[:2], 1):
            name = _short(name, self.console.width // 2 - 5) if len(self.sides) > 1 else ""
            table.add_column(Shown(f"{number}  {name}", overflow="fold"), ratio=1, overflow="fold")
        table.add_row(*cells)
        return table

    def _write(self, prompt: Text, row: int, side: Side, show: Callable[[str], None]) -> Response:
        """Return the response with the noise of a row; `show` is given its text so far."""
        policy, tokenizer = side.policy.model, side.policy.tokenizer
        generator = side.policy.generator
        room = prompt_room(policy, UNLIMITED, self.length)
        encoded = encode_prompt(PromptRecord(prompt), tokenizer, max_length=room)
        if encoded is None:
            raise ValueError(f"the conversation has more than {room} tokens: /new starts over")
        ids = encoded.input_ids.tolist()

        def watch(tokens: torch.Tensor) -> None:
            written = takewhile(lambda token: token not in generator.stop_ids, tokens[0].tolist())
            (text,) = response_texts([ids], [list(written)], tokenizer)
            show(text.rstrip("\ufffd"))  # a character that has begun

        generator.watch = watch
        with in_precision(side.precision, policy.device):
            found = sample_batches(
                policy,
                [PromptCollator(generator.pad_token_id)([(encoded, row)])],
                Sampling(generator, tokenizer, self.settings.temperature, self.length),
                noise=RowNoise(self.settings.seed, "generate", self.turn),
                scorer=self.scorer,
            )
        finished, note = found.finished[0], counted(found.lengths[0], "token")
        note = note if self.scorer is None else f"score {found.scores[0]:.2f}, {note}"
        note += "" if finished else f", cut off at max_new_tokens={self.length}"
        return Response(found.completions[0], note, finished)


def _message(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def _which(flags: Sequence[bool]) -> str:
    return "both responses are" if all(flags) else f"response {flags.index(True) + 1} is"


def _short(name: str, width: int) -> str:
    """Return a name, of a path that is too wide its last two parts, cut in the middle."""
    if len(name) > width:
        name = "/".join(Path(name).parts[-2:])
    half = width // 2 - 2
    return name if len(name) <= width else f"{name[:half]}...{name[-half:]}"


def run(settings: ChatSettings) -> None:
    """Talk until the user ends it.

    Raises:
        ConfigError: if there is no policy to talk to, or the two do not fit together.
    """
    quieten()
    sides = [load_side(name) for name in settings.run]
    chat = Chat(settings, sides, load_scorer(settings, sides))
    way = "" if chat.has_turns else "without a chat template each line is a prompt of its own\n"
    tell(f"seed={settings.seed} max_new_tokens={chat.length}\n{way}{HELP}")
    with suppress(EOFError):
        while (line := input("\n> ").strip()) != "/quit":
            try:
                chat.take(line)
            except KeyboardInterrupt:
                tell("stopped")
            except (ValueError, TypeError, RuntimeError) as error:
                tell(f"error: {error}")


def main() -> None:
    """Run the command line."""
    run_command("chat", run)
