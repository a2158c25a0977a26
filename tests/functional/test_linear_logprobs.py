import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.flop_counter import FlopCounterMode

from rlhf_lightning.functional import linear_logprobs
from rlhf_lightning.functional.linear_logprobs import linear_token_logprobs
from rlhf_lightning.functional.logprobs import token_entropy, token_logprobs

ROWS, HIDDEN, VOCABULARY = 70, 24, 301


def head(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shapes = (ROWS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,)
    hidden, weight, bias = (torch.randn(s, generator=generator, dtype=dtype) for s in shapes)
    tokens = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    return hidden, weight, bias, tokens


@pytest.mark.parametrize(
    ("temperature", "chunk_rows", "with_bias", "softcap", "with_entropy"),
    [
        (1.0, 16, True, None, True),
        (0.7, 32, False, None, False),
        (0.7, None, True, None, True),
        (0.7, 16, False, 3.0, True),
        (1.0, 16, False, 3.0, False),
    ],
)
def test_values_and_gradients_are_those_of_all_logits_at_once(
    temperature, chunk_rows, with_bias, softcap, with_entropy
):
    hidden, weight, bias, tokens = head()
    leaves = [hidden, weight, bias] if with_bias else [hidden, weight]
    for leaf in leaves:
        leaf.requires_grad_()
    mix = torch.randn(2, ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    logits = torch.nn.functional.linear(hidden, weight, bias if with_bias else None)
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    expected = [token_logprobs(logits, tokens, temperature=temperature)]
    if with_entropy:
        expected.append(token_entropy(logits, temperature=temperature))
    got = linear_token_logprobs(
        hidden,
        weight,
        tokens,
        bias=bias if with_bias else None,
        temperature=temperature,
        softcap=softcap,
        with_entropy=with_entropy,
        chunk_rows=chunk_rows,
    )
    assert (got.entropy is None) == (not with_entropy)
    found = [got.logprobs, got.entropy][: len(expected)]
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    gradients, wanted = (
        torch.autograd.grad(sum((m * x).sum() for m, x in zip(mix, values, strict=False)), leaves)
        for values in (found, expected)
    )
    torch.testing.assert_close(gradients, wanted, rtol=1e-10, atol=1e-10)


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, _, tokens = head()
    hidden.requires_grad_()
    linear_token_logprobs(hidden, weight, tokens, temperature=1.0).logprobs.sum().backward()
    assert weight.grad is None
    assert hidden.grad is not None


@pytest.mark.parametrize("weights", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("accumulate", [None, lambda weight, grad, inputs: grad.T @ inputs])
def test_many_chunks_in_bf16_are_as_near_to_the_exact_gradient_as_one(weights, accumulate):
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(16 * 64, HIDDEN, generator=generator).bfloat16()
    weight = (0.3 * torch.randn(VOCABULARY, HIDDEN, generator=generator)).bfloat16()
    tokens = torch.randint(0, VOCABULARY, (len(hidden),), generator=generator)

    def gradient(dtype: torch.dtype, leaf_dtype: torch.dtype, chunk_rows: int) -> Tensor:
        leaf = weight.detach().clone().to(leaf_dtype).requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            got = linear_token_logprobs(
                hidden.to(leaf_dtype),
                leaf,
                tokens,
                temperature=1.0,
                chunk_rows=chunk_rows,
                accumulate=accumulate,
            )
        got.logprobs.sum().backward()
        assert leaf.grad is not None
        return leaf.grad.double()

    exact = gradient(torch.float64, torch.float64, len(hidden))

    def error(chunk_rows: int) -> float:
        got = gradient(torch.bfloat16, weights, chunk_rows)
        return float((got - exact).norm() / exact.norm())

    assert 1e-4 < error(len(hidden)) < 4e-3
    assert error(16) < 1.3 * error(len(hidden))


@pytest.mark.parametrize("chunk_rows", [16, None])
def test_autocast_multiplies_in_bf16_and_normalizes_in_fp32(chunk_rows):
    hidden, weight, _, tokens = head(torch.float32)
    hidden.requires_grad_()
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        logits = torch.nn.functional.linear(hidden, weight)
        assert logits.dtype == torch.bfloat16
        wanted = token_logprobs(logits, tokens, temperature=1.0)
        got = linear_token_logprobs(
            hidden, weight, tokens, temperature=1.0, chunk_rows=chunk_rows
        ).logprobs
    assert got.dtype == torch.float32
    torch.testing.assert_close(got, wanted, rtol=1e-6, atol=1e-6)
    expected = torch.autograd.grad(wanted.sum(), [hidden, weight])
    gradients = torch.autograd.grad(got.sum(), [hidden, weight])
    for gradient, reference in zip(gradients, expected, strict=True):
        assert gradient.dtype == torch.float32
        error = (gradient - reference).norm() / reference.norm()
        assert error < 1e-2


def test_chunks_do_not_change_a_bit_of_the_values():
    hidden, weight, _, tokens = head(torch.float32)
    one = linear_token_logprobs(hidden, weight, tokens, temperature=0.9, with_entropy=True)
    many = linear_token_logprobs(
        hidden, weight, tokens, temperature=0.9, with_entropy=True, chunk_rows=16
    )
    assert torch.equal(one.logprobs, many.logprobs)
    assert torch.equal(one.entropy, many.entropy)


def test_a_gpu_takes_the_head_in_one_chunk_where_a_cpu_takes_many_with_the_same_gradient(
    monkeypatch,
):
    tokens = torch.arange(2048)

    def products_and_gradient(device_type: str) -> tuple[int, Tensor]:
        generator = torch.Generator().manual_seed(1)
        hidden = torch.randn(2048, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        weight = torch.randn(9_000, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        monkeypatch.setattr(linear_logprobs, "_on_cpu", lambda _: device_type == "cpu")
        with FlopCounterMode(display=False) as counter:
            linear_token_logprobs(hidden, weight, tokens, temperature=1.0).logprobs.sum().backward()
        one = 2 * 2048 * 4 * 9_000
        return counter.get_total_flops() // one, weight.grad

    # The logits are made, made again, and multiplied twice; a single chunk's are kept.
    (on_cpu, expected), (on_gpu, got) = (products_and_gradient(kind) for kind in ("cpu", "cuda"))
    assert (on_cpu, on_gpu) == (4, 3)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-10)


def test_no_position_gives_no_numbers():
    hidden, weight, _, tokens = head()
    got = linear_token_logprobs(hidden[:0], weight, tokens[:0], temperature=1.0)
    assert got.logprobs.shape == (0,)


def test_saved_tensors_do_not_grow_with_the_vocabulary():
    def saved_bytes(vocabulary: int) -> int:
        hidden = torch.randn(4096, 8, requires_grad=True)
        weight = torch.randn(vocabulary, 8)
        total = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal total
            total += 0 if tensor is weight else tensor.numel() * tensor.element_size()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            linear_token_logprobs(
                hidden, weight, torch.zeros(4096, dtype=torch.long), temperature=1.0
            )
        return total

    assert saved_bytes(20_000) - saved_bytes(10_000) == 0


def both_ways(
    rows: int, softcap: float | None, with_entropy: bool, *, dtype=torch.float64, device="cpu"
):
    """Return values and gradients, plain and compiled, of the first rows."""
    mix = torch.randn(2, ROWS, dtype=dtype, generator=torch.Generator().manual_seed(1))
    hidden, weight, bias, tokens, mix = (x.to(device) for x in (*head(dtype), mix))
    found = []
    for compiled in (False, True):
        leaves = [x.clone().requires_grad_() for x in (hidden, weight, bias)]
        got = linear_token_logprobs(
            leaves[0][:rows],
            leaves[1],
            tokens[:rows],
            bias=leaves[2],
            temperature=0.7,
            softcap=softcap,
            with_entropy=with_entropy,
            chunk_rows=32,
            compiled=compiled,
        )
        total = (mix[0, :rows] * got.logprobs).sum()
        values = [got.logprobs]
        if got.entropy is not None:
            total = total + (mix[1, :rows] * got.entropy).sum()
            values.append(got.entropy)
        found.append([*values, *torch.autograd.grad(total, leaves)])
    return found


@pytest.fixture
def graphs(monkeypatch):
    """The number of graphs compiled so far, differentiated as always but run as they are."""
    monkeypatch.setattr(linear_logprobs, "BACKEND", "aot_eager")
    monkeypatch.setattr(linear_logprobs, "_fails", False)
    monkeypatch.setattr(linear_logprobs, "_ran", set())
    linear_logprobs._compiled.cache_clear()
    torch._dynamo.reset()
    counters.clear()
    yield lambda: counters["stats"]["unique_graphs"]
    torch._dynamo.reset()


@pytest.mark.thorough
@pytest.mark.parametrize(("softcap", "with_entropy"), [(None, False), (3.0, True)])
def test_compiled_chunks_give_the_numbers_of_plain_ones_by_one_graph_a_function(
    softcap, with_entropy, graphs
):
    for rows in (70, 40, 20):  # chunks of 32 + 38, 40 and 20 rows
        plain, compiled = both_ways(rows, softcap, with_entropy)
        for ours, theirs in zip(compiled, plain, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)
    assert graphs() == 2, "one forward and one backward, whatever the rows"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "device",
    [pytest.param("cpu", marks=pytest.mark.slow), pytest.param("cuda", marks=pytest.mark.gpu)],
)
def test_compiled_kernels_are_right_too(device, monkeypatch):
    monkeypatch.setattr(linear_logprobs, "_fails", False)
    for softcap, with_entropy in ((None, False), (3.0, True)):
        for rows in (70, 20):
            plain, compiled = both_ways(
                rows, softcap, with_entropy, dtype=torch.float32, device=device
            )
            for ours, theirs in zip(compiled, plain, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not linear_logprobs._fails


def test_a_machine_that_cannot_compile_computes_plainly_and_says_so(graphs, monkeypatch, caplog):
    monkeypatch.setattr(linear_logprobs, "BACKEND", broken_backend)
    plain, compiled = both_ways(40, None, False)
    for ours, theirs in zip(compiled, plain, strict=True):
        assert torch.equal(ours, theirs)
    assert caplog.text.count("The head is not compiled") == 1


def broken_backend(graph, inputs):
    raise RuntimeError("no compiler")
