# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # PPO by hand, on one batch
#
# Two articles' pseudo-code of PPO for language models, step by step, next to the correct code. Each step
# prints the cost of the error and draws it. The correct versions are calls of
# `rlhf_lightning.functional`. At the end there is a loop that learns, and the same loop with one error each.

# %%
import copy

import matplotlib.pyplot as plt
import torch

from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.functional.advantages import compute_gae
from rlhf_lightning.functional.kl import kl_k1, kl_k2, kl_k3
from rlhf_lightning.functional.logprobs import token_logprobs
from rlhf_lightning.functional.losses import clipped_value_loss, ppo_policy_loss
from rlhf_lightning.functional.masked import masked_mean, masked_whiten
from rlhf_lightning.functional.rewards import adjust_scores, shape_rewards
from rlhf_lightning.functional.sequences import position_ids
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.models.forward import ResponseRows, response_statistics, response_values
from rlhf_lightning.models.heads import ScalarHeadModel, scalar_head
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.noise import RowNoise

torch.manual_seed(0)
torch.set_num_threads(1)
plt.rcParams |= {"figure.dpi": 70, "font.size": 8, "savefig.bbox": "tight"}
RIGHT, WRONG = "#3182bd", "#e6550d"
VOCABULARY, EOS, PAD, TARGET = 24, 0, 0, 5  # pad is EOS, as in most checkpoints
PLAIN = {"cliprange": 0.2, "cliprange_high": None, "dual_clip": None, "num_tokens": None}
effects = {}  # error: what it does here


def small_gpt2(init_std, seed=0):
    fields = {
        "model_type": "gpt2", "vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2,
        "n_positions": 64, "initializer_range": init_std, "bos_token_id": None,
        "eos_token_id": EOS, "pad_token_id": None,
    }  # fmt: skip
    return load_policy(from_scratch=fields, seed=seed)


def prompts_of(count, longest, seed=0, first_row=0):
    """Random prompts of 1 to `longest` tokens, padded on the left."""
    draw = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count, 1), generator=draw)
    mask = torch.arange(longest) >= longest - lengths
    ids = torch.randint(1, VOCABULARY, (count, longest), generator=draw)
    return PromptBatch(
        torch.where(mask, ids, PAD), mask, torch.arange(first_row, first_row + count),
        ("",) * count, {"prompt": ("",) * count},
    )  # fmt: skip


# %% [markdown]
# ## One batch
#
# A GPT-2 of two layers with random weights responds to 64 prompts; each response is scored by how often it
# has the word 5. The grey part of the picture is padding: in real batches it is often most of it.

# %%
policy = small_gpt2(0.2)
generate = CachedGenerator([EOS], PAD)
prompts = prompts_of(64, 6)
with policy.generating() as model:
    generation = generate(
        model, prompts, noise=RowNoise(0, "rollout"), temperature=1.0, max_new_tokens=16
    )
mask = generation.response_mask  # [B, R]: up to and with the first EOS
answers = generation.sequences[:, -mask.shape[1] :]
rows = ResponseRows(generation.sequences, torch.cat([prompts.attention_mask, mask], dim=1), mask)
with torch.no_grad():
    logprobs = response_statistics(policy, rows, temperature=1.0).logprobs
scores = (torch.where(mask, answers, -1) == TARGET).float().sum(1)
finished = (torch.where(mask, answers, -1) == EOS).any(1)

figure, ax = plt.subplots(figsize=(7, 2))
ax.imshow(torch.where(mask, logprobs, torch.nan).T, aspect="auto", cmap="viridis")
ax.set(xlabel="row", ylabel="response token", title="log-probability of each sampled token")
ax.set_facecolor("#dddddd")
plt.show()
print(
    f"{mask.float().mean():.0%} of the positions are tokens, {finished.float().mean():.0%} of the rows stopped"
)

# %% [markdown]
# ## 1 · A log-probability is not the mean of the logits
#
# `avg_log_prob = torch.stack(outputs.scores).mean()` averages over the vocabulary.

# %%
attended = rows.attention_mask.long()
with torch.no_grad():
    states = policy.model(
        input_ids=generation.sequences, attention_mask=attended, position_ids=position_ids(attended)
    ).logits[:, prompts.input_ids.shape[1] - 1 : -1]  # [B, R, V]: predicts token t
mean_logit = states[mask].mean()
print(
    f"mean of the scores: {mean_logit:+.2f}   mean log-probability: {masked_mean(logprobs, mask):+.2f}"
)
effects["log-prob = mean of the scores"] = (
    f"{mean_logit:+.2f} instead of {masked_mean(logprobs, mask):+.2f}"
)

# %% [markdown]
# ## 2 · A mask made of `ids != pad` drops EOS
#
# The policy then gets no credit for stopping; rows that stop at once have no token at all.

# %%
by_id = answers != PAD
eos_actions = int((mask & (answers == EOS)).sum())
print(
    f"EOS actions in the loss: {eos_actions} by the mask, {int((by_id & (answers == EOS)).sum())} by id"
)
effects["mask from ids != pad"] = f"{eos_actions} stop actions lost of {eos_actions}"

# %% [markdown]
# ## 3 · The ratio must be 1 before the first update
#
# Old and new log-probabilities belong to one policy here, so each ratio should be exactly 1. It is not
# if the sampler's log-probabilities are kept (bf16), if sampling was truncated (`top_k`, on by
# default in many checkpoints), if it was at another temperature, or if positions ignore padding.

# %%
with torch.no_grad():
    again = response_statistics(policy, rows, temperature=1.0).logprobs
    half = copy.deepcopy(policy.model).to(torch.bfloat16)
    bf16 = half(
        input_ids=generation.sequences, attention_mask=attended, position_ids=position_ids(attended)
    ).logits[:, prompts.input_ids.shape[1] - 1 : -1]
    no_positions = policy.model(
        input_ids=generation.sequences, attention_mask=attended,
        position_ids=torch.arange(attended.shape[1]).expand_as(attended),
    ).logits[:, prompts.input_ids.shape[1] - 1 : -1]  # fmt: skip
kept = states >= states.topk(8, dim=-1).values[..., -1:]
inside = mask & kept.gather(-1, answers[..., None])[..., 0]
top_k = states.masked_fill(~kept, -torch.inf)
old = {
    "recomputed": (again, mask),
    "sampler's, bf16": (token_logprobs(bf16, answers, temperature=1.0), mask),
    "no position_ids": (token_logprobs(no_positions, answers, temperature=1.0), mask),
    "sampled at T = 0.7": (token_logprobs(states, answers, temperature=0.7), mask),
    "sampled with top_k = 8": (token_logprobs(top_k, answers, temperature=1.0), inside),
}
ratios = {name: (logprobs - values).exp()[on] for name, (values, on) in old.items()}
figure, axes = plt.subplots(1, 5, figsize=(11, 1.6))
for ax, (name, ratio) in zip(axes, ratios.items(), strict=True):
    ax.hist(ratio.clamp(0, 2).numpy(), bins=torch.linspace(0, 2, 41).numpy(),
            color=RIGHT if name == "recomputed" else WRONG)  # fmt: skip
    clipped = ((ratio - 1).abs() > 0.2).float().mean()
    ax.set(title=f"{name}\noutside 1 ± 0.2: {clipped:.0%}", yticks=[], xlim=(0, 2))
    if name != "recomputed":
        effects[f"old log-probs: {name}"] = (
            f"ratio {ratio.min():.2f} to {ratio.max():.2f}, {clipped:.0%} clipped before any update"
        )
plt.show()
assert (ratios["recomputed"] == 1).all()

# %% [markdown]
# ## 4 · `rewards - rewards.mean() / (std + eps)`, and a batch of one
#
# The first is a missing pair of brackets. The second comes from `prompts[ep % n : (ep + 1) % n]`, which
# is one prompt, and none at every wrap; the standard deviation of one number is NaN.

# %%
r = torch.tensor([1.0, 2.0, 3.0, 6.0])
wrong = r - r.mean() / (r.std() + 1e-8)
ones = torch.ones(4, 1, dtype=torch.bool)
print(
    f"mean of the 'advantages': {wrong.mean():.2f}; whitened: {masked_whiten(r[:, None], ones).mean():.1e}"
)
print("advantage in a batch of one:", ((r[:1] - r[:1].mean()) / (r[:1].std() + 1e-8)).item(),
      "· masked_whiten:", masked_whiten(r[:1, None], ones[:1]).item())  # fmt: skip
effects["brackets around r - mean"] = f"advantages have mean {wrong.mean():.2f} instead of 0"
effects["a batch of one prompt"] = "advantage NaN, then every weight"

# %% [markdown]
# ## 5 · gamma = 0.99 forgets the score
#
# The score comes with the last token. What the first token sees of it:

# %%
lengths = torch.arange(1, 513)
figure, ax = plt.subplots(figsize=(5, 1.8))
ax.plot(lengths, torch.ones(512), color=RIGHT, label="gamma = 1")
ax.plot(lengths, 0.99**lengths, color=WRONG, label="gamma = 0.99")
ax.set(xlabel="response length", ylabel="share of the score", title="credit of the first token")
ax.legend(fontsize=7)
plt.show()
effects["gamma = 0.99"] = (
    f"first of 100 tokens sees {0.99**100:.0%} of the score, of 512 {0.99**512:.1%}"
)

# %% [markdown]
# ## 6 · Where the KL belongs, and which one
#
# One token, eight words, known scores: the optimum is `softmax(log ref + score / beta)`. PPO finds it
# with k1 in the reward, or k2 in the loss. With the others every curve looks healthy, but the run ends
# elsewhere (distance 0: the optimum; the last bar has no KL at all).

# %%
ref_logits = torch.tensor([-0.12, 0.49, -0.95, -0.31, 1.03, -0.44, 1.08, 0.94]).double()
word_scores = torch.tensor([-0.90, 0.58, 0.54, -1.66, -1.00, 0.77, -0.57, 1.77]).double()
BETA, DRAWS = 2.0, 512
optimum = (ref_logits.log_softmax(-1) + word_scores / BETA).softmax(-1)
every = torch.ones(DRAWS, 1, dtype=torch.bool)


def bandit(in_reward=None, in_loss=None):
    """Train; return the total variation from the optimum."""
    draw = torch.Generator().manual_seed(0)
    logits = ref_logits.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, 60)
    for _ in range(60):
        tokens = torch.multinomial(logits.detach().softmax(-1), DRAWS, True, generator=draw)[
            :, None
        ]
        old = logits.detach().log_softmax(-1)[tokens]
        ref = ref_logits.log_softmax(-1)[tokens]
        kl = torch.zeros_like(old) if in_reward is None else in_reward(old, ref)
        rewards = shape_rewards(word_scores[tokens[:, 0]], kl, every, kl_coef=BETA)
        advantages = rewards - masked_mean(rewards, every)
        for _ in range(4):
            new = logits.log_softmax(-1)[tokens]
            loss = ppo_policy_loss(new, old, advantages, every, **PLAIN).loss
            if in_loss is not None:
                loss = loss + BETA * masked_mean(in_loss(new, ref), every)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    return 0.5 * (logits.detach().softmax(-1) - optimum).abs().sum().item()


distances = {
    "k1 in the reward": bandit(in_reward=kl_k1),
    "k2 in the loss": bandit(in_loss=kl_k2),
    "k3 in the loss": bandit(in_loss=kl_k3),
    "|k1| cut at 0, reward": bandit(in_reward=lambda new, ref: kl_k1(new, ref).clamp(min=0)),
    "k2 in the reward": bandit(in_reward=kl_k2),
    "k3 in the reward": bandit(in_reward=kl_k3),
    "k1 in the loss (articles)": bandit(in_loss=kl_k1),
    "no KL": bandit(),
}
figure, ax = plt.subplots(figsize=(6, 2.2))
ax.barh(list(distances), list(distances.values()),
        color=[RIGHT, RIGHT] + [WRONG] * 5 + ["#999999"])  # fmt: skip
ax.invert_yaxis()
ax.set(xlabel="distance from the optimum (total variation)")
plt.show()
for name in ("k2 in the reward", "k3 in the reward", "k1 in the loss (articles)"):
    effects[f"KL: {name}"] = (
        f"{distances[name]:.2f} from the optimum; none at all: {distances['no KL']:.2f}"
    )

# %% [markdown]
# ## 7 · Advantages: the mask, and whitening over everything
#
# Rewards and values of our batch. Orange, left: GAE without a mask bootstraps from the value of
# padding. Middle: statistics over padding too. Right: each of two processes whitens its half, so
# the weight of a token depends on its process.

# %%
trunk = small_gpt2(0.2, seed=1).model.base_model
head = scalar_head(32, init_std=0.1)
value_model = ScalarHeadModel(trunk, head)
with torch.no_grad():
    values = response_values(value_model, rows)
    everywhere = values.clone()
    everywhere[~mask] = values[mask].mean() + values[mask].std()  # what a model says of padding
adjusted = adjust_scores(scores, finished, clip=5.0, missing_eos_penalty=1.0)
rewards = shape_rewards(adjusted, torch.zeros_like(logprobs), mask, kl_coef=0.05)
gae = {"gamma": 1.0, "gae_lambda": 0.95}
advantages, returns = compute_gae(rewards, values, mask, **gae)
unmasked = compute_gae(rewards, everywhere, torch.ones_like(mask), **gae).advantages
white = masked_whiten(advantages, mask)
over_padding = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
order = scores.argsort()  # two processes with unlike halves
halves = torch.zeros(len(scores), dtype=torch.long)
halves[order[32:]] = 1
local = torch.zeros_like(white)
for half_of in (0, 1):
    mine = halves == half_of
    local[mine] = masked_whiten(advantages[mine], mask[mine])
figure, axes = plt.subplots(1, 3, figsize=(9, 2.4))
for ax, other, base, title in (
    (axes[0], unmasked, advantages, "GAE without a mask"),
    (axes[1], over_padding, white, "whitened with the padding"),
    (axes[2], local, white, "whitened by each process"),
):
    ax.scatter(base[mask], other[mask], s=3, color=WRONG)
    ax.axline((0, 0), slope=1, color=RIGHT, lw=1)
    gap = (other - base)[mask].abs().mean() / base[mask].std()
    ax.set(title=f"{title}\nmean error {gap:.2f} std", xlabel="right")
    effects[title] = f"advantages off by {gap:.2f} standard deviations"
axes[0].set_ylabel("as in the error")
plt.show()

# %% [markdown]
# ## 8 · The mean of means depends on the micro-batch
#
# The same minibatch, split into micro-batches. `sum / (tokens of the whole step)` gives one gradient;
# the mean of the micro-batches' means gives a different one for each size. A mean by row is the limit.

# %%
scale = 1.05  # a policy that has moved a little, so that the gradient is not degenerate


def gradient(num_parts, *, by_row=False, global_count=True):
    policy.zero_grad()
    for part in torch.arange(len(mask)).chunk(num_parts):
        some = ResponseRows(rows.sequences[part], rows.attention_mask[part], mask[part])
        new = response_statistics(policy, some, temperature=scale).logprobs
        settings = PLAIN | {"num_tokens": mask.sum() if global_count else None}
        if by_row:
            per_row = [
                ppo_policy_loss(new[[i]], logprobs[part][[i]], white[part][[i]], mask[part][[i]],
                                **PLAIN).loss for i in range(len(part))
            ]  # fmt: skip
            loss = torch.stack(per_row).sum() / len(mask)
        else:
            loss = ppo_policy_loss(new, logprobs[part], white[part], mask[part], **settings).loss
            loss = loss if global_count else loss / num_parts
        loss.backward()
    return torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None])


whole = gradient(1)
parts = [1, 2, 4, 8, 16, 32]


def error(g):
    return ((g - whole).norm() / whole.norm()).item()


of_means = [error(gradient(n, global_count=False)) for n in parts]
of_sums = [error(gradient(n)) for n in parts]
by_row = error(gradient(1, by_row=True))
figure, ax = plt.subplots(figsize=(5, 2))
ax.plot(parts, of_means, "s--", color=WRONG, label="mean of means")
ax.axhline(by_row, color=WRONG, ls=":", label="mean by row")
ax.plot(parts, of_sums, "o-", color=RIGHT, label="global token count")
ax.set(xscale="log", xticks=parts, xticklabels=parts, xlabel="micro-batches", ylabel="relative error",
       title="gradient of one minibatch")  # fmt: skip
ax.legend(fontsize=7)
plt.show()
print(f"largest error with the global count: {max(of_sums):.1e}")
effects["mean of micro-batch means"] = f"gradient off by {of_means[4]:.0%} at 16 micro-batches"
effects["mean by row"] = f"gradient off by {by_row:.0%}"

# %% [markdown]
# ## 9 · `vf_coef = 0.5` without the half, under one gradient norm
#
# One clip for both models lets the value gradient decide how far the policy moves.

# %%
policy.zero_grad()
new = response_statistics(policy, rows, temperature=scale).logprobs
ppo_policy_loss(new, logprobs, white, mask, **PLAIN).loss.backward()
policy_norm = torch.nn.utils.get_total_norm(
    [p.grad for p in policy.parameters() if p.grad is not None]
)


def value_norm(loss):
    value_model.zero_grad()
    loss.backward()
    return torch.nn.utils.get_total_norm(
        [p.grad for p in value_model.parameters() if p.grad is not None]
    )


now = response_values(value_model, rows)
article = value_norm(0.5 * ((now - returns) ** 2).mean())
now = response_values(value_model, rows)
ours = value_norm(
    0.1 * clipped_value_loss(now, values, returns, mask, cliprange_value=0.2, num_tokens=None).loss
)
joint = policy_norm / torch.hypot(policy_norm, article).clamp(min=1.0)
alone = policy_norm / policy_norm.clamp(min=1.0)
print(
    f"norms: policy {policy_norm:.2f}, value {article:.2f} (articles), {ours:.2f} (vf_coef 0.1, with the half)"
)
print(f"policy step after clipping at 1: {joint:.2f} with one norm, {alone:.2f} with its own")
effects["one gradient norm for both"] = f"policy step {joint:.2f} instead of {alone:.2f}"

# %% [markdown]
# ## The loop
#
# All of it together, and the same loop with one error each: 64 rollouts of up to 8 tokens, 2 epochs of
# 2 minibatches, mean of 3 seeds. Score: an eighth for every word 5, minus 1 if it does not stop.

# %%
UPDATES = 30


def train(error, seed):
    """Return score and share of finished rows by update."""
    policy = small_gpt2(0.02, seed=seed)
    reference = copy.deepcopy(policy).eval()
    value_model = ScalarHeadModel(
        small_gpt2(0.02, seed=1).model.base_model, scalar_head(32, init_std=0.0)
    )
    optimizer = torch.optim.AdamW(
        [*policy.parameters(), *value_model.parameters()], lr=3e-3, eps=1e-5, weight_decay=0.0
    )
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, UPDATES)
    articles = error == "the articles' loop"
    curve = []
    for iteration in range(UPDATES):
        prompts = prompts_of(64, 4, seed=1000 * seed + iteration)
        with policy.generating() as model:
            generation = generate(
                model, prompts, noise=RowNoise(seed, "rollout").at_iteration(iteration),
                temperature=1.0, max_new_tokens=8,
            )  # fmt: skip
        counts = generation.response_mask
        answers = generation.sequences[:, -counts.shape[1] :]
        finished = (torch.where(counts, answers, -1) == EOS).any(1)
        scores = (torch.where(counts, answers, -1) == TARGET).float().sum(1) / 8
        scores = adjust_scores(scores, finished, clip=5.0, missing_eos_penalty=1.0)
        curve.append((scores.mean().item(), finished.float().mean().item()))
        rows = ResponseRows(
            generation.sequences, torch.cat([prompts.attention_mask, counts], dim=1), counts
        )
        mask = answers != PAD if error == "mask from ids != pad" or articles else counts
        with torch.no_grad():
            old = response_statistics(policy, rows, temperature=1.0).logprobs
            ref = response_statistics(reference, rows, temperature=1.0).logprobs
            values = response_values(value_model, rows)
        kl = torch.zeros_like(old) if articles else kl_k1(old, ref)
        if error == "score given to every token" or articles:
            rewards = torch.where(mask, scores[:, None], 0) - 0.02 * kl
        else:
            rewards = shape_rewards(scores, kl, mask, kl_coef=0.02)
        where = torch.ones_like(mask) if articles else mask
        gamma = 0.99 if articles else 1.0
        advantages, returns = compute_gae(rewards, values, where, gamma=gamma, gae_lambda=0.95)
        advantages = masked_whiten(advantages, where)
        for epoch in range(2):
            order = torch.randperm(
                64, generator=torch.Generator().manual_seed(100 * iteration + epoch)
            )
            for part in order.chunk(2):
                some = ResponseRows(rows.sequences[part], rows.attention_mask[part], counts[part])
                new = response_statistics(policy, some, temperature=1.0).logprobs
                loss = ppo_policy_loss(new, old[part], advantages[part], where[part], **PLAIN).loss
                if articles:
                    loss = loss + 0.05 * (new - ref[part]).mean()
                now = response_values(value_model, some)
                loss = loss + (0.5 if articles else 0.1) * clipped_value_loss(
                    now, values[part], returns[part], where[part],
                    cliprange_value=None if articles else 0.2, num_tokens=None,
                ).loss  # fmt: skip
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
                torch.nn.utils.clip_grad_norm_(value_model.parameters(), 1.0)
                optimizer.step()
        schedule.step()
    return torch.tensor(curve)


curves = {
    name: torch.stack([train(name, seed) for seed in range(3)]).mean(0)
    for name in (
        "right",
        "mask from ids != pad",
        "score given to every token",
        "the articles' loop",
    )
}
figure, axes = plt.subplots(1, 2, figsize=(9, 2.4))
for name, curve in curves.items():
    style = {"color": RIGHT, "lw": 2} if name == "right" else {"lw": 1, "ls": "--"}
    axes[0].plot(curve[:, 0], label=name, **style)
    axes[1].plot(curve[:, 1], label=name, **style)
    stops = (curve[:, 1] > 0.9).float()
    print(f"{name:28} last 5: score {curve[-5:, 0].mean():+.2f}, {curve[-5:, 1].mean():.0%} stop"
          f" · 90% stop after {int(stops.argmax()) if stops.any() else f'more than {UPDATES}'} updates")  # fmt: skip
axes[0].set(title="score", xlabel="update")
axes[1].set(title="share of answers that stop", xlabel="update", ylim=(0, 1.02))
axes[1].legend(fontsize=7)
plt.show()

# %% [markdown]
# ## What each error did

# %%
width = max(map(len, effects))
for name, effect in effects.items():
    print(f"{name:{width}}  {effect}")

# %% [markdown]
# The training loop itself is `OnPolicyModule.training_step` in `rlhf_lightning/modules/on_policy.py`;
# `docs/implementation_details.md` lists every choice with its line. Next:
# [reading a run](03_reading_a_run.ipynb).
