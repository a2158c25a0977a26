"""Distillation: values of the vectors, and what the chunks hold."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from rlhf_lightning.functional.distillation import (
    DIVERGENCES,
    Distilled,
    chunked_divergence,
    distillation_advantages,
    vocabulary_divergence,
)
from rlhf_lightning.functional.masked import masked_mean
from tests.vectors.cases import DTYPES, Case, assert_matches, cases


def sampled(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    logprobs, teacher = (case.tensor(name, dtype) for name in ("logprobs", "teacher_logprobs"))
    coef, mask = case.inputs.get("teacher_coef", 1.0), case.mask()
    of_reward = case.tensor("advantages", dtype) if "advantages" in case.inputs else None
    leaf = logprobs.requires_grad_()
    advantages = distillation_advantages(
        leaf, teacher, mask, teacher_coef=coef, advantages=of_reward
    )
    if of_reward is not None:
        return {"advantages": advantages}
    (gradient,) = torch.autograd.grad(-masked_mean(advantages * leaf, mask), leaf)
    return {
        "advantages": advantages,
        "mean_kl": -masked_mean(advantages, mask),
        "grad_logprobs": gradient,
    }


def whole(case: Case, dtype: torch.dtype) -> dict[str, Any]:
    student, teacher = (case.tensor(f"{name}_logits", dtype) for name in ("student", "teacher"))
    mask, leaf = case.mask(), student.requires_grad_()
    per_token = vocabulary_divergence(
        leaf.log_softmax(-1),
        teacher.log_softmax(-1),
        kind=case.inputs["kind"],
        weight=case.inputs["weight"],
    )
    per_token = torch.where(mask, per_token, 0)
    loss = per_token.sum() / mask.sum()
    (gradient,) = torch.autograd.grad(loss, leaf)
    return {"per_token": per_token.detach(), "loss": loss.detach(), "grad_student_logits": gradient}


@pytest.mark.parametrize("case", cases("distillation"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_distillation_matches_the_vectors(case: Case, dtype: torch.dtype):
    assert_matches(case, (whole if "kind" in case.inputs else sampled)(case, dtype), dtype)


def test_the_sampled_form_has_in_expectation_the_gradient_of_the_reverse_kl():
    student, teacher = torch.randn(2, 4, 9, dtype=torch.float64)
    leaf = student.clone().requires_grad_()
    logprobs, others = leaf.log_softmax(-1), teacher.log_softmax(-1)
    every = torch.ones_like(logprobs, dtype=torch.bool)  # each token of the vocabulary once
    advantages = distillation_advantages(logprobs.detach(), others, every, teacher_coef=1.0)
    sampled = -(logprobs.detach().exp() * advantages * logprobs).sum()
    reverse = vocabulary_divergence(logprobs, others, kind="reverse", weight=0.5).sum()
    (got,) = torch.autograd.grad(sampled, leaf, retain_graph=True)
    (wanted,) = torch.autograd.grad(reverse, leaf)
    assert wanted.abs().max() > 1e-2
    torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-9)


def test_the_weight_is_that_of_the_teacher_in_the_mixture():
    student, teacher = torch.randn(2, 4, 9, dtype=torch.float64).log_softmax(-1)
    mixture = (0.2 * teacher.exp() + 0.8 * student.exp()).log()
    wanted = 0.2 * (teacher.exp() * (teacher - mixture)).sum(-1)
    wanted = wanted + 0.8 * (student.exp() * (student - mixture)).sum(-1)
    found = vocabulary_divergence(student, teacher, kind="jensen_shannon", weight=0.2)
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    # Near its ends it is, over the weight, the KL of one side.
    for weight, kind, scale in ((1e-7, "forward", 1e7), (1 - 1e-7, "reverse", 1e7)):
        near = vocabulary_divergence(student, teacher, kind="jensen_shannon", weight=weight)
        limit = vocabulary_divergence(student, teacher, kind=kind, weight=0.5)
        torch.testing.assert_close(near * scale, limit, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="kind='js' must be one of reverse, forward"):
        vocabulary_divergence(student, teacher, kind="js", weight=0.5)


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("both", [True, False])
def test_a_token_that_the_student_cannot_say_adds_nothing_of_its_own(kind: str, both: bool):
    generator = torch.Generator().manual_seed(3)
    logits, teacher = torch.randn(2, 4, 6, generator=generator, dtype=torch.float64)
    mask = torch.tensor([0.0, 0.0, 0.0, 0.0, 0.0, -math.inf], dtype=torch.float64)
    leaf, wanted_leaf = (logits.clone().requires_grad_() for _ in range(2))
    student, others = (leaf + mask).log_softmax(-1), teacher + (mask if both else 0)
    found = vocabulary_divergence(student, others.log_softmax(-1), kind=kind, weight=0.3)
    if kind == "forward" and not both:
        assert found.isposinf().all()
        return
    # The same with a token that is all but impossible.
    rare = mask.clamp(min=-600)
    wanted = vocabulary_divergence(
        (wanted_leaf + rare).log_softmax(-1),
        (teacher + (rare if both else 0)).log_softmax(-1),
        kind=kind,
        weight=0.3,
    )
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-9)
    found.sum().backward()
    wanted.sum().backward()
    torch.testing.assert_close(leaf.grad, wanted_leaf.grad, rtol=1e-9, atol=1e-9)


class Sizes(TorchDispatchMode):
    """Notes the largest number of elements of what is made."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, tuple | list) else [made]:
            if isinstance(one, Tensor):
                self.largest = max(self.largest, one.numel())
        return made


def heads(*, teacher_vocabulary: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(50, 6, generator=generator, dtype=torch.float64).requires_grad_()
    return weights, torch.randn(teacher_vocabulary, 4, generator=generator, dtype=torch.float64)


def with_heads(
    own: Tensor, others: Tensor, states: Tensor, teacher_states: Tensor, **how: Any
) -> Distilled:
    given: dict[str, Any] = {
        "kind": "reverse",
        "weight": 0.5,
        "temperature": 0.7,
        "chunk_rows": 8,
        **how,
    }
    return chunked_divergence(
        states,
        teacher_states,
        torch.arange(len(states)) % 50,
        logits=lambda rows: rows @ own.T,
        teacher_logits=lambda rows: rows @ others.T,
        **given,
    )


def test_no_tensor_holds_all_logits_of_either_model_forward_or_backward():
    own, others = heads(teacher_vocabulary=50)
    states = torch.randn(64, 6, dtype=torch.float64, requires_grad=True)
    teacher_states = torch.randn(64, 4, dtype=torch.float64)
    with Sizes() as sizes:
        with_heads(own, others, states, teacher_states).divergence.sum().backward()
    assert sizes.largest == 8 * 50  # of a chunk
    assert own.grad is not None
    assert states.grad is not None


@pytest.mark.parametrize(("kind", "chunk_rows"), zip(DIVERGENCES, (1, 8, 100), strict=True))
def test_gradients_of_chunks_reach_the_head_at_the_temperature_and_both_outputs(kind, chunk_rows):
    own, others = heads(teacher_vocabulary=50)
    states = torch.randn(21, 6, dtype=torch.float64, requires_grad=True)
    teacher_states = torch.randn(21, 4, dtype=torch.float64)
    how = {"kind": kind, "weight": 0.3}
    found = with_heads(own, others, states, teacher_states, chunk_rows=chunk_rows, **how)
    logprobs = (states @ own.T / 0.7).log_softmax(-1)
    teacher = (teacher_states @ others.T / 0.7).log_softmax(-1)
    wanted = vocabulary_divergence(logprobs, teacher, **how)
    chosen = logprobs[torch.arange(21), torch.arange(21)]
    torch.testing.assert_close(found.divergence, wanted, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found.logprobs, chosen, rtol=1e-9, atol=1e-9)
    leaves, factors = (own, states), torch.linspace(-1, 2, 21, dtype=torch.float64)
    got = torch.autograd.grad((found.divergence * factors + found.logprobs).sum(), leaves)
    expected = torch.autograd.grad((wanted * factors + chosen).sum(), leaves)
    torch.testing.assert_close(got, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("columns", [40, 64])
def test_of_tables_of_two_sizes_the_columns_of_both_count(columns: int):
    own, others = heads(teacher_vocabulary=columns)
    states, teacher_states = (torch.randn(5, n, dtype=torch.float64) for n in (6, 4))
    found = with_heads(own, others, states, teacher_states)
    width = min(50, columns)
    student = (states @ own[:width].T / 0.7).log_softmax(-1)
    teacher = (teacher_states @ others[:width].T / 0.7).log_softmax(-1)
    wanted = (student.exp() * (student - teacher)).sum(-1)
    torch.testing.assert_close(found.divergence, wanted, rtol=1e-9, atol=1e-9)
    whole_table = (states @ own.T / 0.7).log_softmax(-1)[torch.arange(5), torch.arange(5)]
    torch.testing.assert_close(found.logprobs, whole_table, rtol=1e-9, atol=1e-9)


def test_what_is_off_the_mask_counts_nowhere_and_the_coefficient_scales_the_teacher():
    mask = torch.tensor([[True, False]])
    logprobs, teacher = torch.tensor([[-1.0, math.nan]]), torch.tensor([[-0.25, math.inf]])
    found = distillation_advantages(logprobs, teacher, mask, teacher_coef=2.0)
    assert found.tolist() == [[1.5, 0.0]]
    assert distillation_advantages(
        logprobs, teacher, mask, teacher_coef=2.0, advantages=torch.tensor([[0.5, 9.0]])
    ).tolist() == [[2.0, 0.0]]
