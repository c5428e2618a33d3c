"""From layers to a configuration and back to TOML, and what is said when they are wrong."""

from __future__ import annotations

import copy
import dataclasses
import tomllib
from collections.abc import Sequence
from types import NoneType
from typing import Annotated, Any, ClassVar, Literal, get_args, get_origin

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from typing_extensions import Doc

from predmask.core import CISPO, DPPO, RULES, PPOClip, Predictive
from predmask.rollout import ENGINES
from predmask.tasks import TASKS, Arithmetic, Problem
from predmask.tasks.reasoning_gym import ReasoningGym
from predmask.train.config import Config, ConfigError
from predmask.train.fields import fields
from predmask.train.options import SECTIONS, describe, overrides, preset_layer, read_toml, resolve, to_toml
from predmask.train.presets import PRESETS


class _Task:
    inline_verifier: ClassVar[bool] = True

    def problems(self, split: str) -> Sequence[Problem]:
        return ()

    def score(self, problem: Problem, response: str) -> float:
        return 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Puzzle(_Task):
    """A user's task with a field of every kind."""

    title: Annotated[str, Doc("what it is\n  called")]
    sizes: Annotated[tuple[int, ...], Doc("sizes")] = (1, 2)
    pair: tuple[float, str | None] = (1.0, None)
    mode: Literal["easy", 3, True] = "easy"
    hints: bool | None = None
    table: tuple[tuple[int, ...], ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Unspellable(_Task):
    lengths: list[int] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Named(_Task):
    name: str = "x"


def typed(line: str) -> Config:
    """The configuration that the options of a command line give."""
    return resolve(overrides(line.split()))


def read(toml: str) -> Config:
    return resolve(tomllib.loads(toml))


# Layers


def test_no_layer_is_the_defaults() -> None:
    assert resolve() == Config()


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_can_be_run(name: str) -> None:
    before = copy.deepcopy(PRESETS[name].values)
    assert resolve(preset_layer(name), overrides(["--rule", "ppo_clip", "--steps", "2"])).steps == 2
    assert PRESETS[name].values == before


def test_command_line_over_file_over_preset() -> None:
    preset = {"steps": 1, "seed": 1, "threads": 1, "rollout": {"prompts": 1, "top_k": 1}}
    file = tomllib.loads("seed = 2\nthreads = 2\n[rollout]\ntop_k = 2")
    config = resolve(preset, file, overrides(["--threads", "3"]))
    assert (config.steps, config.seed, config.threads) == (1, 2, 3)
    assert (config.rollout.prompts, config.rollout.top_k) == (1, 2)


def test_a_bare_string_is_short_for_the_name() -> None:
    assert read('rule = "dppo"') == read('[rule]\nname = "dppo"') == typed("--rule dppo") == typed("--rule.name=dppo")


def test_another_name_keeps_the_fields_that_both_have() -> None:
    predictive = {"rule": {"name": "predictive", "delta": 0.05, "tail": "uniform"}}
    assert resolve(predictive, {"rule": "dppo"}).rule == DPPO(delta=0.05)
    assert resolve(predictive, {"rule": "dppo"}, {"rule": "predictive"}).rule == Predictive(delta=0.05)
    assert resolve(predictive, {"rule": "cispo"}).rule == CISPO()
    assert resolve(predictive, {"rule": {"delta": 0.1}}).rule == Predictive(delta=0.1, tail="uniform")
    assert resolve(predictive, {"rule": {"name": "predictive"}}).rule == Predictive(delta=0.05, tail="uniform")


def test_tasks_are_named_in_three_ways() -> None:
    assert typed("--task arithmetic --task.digits 5").task == Arithmetic(digits=5)
    assert typed("--task reasoning_gym:chain_sum").task == ReasoningGym(dataset="chain_sum")
    assert typed("--task reasoning_gym --task.dataset chain_sum").task == ReasoningGym(dataset="chain_sum")
    assert typed(f"--task {__name__}:Puzzle --task.title x").task == Puzzle(title="x")


# Values


@pytest.mark.parametrize(
    ("line", "path", "value"),
    [
        ("--rule.delta 0.15", "rule.delta", 0.15),
        ("--rule.delta=1e-3", "rule.delta", 0.001),
        ("--rule.delta 2", "rule.delta", 2.0),
        ("--seed 3 --seed 4", "seed", 4),
        ("--update.autocast", "update.autocast", True),
        ("--update.autocast --seed 3", "update.autocast", True),
        ("--update.autocast false", "update.autocast", False),
        ("--update.autocast=True", "update.autocast", True),
        ("--loss.ratio_cap none", "loss.ratio_cap", None),
        ("--output none", "output", None),
        ("--output 3", "output", "3"),
        ("--output=--odd", "output", "--odd"),
        ("--model=a=b", "model", "a=b"),
        ("--model -x", "model", "-x"),
        ("--rule.tail uniform", "rule.tail", "uniform"),
    ],
)
def test_typed_values(line: str, path: str, value: object) -> None:
    config: Any = typed(line)
    for part in path.split("."):
        config = getattr(config, part)
    assert config == value
    assert type(config) is type(value)


@pytest.mark.parametrize(
    ("option", "field", "value"),
    [
        ("sizes=3, 4,5", "sizes", (3, 4, 5)),
        ("sizes=", "sizes", ()),
        ("sizes=-7", "sizes", (-7,)),
        ("pair=2,none", "pair", (2.0, None)),
        ("pair=inf,a", "pair", (float("inf"), "a")),
        ("mode=3", "mode", 3),
        ("mode=true", "mode", True),
        ("hints=none", "hints", None),
        ("hints", "hints", True),
    ],
)
def test_typed_values_of_a_users_task(option: str, field: str, value: object) -> None:
    task = resolve(overrides([f"--task={__name__}:Puzzle", "--task.title=x", f"--task.{option}"])).task
    assert getattr(task, field) == value
    assert type(getattr(task, field)) is type(value)


def test_toml_values() -> None:
    config = read('loss.ratio_cap = 5\nloss.horizon = "none"\nrule.delta = 1e-2')
    assert type(config.loss.ratio_cap) is float
    assert config.loss.horizon is None
    task = read(
        f'[task]\nname = "{__name__}:Puzzle"\ntitle = "x"\nsizes = [3]\npair = [1, "a"]\ntable = [[1], []]'
    ).task
    assert task == Puzzle(title="x", sizes=(3,), pair=(1.0, "a"), table=((1,), ()))


def test_negative_numbers_are_values() -> None:
    with pytest.raises(ConfigError, match=r"rule.delta is -0.15; it must be a finite number above 0"):
        typed("--rule.delta -0.15")
    with pytest.raises(ConfigError, match=r"seed is -1; it must be 0 or more"):
        typed("--seed -1")


# Errors name the field, the value and the remedy


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("--rule.dleta 1", ["'rule.dleta'", "did you mean 'rule.delta'", "rule.divergence, rule.tail, rule.delta"]),
        ("--delta 1", ["'delta'", "did you mean 'rule.delta'"]),
        ("--rulle.delta 1", ["'rulle.delta'", "did you mean 'rule.delta'"]),
        ("--sead 1", ["'sead'", "did you mean 'seed'", "model, steps"]),
        ("--see 1", ["'see'", "did you mean 'seed'"]),
        ("--rollout.max-new-tokens 1", ["did you mean 'rollout.max_new_tokens'"]),
        ("--rule cispo --rule.delta 1", ["'rule.delta'", "rule cispo has rule.name, rule.eps_low, rule.eps_high"]),
        ("--rule none --rule.delta 1", ["'rule.delta'", "rule none has rule.name"]),
        ("--seed.x 1", ["'seed.x'", "did you mean 'seed'"]),
        ("--rule.delta.x 1", ["'rule.delta.x'"]),
        ("--rollout.top_p 0.9", ["'rollout.top_p'", "truncated sampling is refused", "rollout.top_k is how many"]),
        ("--min_p 0.1", ["'min_p'", "truncated sampling is refused"]),
        ("--rollout 3", ["rollout is '3'", "section", "rollout.prompts"]),
        ("--rule dpo", ["unknown rule 'dpo'", "did you mean 'dppo'", *RULES]),
        ("--engine vlm", ["unknown engine 'vlm'", *ENGINES]),
        ("--task aritmetic", ["unknown task 'aritmetic'", "did you mean 'arithmetic'", *TASKS, "package.module:Class"]),
        ("--task reasoning_gym", ["task.dataset must be set", "name of the data set"]),
        ("--task nowhere.to:Find", ["'nowhere.to:Find'", "cannot be imported"]),
        ("--task.digits 0", ["task: digits is 0"]),
        (f"--task {__name__}:Unspellable", ["the field lengths is list[int]", "bool, int, float, str"]),
        (f"--task {__name__}:Named", ["field called name"]),
        ("--rollout.prompts 1.5", ["rollout.prompts is '1.5'", "int"]),
        ("--rollout.prompts many", ["rollout.prompts is 'many'", "int"]),
        ("--rollout.prompts", ["rollout.prompts is true (or was given no value)", "int"]),
        ("--model", ["model is true (or was given no value)", "str"]),
        ("--update.autocast yes", ["update.autocast is 'yes'", "true|false"]),
        ("--loss.ratio_cap x", ["loss.ratio_cap is 'x'", "float|none"]),
        ("--seed none", ["seed is 'none'", "int"]),
        ("--rule.tail exat", ["rule.tail is 'exat'", "exact|aggregated|uniform"]),
        ("--loss.aggregation mean", ["loss.aggregation is 'mean'", "token_mean|seq_mean_token_mean"]),
        ("--rule.delta 0", ["rule.delta is 0.0", "above 0"]),
        ("--rule.delta nan", ["rule.delta is nan"]),
        ("--loss.ratio_cap 0.5", ["loss.ratio_cap is 0.5"]),
        ("--rollout.top_k 0", ["rollout.top_k is 0", "ppo_clip"]),
        ("arithmetic", ["'arithmetic' belongs to no option", "preset comes first"]),
        ("--seed 1 2", ["'2' belongs to no option"]),
        ("-s 1", ["'-s' belongs to no option"]),
    ],
)
def test_mistakes_on_the_command_line(line: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        typed(line)
    assert [part for part in parts if part not in str(error.value)] == [], error.value


@pytest.mark.parametrize(
    ("toml", "parts"),
    [
        ("seed = 1.0", ["seed is 1.0", "int"]),
        ("seed = true", ["seed is true", "int"]),
        ('seed = "1"', ["seed is '1'", "int"]),
        ("seed = 2020-01-01", ["seed is", "int"]),
        ("seed = {a = 1}", ["seed is {'a': 1}", "int"]),
        ("rule.delta = true", ["rule.delta is true", "float"]),
        ('rule.delta = "0.1"', ["rule.delta is '0.1'", "float"]),
        (f"rule.delta = 1{'0' * 400}", ["rule.delta is 1000", "float"]),
        ("update.autocast = 1", ["update.autocast is 1", "true|false"]),
        ("model = 3", ["model is 3", "str"]),
        ("rule.tail = 3", ["rule.tail is 3", "exact|aggregated|uniform"]),
        ("rule = 3", ["rule is 3", "section", "rule.delta"]),
        ("rule.name = 3", ["unknown rule 3", "predictive"]),
        ("task.name = 3", ["unknown task 3", "arithmetic"]),
        ("rollout = [1]", ["rollout is [1]", "section", "rollout.prompts"]),
        ('rollout = "x"', ["rollout is 'x'", "section"]),
        ("[rule]\nnmae = 1", ["'rule.nmae'", "did you mean 'rule.name'"]),
        ("[rules]\ndelta = 1", ["'rules'", "did you mean 'rule'"]),
        ("[rollout]\nname = 1", ["'rollout.name'", "rollout has rollout.prompts"]),
        (
            f'[task]\nname = "{__name__}:Puzzle"\ntitle = ""\npair = [1]',
            ["task.pair is [1]", "list of float, str|none"],
        ),
        (f'[task]\nname = "{__name__}:Puzzle"\ntitle = ""\nsizes = ["1"]', ["task.sizes is ['1']", "list of int"]),
        (f'[task]\nname = "{__name__}:Puzzle"\ntitle = ""\nmode = 1', ["task.mode is 1", "easy|3|true"]),
    ],
)
def test_mistakes_in_toml(toml: str, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        read(toml)
    assert [part for part in parts if part not in str(error.value)] == [], error.value


def test_a_mistake_is_found_also_where_a_later_layer_takes_another_rule() -> None:
    with pytest.raises(ConfigError, match=r"'rule.dleta'"):
        resolve({"rule": {"dleta": 1}}, {"rule": "cispo"})


def test_unknown_preset() -> None:
    with pytest.raises(ConfigError, match=r"unknown preset 'arithmetics' \(did you mean 'arithmetic'\?\); .*stress"):
        preset_layer("arithmetics")


def test_unreadable_files(tmp_path: Any) -> None:
    file = tmp_path / "run.toml"
    with pytest.raises(ConfigError, match=r"cannot read .*run\.toml: No such file"):
        read_toml(file)
    with pytest.raises(ConfigError, match=r"cannot read .*: Is a directory"):
        read_toml(tmp_path)
    file.write_text("seed = 1\nsteps = = 2\n")
    with pytest.raises(ConfigError, match=r"run\.toml is not valid TOML: .*line 2"):
        read_toml(file)
    file.write_bytes('model = "modèle"'.encode("latin-1"))
    with pytest.raises(ConfigError, match=r"run\.toml is not UTF-8 text \(byte 12\)"):
        read_toml(file)
    file.write_bytes('model = "modèle"'.encode("utf-8-sig"))
    assert read_toml(file) == {"model": "modèle"}


# Writing


def _values(hint: Any, default: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type, near the default so that most are allowed."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Literal:
        return st.sampled_from(args)
    if origin is tuple:
        if args[-1] is Ellipsis:
            return st.lists(_values(args[0], 1), max_size=3).map(tuple)
        return st.tuples(*(_values(item, 1) for item in args))
    if NoneType in args:
        return st.none() | st.one_of(*(_values(item, default or 4) for item in args if item is not NoneType))
    if hint is bool:
        return st.booleans()
    if hint is str:
        return st.text().filter(lambda text: text != "none")
    near = st.floats(0.5, 1.0, exclude_min=True).map(lambda factor: float(default) * factor)
    return near if hint is float else st.integers(0, 100).map(lambda more: int(default) + more)


@st.composite
def configs(draw: st.DrawFn) -> Config:
    classes = {name: type(getattr(Config(), name)) for name in SECTIONS}
    classes["task"] = draw(st.sampled_from([*TASKS.values(), Puzzle]))
    classes["engine"] = draw(st.sampled_from([*ENGINES.values()]))
    classes["rule"] = draw(st.sampled_from([*RULES.values()]))

    def build(cls: Any, **given: Any) -> Any:
        for name, field in fields(cls).items():
            required = field.default is dataclasses.MISSING
            if name not in given and (required or draw(st.integers(0, 3)) == 0):
                given[name] = draw(_values(field.hint, field.default))
        try:
            return cls(**given)
        except ValueError:
            assume(False)

    return build(Config, **{name: build(cls) for name, cls in classes.items()})


@given(configs(), st.booleans())
def test_what_is_written_is_read_back(config: Config, comments: bool) -> None:
    assert resolve(tomllib.loads(to_toml(config, comments=comments))) == config


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_is_read_back(rule: str) -> None:
    config = typed(f"--rule {rule}")
    assert read(to_toml(config)) == config
    assert f'name = "{rule}"' in to_toml(config)


def test_written_toml_explains_every_field() -> None:
    lines = to_toml(Config()).splitlines()
    for option in describe():
        comment = [line.partition("#")[2] for line in lines if option.meaning and option.meaning in line]
        assert comment, option
    assert any("[exact|aggregated|uniform]" in line for line in lines)
    assert "#" not in to_toml(Config(), comments=False)
    sections = [line.partition("]")[0][1:] for line in lines if line.startswith("[")]
    assert sections == list(SECTIONS)


def test_a_meaning_of_many_lines_stays_in_its_comment() -> None:
    config = Config(task=Puzzle(title="x"))
    assert 'title = "x"' in to_toml(config)
    assert "# what it is called" in to_toml(config)
    assert read(to_toml(config)) == config


# Describing


def test_describe_lists_every_field_with_its_default() -> None:
    options = {option.path: option for option in describe()}
    for part in dataclasses.fields(Config):
        assert part.name in options
        value = getattr(Config(), part.name)
        if part.name in SECTIONS:
            assert {f"{part.name}.{field.name}" for field in dataclasses.fields(value)} <= set(options)
    assert options["rule.delta"] == ("rule.delta", "float", "0.15", options["rule.delta"].meaning)
    assert options["rule"].type == "|".join(RULES)
    assert options["rule"].default == "predictive"
    assert options["loss.horizon"].default == "none"
    assert options["update.autocast"][1:3] == ("true|false", "false")
    assert options["rollout"].type == ""


def test_describe_follows_the_layers() -> None:
    options = {option.path: option for option in describe(overrides(["--rule=ppo_clip", "--rule.eps_low=0.1"]))}
    assert {f"rule.{field.name}" for field in dataclasses.fields(PPOClip)} <= set(options)
    assert "rule.delta" not in options
    assert options["rule.eps_low"].default == "0.1"
    required = {option.path: option for option in describe({"task": f"{__name__}:Puzzle"})}
    assert required["task"].default == f"{__name__}:Puzzle"
    assert required["task.title"].default is None
    assert required["task.sizes"][1:3] == ("list of int", "1,2")


def test_the_temperature_of_evaluation_is_within_what_answers() -> None:
    layer = {"engine": "vllm", "eval": {"temperature": 5.0}}
    assert resolve(layer).eval.temperature == 5.0  # the policy itself answers at any
    with pytest.raises(ConfigError, match=r"eval\.temperature is 5\.0, but engine 'vllm' samples at 0\.01 to 2"):
        resolve(layer, {"eval": {"engine": "rollout"}})
