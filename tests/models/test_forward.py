from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rlhf_lightning.models.forward import (
    BUCKET,
    bucket_width,
    by_micro_batch,
    micro_batches,
    response_statistics,
    response_values,
    sequence_scores,
)
from rlhf_lightning.models.micro_batching import in_buckets, micro_batching
from tests.builders.models import EOS, MODEL_TYPES, PAD, prompt_rows, tiny_policy, tiny_scalar_model

TEMPERATURE = 0.7


@dataclass(frozen=True)
class Rows:
    sequences: Tensor
    attention_mask: Tensor
    response_mask: Tensor

    def __getitem__(self, rows: Tensor) -> Rows:
        return Rows(self.sequences[rows], self.attention_mask[rows], self.response_mask[rows])


def padded(
    prompts: list[list[int]],
    responses: list[list[int]],
    *,
    pad: int = PAD,
    left: int = 0,
    right: int = 0,
) -> Rows:
    p = max(map(len, prompts)) + left
    r = max(map(len, responses)) + right
    pairs = list(zip(prompts, responses, strict=True))
    ids = [[pad] * (p - len(a)) + a + b + [pad] * (r - len(b)) for a, b in pairs]
    mask = [[0] * (p - len(a)) + [1] * (len(a) + len(b)) + [0] * (r - len(b)) for a, b in pairs]
    actions = [[1] * len(b) + [0] * (r - len(b)) for b in responses]
    return Rows(torch.tensor(ids), torch.tensor(mask).bool(), torch.tensor(actions).bool())


PROMPTS = prompt_rows([3, 9, 1, 6], seed=1)
RESPONSES = [*([*r[:-1], EOS] for r in prompt_rows([5, 12, 2], seed=2)), [7]]


def unpadded_logits(model, ids: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("pad", [PAD, EOS])
def test_logprobs_and_entropy_are_those_of_the_plain_model_without_padding(model_type, pad):
    policy = tiny_policy(model_type)
    batch = padded(PROMPTS, RESPONSES, pad=pad, left=2, right=3)
    with torch.no_grad():
        got = response_statistics(policy, batch, temperature=TEMPERATURE)
        for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            logits = unpadded_logits(policy.model, prompt + response)
            at = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
            expected = (logits[at].double() / TEMPERATURE).log_softmax(-1)
            n = len(response)
            picked = expected[torch.arange(n), torch.tensor(response)]
            entropy = -(expected.exp() * expected).sum(-1)
            torch.testing.assert_close(got.logprobs[row, :n].double(), picked, rtol=0, atol=1e-5)
            torch.testing.assert_close(got.entropy[row, :n].double(), entropy, rtol=0, atol=1e-5)
            assert (got.logprobs[row, n:] == 0).all()
            assert (got.entropy[row, n:] == 0).all()
    assert got.logprobs[batch.response_mask].std() > 0.5, "all alike would prove nothing"


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_values_and_scores_are_those_of_the_plain_model_without_padding(model_type):
    model = tiny_scalar_model(model_type, bias=0.25)
    batch = padded(PROMPTS, RESPONSES, left=1, right=2)
    with torch.no_grad():
        values = response_values(model, batch)
        scores = sequence_scores(model, batch.sequences, batch.attention_mask)
        for row, (prompt, response) in enumerate(zip(PROMPTS, RESPONSES, strict=True)):
            states = model.trunk(input_ids=torch.tensor([prompt + response])).last_hidden_state[0]
            scalars = model.head(states).squeeze(-1)
            at = slice(len(prompt) - 1, len(prompt) + len(response) - 1)
            n = len(response)
            torch.testing.assert_close(values[row, :n], scalars[at], rtol=0, atol=1e-5)
            torch.testing.assert_close(scores[row], scalars[-1], rtol=0, atol=1e-5)
            assert (values[row, n:] == 0).all()
    assert scores.std() > 0.1


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("bf16", [False, True])
def test_a_row_has_the_same_bits_in_every_micro_batch_and_padding(model_type, bf16):
    policy, model = tiny_policy(model_type), tiny_scalar_model(model_type)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=bf16, cache_enabled=False):

        def evaluate(batch: Rows, size: int | None) -> tuple[Tensor, ...]:
            def function(rows: Tensor) -> tuple[Tensor, ...]:
                part = batch[rows]
                statistics = response_statistics(policy, part, temperature=TEMPERATURE)
                return (*statistics[:2], response_values(model, part))

            return by_micro_batch(function, batch.attention_mask, size)

        whole = padded(PROMPTS, RESPONSES)
        *exact, values = evaluate(whole, None)
        width = whole.response_mask.shape[1]
        for size in (1, 2, 3):
            *got, got_values = evaluate(whole, size)
            for a, b in zip(got, exact, strict=True):
                assert torch.equal(a, b), size
            # A head of one number rounds by the number of its rows; no ratio is made of values.
            torch.testing.assert_close(got_values, values, rtol=0, atol=1e-5)
        wide = padded(PROMPTS, RESPONSES, left=5, right=4, pad=EOS)
        for a, b in zip(evaluate(wide, None), (*exact, values), strict=True):
            assert torch.equal(a[:, :width], b)
            assert (a[:, width:] == 0).all()


def log_normal_mask(rows: int, seed: int) -> Tensor:
    """Rows of some 470 tokens on average, up to 1,024, as prompts and answers of a chat have."""
    generator = torch.Generator().manual_seed(seed)

    def lengths(mean: float, std: float, least: int) -> Tensor:
        return torch.empty(rows).log_normal_(mean, std, generator=generator).clamp(least, 512)

    return torch.arange(1024) < (lengths(5.0, 0.6, 16) + lengths(5.6, 0.7, 8)).long()[:, None]


@pytest.mark.parametrize("size", [1, 4])
def test_micro_batches_by_tokens_hold_every_row_once_and_no_more_than_so_many_longest_rows(size):
    mask = log_normal_mask(64, seed=0)
    with micro_batching("tokens"):
        parts = micro_batches(mask, size)
    assert sorted(torch.cat(parts).tolist()) == list(range(64))
    widths = [int(bucket_width(mask[rows].sum(-1)).max()) for rows in parts]
    assert widths == sorted(widths, reverse=True)
    for rows, width in zip(parts, widths, strict=True):
        padding = len(rows) * width - int(bucket_width(mask[rows].sum(-1)).sum())
        assert padding <= 1024
        assert len(rows) == 1 or len(rows) * width <= size * 1024
    if size == 4:
        assert max(map(len, parts)) > 4, "short rows go together in greater numbers"


def test_rows_share_a_forward_by_buckets_on_a_cpu_and_by_tokens_elsewhere_unless_told():
    assert in_buckets("cpu")
    assert not in_buckets("cuda")
    with micro_batching("buckets"):
        assert in_buckets("cuda")
        with micro_batching("tokens"):
            assert not in_buckets("cpu")
        assert in_buckets("cuda")
    with pytest.raises(ValueError, match=r"model.micro_batches='rows': use auto, buckets, tokens"):
        micro_batching("rows").__enter__()


def test_a_rank_with_fewer_micro_batches_repeats_one_and_drops_the_result():
    lengths = torch.tensor([3, 2 * BUCKET, 5])
    mask = torch.arange(2 * BUCKET) < lengths[:, None]
    calls: list[list[int]] = []

    def function(rows: Tensor) -> tuple[Tensor]:
        calls.append(rows.tolist())
        return (lengths[rows],)

    (got,) = by_micro_batch(function, mask, None, agree=lambda count, device: count + 2)
    assert got.tolist() == lengths.tolist()
    assert calls == [[1], [0, 2], [1], [1]]


def test_scores_are_read_at_the_last_token_for_any_padding_also_where_pad_is_eos():
    model = tiny_scalar_model("llama")
    rows = [[4, 5, 6, EOS], [9, EOS]]
    tokens = {"left": (2, 0), "right": (0, 2), "both": (1, 4), "none": (0, 0)}
    results = []
    for left, right in tokens.values():
        width = 4 + left + right
        ids = torch.full((2, width), EOS)
        mask = torch.zeros(2, width, dtype=torch.bool)
        for i, row in enumerate(rows):
            start = width - right - len(row) if left else 0
            ids[i, start : start + len(row)] = torch.tensor(row)
            mask[i, start : start + len(row)] = True
        results.append(sequence_scores(model, ids, mask))
    for result in results[1:]:
        assert torch.equal(result, results[0])
    without_eos = sequence_scores(
        model, torch.tensor([[4, 5, 6]]), torch.ones(1, 3, dtype=torch.bool)
    )
    assert (without_eos[0] - results[0][0]).abs() > 1e-2, "the EOS must be what is scored"
