"""Engines for the tests of the contract: every one that is installed, and processes that are shared."""

import importlib.util
import json

from predmask.rollout import ENGINES, RolloutError, SGLangConfig, TransformersConfig, VLLMConfig

_PACKAGES = {VLLMConfig: "vllm", SGLangConfig: "sglang"}
_running = {}


def installed(cls):
    """Whether the engine of that configuration can be started here."""
    return cls not in _PACKAGES or importlib.util.find_spec(_PACKAGES[cls]) is not None


def exact_configs():
    """One configuration of each installed engine that has float32, in that."""
    options = {TransformersConfig: {}, VLLMConfig: {"dtype": "float32", "kv_cache_gb": 0.5}}
    return [cls(**options[cls]) for cls in ENGINES.values() if cls in options and installed(cls)]


def started(config, model):
    """As `config.start(model)`; engines in processes of their own, which start slowly, are kept for the next test.

    Two engines of one configuration and one architecture are one process: update its weights before asking it again.
    """
    if isinstance(config, TransformersConfig):
        return config.start(model)
    built = {name: value for name, value in model.config.to_dict().items() if "token_id" not in name}
    key = repr(config) + json.dumps(built, sort_keys=True, default=str)
    try:
        _running[key].update_weights(model, 0)
    except KeyError:
        _running[key] = config.start(model)
    except RolloutError as error:
        if "was closed" not in str(error):
            raise
        _running[key] = config.start(model)
    return _running[key]
