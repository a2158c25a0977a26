# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # From PPO to GRPO in four edits, with what each does
#
# PPO on the built-in world, and four changes of settings that turn it into GRPO, each with its effect.
# Every run samples 64 responses per iteration, takes two optimizer steps on them and is scored by
# the same rule: whether a response is right and polite.
#
# These are single runs of a tiny policy. They show what the edits do, not which objective is better:
# for that see `docs/objectives.md` and `python -m benchmarks.studies.objectives`.

# %%
import matplotlib.pyplot as plt
import torch
from small_world import train_grpo, train_ppo, train_sft

from rlhf_lightning.functional.advantages import group_advantages
from rlhf_lightning.runs.folder import read_metrics, read_samples
from rlhf_lightning.runs.summary import read_summary

torch.set_num_threads(1)
plt.rcParams |= {"figure.dpi": 60, "font.size": 8, "savefig.bbox": "tight"}
ITERATIONS, GROUP, KL_COEF = 16, 8, 0.05
COLOURS = {"PPO": "#999999", "1": "#3182bd", "2": "#e6a817", "3": "#e6550d", "4": "#31a354"}
SHARED = [f"data.num_iterations={ITERATIONS}", "module.sampling.max_new_tokens=24",
          "evaluation.num_prompts=64"]  # fmt: skip
GROUPS = ["data.batch_size=8", f"++data.num_generations={GROUP}"]
runs = {}


def answers(run):
    """Return score and KL (nats) of each answer, `[iterations, prompts, 8]`."""
    samples = [s for s in read_samples(runs[run].samples) if "baseline_response" not in s]
    table = torch.tensor([[s["score"], s["kl"] * s["length"]] for s in samples])
    return table.view(ITERATIONS, -1, GROUP, 2).unbind(-1)


def of_groups(scores, **how):
    """Return the advantage of each answer, `[iterations, prompts, 8]`."""
    group_ids = torch.arange(scores.numel()) // GROUP
    return group_advantages(scores.flatten(), group_ids, **how).view_as(scores)


def curves(*names):
    """Draw metrics over iterations."""
    _, axes = plt.subplots(1, len(names), figsize=(3.2 * len(names), 2.2), layout="constrained")
    for ax, name in zip(axes, names, strict=True):
        for run, folder in runs.items():
            rows = [row[name] for row in read_metrics(folder.metrics) if name in row]
            if rows:
                ax.plot(range(1, len(rows) + 1), rows, color=COLOURS[run], label=run)
        ax.set(title=name, xlabel="iteration")
    axes[0].legend(fontsize=7)
    plt.show()


def pictures(**tables):
    """Draw one number for each answer, `[prompts, 8]`; a row is a prompt."""
    figure, axes = plt.subplots(
        1, len(tables), figsize=(3.2 * len(tables), 2.0), layout="constrained"
    )
    for ax, (name, table) in zip(axes, tables.items(), strict=True):
        bound = float(table.abs().max())
        image = ax.imshow(table, cmap="RdBu", vmin=-bound, vmax=bound, aspect="auto")
        ax.set(title=name.replace("_", " "), xlabel="answer", ylabel="prompt")
        figure.colorbar(image, ax=ax)
    plt.show()


train_sft()
PASSES = "module.ppo.num_ppo_epochs=1"  # as many as GRPO makes
runs["PPO"] = train_ppo("ppo", PASSES, *SHARED, reward="rule")

# %% [markdown]
# ## Edit 1 · Several responses to a prompt
#
# `data.batch_size=8 data.num_generations=8`: 8 prompts with 8 responses each instead of 64 prompts with one.
# It is still PPO with its value model. Now responses can be compared: the same prompt, several scores. A row
# of one colour is a prompt whose responses all score the same; `rollout/informative_groups` is the share of the
# others.

# %%
runs["1"] = train_ppo("edit_1", PASSES, *SHARED, *GROUPS, reward="rule")
scores, _ = answers("1")
pictures(scores_of_iteration_1=scores[0], scores_of_the_last=scores[-1])
curves("rollout/score", "rollout/informative_groups")
between = scores.mean(-1).var(unbiased=False) / scores.var(unbiased=False)
print(f"share of the scores' variance between prompts or iterations: {between:.0%}")

# %% [markdown]
# ## Edit 2 · The mean of the group instead of the value model
#
# `+experiment=grpo module.grpo.scale=none module.grpo.kl_in=reward`: the advantage of a response is its
# reward minus the mean of its group, the same at every token. There is no value model, no GAE and no
# whitening. On the left the scores of an iteration, on the right the advantages.
#
# Both baselines remove what a prompt's responses have in common. The value model must learn it, and
# `ppo/explained_variance` is the share of the returns that it explains. The group's mean needs no learning, but
# eight responses. The mean includes the response itself: `baseline=leave_one_out` (RLOO) leaves it out, which
# makes every advantage 8/7 times as large.

# %%
runs["2"] = train_grpo("edit_2", *SHARED, *GROUPS, "module.grpo.scale=none",
                       "module.grpo.kl_in=reward", f"module.grpo.kl_coef={KL_COEF}", reward="rule")  # fmt: skip
scores, _ = answers("2")
pictures(scores=scores[0], less_the_group_mean=of_groups(scores, baseline="mean", scale="none")[0])
curves("rollout/score", "ppo/explained_variance", "rollout/kl_per_response")
mean = of_groups(scores, baseline="mean", scale="none")
others = of_groups(scores, baseline="leave_one_out", scale="none")
kept = mean.abs() > 1e-6
print(f"variance of the scores {scores.var():.2f}, of the advantages {mean.var():.2f}")
print(f"leave-one-out over mean: {(others[kept] / mean[kept]).mean():.3f}")

# %% [markdown]
# ## Edit 3 · Divide by the spread of the group
#
# `module.grpo.scale=group_std`: every group with a difference now weighs about the same, whether its responses
# differ by much or by little (right). Without it (left) the weight of a group is its spread. Dr. GRPO
# leaves the division out again, because division raises the weight of prompts whose responses are nearly all good or nearly
# all bad. A group of equal scores has advantages of 0 either way, but for the KL in the reward, which the division
# brings to full strength whatever `kl_coef` is: `rlhf-train` warns of the two together.
#
# The advantages have another size now, and so has the gradient. Adam removes most of that, but
# `max_grad_norm` and an entropy bonus do not.

# %%
runs["3"] = train_grpo("edit_3", *SHARED, *GROUPS, "module.grpo.kl_in=reward",
                       f"module.grpo.kl_coef={KL_COEF}", reward="rule")  # fmt: skip
scores, _ = answers("3")
plain = of_groups(scores, baseline="mean", scale="none")
scaled = of_groups(scores, baseline="mean", scale="group_std")
figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.2), layout="constrained")
for ax, values, colour in zip(axes, (plain, scaled), (COLOURS["2"], COLOURS["3"]), strict=True):
    ax.scatter(scores.std(-1), values.abs().mean(-1), s=8, color=colour)
    ax.set(xlabel="spread of the group's scores", ylabel="mean |advantage|")
axes[0].set(title="scale=none")
axes[1].set(title="scale=group_std")
plt.show()
curves("rollout/score", "grpo/policy_loss", "grpo/grad_norm")
spread = scores.std(-1)
print(f"groups without a difference: {(spread == 0).float().mean():.0%}")
print(f"largest over median spread of a group: {spread.max() / spread.median():.1f}")

# %% [markdown]
# ## Edit 4 · The KL from the reward into the loss
#
# `module.grpo.kl_in=loss`, the default: now this is `+experiment=grpo`. In the reward the KL of a response is
# compared with that of its group and divided by the group's spread, like the score. Left, the responses of
# edit 3's last rollout: their advantages with the KL over those without it. In the loss the penalty
# is added to the surrogate at every token, and no group changes its weight.
#
# `kl_estimator=k2` has the gradient of KL(policy || reference). The paper's k3 has that of
# KL(reference || policy) and is there for comparison.

# %%
runs["4"] = train_grpo("edit_4", *SHARED, *GROUPS, f"module.grpo.kl_coef={KL_COEF}", reward="rule")
scores, kl = answers("3")
how = {"baseline": "mean", "scale": "group_std"}
without, within = of_groups(scores, **how), of_groups(scores - KL_COEF * kl, **how)
figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.4), layout="constrained")
axes[0].scatter(without[-1], within[-1], s=8, color=COLOURS["3"])
axes[0].axline((0, 0), slope=1, color="#cccccc", lw=1)
axes[0].set(xlabel="advantage of the score", ylabel="of score less KL", title="KL in the reward")
axes[1].hist((within - without).flatten(), bins=40, color=COLOURS["3"])
axes[1].set(title="what the KL adds to an advantage", xlabel="all iterations")
plt.show()
curves("rollout/score", "rollout/kl_per_response", "grpo/approx_kl")
share = (within - without).std() / without.std()
print(f"the KL moves an advantage by {share:.0%} of the advantages' own spread")

# %% [markdown]
# ## All five
#
# On held-out prompts, at the end. One seed, 16 iterations of 64 responses, 64 prompts: intervals that overlap say
# nothing about which is better, and one that includes 50 % nothing about SFT. The rule is not the gold reward.

# %%
for run, folder in runs.items():
    metrics = read_summary(folder).metrics
    low, high = metrics["val/gold_win_rate_low"], metrics["val/gold_win_rate_high"]
    print(f"{run:4} score {metrics['val/score']:+.2f} (SFT {metrics['val/baseline_score']:+.2f})"
          f"  KL {metrics['val/kl_per_token']:.3f} nats a token"
          f"  gold win rate {metrics['val/gold_win_rate']:.0%} ({low:.0%} to {high:.0%})")  # fmt: skip

# %% [markdown]
# From here it is one more setting each: `module.grpo.loss_reduction=constant` with `scale=none` is Dr. GRPO,
# `surrogate=gspo` one ratio for a whole response, `surrogate=cispo` clipped weights. Their experiments have
# these names; `docs/objectives.md` says when to use which.
