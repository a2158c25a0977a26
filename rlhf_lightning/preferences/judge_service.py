"""A model behind an OpenAI-compatible endpoint: one request, its reply and its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rlhf_lightning import arguments
from rlhf_lightning.arguments import Above0, Address, AtLeast0, Count, CountOrZero, Name
from rlhf_lightning.hparams import Checked
from rlhf_lightning.preferences.annotators import AnnotationError
from rlhf_lightning.rollout.scorers.hparams import check_url, key_in

NUM_SHOWN = 200  # characters of an error that a service sent
BYTES_PER_TOKEN = 3  # of a text whose tokens were not counted; overestimates
TOP_TOKENS = 20  # what the OpenAI API allows
GO_ON = "use resume=auto, or in an evaluation judge.known=FOLDER/judge/judgements.jsonl"


@dataclass(frozen=True)
class JudgeHparams(Checked):
    """Endpoint, sampling, limits and prices of a judge.

    Args:
        model: name of the model at the endpoint.
        base_url: address of the endpoint, `http://127.0.0.1:8001/v1`; None is OpenAI's.
        api_key_env: name of the environment variable that holds the key; None for a service that
            wants none.
        timeout: seconds without a byte of the reply.
        max_retries: attempts after connection errors, time-outs, 408, 409, 429 and 5xx, which the
            client of the `openai` package makes, after what the service asks for.
        concurrency: largest number of requests at once.
        temperature: temperature of the judge's sampling; None leaves it to the service.
        max_tokens: longest reply in tokens, its thoughts included; None leaves it to the service.
        max_completion_tokens: the same under the name that newer services want; it replaces
            `max_tokens`.
        input_price: price of a million tokens that are sent, in the budget's currency.
        output_price: price of a million tokens of replies.
        max_cost: ask no more once this is spent; requests under way still count. None for no limit.
            Tokens that the service does not count are estimated from the text.
    """

    model: Name
    base_url: Address | None = None
    api_key_env: arguments.SecretName | None = "OPENAI_API_KEY"
    timeout: arguments.Seconds = 60.0
    max_retries: CountOrZero = 5
    concurrency: Count = 4
    temperature: AtLeast0 | None = 0.0
    max_tokens: Count | None = 16
    max_completion_tokens: Count | None = None
    input_price: AtLeast0 = 0.0
    output_price: AtLeast0 = 0.0
    max_cost: Above0 | None = None

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.base_url is not None:
            check_url(self.base_url, "base_url", "api_key_env")


class Reply(NamedTuple):
    """One reply of a judge.

    Args:
        text: text of the reply, or the service's sentence where it refused the request.
        refused: the service would not take the request.
        cut_off: whether it ended at the limit of tokens or in a filter.
        top_tokens: token -> log-probability at the first place, where they were asked for.
        counts: `input_tokens`, `output_tokens`, `retries` and `estimated` of a `Judgement`.
    """

    text: str
    refused: bool = False
    cut_off: bool = False
    top_tokens: Mapping[str, float] = {}
    counts: Mapping[str, Any] = {}


class JudgeService:
    """Sends requests to the endpoint of a judge; `openai` makes the retries.

    Args:
        hparams: endpoint, sampling and limits.

    Raises:
        ValueError: if `api_key_env` names a variable that holds no key.
        AnnotationError: if the `openai` package is not installed.
    """

    def __init__(self, hparams: JudgeHparams) -> None:
        try:
            import openai
        except ImportError as error:
            raise AnnotationError("a judge needs openai: pip install -e '.[judge]'") from error
        self._api, self.hparams = openai, hparams
        self._key = key_in("judge.api_key_env", hparams.api_key_env)
        self._client = openai.OpenAI(
            # The client wants some key, also where the service wants none.
            api_key=self._key or "none",
            base_url=hparams.base_url or "https://api.openai.com/v1",
            timeout=hparams.timeout,
            max_retries=hparams.max_retries,
        )

    def ask(
        self, messages: Sequence[Mapping[str, str]], *, logprobs: bool, extra: Mapping[str, Any]
    ) -> Reply:
        """Return the reply to one conversation.

        Args:
            messages: messages with role and content.
            logprobs: ask for one token and the likeliest ones in its place.
            extra: further keys of the request.

        Raises:
            AnnotationError: if there is none, with the fix.
        """
        api, hparams = self._api, self.hparams
        limit = "max_tokens" if hparams.max_completion_tokens is None else "max_completion_tokens"
        options: dict[str, Any] = {limit: getattr(hparams, limit)}
        if logprobs:
            options = {limit: options[limit] and 1, "logprobs": True, "top_logprobs": TOP_TOKENS}
        options["temperature"] = hparams.temperature
        try:
            answer = self._client.chat.completions.with_raw_response.create(
                model=hparams.model,
                messages=messages,  # type: ignore[arg-type]
                extra_body=extra,
                **{key: value for key, value in options.items() if value is not None},
            )
            return _reply(answer.parse(), messages, answer.retries_taken, logprobs)
        except (api.BadRequestError, api.UnprocessableEntityError) as error:
            return Reply(self._shown(error), refused=True)
        except (api.APIError, AttributeError, LookupError, TypeError, ValueError) as error:
            shown = self._shown(error)
            if not isinstance(error, api.APIError):
                shown = f"no chat completion: {answer.text[:NUM_SHOWN]!r}"
            keys = f"judge.model, judge.api_key_env={hparams.api_key_env}, judge.timeout"
            raise AnnotationError(
                f"the judge at {self._client.base_url} failed ({shown}): check judge.base_url, "
                f"{keys}, judge.max_retries and judge.concurrency; {GO_ON}"
            ) from error

    def _shown(self, error: Any) -> str:
        cause = f" ({error.__cause__})" if error.__cause__ else ""  # "Connection error." alone
        text = " ".join(f"{error}{cause}".split())
        return (text.replace(self._key, "***") if self._key else text)[:NUM_SHOWN]


def _reply(answer: Any, asked: Sequence[Mapping[str, str]], retries: int, logprobs: bool) -> Reply:
    """Read a chat completion, which the client does not check."""
    choice = answer.choices[0]
    text = choice.message.content or ""
    if isinstance(text, list):  # parts, as some services write them
        text = "".join(part["text"] for part in text if part["type"] == "text")
    if not isinstance(text, str):
        raise TypeError("the content is no text")
    top: dict[str, float] = {}
    if logprobs:
        if not (choice.logprobs and choice.logprobs.content):
            raise AnnotationError("the judge gives no log-probabilities: use judge.read=text")
        top = {each.token: each.logprob for each in choice.logprobs.content[0].top_logprobs}
    sent = "".join(message["content"] for message in asked)
    usage, both = answer.usage, (sent, text)
    tokens = [] if usage is None else [usage.prompt_tokens, usage.completion_tokens]
    estimated = not tokens or not all(isinstance(each, int) and each >= 0 for each in tokens)
    if estimated:
        tokens = [len(each.encode(errors="replace")) // BYTES_PER_TOKEN + 1 for each in both]
    counts = {"input_tokens": tokens[0], "output_tokens": tokens[1], "retries": retries}
    cut_off = choice.finish_reason in ("length", "content_filter")
    return Reply(text, False, cut_off, top, counts | {"estimated": estimated})
