"""The plug-in for verl: the overrides that a launch command needs, and what verl makes of them."""

from importlib import resources
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from predmask.cli import main
from predmask.core import DPPO, RULES, PPOClip, Predictive
from predmask.plugins.verl import LOSS_MODE, RATIO_CAP, RULE, TOP_K, launch
from predmask.plugins.verl.launch import GROUP, LaunchError, launch_args

LOSS = "actor_rollout_ref.actor.policy_loss"
needs_verl = pytest.mark.skipif(find_spec("verl") is None, reason="verl is not installed")
# What verl says of engines that are not installed, and of its own defaults.
ignores_verl = pytest.mark.filterwarnings("ignore::UserWarning:verl", "ignore::DeprecationWarning")


def said(words):
    """The overrides as a dict, by their paths."""
    return {path.lstrip("+"): yaml.safe_load(value) for path, _, value in (word.partition("=") for word in words)}


def of_the_mask(words):
    return {path: value for path, value in said(words).items() if path.startswith(LOSS)}


def group():
    text = resources.files("predmask.plugins.verl.config").joinpath("predmask/verl.yaml").read_text(encoding="utf-8")
    return yaml.safe_load(text)["actor_rollout_ref"]["actor"]["policy_loss"]


def test_defaults_are_left_to_the_group():
    words = launch_args(Predictive())
    assert tuple(words[:2]) == GROUP == ("hydra.searchpath=[pkg://predmask.plugins.verl.config]", "+predmask=verl")
    assert of_the_mask(words) == {}
    assert (group()["rule"], group()["top_k"], group()["ratio_cap"]) == ({"name": RULE}, TOP_K, RATIO_CAP)
    assert group()["loss_mode"] == LOSS_MODE


def test_the_command_says_the_same_defaults(capsys):
    with pytest.raises(SystemExit):
        main(["verl", "args", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert f"(default: {TOP_K}; 0 for rules" in said
    assert f"or none (default: {RATIO_CAP:g})" in said
    assert main(["verl", "args"]) == 0
    assert of_the_mask(capsys.readouterr().out.split()) == {}


@pytest.mark.parametrize("rule", RULES.values(), ids=list(RULES))
def test_each_rule_survives_the_way_there(rule):
    given = of_the_mask(launch_args(rule()))
    name = given.pop(f"{LOSS}.rule.name", "predictive")
    assert RULES[name]() == rule()
    assert given.get(f"{LOSS}.top_k", 20) == (20 if rule().needs_topk else 0)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        (
            Predictive(delta=0.05, tail="uniform", divergence="js"),
            {"delta": 0.05, "tail": "uniform", "divergence": "js"},
        ),
        (DPPO(support="binary", divergence="tv", delta=0.2), {"support": "binary", "divergence": "tv", "delta": 0.2}),
        (PPOClip(eps_low=0.1, eps_high=1e-5), {"eps_low": 0.1, "eps_high": 1e-5}),
    ],
)
def test_fields_that_are_not_the_rules_defaults(rule, expected):
    given = of_the_mask(launch_args(rule))
    fields = {path.removeprefix(f"{LOSS}.rule."): value for path, value in given.items() if ".rule." in path}
    fields.pop("name", None)
    assert {key: float(value) if key.startswith("eps") else value for key, value in fields.items()} == expected


def test_numbers_and_traces(tmp_path):
    words = launch_args(Predictive(), top_k=50, ratio_cap=None, traces={"directory": tmp_path / "t", "every": 5})
    assert of_the_mask(words) == {
        f"{LOSS}.top_k": 50,
        f"{LOSS}.ratio_cap": None,
        f"{LOSS}.traces.directory": str(tmp_path / "t"),
        f"{LOSS}.traces.every": 5,
    }
    assert said(words)["actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs"] == 50
    assert not any(map(str.isspace, "".join(words)))


def test_a_relative_directory_is_that_of_whoever_launches(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    words = launch_args(Predictive(), traces={"directory": Path("t")})
    assert said(words)[f"{LOSS}.traces.directory"] == str(tmp_path / "t")


def test_a_rule_of_the_topk_without_one_is_refused():
    """Field case 17: no silent fall-back to the sampled token."""
    with pytest.raises(LaunchError, match=r"top-K missing.*--top-k 20"):
        launch_args(Predictive(), top_k=0)
    assert said(launch_args(PPOClip(), top_k=0))[f"{LOSS}.top_k"] == 0


def test_what_would_not_survive_the_shell_is_refused(tmp_path):
    for name in ("a b", "a,b", "a*", "$(id)", "a'b"):
        with pytest.raises(LaunchError, match="letters, digits"):
            launch_args(Predictive(), traces={"directory": tmp_path / name})
    with pytest.raises(LaunchError, match="give --traces DIR"):
        launch_args(Predictive(), traces={"every": 2})
    with pytest.raises(LaunchError, match="above 0"):
        launch_args(Predictive(), ratio_cap=0.0)


def test_the_agent_loops_file_is_named_where_verl_would_not_find_it(tmp_path, monkeypatch):
    site = tmp_path / "site"
    monkeypatch.setattr(launch, "find_spec", lambda name: ModuleSpec(name, None, origin=f"{site}/{name}/__init__.py"))
    path = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
    named = Path(said(launch_args(Predictive()))[path])
    assert named.read_text(encoding="utf-8").count("name: predmask") == 1
    # Installed beside verl, on whatever node.
    beside = site / "predmask" / "plugins" / "verl" / "config" / "agent_loops.yaml"
    beside.parent.mkdir(parents=True)
    beside.touch()
    assert path not in said(launch_args(Predictive()))


def test_the_command_prints_one_line(capsys, tmp_path):
    options = ["--rule", "dppo", "--rule.delta", "0.05", "--ratio-cap", "none", "--traces", str(tmp_path)]
    assert main(["verl", "args", *options, "--traces.max-mb", "10", "--traces.responses", "0"]) == 0
    [line] = capsys.readouterr().out.splitlines()
    assert of_the_mask(line.split()) == {
        f"{LOSS}.rule.name": "dppo",
        f"{LOSS}.rule.delta": 0.05,
        f"{LOSS}.ratio_cap": None,
        f"{LOSS}.traces.directory": str(tmp_path),
        f"{LOSS}.traces.responses": 0,
        f"{LOSS}.traces.max_mb": 10.0,
    }


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rule", "dpo"], "did you mean 'dppo'"),
        (["--rule.delat", "0.1"], "did you mean 'rule.delta'"),
        (["--rule.delta", "-1"], "rule.delta is -1.0"),
        (["--delta", "0.1"], "unknown option --delta"),
        (["--top-k", "0"], "top-K missing"),
    ],
)
def test_mistakes_name_the_remedy(capsys, options, said):
    assert main(["verl", "args", *options]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out.split() == ["+predmask=args_failed"]  # at which Hydra stops the launch command


# --- with verl -----------------------------------------------------------------------------------------------


def composed(*overrides, name="ppo_trainer"):
    from hydra import compose, initialize_config_module

    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(name, overrides=list(overrides))


VLLM = "actor_rollout_ref.rollout.engine_kwargs.vllm"
RUNNABLE = ("actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.actor.use_dynamic_bsz=true")


@needs_verl
@ignores_verl
@pytest.mark.parametrize("name", ["ppo_trainer", "ppo_megatron_trainer"])
def test_the_group_wins_over_verl_and_the_user_over_both(name):
    words = launch_args(Predictive())
    plain = composed(*RUNNABLE, name=name)
    ours = composed(*RUNNABLE, *words, name=name)
    theirs = composed(*RUNNABLE, *words, f"{LOSS}.ratio_cap=3", f"++{LOSS}.rule.delta=0.2", name=name)
    agent = "actor_rollout_ref.rollout.agent"
    for path, before, after in [
        ("algorithm.rollout_correction.bypass_mode", False, True),
        (f"{agent}.default_agent_loop", "single_turn_agent", "predmask"),
        (f"{LOSS}.loss_mode", "vanilla", "predmask"),
    ]:
        assert (value(plain, path), value(ours, path)) == (before, after)
    assert value(ours, f"{LOSS}.ratio_cap") == 5.0
    assert (value(theirs, f"{LOSS}.ratio_cap"), value(theirs, f"{LOSS}.rule.delta")) == (3, 0.2)


def value(config, path):
    from omegaconf import OmegaConf

    return OmegaConf.select(config, path)


@needs_verl
@ignores_verl
@pytest.mark.parametrize("model_engine", ["dp", "megatron"])
def test_verl_makes_the_settings_before_anything_starts(model_engine):
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    words = launch_args(DPPO(delta=0.05), traces={"directory": "/tmp/t"})
    config = composed(f"model_engine={model_engine}", *RUNNABLE, *words)
    before = instantiate(config.actor_rollout_ref.actor, _convert_="partial").policy_loss
    assert before.make_rule() == DPPO(delta=0.05)
    assert before.trace_settings().directory == "/tmp/t"
    assert before.host["actor_strategy"] == {"dp": "fsdp", "megatron": "megatron"}[model_engine]
    # A worker gets a part of the resolved whole.
    OmegaConf.resolve(config)
    part = OmegaConf.create(OmegaConf.to_container(config.actor_rollout_ref))
    assert instantiate(part.actor, _convert_="partial").policy_loss.host == before.host


@needs_verl
@ignores_verl
def test_settings_have_the_groups_defaults():
    from dataclasses import MISSING, fields

    from predmask.plugins.verl.settings import PolicyLossConfig

    found = {
        one.name: one.default_factory() if one.default is MISSING else one.default for one in fields(PolicyLossConfig)
    }
    names = ("loss_mode", "rule", "top_k", "ratio_cap", "traces")
    assert {name: found[name] for name in names} == {name: group()[name] for name in names}


@needs_verl
@ignores_verl
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ratio_cap": "abc"}, r"ratio_cap is 'abc': it must be a number above 0 \(null for no cap\)"),
        ({"ratio_cap": float("nan")}, "ratio_cap is nan: it must be a number above 0"),
        ({"ratio_cap": 0}, "ratio_cap is 0: it must be a number above 0"),
        ({"top_k": 10.5}, r"top_k is 10\.5: it must be a whole number, 0 or more"),
        ({"top_k": "many"}, "top_k is 'many': it must be a whole number"),
        ({"top_k": None}, "top_k is None: it must be a whole number"),
        ({"top_k": -1}, "top_k is -1: it must be a whole number"),
        ({"top_k": 0}, "reads the top-K, and policy_loss.top_k is 0: set 20"),
        ({"rule": "dppo"}, "policy_loss.rule is 'dppo': set its fields, as policy_loss.rule.name=predictive"),
        ({"traces": "/t"}, "policy_loss.traces is '/t': set its fields, as policy_loss.traces.directory=DIR"),
    ],
)
def test_settings_that_are_refused(given, said):
    from omegaconf import OmegaConf

    from predmask.plugins.verl.settings import PolicyLossConfig, SettingsError

    values = composed(*RUNNABLE, *launch_args(Predictive())).actor_rollout_ref.actor.policy_loss
    values = {name: value for name, value in OmegaConf.to_container(values, resolve=True).items() if name != "_target_"}
    PolicyLossConfig(**values)
    host = {**values["host"], "actor_policy_loss_top_k": given.get("top_k", 20)}
    with pytest.raises(SettingsError, match=said):
        PolicyLossConfig(**{**values, "host": host, **given})


@needs_verl
@ignores_verl
def test_a_rule_of_the_sampled_token_alone_may_have_several_turns():
    from hydra.utils import instantiate

    from predmask.plugins.verl.settings import SettingsError

    turns = (
        "actor_rollout_ref.rollout.multi_turn.enable=true",
        "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent",
    )
    config = composed(*RUNNABLE, *launch_args(PPOClip()), *turns)
    assert instantiate(config.actor_rollout_ref.actor, _convert_="partial").policy_loss.top_k == 0
    config = composed(*RUNNABLE, *launch_args(PPOClip(), top_k=20), *turns)
    with pytest.raises(Exception, match="default_agent_loop is tool_agent") as caught:
        instantiate(config.actor_rollout_ref.actor, _convert_="partial")
    assert isinstance(caught.value.__cause__, SettingsError)


@needs_verl
@ignores_verl
@pytest.mark.parametrize("name", ["fully_async", "one_step_off"])
def test_other_trainers_of_verl_are_refused(name):
    import verl
    from hydra import compose, initialize_config_dir
    from hydra.utils import instantiate

    directory = Path(verl.__file__).parent / "experimental" / f"{name}_policy" / "config"
    # The one searchpath must have verl's, too.
    words = ["hydra.searchpath=[pkg://verl.trainer.config,pkg://predmask.plugins.verl.config]", GROUP[1]]
    with initialize_config_dir(str(directory), version_base=None):
        config = compose(f"{name}_ppo_trainer", overrides=[*RUNNABLE, *words])
    with pytest.raises(Exception, match=r"start verl\.trainer\.main_ppo"):
        instantiate(config.actor_rollout_ref.actor, _convert_="partial")


@needs_verl
@ignores_verl
def test_vllms_arguments_are_looked_at_in_either_spelling():
    from hydra.utils import instantiate

    config = composed(*RUNNABLE, *launch_args(Predictive()), f"++{VLLM}.logprobs-mode=raw_logprobs", f"++{VLLM}.seed=3")
    with pytest.raises(Exception, match=r"vllm.logprobs-mode is raw_logprobs: .*; leave it out"):
        instantiate(config.actor_rollout_ref.actor, _convert_="partial")


@needs_verl
@ignores_verl
def test_verl_stops_at_a_configuration_that_is_refused():
    from hydra.errors import InstantiationException
    from verl.utils.config import validate_config

    config = composed(*RUNNABLE, *launch_args(Predictive()), "actor_rollout_ref.rollout.top_p=0.9")
    with pytest.raises(InstantiationException, match=r"truncated sampling.*set actor_rollout_ref.rollout.top_p=1"):
        validate_config(config, use_reference_policy=False, use_critic=False)


@needs_verl
def test_verl_finds_the_agent_loop():
    import hydra
    from omegaconf import OmegaConf
    from verl.utils.import_utils import resolve_config_path

    config = composed(*RUNNABLE, *launch_args(Predictive()))
    path = value(config, "actor_rollout_ref.rollout.agent.agent_loop_config_path")
    [entry] = OmegaConf.load(resolve_config_path(path))
    assert entry.name == value(config, "actor_rollout_ref.rollout.agent.default_agent_loop")
    assert hydra.utils.get_class(entry._target_).__name__ == "TopKAgentLoop"
