"""Every experiment composes, hyper-parameters build, and what is mistyped is refused by name."""

from pathlib import Path

import pytest
from hydra import initialize_config_dir

from rlhf_lightning.app.config.compose import ConfigError, choices, conf_dir, register
from rlhf_lightning.app.config.save import keep_configuration
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.validate import load_settings
from rlhf_lightning.hparams import UnusualHparamWarning
from rlhf_lightning.reports.page import render_report
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import Summary, write_summary
from tests.builders.command_lines import settings_of


def composed(*overrides: str) -> TrainSettings:
    register()
    return load_settings(TrainSettings, "train", list(overrides))


@pytest.mark.parametrize("experiment", choices("experiment"))
def test_every_experiment_composes_and_its_hyperparameters_build(experiment):
    settings = composed(f"+experiment={experiment}")
    assert settings.stage in ("sft", "reward", "dpo", "ppo", "grpo", "distillation")
    assert type(settings.hparams) is settings.spec.module.kinds[settings.spec.settings]
    assert settings.artifacts.publish, "a stage that publishes nothing cannot be built upon"


@pytest.mark.parametrize("preset", [n for n in choices("preset") if n.startswith("article_")])
def test_presets_set_the_articles_values_and_warn_of_what_is_unusual(preset):
    with pytest.warns(UnusualHparamWarning, match=r"gamma=0\.99 is outside the usual range 1 to 1"):
        ppo = composed("+experiment=ppo", f"+preset={preset}").hparams
    assert (ppo.gamma, ppo.vf_coef, ppo.gae_lambda, ppo.num_ppo_epochs) == (0.99, 0.5, 0.95, 4)
    assert ppo.kl_coef == (0.05 if preset == "article_step_by_step" else 0.1)


@pytest.mark.thorough
def test_a_page_begins_with_what_the_user_has_set_and_folds_the_rest_resolved(tmp_path):
    words = ["+experiment=dpo", "model=pretrained", "dataset=files", "dataset.name=mine"]
    words += ["dataset.path=pairs.jsonl", "module.dpo.beta=0.3", "seed=3", "logger=none"]
    words += ["artifacts.sft=org/m", "trainer.precision=bf16-mixed"]
    register()
    folder = RunFolder(tmp_path)
    folder.config.parent.mkdir()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        settings = load_settings(TrainSettings, "train", words)
        keep_configuration(settings, folder)
    folder.config.with_name("overrides.yaml").write_text("".join(f"- {w}\n" for w in words))
    write_summary(folder, Summary("dpo", "completed", 3))
    page = render_report(folder)
    assert "${" not in page
    assert (
        page.index("module.dpo.beta=0.3") < page.index("<dt>seed") < page.index("max_length: 1024")
    )


@pytest.mark.thorough
def test_what_is_read_from_the_environment_counts_in_the_hash_but_for_secrets(monkeypatch):
    def digest(path, *more):
        own = ("dataset=files", "dataset.name=mine", f"dataset.path='{path}'")
        return composed("+experiment=sft", *own, *more).config_hash

    for name, value in {"DATA": "/a", "JUDGE_API_KEY": "secret", "HERE": "/a"}.items():
        monkeypatch.setenv(name, value)
    first = digest("${oc.env:DATA}/d")
    assert first == digest("${oc.env:HERE}/d") == digest("/a/d")
    assert first == digest("${oc.env:NOT_SET,${oc.env:DATA}}/d") == digest("${oc.env:DATA,/b}/d")
    keyed = digest("${oc.env:JUDGE_API_KEY}")
    monkeypatch.setenv("SLURM_TMPDIR", "/scratch/job.1")
    staged = digest("${oc.env:SLURM_TMPDIR}/d")
    placed = digest("mine", "paths.outputs=${oc.env:DATA}/outputs")
    monkeypatch.setenv("DATA", "/b")
    monkeypatch.setenv("JUDGE_API_KEY", "renewed")
    monkeypatch.setenv("SLURM_TMPDIR", "/scratch/job.2")
    assert digest("${oc.env:SLURM_TMPDIR}/d") == staged  # the next job of the same run
    assert digest("${oc.env:DATA}/d") == digest("/b/d") != first
    assert digest("${oc.env:JUDGE_API_KEY}") == keyed
    assert digest("mine", "paths.outputs=${oc.env:DATA}/outputs") == placed == digest("mine")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["+experment=ppo"], "unknown top-level key 'experment'; did you mean experiment"),
        (["+presets=x", "+experiment=ppo"], "'presets'; did you mean preset"),
        (["+sweep=x", "+experiment=ppo"], "'sweep'; did you mean sweeps"),
        ([], "stage=None: choose what to train with"),
        (["+experiment=ppo", "module._target_=os.system"], "_target_=os.system is not allowed"),
        (
            ["+experiment=ppo", "dataset.gold.path=os.system"],
            "dataset.gold._target_=os.system is not allowed",
        ),
        (
            ["+experiment=ppo", "+gates.mine={metric: val/score, at_leest: 1}"],
            "gates.mine=.* has the unknown key at_leest: use metric, at_least",
        ),
        (
            ["+experiment=ppo", "+callbacks.extra.mine._target_=subprocess.run"],
            "callbacks.extra.mine._target_=subprocess.run is not allowed",
        ),
    ],
)
def test_a_configuration_that_would_run_something_else_is_refused(overrides, message):
    with pytest.raises(ConfigError, match=message.replace("[", r"\[")):
        composed(*overrides)


def test_a_target_that_the_user_lists_is_allowed(tmp_path, monkeypatch):
    given = ["+experiment=ppo", "+callbacks.extra.mine._target_=my_package.Callback"]
    with pytest.raises(ConfigError, match=r"my_package\.Callback is not allowed"):
        composed(*given)
    monkeypatch.setenv("RLHF_ALLOWED_TARGETS", "my_package.")
    (tmp_path / "my_package.py").write_text(
        "from lightning import Callback as Base\nclass Callback(Base): ...\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert composed(*given).callbacks.extra["mine"].path == "my_package.Callback"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ("module.ppo.gamma=1.5", r"module\.ppo\.gamma=1.5 must be <= 1"),
        ("module.ppo.kl_coef=-1", r"module\.ppo\.kl_coef=-1 must be >= 0"),
        ("module.ppo.num_ppo_epochs=2.5", r"num_ppo_epochs=2.5 is float, expected int"),
        ("module.ppo.kl_coef=abc", r"kl_coef='abc' is str, expected float"),
        ("module.sampling.top_k=50", r"top_k=50.*full distribution"),
        ("module.ppo.num_minibatches=3", r"num_minibatches=3 must divide data.batch_size=128"),
        ("data.batch_size=9", r"num_minibatches=2 must divide .*=9: use one of \[1, 3, 9\]"),
        ("module.ppo.cliprange=null", r"cliprange=None is NoneType, expected float"),
        (
            "model.ppo.learning_rate=-1",
            r"module\.ppo\.learning_rate=-1.*\(\$\{model\.ppo\.learning",
        ),
        ("model.run_name=null", r"name=None is NoneType, expected str \(\$\{model\.run_name\}\)"),
        # The controller would flip the sign of the coefficient.
        (
            "module.ppo.kl_target=6 module.ppo.kl_horizon=20",
            r"kl_horizon=20 is too small for 128 responses",
        ),
    ],
)
def test_impossible_hyperparameters_fail_before_anything_runs(overrides, message):
    with pytest.raises(ConfigError, match=message):
        composed("+experiment=ppo", *overrides.split())


def test_the_configuration_stands_inside_the_package_or_beside_it():
    assert conf_dir().name == "conf"
    assert (conf_dir().parent / "sweeps").is_dir()
    assert Path(__file__).resolve().parents[2] in conf_dir().parents or "site-packages" in str(
        conf_dir()
    )


@pytest.mark.parametrize("entry", ["evaluate", "collect"])
@pytest.mark.parametrize("name", ["local", "openai"])
def test_every_judge_is_built_with_further_keys_and_nulls(entry, name, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "k")
    words = [f"judge={name}", "judge.model=m", "judge.system=null", "judge.temperature=null"]
    words += ["judge.extra={chat_template_kwargs: {enable_thinking: false}}"]
    words += ["judge.input_price=1", "judge.output_price=1"] if name == "openai" else []
    judge = settings_of(*words, entry=entry).judge.build()
    assert judge.extra == {"chat_template_kwargs": {"enable_thinking": False}}
    assert judge.prompt.system == []
    assert judge.hparams.temperature is None
