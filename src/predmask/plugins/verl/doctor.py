"""`predmask verl doctor`: does the installation fit, and can a configuration be honoured?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from predmask.plugins.verl import LOSS_MODE
from predmask.plugins.verl.host import PATHS, key_of, notes
from predmask.plugins.verl.installation import Finding, engine, imported, packages, plug_in, server, text_of

_TARGET = "predmask.plugins.verl.settings.PolicyLossConfig"
_PROCESSORS = ("preprocessor_config.json", "processor_config.json")
"""Files of models that read more than text."""
_MAIN = "verl.trainer.main_ppo"
_READ = ("overrides", "config_name", "config_path", "run")
"""Of Hydra's own arguments."""
_COMPOSED = "add --cfg job to the launch command, write what it prints into a file, and give the doctor that file"


def examine(words: Sequence[str] = ()) -> Iterator[Finding]:
    """Findings on the installation, and on a configuration if there is one.

    `words` is nothing, the path of a composed configuration's YAML, or what follows `python -m verl.trainer.main_ppo`.
    """
    found = list(packages())
    yield from found
    if found[0].text == "not installed":
        return
    if failure := imported():
        yield failure
        return
    loaded = list(plug_in())
    yield from loaded
    if words and all(finding.state != "problem" for finding in loaded):
        yield from _configuration(words)


def _configuration(words: Sequence[str]) -> Iterator[Finding]:
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]

    try:
        config = _read(words)
        loss = OmegaConf.select(config, "actor_rollout_ref.actor.policy_loss")
        loss = {} if loss is None else OmegaConf.to_container(loss, resolve=True)
        host = {key_of(path): _plain(OmegaConf.select(config, path)) for path in PATHS}
    except Exception as error:  # noqa: BLE001 - of Hydra, OmegaConf and YAML
        text, _, remedy = text_of(error).partition("; ")
        yield Finding("configuration", "problem", text, remedy)
        return
    if not isinstance(loss, Mapping) or loss.get("_target_") != _TARGET:
        text = "it does not use predmask (actor_rollout_ref.actor.policy_loss._target_ is verl's)"
        yield Finding("configuration", "problem", text, "add $(predmask verl args) to the launch command")
        return
    problems = list(_problems({str(key): value for key, value in loss.items()}, host))
    for problem in problems:
        text, _, remedy = problem.rpartition("; ")
        yield Finding("configuration", "problem", text or problem, remedy if text else "")
    if not problems:
        from predmask.plugins.verl.settings import make_rule

        mask = f"{make_rule(loss['rule'])}, K={loss['top_k']}, C={loss['ratio_cap']}"
        yield Finding("configuration", "ok", mask)
    yield from server(host["rollout_name"])
    yield from engine(host["actor_strategy"])
    yield from _agent_loops(OmegaConf.select(config, "actor_rollout_ref.rollout.agent.agent_loop_config_path"))
    if loss.get("top_k"):
        yield from _data(_plain(OmegaConf.select(config, "data.train_files")))
    yield from _processor(OmegaConf.select(config, "actor_rollout_ref.model.path"), host)
    yield from (Finding("configuration", "note", note) for note in notes(host))


def _read(words: Sequence[str]) -> Any:
    """The configuration that a YAML file holds, or that a launch command composes, as Hydra reads it."""
    import verl  # pyright: ignore[reportMissingImports]
    from hydra import compose, initialize_config_dir  # pyright: ignore[reportMissingImports]
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]

    if len(words) == 1 and "=" not in words[0] and not words[0].startswith("-"):
        return OmegaConf.load(words[0])
    given = _arguments(words)
    name = (given["config_name"] or "ppo_trainer").removesuffix(".yaml")
    directory = Path(str(verl.__file__)).parent / "trainer" / (given["config_path"] or "config")
    with initialize_config_dir(str(directory.resolve()), version_base=None):
        return compose(name, overrides=given["overrides"])


def _arguments(words: Sequence[str]) -> dict[str, Any]:
    """What Hydra makes of a launch command; ValueError for what the doctor cannot follow."""
    from hydra._internal.utils import get_args_parser  # pyright: ignore[reportMissingImports]

    def refuse(*said: Any) -> None:
        raise ValueError(f"Hydra: {' '.join(map(str, said)) or 'nothing would be started'}")

    words = list(words)
    if _MAIN in words:  # a whole command, as the recipes print it
        words = words[words.index(_MAIN) + 1 :]
    parser = get_args_parser()
    parser.error = parser.exit = refuse
    given = vars(parser.parse_args(words))
    for name, value in given.items():
        if value and name not in _READ:
            raise ValueError(f"--{name.replace('_', '-')} is not read here; {_COMPOSED}")
    return given


def _plain(value: Any) -> Any:
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]

    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _problems(loss: Mapping[str, Any], host: Mapping[str, Any]) -> Iterator[str]:
    from predmask.plugins.verl.settings import PolicyLossConfig, SettingsError

    values = {key: value for key, value in loss.items() if key != "_target_"}
    try:
        PolicyLossConfig(**{**values, "host": host})
    except SettingsError as error:
        first, *listed = str(error).split("\n- ")
        yield from listed or [first]
    except TypeError as error:
        yield f"policy_loss: {error}"


def _agent_loops(path: str | None) -> Iterator[Finding]:
    from verl.utils.import_utils import resolve_config_path  # pyright: ignore[reportMissingImports]

    try:
        found = resolve_config_path(path or "")
        if Path(found).is_file():
            return
    except FileNotFoundError:
        pass
    text = f"rollout.agent.agent_loop_config_path={path} is not found from here"
    yield Finding("agent loop", "problem", text, "add what `predmask verl args` prints on this machine")


def _data(files: Any) -> Iterator[Finding]:
    """Rows of the data may name an agent loop of their own."""
    import pyarrow.parquet as pq

    for file in [files] if isinstance(files, str) else files or ():
        path = Path(file).expanduser()
        if path.suffix == ".parquet" and path.is_file() and "agent_name" in pq.read_schema(path).names:
            text = f"{path} has a column agent_name, which chooses the agent loop row by row"
            yield Finding("data", "problem", text, f"drop the column, or write {LOSS_MODE!r} in it")


def _processor(model: Any, host: Mapping[str, Any]) -> Iterator[Finding]:
    """verl keeps vLLM from sampling the placeholders of images and videos, which the actor's softmax still has."""
    if host["rollout_name"] == "vllm" and any(_is_there(str(model), name) for name in _PROCESSORS):
        text = (
            f"{model} has a processor: verl keeps vLLM from sampling the placeholders of images and videos, which the "
            "actor counts among the ids, so that each distance is off by what the policy gives them"
        )
        yield Finding("model", "note", text)


def _is_there(model: str, name: str) -> bool:
    """Is a file with the model, in its directory or in the hub's cache?"""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    if Path(model).expanduser().is_dir():
        return (Path(model).expanduser() / name).is_file()
    try:
        return isinstance(try_to_load_from_cache(model, name), str)
    except HFValidationError:
        return False
