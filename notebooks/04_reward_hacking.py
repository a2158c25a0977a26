# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reward hacking, live
#
# A reward model that counts words, and PPO against it without and with a KL penalty. The built-in world also
# has a gold reward, which training never sees: here you can watch the two diverge.

# %%
import math
from collections import Counter

import matplotlib.pyplot as plt
import torch
from small_world import fit_reward_model, train_ppo, train_sft, word_weights

from rlhf_lightning.data.demo.gold import gold_parts, gold_scores
from rlhf_lightning.runs.folder import read_metrics, read_samples
from rlhf_lightning.runs.summary import read_summary

torch.set_num_threads(1)
plt.rcParams |= {"figure.dpi": 70, "font.size": 8, "savefig.bbox": "tight"}
LEARNT, GOLD, SOFT = "#3182bd", "#e6a817", "#999999"
ITERATIONS = 24

accuracy = fit_reward_model()
train_sft()
penalties = {0.0: "#d62728", 0.3: "#2ca02c"}
runs = {
    kl: train_ppo(
        f"kl_{kl}",
        f"module.ppo.kl_coef={kl}",
        f"data.num_iterations={ITERATIONS}",
        "data.batch_size=32",
        "module.sampling.max_new_tokens=24",
        "evaluation.num_prompts=32",
    )
    for kl in penalties
}

# %% [markdown]
# ## 1 · What the reward model has learnt
#
# Its held-out accuracy is respectable. Its weights show that it is only a list of words that score well.

# %%
weights = sorted(word_weights().items(), key=lambda item: item[1])
shown = weights[:12] + weights[-12:]
figure, ax = plt.subplots(figsize=(8, 2.2))
ax.bar([word for word, _ in shown], [w for _, w in shown],
       color=[GOLD if w < 0 else LEARNT for _, w in shown])  # fmt: skip
ax.tick_params(axis="x", rotation=70)
ax.set(title=f"what a word adds to the reward; accuracy on held-out pairs {accuracy:.1%}")
plt.show()

# %% [markdown]
# ## 2 · The two rewards diverge
#
# Means of each rollout of 32 responses. Without a penalty the learnt reward rises to the end.

# %%
answers = {}
for kl, folder in runs.items():
    by_iteration = [[] for _ in range(ITERATIONS)]
    for sample in read_samples(folder.samples):
        if "baseline_response" not in sample:
            by_iteration[sample["iteration"] - 1].append(sample)
    answers[kl] = by_iteration


def mean(values):
    values = list(values)
    return sum(values) / max(len(values), 1)


def gold_of(samples):
    return gold_scores(*([s[key] for s in samples] for key in ("prompt", "response", "finished")))


learnt = {kl: [mean(s["score"] for s in rollout) for rollout in a] for kl, a in answers.items()}
gold = {kl: [mean(gold_of(rollout)) for rollout in a] for kl, a in answers.items()}
figure, axes = plt.subplots(1, 2, figsize=(8, 2.4), layout="constrained")
for ax, kl in zip(axes, runs, strict=True):
    ax.plot(learnt[kl], color=LEARNT)
    ax.set_ylabel("learnt reward", color=LEARNT)
    right = ax.twinx()
    right.plot(gold[kl], color=GOLD)
    right.set_ylabel("gold reward", color=GOLD)
    right.set_ylim(min(map(min, gold.values())) - 0.1, max(map(max, gold.values())) + 0.1)
    ax.set_ylim(min(map(min, learnt.values())) - 0.1, max(map(max, learnt.values())) + 0.1)
    ax.set(title=f"kl_coef = {kl:g}", xlabel="iteration")
plt.show()

# %% [markdown]
# ## 3 · Over the distance from the SFT policy
#
# Gao et al. (2023) draw both rewards over √KL. Gold turns; how early depends on the reward model. The
# penalty decides how far out a run goes.

# %%
figure, axes = plt.subplots(1, 2, figsize=(9, 2.6), layout="constrained")
for kl, folder in runs.items():
    distance = [
        math.sqrt(max(row["rollout/kl_per_response"], 0)) for row in read_metrics(folder.metrics)
    ]
    for ax, values in ((axes[0], learnt[kl]), (axes[1], gold[kl])):
        ax.scatter(distance, values, s=6, color=penalties[kl], label=f"kl_coef = {kl:g}")
for ax, title in zip(axes, ("learnt reward", "gold reward"), strict=True):
    ax.set(title=title, xlabel="√KL, nats a response")
axes[0].legend(fontsize=7)
plt.show()

# %% [markdown]
# ## 4 · How it cheats
#
# Left: the words of a rollout without penalty, iteration by iteration. Right: the parts of the gold
# reward. Polite phrases fill the response; whether it is right no longer matters.

# %%
counts = [Counter(w for s in rollout for w in s["response"].split()) for rollout in answers[0.0]]
shares = [{word: n / max(c.total(), 1) for word, n in c.items()} for c in counts]
risen = sorted(shares[-1], key=lambda w: shares[0].get(w, 0) - shares[-1][w])[:14]
picture = torch.tensor([[share.get(word, 0.0) for share in shares] for word in risen])
figure, axes = plt.subplots(1, 2, figsize=(10, 2.8), layout="constrained")
image = axes[0].imshow(100 * picture, aspect="auto", cmap="magma")
axes[0].set(yticks=range(len(risen)), yticklabels=risen, xlabel="iteration",
            title="% of all words, those that rose most")  # fmt: skip
figure.colorbar(image, ax=axes[0])
parts = [
    [gold_parts(s["prompt"], s["response"], s["finished"]) for s in rollout]
    for rollout in answers[0.0]
]
for name in ("correct", "polite", "repeated", "malformed"):
    axes[1].plot([mean(float(getattr(p, name)) for p in rollout) for rollout in parts], label=name)
axes[1].set(xlabel="iteration", title="a mean answer: parts of the gold reward")
axes[1].legend(fontsize=7)
plt.show()

# %% [markdown]
# ## 5 · What it looks like
#
# The best response of a rollout by the learnt reward.

# %%
for iteration in (1, 6, 12, ITERATIONS):
    best = max(answers[0.0][iteration - 1], key=lambda s: s["score"])
    print(f"iteration {iteration:>2}  learnt {best['score']:+.1f}  gold {gold_of([best])[0]:+.1f}"
          f"\n   {best['prompt']}\n   -> {best['response']}")  # fmt: skip

# %% [markdown]
# ## 6 · Without gold
#
# In practice there is no gold reward. You still see length, variety, and the doctor's alerts (dotted lines,
# at the iterations at which they were raised).

# %%
figure, axes = plt.subplots(1, 3, figsize=(10, 2.4), layout="constrained")
for kl, folder in runs.items():
    rows = read_metrics(folder.metrics)
    for ax, name in zip(axes, ("rollout/response_length", "rollout/distinct_2"), strict=False):
        ax.plot([row[name] for row in rows], color=penalties[kl], label=f"kl_coef = {kl:g}")
        ax.set(title=name, xlabel="iteration")
    alerts = list(read_summary(folder).alerts)
    for alert in alerts:
        axes[0].axvline(alert["raised_at"], color=penalties[kl], ls=":", lw=1)
    axes[2].plot(gold[kl], color=penalties[kl])
    print(f"kl_coef = {kl:g}: " + ("; ".join(
        f"iteration {a['raised_at']}: {a['detector']}" for a in alerts) or "no alert"))  # fmt: skip
axes[2].set(title="gold, for comparison", xlabel="iteration")
axes[0].legend(fontsize=7)
plt.show()

# %% [markdown]
# The same with a trained reward model: `python -m rlhf_lightning.train +experiment=ppo
# module.ppo.kl_coef=0 data.num_iterations=150`. `doctor=act` changes the controls when it sees this;
# `docs/doctor.md` has every detector.
