from __future__ import annotations

import itertools

import pytest
import torch
from scipy import stats

from rlhf_lightning.rollout.noise import PURPOSES, RowNoise, sample

ROWS = torch.arange(2000)


def test_numbers_are_uniform_over_rows_positions_and_iterations():
    noise = RowNoise(seed=3)
    over_rows = noise.uniform(torch.arange(20_000), 5)
    over_positions = torch.stack([noise.uniform(torch.tensor([7]), t) for t in range(4000)])
    over_iterations = torch.stack(
        [noise.at_iteration(i).uniform(torch.tensor([7]), 0) for i in range(4000)]
    )
    for x in (over_rows, over_positions.flatten(), over_iterations.flatten()):
        assert 0 <= float(x.min()) < float(x.max()) < 1
        assert stats.kstest(x.numpy(), "uniform").pvalue > 1e-3
        assert x.unique().numel() == x.numel()


def test_neighbouring_rows_positions_iterations_seeds_and_purposes_are_independent():
    noise = RowNoise(seed=3, purpose="rollout", iteration=4)
    base = noise.uniform(ROWS, 6)
    others = [
        noise.uniform(ROWS + 1, 6),
        noise.uniform(ROWS, 7),
        noise.at_iteration(5).uniform(ROWS, 6),
        RowNoise(4, "rollout", 4).uniform(ROWS, 6),
        *(RowNoise(3, purpose, 4).uniform(ROWS, 6) for purpose in PURPOSES if purpose != "rollout"),
    ]
    for a, b in itertools.combinations([base, *others], 2):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.1
        assert not torch.equal(a, b)


def test_no_two_of_many_seeds_purposes_iterations_rows_and_positions_share_a_number():
    rows, positions = torch.arange(8), torch.arange(6)
    streams = {
        (seed, purpose, iteration): RowNoise(seed, purpose, iteration)
        .uniform(rows.unsqueeze(-1), positions)
        .flatten()
        for seed in (*range(-3, 40), 2**31, 2**63 - 1)
        for purpose in PURPOSES
        for iteration in (*range(12), 1000)
    }
    numbers = torch.cat(list(streams.values()))
    assert len(numbers) == len(streams) * 48 > 100_000
    # Of this many draws of 53 bits two are equal with a probability of 1e-6.
    assert numbers.unique().numel() == len(numbers)
    assert stats.kstest(numbers.numpy(), "uniform").pvalue > 1e-3


def test_the_numbers_are_those_of_the_hash_written_out_with_whole_numbers():
    def mixed(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) % 2**64
        return x ^ (x >> 31)

    for seed, purpose, iteration, row, position in [
        *((1, "rollout", 2, row, 3) for row in (0, 1, 2**40)),
        (2**63 - 1, "minibatches", 7, 5, 0),
        (-1, "evaluation", 0, 123, 2047),
    ]:
        state = 0
        for key in (seed, PURPOSES[purpose], iteration, row, position):
            state = mixed(((state ^ (key % 2**64)) + 0x9E3779B97F4A7C15) % 2**64)
        got = RowNoise(seed, purpose, iteration).uniform(torch.tensor([row]), position)
        assert got.item() == (state >> 11) / 2**53


def test_a_rows_number_does_not_depend_on_the_batch_around_it():
    noise = RowNoise(seed=0, iteration=2)
    whole = noise.uniform(ROWS, 3)
    order = torch.randperm(len(ROWS))
    assert torch.equal(noise.uniform(ROWS[order], 3), whole[order])
    assert torch.equal(noise.uniform(ROWS[100:103], 3), whole[100:103])
    torch.manual_seed(99)
    assert torch.equal(noise.uniform(ROWS, torch.tensor(3)), whole)


def test_tokens_follow_the_softmax_of_the_logits_over_the_temperature():
    logits = torch.tensor([2.0, 0.0, -1.0, 1.0, -3.0, 0.5])
    uniform = RowNoise(seed=0).uniform(torch.arange(40_000), 0)
    for temperature in (0.5, 1.0, 2.0):
        tokens = sample(logits.expand(len(uniform), -1), uniform, temperature=temperature).tokens
        expected = (logits.double() / temperature).softmax(-1) * len(uniform)
        observed = torch.bincount(tokens, minlength=len(logits))
        assert stats.chisquare(observed.numpy(), expected.numpy()).pvalue > 1e-3
        flat = (logits.double() / (2 * temperature)).softmax(-1) * len(uniform)
        assert stats.chisquare(observed.numpy(), flat.numpy()).pvalue < 1e-9


def test_a_token_is_the_one_whose_interval_of_the_cdf_holds_the_number():
    logits = torch.tensor([[0.25, 0.5, 0.25]]).log()
    for value, token in [(0.0, 0), (0.2499, 0), (0.25001, 1), (0.7499, 1), (0.75001, 2)]:
        uniform = torch.tensor([value], dtype=torch.float64)
        assert sample(logits, uniform, temperature=1.0).tokens.item() == token


@pytest.mark.parametrize("vocabulary", [5, 256, 1000])
def test_the_log_probability_of_a_token_is_that_of_the_softmax_at_the_temperature(vocabulary):
    logits = 4 * torch.randn(vocabulary, generator=torch.Generator().manual_seed(vocabulary))
    uniform = torch.linspace(0, 1 - 1e-12, 301, dtype=torch.float64)
    rows = logits.expand(len(uniform), -1)
    for temperature in (0.5, 1.0, 2.0):
        tokens, logprobs, _ = sample(rows, uniform, temperature=temperature)
        expected = (logits.double() / temperature).log_softmax(-1)[tokens]
        assert expected.unique().numel() >= 3
        torch.testing.assert_close(logprobs.double(), expected, rtol=1e-6, atol=2e-6)
    certain = sample(rows, uniform, temperature=0)
    assert torch.equal(certain.tokens, logits.argmax().expand(len(uniform)))
    assert (certain.logprobs == 0).all(), "the only possible token has probability 1"


def test_an_impossible_token_is_never_sampled():
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    uniform = torch.linspace(0, 1 - 1e-12, 101, dtype=torch.float64)
    tokens = sample(logits.expand(101, -1), uniform, temperature=1.0).tokens
    assert set(tokens.tolist()) == {1, 3}


def test_logits_that_are_not_finite_are_an_error():
    with pytest.raises(ValueError, match="logits are not finite"):
        sample(torch.tensor([[0.0, torch.nan]]), torch.tensor([0.5]).double(), temperature=1.0)
