# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Reading a run
#
# Two PPO runs of a tiny policy, trained here in seconds: one with sensible settings (blue), one with twelve
# times the learning rate and no KL penalty (orange). The reward is a rule that checks whether a response is
# right and polite. Everything below is read from the run's folder.

# %%
import math
import textwrap

import matplotlib.pyplot as plt
import torch
from small_world import train_ppo, train_sft

from rlhf_lightning.data.demo.gold import gold_scores
from rlhf_lightning.runs.folder import read_metrics, read_samples
from rlhf_lightning.runs.metric_catalog import quantity
from rlhf_lightning.runs.summary import read_summary
from rlhf_lightning.runs.verdict import verdict

torch.set_num_threads(1)
plt.rcParams |= {"figure.dpi": 70, "font.size": 8, "savefig.bbox": "tight"}
HEALTHY, SICK, BAND, SOFT = "#3182bd", "#e6550d", "#31a35422", "#999999"

train_sft()
measured = ["evaluation.every_n_iterations=6", "evaluation.during_training=64"]
runs = {
    "healthy": train_ppo("healthy", "data.num_iterations=24", *measured, reward="rule"),
    "sick": train_ppo(
        "sick", "data.num_iterations=24", *measured,
        "module.ppo.learning_rate=1.2e-2", "module.ppo.kl_coef=0", reward="rule",
    ),
}  # fmt: skip
colours = {"healthy": HEALTHY, "sick": SICK}
print(*sorted(path.name for path in runs["healthy"].path.iterdir()))

# %% [markdown]
# ## 1 · The verdict
#
# `summary.json` has one figure, its interval, and what changed.

# %%
figure, axes = plt.subplots(1, 3, figsize=(9, 1.6), sharey=True)
for ax, (name, unit) in zip(
    axes, {"score": "reward", "gold": "gold reward", "response_length": "tokens"}.items(), strict=True
):  # fmt: skip
    for y, (run, folder) in enumerate(runs.items()):
        metrics = read_summary(folder).metrics
        before, after = metrics[f"val/baseline_{name}"], metrics[f"val/{name}"]
        ax.annotate(
            "",
            (after, y),
            (before, y),
            arrowprops={"arrowstyle": "->", "color": colours[run], "lw": 2},
        )
        ax.plot([before, after], [y, y], alpha=0)
        ax.text(after, y - 0.2, f"{after:.2f}", color=colours[run], ha="center")
    ax.margins(x=0.2)
    ax.set(yticks=range(2), yticklabels=list(runs), ylim=(1.5, -0.8), title=f"{unit}, SFT to PPO")
plt.show()
for run, folder in runs.items():
    told = verdict(read_summary(folder))
    print(f"{run:8} {told.number} {told.caption}\n         {told.sentence}")

# %% [markdown]
# ## 2 · Six curves
#
# The green band is the range of a healthy run (`docs/metrics.md`). Look in this order: does the
# score rise, how far has the policy moved, does the update stay small, do responses end, does the critic
# learn, is there variety left.

# %%
FIRST = ["rollout/score", "rollout/kl_per_token", "ppo/approx_kl", "rollout/eos_fraction",
         "ppo/explained_variance", "rollout/distinct_2"]  # fmt: skip
rows = {run: read_metrics(folder.metrics) for run, folder in runs.items()}
figure, axes = plt.subplots(2, 3, figsize=(9.5, 4), layout="constrained")
for ax, name in zip(axes.flat, FIRST, strict=True):
    curves = {run: [row[name] for row in table if name in row] for run, table in rows.items()}
    values = [value for curve in curves.values() for value in curve]
    low, high = quantity(name).healthy or (math.nan, math.nan)
    if low == low:
        ax.axhspan(low, high, color=BAND, lw=0)
    for run, curve in curves.items():
        ax.plot(range(1, len(curve) + 1), curve, color=colours[run], label=run)
    margin = 0.08 * (max(values) - min(values))
    ax.set(title=quantity(name).label, xlabel="iteration",
           ylim=(min(values) - margin, max(values) + margin))  # fmt: skip
axes[0, 0].legend(fontsize=7)
plt.show()

# %% [markdown]
# ## 3 · The cost
#
# Reward over the root of the KL from the SFT policy, on held-out prompts. Where gold falls while the learnt
# score rises, the policy has found what the reward model cannot see.

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 2.6), sharex=True, layout="constrained")
for run, folder in runs.items():
    metrics = read_summary(folder).metrics
    for ax, name in zip(axes, ("val/score", "val/gold"), strict=True):
        points = [(0.0, metrics[name.replace("/", "/baseline_")])]
        points += [
            (math.sqrt(max(row["val/kl_per_response"], 0)), row[name])
            for row in rows[run]
            if "val/kl_per_response" in row
        ]
        ax.plot(*zip(*points, strict=True), "o-", color=colours[run], ms=3, label=run)
        ax.set(title=quantity(name).label, xlabel="√KL, nats a response")
axes[0].legend(fontsize=7)
plt.show()

# %% [markdown]
# ## 4 · Every domain
#
# One figure for all prompts hides a domain that is forgotten. The line is the SFT policy.

# %%
first = [s for s in read_samples(runs["healthy"].samples) if "baseline_response" not in s]
domains = sorted({sample["domain"] for sample in first})


def gold_by_domain(folder, iterations):
    kept = [
        s
        for s in read_samples(folder.samples)
        if s["iteration"] in iterations and "baseline_response" not in s
    ]
    gold = gold_scores(*([s[key] for s in kept] for key in ("prompt", "response", "finished")))
    found = {d: [g for g, s in zip(gold, kept, strict=True) if s["domain"] == d] for d in domains}
    return [sum(values) / max(len(values), 1) for values in found.values()]


figure, ax = plt.subplots(figsize=(8, 2.3))
places = torch.arange(len(domains))
for shift, (run, folder) in zip((-0.2, 0.2), runs.items(), strict=True):
    ax.bar(
        places + shift, gold_by_domain(folder, range(20, 25)), 0.38, color=colours[run], label=run
    )
ax.plot(
    places,
    gold_by_domain(runs["healthy"], range(1, 3)),
    "_",
    color="black",
    ms=26,
    label="at first",
)
ax.set(xticks=places, xticklabels=domains, title="gold reward of the last rollouts")
ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
plt.show()

# %% [markdown]
# ## 5 · Length
#
# Each dot is one response: at the start (grey) and at the end. A score that is a function of length is a warning.

# %%
figure, axes = plt.subplots(1, 2, figsize=(8, 2.4), sharey=True, sharex=True)
for ax, (run, folder) in zip(axes, runs.items(), strict=True):
    samples = [s for s in read_samples(folder.samples) if "baseline_response" not in s]
    for iterations, colour in (((1, 2), SOFT), ((23, 24), colours[run])):
        kept = [s for s in samples if s["iteration"] in iterations]
        ax.scatter([s["length"] for s in kept], [s["score"] for s in kept], s=6, color=colour)
    last = torch.tensor([[s["length"], s["score"]] for s in samples if s["iteration"] == 24])
    ax.set(title=f"{run}: correlation at the end {torch.corrcoef(last.T)[0, 1]:+.2f}",
           xlabel="tokens", ylabel="reward")  # fmt: skip
plt.show()

# %% [markdown]
# ## 6 · The responses
#
# Read these before you believe a figure.

# %%
for run, folder in runs.items():
    pairs = [s for s in read_samples(folder.samples) if s.get("baseline_response") is not None]
    print(f"--- {run}")
    for sample in pairs[:4]:
        print(sample["prompt"])
        for who, text in (("SFT", sample["baseline_response"]), ("PPO", sample["response"])):
            print(f"   {who}  {textwrap.shorten(text, 90)}")

# %% [markdown]
# ## 7 · The doctor's alerts, and the time
#
# The doctor watches every rollout and names each problem, with cause and remedy.

# %%
for run, folder in runs.items():
    alerts = read_summary(folder).alerts
    print(f"{run}: {len(alerts)} alerts")
    for alert in alerts[:5]:
        print(
            f"   iteration {alert['raised_at']:>2}  {alert['level']:7} {textwrap.shorten(alert['message'], 90)}"
        )
figure, ax = plt.subplots(figsize=(8, 1.2))
left = [0.0, 0.0]
for phase, colour in (("generate", "#9ecae1"), ("score", "#fdae6b"), ("update", "#a1d99b")):
    seconds = [sum(row[f"time/{phase}"] for row in table) for table in rows.values()]
    ax.barh(list(rows), seconds, left=left, color=colour, label=phase)
    left = [a + b for a, b in zip(left, seconds, strict=True)]
ax.invert_yaxis()
ax.set(xlabel="seconds of training")
ax.legend(fontsize=7, ncols=3, loc="upper right", bbox_to_anchor=(1, 1.5))
plt.show()

# %% [markdown]
# All this is in `report.html` of every run, and `python -m rlhf_lightning.report RUN RUN` overlays two runs. Next: [reward hacking, live](04_reward_hacking.ipynb).
