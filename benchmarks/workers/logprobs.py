"""Memory of log-probabilities, forward and backward, beyond weights and their gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from benchmarks.worker import Stopwatch, Task, memory_bytes, reset_peak, worker_main
from rlhf_lightning.distributed.process import prepare_process
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.models.heads import PolicyModel, hidden_states


def run(task: Task) -> dict[str, Any]:
    """Return the bytes that the second of two micro-batches adds at its peak.

    Its gradients already stand in memory, as in every micro-batch but the first.
    """
    device = task["device"]
    policy = load_policy(from_scratch=task["shape"]).to(device)
    vocabulary, length = task["shape"]["vocab_size"], task["tokens"]
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, vocabulary, (1, length + 1), generator=generator).to(device)
    asked = length if task["head"] != "trunk" else 16  # 16 positions: hardly more than the trunk
    positions = torch.arange(length - asked, length, device=device)
    compute = full_logits if task["head"] == "full" else chunked

    def step() -> None:
        with torch.autocast(device, torch.bfloat16, enabled=task["precision"] == "bf16"):
            logprobs = compute(policy, ids[:, :length], positions, ids[0, positions + 1])
        (logprobs.mean() + 0.0).backward()

    for parameter in policy.parameters():
        parameter.grad = torch.zeros_like(parameter).add_(1e-9)  # touched, so resident
    watch = Stopwatch(device)
    before, started = start_peak(device), watch.now()
    step()
    seconds = watch.now() - started
    added = peak(device) - before
    weights = sum(p.numel() * p.element_size() for p in policy.parameters())
    return {"added": added, "weights": weights, "gradients": weights, "seconds": seconds}


def start_peak(device: str) -> int:
    """Start a new peak and return what is in use now, bytes."""
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    reset_peak()
    return memory_bytes("VmRSS")


def peak(device: str) -> int:
    """Return the peak since `start_peak`, bytes."""
    return torch.cuda.max_memory_allocated() if device == "cuda" else memory_bytes("VmHWM")


def chunked(policy: PolicyModel, ids: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities as this project computes them."""
    return policy(ids, positions, tokens).logprobs


def full_logits(policy: PolicyModel, ids: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Return the log-probabilities as they are usually computed: all logits, then log-softmax."""
    head: Any = policy.model.get_output_embeddings()
    hidden = hidden_states(policy.model.base_model, ids).flatten(0, 1)[positions]
    return head(hidden).float().log_softmax(-1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


if __name__ == "__main__":
    prepare_process()  # as a run of the command line does
    worker_main(run)
