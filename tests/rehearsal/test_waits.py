"""How often the host waits for the device, by phase: budgets.

A GPU stands still while Python reads a number and launches what follows. Each budget is the number
of reads and of blocking copies to the device that a phase may take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

from rlhf_lightning.hparams import SamplingHparams
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.noise import RowNoise
from tests.builders.mirror import READ, WRITE, Log, on_mirror, recorded, trainer_options
from tests.builders.models import PAD, VOCABULARY, prompt_batch, prompt_rows, tiny_policy
from tests.builders.stages import fit, ppo_hparams, sft_batch, tiny_module, tiny_sft

DEVICE = "mirror"
NEVER = (VOCABULARY + 1,)  # a stop id that is never drawn


class Waits(NamedTuple):
    """Waits of a phase by kind, and where."""

    reads: int
    writes: int
    lines: list[str]


def waits(log: Log, less: Log | None = None, times: int = 1) -> Waits:
    """Return the waits of `log` without those of `less`, which did the same `times` times less."""
    if less is not None:
        log.waits -= less.waits
    counts = [log.count(kind=kind) / times for kind in (READ, WRITE)]
    assert all(count == int(count) for count in counts), log.lines()
    return Waits(*map(int, counts), log.lines())


def counted(function: Callable[..., object], *args: Any) -> Log:
    with recorded() as log:
        function(*args)
    return log


def generating(prompt_lengths: tuple[int, ...], stops: tuple[int, ...]) -> Waits:
    """Return the waits of one more token, all rows going on unless `stops` ends some."""
    policy = tiny_policy("llama").to(DEVICE)
    batch = prompt_batch(prompt_rows(prompt_lengths)).to(DEVICE)
    generator = CachedGenerator(stops, PAD)

    def write(tokens: int) -> None:
        with policy.generating() as model:
            generator(model, batch, noise=RowNoise(1), temperature=1.0, max_new_tokens=tokens)

    few, more = counted(write, 4), counted(write, 8)
    return waits(more, few, times=4)


def one_prompt_length(iteration: int = 0, rows: int = 8) -> Any:
    """Return prompts whose answers all are of one micro-batch's width."""
    return prompt_batch(prompt_rows([3] * rows, seed=iteration), first_row=iteration * rows)


def run_ppo(iterations: int) -> None:
    """Run PPO on prompts and answers of one length, so that each iteration does the same."""
    hparams = ppo_hparams(num_ppo_epochs=1, micro_batch_size=4)
    module = tiny_module(
        "llama",
        ppo=hparams,
        generator=CachedGenerator(NEVER, PAD),
        sampling=SamplingHparams(max_new_tokens=4),
    )
    batches = [one_prompt_length()] * iterations
    fit(module, batches, **trainer_options(DEVICE))


def iterating(stage: str) -> Waits:
    """Return the waits of one more iteration of a whole run."""

    def run(iterations: int) -> None:
        if stage == "ppo":
            run_ppo(iterations)
        else:
            fit(tiny_sft("llama"), [sft_batch()] * iterations, **trainer_options(DEVICE))

    few, more = counted(run, 2), counted(run, 3)
    return waits(more, few)


ROWS_END = tuple(range(2, 8))  # ids that end a random answer now and then
# The second read is of transformers: does the mask hide anything?
TOKENS = {
    "all go on": ((5, 5, 5), NEVER, 1),
    "padded": ((3, 5, 1), NEVER, 2),
    "rows end": ((5,) * 64, ROWS_END, 1),
}


@pytest.mark.thorough
@pytest.mark.parametrize("rows", TOKENS)
def test_a_token_waits_once_and_once_more_where_prompts_are_padded(rows):
    lengths, stops, reads = TOKENS[rows]
    found = on_mirror(generating, lengths, stops)
    assert (found.reads, found.writes) == (reads, 0), found.lines


BUDGETS = {"ppo": (50, 6), "sft": (7, 0)}  # reads and writes


@pytest.mark.thorough
@pytest.mark.parametrize("stage", BUDGETS)
def test_an_iteration_stays_in_its_budget(stage):
    found = on_mirror(iterating, stage)
    assert (found.reads, found.writes) == BUDGETS[stage], "\n".join(found.lines)
