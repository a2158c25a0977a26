"""What a server of vLLM answers about given tokens, by a model of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def vllm_of(model: Any, tokenizer: Any) -> Callable[[dict[str, Any]], Any]:
    """Behaviour of a server, for `reward_server.serving`: /tokenize, and prompt_logprobs."""

    @torch.no_grad()
    def answer(body: dict[str, Any]) -> Any:
        if isinstance(body["prompt"], str):
            ids = tokenizer(body["prompt"], add_special_tokens=body["add_special_tokens"])
            return {"tokens": ids["input_ids"], "count": len(ids["input_ids"])}
        ids = body["prompt"]
        logits = model(input_ids=torch.tensor([ids])).logits[0]  # [T, V]
        values = logits.log_softmax(-1)[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        said: list[Any] = [None]
        for token, value in zip(ids[1:], values.tolist(), strict=True):
            text = tokenizer.decode([token])
            said.append({str(token): {"logprob": value, "rank": 1, "decoded_token": text}})
        return {"choices": [{"index": 0, "text": "", "prompt_logprobs": said}]}

    return answer
