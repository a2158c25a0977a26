"""The two shapes in which a Hugging Face decoder is used: token statistics and scalars.

Legend: b rows of a micro-batch, W their padded width, N asked positions,
H hidden size, V vocabulary. Rows are padded on the right and start at column 0, so a causal
decoder needs no attention mask: no real token ever attends to padding.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, pad
from transformers import PreTrainedModel

from rlhf_lightning.functional.distillation import Logits, chunked_divergence
from rlhf_lightning.functional.linear_logprobs import linear_token_logprobs, rows_of_chunk
from rlhf_lightning.functional.masked import at_least_float32
from rlhf_lightning.models.attention import expect_varying_shapes
from rlhf_lightning.models.building import in_eval_mode
from rlhf_lightning.models.cpu_kernels import (
    packed_head_dtype,
    packs_rows,
    prepare,
    weight_grad_adder,
)
from rlhf_lightning.models.gpu_kernels import compiles_head
from rlhf_lightning.models.precision import computing

# Fewer rows than this use other CPU kernels, and a ratio of 1 would be 1 + 5e-7. Each new number
# above it adds a cached kernel, see `kernel_rows`; its multiples are few.
CPU_ROWS = 16
# Of packed rows, which attention keeps apart by their lengths. Where there is no mask, transformers
# makes one of `[1, 1, W, W]`; one of four dimensions goes to the layers as it is.
_NO_MASK = torch.ones(1, 1, 1, 1, dtype=torch.bool)


class Teaching(NamedTuple):
    """A teacher, with which a policy is compared over the whole vocabulary.

    Args:
        states: `[N, H']` last hidden states of the teacher at the asked positions.
        logits: gives the teacher's logits of such states.
        kind: see `vocabulary_divergence`.
        weight: see `vocabulary_divergence`.
    """

    states: Tensor
    logits: Logits
    kind: str
    weight: float


class TokenStatistics(NamedTuple):
    """Log-probability of each asked token and entropy of its distribution, nats, `[N]`.

    Also the divergence from a teacher, nats, `[N]`, and the states `[N, H]` that predict the
    tokens. All but the log-probability are None where they were not asked for.
    """

    logprobs: Tensor
    entropy: Tensor | None
    divergence: Tensor | None = None
    states: Tensor | None = None


def hidden_states(
    trunk: nn.Module, input_ids: Tensor, row_lengths: tuple[int, ...] | None = None
) -> Tensor:
    """Return the last hidden states `[b, W, H]` of right-padded `input_ids` `[b, W]`.

    Args:
        trunk: the decoder without its head.
        input_ids: one sequence `[1, W]` where there are `row_lengths`.
        row_lengths: lengths of packed rows; a token attends to its own row. See `packs_rows`.
    """
    if row_lengths is not None:
        position_ids = torch.cat([torch.arange(length) for length in row_lengths]).unsqueeze(0)
        packed = trunk(
            input_ids=input_ids,
            attention_mask=_NO_MASK,
            position_ids=position_ids,
            row_lengths=row_lengths,
            use_cache=False,
        )
        return packed.last_hidden_state  # type: ignore[no-any-return]
    rows = len(input_ids)
    if rows == 1 and input_ids.device.type == "cpu":
        # One row takes other CPU kernels than two or more, and a ratio of 1 would be 1 + 5e-7.
        input_ids = input_ids.expand(2, -1)
    position_ids = torch.arange(input_ids.shape[1], device=input_ids.device)
    position_ids = position_ids.expand_as(input_ids)
    output = trunk(input_ids=input_ids, position_ids=position_ids, use_cache=False)
    hidden: Tensor = output.last_hidden_state[:rows]  # [b, W, H]
    return hidden


def in_whole_blocks(positions: Tensor) -> Tensor:
    """Return `positions` `[N]`, on a CPU followed by zeros up to a multiple of `CPU_ROWS`."""
    if positions.device.type != "cpu":
        return positions
    blocks = max(-(-len(positions) // CPU_ROWS), 1)
    return pad(positions, (0, blocks * CPU_ROWS - len(positions)))


class PolicyModel(nn.Module):
    """A causal language model whose forward returns log-probabilities, never all logits.

    The head runs on the requested positions only, a chunk at a time. Everything happens inside one
    `forward`, so that the module can be one root unit of FSDP2.

    Args:
        model: any Hugging Face causal language model.

    Raises:
        ValueError: if head(trunk(x)), soft-capped where its config says so, are not the model's
            logits (scaling and the like).
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        prepare(model)
        expect_varying_shapes()
        self.model = model
        check_head_split(model)

    @property
    def root(self) -> nn.Module:
        """The module that is placed and sharded as a whole."""
        return self

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.root.parameters()).device

    @property
    def packs(self) -> bool:
        """True if rows may be packed into one sequence."""
        return packs_rows(self.model)

    @contextmanager
    def generating(self) -> Iterator[PreTrainedModel]:
        """Yield the Hugging Face model that writes this policy's next tokens, in eval mode."""
        with in_eval_mode(self), computing(self.model, self.device):
            yield self.model

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        tokens: Tensor,
        temperature: float = 1.0,
        with_entropy: bool = True,
        row_lengths: tuple[int, ...] | None = None,
        teaching: Teaching | None = None,
        with_states: bool = False,
    ) -> TokenStatistics:
        """Return statistics of `tokens` at `positions`.

        Args:
            input_ids: `[b, W]`, padded on the right.
            positions: `[N]` indices into the flattened `[b * W]` states that predict `tokens`.
            tokens: `[N]` int64 token ids.
            temperature: divides the logits; above 0.
            with_entropy: False leaves the entropy out, which saves a pass over the logits.
            row_lengths: lengths of rows that are packed into `input_ids` `[1, W]`; see
                `hidden_states`.
            teaching: a teacher to compare with; the entropy is then left out.
            with_states: also return the states.
        """
        count = len(positions)
        positions = in_whole_blocks(positions)
        head: Any = self.model.get_output_embeddings()
        with computing(self.model, input_ids.device):
            hidden = hidden_states(self.model.base_model, input_ids, row_lengths).flatten(0, 1)
            states = hidden[positions]  # [N, H] of [b * W, H]
            tokens = pad(tokens, (0, len(positions) - count))
            if teaching is not None:
                return self._taught(states, tokens, temperature, count, teaching)
            logprobs, entropy = linear_token_logprobs(
                states,
                head.weight,
                tokens,
                bias=head.bias,
                temperature=temperature,
                softcap=softcap_of(self.model),
                with_entropy=with_entropy,
                accumulate=weight_grad_adder(),
                product_dtype=None if row_lengths is None else packed_head_dtype,
                compiled=compiles_head(states.device),
            )
        # Copies: FSDP2 hangs its hooks on what is returned, and a view could lose them.
        return TokenStatistics(
            logprobs[:count].clone(),
            None if entropy is None else entropy[:count].clone(),
            states=states[:count].clone() if with_states else None,
        )

    def _taught(
        self, states: Tensor, tokens: Tensor, temperature: float, count: int, teaching: Teaching
    ) -> TokenStatistics:
        logits = logits_of(self.model)
        # No leaf, of which autocast would keep one copy for all chunks, with a sum of their
        # gradients in bf16: of a view every chunk's is widened before it is added.
        logits.weight = logits.weight.view_as(logits.weight)
        found = chunked_divergence(
            states,
            pad(teaching.states, (0, 0, 0, len(states) - count)),
            tokens,
            logits=logits,
            teacher_logits=teaching.logits,
            kind=teaching.kind,
            weight=teaching.weight,
            temperature=temperature,
            # Of student and teacher logits, log-probabilities and what is made of them.
            chunk_rows=rows_of_chunk(states.device, logits.vocabulary, tables=4),
        )
        return TokenStatistics(
            found.logprobs[:count].clone(), None, divergence=found.divergence[:count].clone()
        )


class HeadLogits:
    """The head of a language model, from its last hidden states `[C, H]` to logits `[C, V]`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, softcap: float | None) -> None:
        self.weight, self.bias, self.softcap = weight, bias, softcap

    @property
    def vocabulary(self) -> int:
        """Columns of the logits."""
        return len(self.weight)

    def __call__(self, states: Tensor) -> Tensor:
        """Return the logits, soft-capped where the model's are."""
        logits = linear(states, self.weight, self.bias)
        if self.softcap is None:
            return logits
        return self.softcap * torch.tanh(at_least_float32(logits) / self.softcap)


def logits_of(model: PreTrainedModel, *, copied: bool = False) -> HeadLogits:
    """Return the head of a model; `copied` if its weights are freed before it is used."""
    head: Any = model.get_output_embeddings()
    weight, bias = head.weight, head.bias
    if copied:
        weight, bias = weight.detach().clone(), None if bias is None else bias.detach().clone()
    return HeadLogits(weight, bias, softcap_of(model))


class ScalarHeadModel(nn.Module):
    """A decoder with one number a position: values, or rewards at the last token.

    Args:
        trunk: Hugging Face decoder without a language-model head.
        head: see `scalar_head`; computed in its own dtype, forward and backward, also under
            autocast and where the model is sharded.

    Attributes:
        normalized: whether its scores were given mean 0 and standard deviation 1.
    """

    normalized: bool = False

    def __init__(self, trunk: PreTrainedModel, head: ScalarHead) -> None:
        super().__init__()
        prepare(trunk)
        expect_varying_shapes()
        self.trunk = trunk
        self.head = head

    @property
    def root(self) -> nn.Module:
        """The module that is placed and sharded as a whole."""
        return self

    @property
    def packs(self) -> bool:
        """True if rows may be packed into one sequence."""
        return packs_rows(self.trunk)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        row_lengths: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Return `[N]` fp32 scalars at `positions` of the flattened `[b * W]` states.

        Args:
            input_ids: `[b, W]`, padded on the right.
            positions: `[N]` indices into the flattened states.
            row_lengths: lengths of rows that are packed into `input_ids` `[1, W]`; see
                `hidden_states`.
        """
        asked = in_whole_blocks(positions)
        with computing(self.trunk, input_ids.device):
            hidden = hidden_states(self.trunk, input_ids, row_lengths).flatten(0, 1)[asked]
        scalars: Tensor = self.head(hidden)  # [N, 1] of [N, H]
        return scalars[: len(positions), 0].float().clone()

    @torch.no_grad()
    def normalize(self, mean: float, std: float) -> None:
        """Fold the frozen affine map `(score - mean) / std` into the head.

        Raises:
            ValueError: if `std` is not a positive number.
        """
        if not std > 0:
            raise ValueError(f"std={std} of the reward model's scores must be positive")
        head: Any = self.head
        if hasattr(head, "reshard"):
            head.reshard()  # FSDP2 throws away what is done to weights that it has gathered
        head.weight.div_(std)
        head.bias.sub_(mean).div_(std)
        self.normalized = True


class ScalarHead(nn.Linear):
    """A linear layer, `H` to 1, that is computed in its weights' dtype, forward and backward.

    Sharded, it is a separate unit, because the others gather their weights in the compute dtype: in
    bf16 a score of 9 could only be 9 or 9.0625.
    """

    keeps_dtype = True

    def forward(self, hidden: Tensor) -> Tensor:
        """Return `[..., 1]` scalars of states `[..., H]` of any dtype."""
        with torch.autocast(hidden.device.type, enabled=False):
            scalars: Tensor = _Scalars.apply(hidden.to(self.weight.dtype), self.weight, self.bias)
        return scalars


class _Scalars(torch.autograd.Function):
    """The scalar head; Lightning runs `backward` under autocast, which would round products."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        return linear(hidden, weight, bias)  # [..., 1]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight = ctx.saved_tensors
        rows, states = grads[0].reshape(-1, 1), hidden.reshape(-1, hidden.shape[-1])  # [N, H]
        with torch.autocast(hidden.device.type, enabled=False):
            return grads[0] @ weight, rows.T @ states, rows.sum(0)


def scalar_head(hidden_size: int, *, init_std: float) -> ScalarHead:
    """Return a head with N(0, init_std) weights (0: all zero), bias 0.

    Source: Ziegler et al. 2019 use 0 for values and 1 / sqrt(hidden_size + 1) for rewards.
    """
    head = ScalarHead(hidden_size, 1)
    nn.init.normal_(head.weight, std=init_std) if init_std else nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    return head


def softcap_of(model: PreTrainedModel) -> float | None:
    """Return c of a model whose logits are c tanh(z / c) of its head's output z; None without."""
    capped: float | None = getattr(model.config, "final_logit_softcapping", None)
    return capped


@torch.no_grad()
def check_head_split(model: PreTrainedModel) -> None:
    """Check that the head applied to the last hidden states, soft-capped, gives the model's logits.

    Raises:
        ValueError: if not, as with scaled logits.
    """
    if next(model.parameters()).is_meta:
        return
    input_ids = torch.arange(4, device=next(model.parameters()).device).unsqueeze(0)
    with in_eval_mode(model):
        expected = model(input_ids=input_ids, use_cache=False).logits
        got = logits_of(model)(hidden_states(model.base_model, input_ids))
    # Where logits are still small, scaling them hardly shows in the numbers.
    scaled = getattr(model.config, "logit_scale", 1) != 1
    same = torch.allclose(got.float(), expected.float(), rtol=1e-3, atol=1e-3)
    if scaled or not same:
        fix = "(by scaling, or another soft cap): choose another model"
        raise ValueError(f"{type(model).__name__} changes its logits after the head {fix}")
