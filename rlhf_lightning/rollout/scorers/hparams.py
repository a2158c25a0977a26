"""Settings of scorers whose types and ranges are checked before anything is loaded."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import Field

from rlhf_lightning.arguments import (
    Above0,
    Address,
    AtLeast0,
    Count,
    CountOrZero,
    Name,
    Seconds,
    SecretName,
)
from rlhf_lightning.hparams import Checked, Usual
from rlhf_lightning.text.thoughts import Thoughts


@dataclass(frozen=True)
class TextRewardModelHparams(Checked):
    """Settings of a reward model with a different tokenizer.

    Args:
        input_format: `text` is prompt and response as one text; `pair` is the two as the sentence
            pair of a classifier; `completion` is the response alone.
        ending: what follows a finished response. `eos`: the first stop token of the chat template,
            else EOS, and nothing behind it; `template`: what the chat template or the tokenizer
            writes there; `none`: nothing. None is `eos` where the score is read at the last token,
            else `template`.
        thoughts: `drop` scores a response that thinks without its thoughts, as its author's chat
            template marks them; `keep` scores all that it says.
        max_length: longest text in tokens; None is the model's and the tokenizer's own limit.
        label: name or index of the label that is rewarded; needed if there are several.
        output: `log_odds` of the label against all others, its `logit`, or its `probability`. Of a
            model with one label, log_odds is the logit. None is `logit` where the labels are
            ratings (`problem_type` "regression"), which have no odds, else `log_odds`.
        mean, std: the score is (output - mean) / std; 0 and 1 are those of the model's config.json,
            where it has them (OpenRLHF).
        dtype: dtype of the weights: float32, bfloat16, or auto, which keeps that of the checkpoint.
        micro_batch_size: rows in one forward; None takes all rows of one length bucket.
    """

    input_format: Literal["text", "pair", "completion"] = "text"
    ending: Literal["eos", "template", "none"] | None = None
    thoughts: Thoughts = "drop"
    max_length: Annotated[int, Field(ge=2)] | None = None
    label: Name | CountOrZero | None = None
    output: Literal["log_odds", "logit", "probability"] | None = None
    mean: float = 0.0
    std: Above0 = 1.0
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    micro_batch_size: Count | None = None


def is_address(model: object) -> bool:
    """Return whether a model is the address of a server, and no folder or hub name."""
    return str(model).startswith(("http://", "https://"))


def check_url(url: str, key: str, secret: str) -> None:
    """Check the address of a service.

    Args:
        url: address of the service.
        key: configuration key that has the address.
        secret: key that names the environment variable of its token.

    Raises:
        ValueError: if it is no address, or has credentials.
    """
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{key}={url!r} must be http://HOST[:PORT]/PATH or https://...")
    if parts.username or parts.password:
        fix = f"put the token into an environment variable and name that with {secret}"
        raise ValueError(f"{key} holds credentials for {parts.hostname}: {fix}")


def key_in(setting: str, name: str | None) -> str | None:
    """Return the key of a service in the environment variable `name`; None where it has no name.

    Raises:
        ValueError: naming the setting, if the variable holds no key.
    """
    if name is None:
        return None
    key = os.environ.get(name, "").strip()
    if not key or not key.isascii() or not key.isprintable():
        told = f"{setting}={name}: that environment variable holds no key"
        raise ValueError(f"{told}: export it, or set {setting}=null where none is needed")
    return key


@dataclass(frozen=True)
class HttpScorerHparams(Checked):
    """Settings of a reward service's client.

    Args:
        url: `http://` or `https://`; without a password in it.
        batch_size: responses in one request.
        concurrency: largest number of requests at once.
        timeout: seconds without a byte of the reply.
        max_retries: further attempts after a connection error, a time-out, 429 or 5xx.
        token_env: name of the environment variable that holds the bearer token; None sends none.
        mean, std: the score is (value - mean) / std.
        thoughts: `drop` sends a response that thinks without its thoughts, `keep` sends them too.
    """

    url: Address
    batch_size: Count = 64
    concurrency: Annotated[int, Field(ge=1, le=256)] = 4
    timeout: Seconds = 60.0
    max_retries: CountOrZero = 5
    token_env: SecretName | None = None
    mean: float = 0.0
    std: Above0 = 1.0
    thoughts: Thoughts = "drop"

    def __post_init__(self) -> None:
        """Check the values and the URL."""
        super().__post_init__()
        check_url(self.url, "url", "token_env")


@dataclass(frozen=True)
class RewardEnsembleHparams(Checked):
    """Settings that combine the scores of several reward models.

    Args:
        combine: `mean_minus_std`: the members' mean minus `std_coef` times their standard deviation
            (divided by their number); `minimum`: the lowest of them.
        std_coef: what a unit of disagreement costs; 0 is the plain mean.
    """

    combine: Literal["mean_minus_std", "minimum"] = "mean_minus_std"
    std_coef: Annotated[AtLeast0, Usual(0.0, 4.0)] = 1.0
