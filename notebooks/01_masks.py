# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # What is masked, and why
#
# Every stage of RLHF decides for each token whether it counts. The pictures below show these
# decisions on real batches of the built-in world. Nothing is trained; it takes a few seconds.

# %%
import matplotlib.pyplot as plt
import torch

from rlhf_lightning.data.collate import PreferenceCollator, PromptCollator, SFTCollator
from rlhf_lightning.data.demo.source import DemoSource
from rlhf_lightning.data.demo.vocabulary import demo_tokenizer
from rlhf_lightning.data.encode import RecordEncoder, encode_prompt
from rlhf_lightning.functional.advantages import compute_gae
from rlhf_lightning.functional.losses import causal_lm_loss, ppo_policy_loss
from rlhf_lightning.functional.sequences import (
    last_token_index,
    next_token_labels,
    position_ids,
    response_mask,
)
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.models.forward import pack_right

torch.manual_seed(0)
plt.rcParams |= {"figure.dpi": 70, "font.size": 8, "savefig.bbox": "tight"}
PROMPT, LEARNT, END, PAD, WRONG = "#d9d9d9", "#9ecae1", "#3182bd", "#ffffff", "#e6550d"

tokenizer = demo_tokenizer()
world = DemoSource(seed=1, num_demonstrations=200, num_preferences=200)
pad, eos = tokenizer.pad_token_id, tokenizer.eos_token_id


def words(ids):
    """Each token as text."""
    return [[tokenizer.convert_ids_to_tokens(int(i)) for i in row] for row in ids]


def draw(tokens, colours, title, notes=None):
    """One box a token; a row below each token may carry a note."""
    rows, columns = len(tokens), max(map(len, tokens))
    _, axes = plt.subplots(figsize=(min(0.72 * columns, 15), 0.42 * rows + 0.5))
    for y, row in enumerate(tokens):
        for x, token in enumerate(row):
            box = plt.Rectangle((x, -y), 0.96, 0.9, facecolor=colours[y][x], edgecolor="#bbbbbb")
            axes.add_patch(box)
            text = token if notes is None else f"{token}\n{notes[y][x]}"
            size = 6 if len(token) > 6 or notes is not None else 7
            dark = colours[y][x] in (END, WRONG)
            axes.text(x + 0.48, 0.45 - y, text, ha="center", va="center", fontsize=size,
                      color="white" if dark else "black", clip_on=True)  # fmt: skip
    axes.set(xlim=(0, columns), ylim=(-rows + 0.95, 1), title=title)
    axes.axis("off")
    plt.show()


# %% [markdown]
# ## Supervised fine-tuning: the response and its EOS
#
# Grey is given and not learnt, blue is learnt, dark blue is EOS, white is padding. If EOS were not
# learnt, the policy would never stop.

# %%
records = [r for r in world.records("demonstrations", "train") if len(r.completion.split()) < 12][
    :4
]
encode = RecordEncoder(tokenizer, max_length=64)
rows = [row for record in records for row in encode(record)]
batch = SFTCollator(pad)(rows)
colours = [
    [
        PAD if not a else PROMPT if not m else END if t == eos else LEARNT
        for t, a, m in zip(ids, attended, learnt, strict=True)
    ]
    for ids, attended, learnt in zip(
        batch.input_ids, batch.attention_mask, batch.loss_mask, strict=True
    )
]
draw(words(batch.input_ids), colours, "SFT: what is learnt")

# %% [markdown]
# ## Labels that ignore `pad` kill EOS where pad is EOS
#
# Most checkpoints have no pad token and pad with EOS. A collator that sets the label of every pad to
# -100 then also drops the EOS that should be learnt (orange). Masks here come from lengths.

# %%
same = SFTCollator(eos)(rows)  # pad == eos, as in most checkpoints
labels = next_token_labels(same.input_ids, same.loss_mask)
naive = torch.where(labels == eos, -100, labels)
lost = (labels != naive).sum(1)
print(f"EOS labels, by length: {int((labels == eos).sum())} of {len(rows)} rows")
print(f"EOS labels, by id:     {int((naive == eos).sum())} of {len(rows)} rows")
colours = [[PAD if i == -100 else WRONG if i == eos else LEARNT for i in row] for row in labels]
draw(words(torch.where(labels == -100, pad, labels)), colours,
     "labels (shifted by one): orange is lost when pad == EOS")  # fmt: skip

# %% [markdown]
# ## The reward model reads one position: the last real token
#
# Chosen and rejected response of one pair. The score is read at the dark box, found from the attention
# mask. Where pad is EOS, `ids != pad` would read the orange one, the token before EOS.

# %%
pair = next(
    p
    for record in world.records("preferences", "train")
    for p in encode(record)
    if len(p.chosen_input_ids) < 17 and len(p.chosen_input_ids) != len(p.rejected_input_ids)
    and len(p.rejected_input_ids) < 17
)  # fmt: skip
pairs = PreferenceCollator(eos)([pair])
ids = torch.cat([pairs.chosen_input_ids, pairs.rejected_input_ids])
mask = torch.cat([pairs.chosen_attention_mask, pairs.rejected_attention_mask])
right = last_token_index(mask)
wrong = last_token_index(ids != eos)
print("read at", right.tolist(), "· by ids, pad == EOS:", wrong.tolist())
colours = [
    [
        PAD if not mask[y, x] else END if x == right[y] else WRONG if x == wrong[y] else PROMPT
        for x in range(ids.shape[1])
    ]
    for y in range(2)
]
draw(words(ids), colours, "reward model: chosen, rejected")

# %% [markdown]
# ## A rollout: prompts on the left, responses on the right
#
# Prompts are padded on the left, so generation continues real tokens. The mask of a response goes
# up to and **including** the first EOS: stopping is an action, and gets credit only if it counts.

# %%
questions = [r for r in world.records("prompts", "train") if len(r.prompt.split()) < 8][:3]
prompts = PromptCollator(pad)(
    [(encode_prompt(q, tokenizer, max_length=32), n) for n, q in enumerate(questions)]
)
answers = torch.tensor(
    [
        tokenizer.convert_tokens_to_ids([*["the", "answer", "is", "three", "."], "<eos>"])
        + [eos] * 2,
        tokenizer.convert_tokens_to_ids(["<eos>"]) + [eos] * 7,
        tokenizer.convert_tokens_to_ids(
            ["the", "answer", "is", "three", ".", "the", "answer", "is"]
        ),
    ]
)
counts = response_mask(answers, [eos])
by_id = answers != eos  # pad == EOS
sequences = torch.cat([prompts.input_ids, answers], dim=1)
attended = torch.cat([prompts.attention_mask, counts], dim=1)
width = prompts.input_ids.shape[1]
colours = [
    [
        PAD if not attended[y, x]
        else PROMPT if x < width
        else END if answers[y, x - width] == eos
        else LEARNT
        for x in range(sequences.shape[1])
    ]
    for y in range(len(sequences))
]  # fmt: skip
draw(words(sequences), colours, "PPO: finished · stopped at once · cut off")
print("tokens that count, from where sampling stopped:", counts.sum(1).tolist())
print("tokens that count, from ids != pad:            ", by_id.sum(1).tolist(), "(no EOS at all)")

# %% [markdown]
# ## Full-sequence forwards: packed to the right
#
# For log-probabilities and values each row moves to column 0. Positions are 0, 1, 2, ...; no real
# token can attend to padding, so padding cannot matter. Below: the positions a row has before and
# after. GPT-2, without the right positions, is off by whole nats.

# %%
packed = pack_right(sequences, attended)
lengths = attended.sum(1)
before = position_ids(attended)
figure, axes = plt.subplots(1, 2, figsize=(9, 1.4))
for ax, values, real, title in (
    (axes[0], before, attended, "position ids, padded on the left"),
    (axes[1], torch.arange(packed.shape[1]).expand_as(packed),
     torch.arange(packed.shape[1]) < lengths[:, None], "position ids, packed"),
):  # fmt: skip
    ax.imshow(torch.where(real, values.float(), torch.nan), aspect="auto", cmap="viridis")
    ax.set(title=title, yticks=[], xlabel="column")
plt.show()

policy = load_policy(
    from_scratch={
        "model_type": "gpt2", "vocab_size": len(tokenizer), "n_embd": 32, "n_layer": 2, "n_head": 2,
        "n_positions": 64, "initializer_range": 0.2, "bos_token_id": None, "eos_token_id": eos,
    }
).model.eval()  # fmt: skip


@torch.no_grad()
def next_token(ids, mask=None, positions=None):
    """Log-probabilities of the token after the last column."""
    out = policy(input_ids=ids, attention_mask=mask, position_ids=positions)
    return out.logits[:, -1].log_softmax(-1)


row = prompts.input_ids[[0]]
mask = prompts.attention_mask[[0]]
alone = next_token(row[:, mask[0]])
padded = torch.cat([torch.full((1, 6), pad), row], 1)
mask = torch.cat([torch.zeros(1, 6, dtype=torch.bool), mask], 1)
without = next_token(padded, mask.long(), torch.arange(padded.shape[1])[None])
with_them = next_token(padded, mask.long(), position_ids(mask))
print(
    f"GPT-2, six pads on the left, position_ids 0, 1, 2, ...: {(without - alone).abs().max():.2f} nats off"
)
print(
    f"the same with position_ids from the mask:                {(with_them - alone).abs().max():.1e} nats off"
)

# %% [markdown]
# ## Where gradients arrive
#
# The gradient of the two losses with respect to the logits, by position. It must be exactly 0 on the
# prompt and after EOS, and not 0 on EOS itself.

# %%
logits = torch.randn(*same.input_ids.shape, len(tokenizer), requires_grad=True)
causal_lm_loss(logits, labels, num_tokens=None).backward()
sft_gradient = logits.grad.norm(dim=-1)

states = torch.randn(*answers.shape, len(tokenizer), requires_grad=True)
logprobs = states.log_softmax(-1).gather(-1, answers[..., None])[..., 0]
advantages = torch.randn(answers.shape)
ppo_policy_loss(
    logprobs, logprobs.detach(), advantages, counts,
    cliprange=0.2, cliprange_high=None, dual_clip=None, num_tokens=None,
).loss.backward()  # fmt: skip
ppo_gradient = states.grad.norm(dim=-1)

figure, axes = plt.subplots(1, 2, figsize=(9, 1.5))
for ax, gradient, title in (
    (axes[0], sft_gradient, "SFT: |gradient| (white is exactly 0)"),
    (axes[1], ppo_gradient, "PPO: |gradient| (white is exactly 0)"),
):
    ax.imshow(torch.where(gradient > 0, gradient, torch.nan), aspect="auto", cmap="Blues", vmin=0)
    ax.set(title=title, yticks=[], xlabel="position")
plt.show()
assert (ppo_gradient > 0).equal(counts)

# %% [markdown]
# ## Advantages stop where the response stops
#
# Only tokens that count have rewards and values. Without a mask the last token bootstraps from
# the value of padding: here the value model says 1 on every padded position.

# %%
length, columns = 6, 12
mask = (torch.arange(columns) < length)[None]
rewards = torch.zeros(1, columns)
rewards[0, length - 1] = 1.0
values = torch.where(mask, 0.5, 1.0)
settings = {"gamma": 1.0, "gae_lambda": 0.95}
masked = compute_gae(rewards, values, mask, **settings).advantages[0]
unmasked = compute_gae(rewards, values, torch.ones_like(mask), **settings).advantages[0]
figure, ax = plt.subplots(figsize=(6, 1.8))
ax.axvspan(length - 0.5, columns - 0.5, color="#eeeeee", label="padding")
ax.plot(masked, "o-", color=END, label="masked")
ax.plot(unmasked, "s--", color=WRONG, label="not masked")
ax.set(xlabel="response token", ylabel="advantage", title="a response of 6 tokens, score 1")
ax.legend(fontsize=7)
plt.show()
print(
    f"advantage of EOS: {masked[length - 1]:.2f} masked, {unmasked[length - 1]:.2f} without a mask"
)

# %% [markdown]
# | stage | counts | does not | code |
# |---|---|---|---|
# | SFT | response, EOS | prompt, padding | `functional/sequences.py: next_token_labels` |
# | reward model | last real token | everything else | `functional/sequences.py: last_token_index` |
# | PPO | response up to and including the first EOS | prompt, tokens after EOS | `functional/sequences.py: response_mask` |
#
# Next: [PPO by hand](02_ppo_by_hand.ipynb).
