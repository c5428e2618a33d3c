"""What verl's configuration must not say beside the loss `predmask`, and why: a table, read before anything starts."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from predmask.plugins.verl import LOSS_MODE

VERSIONS = (0, 9, 1), (0, 10)
"""From the first of verl's versions on, and before the second: the seams that are used are not documented."""

_ACTOR, _MODEL, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.model", "actor_rollout_ref.rollout"
_ENGINE = f"{_ROLLOUT}.engine_kwargs"
_CORRECTION = "algorithm.rollout_correction"
_VLLM = f"{_ENGINE}.vllm"
MAX_LOGPROBS, VLLM_LOGPROBS = f"{_VLLM}.max_logprobs", 20
"""The most log-probs that vLLM reports at a position, and its default."""
_TOP_K, _NAME, _TEMPERATURE = f"{_ACTOR}.policy_loss.top_k", f"{_ROLLOUT}.name", f"{_ROLLOUT}.temperature"
_LOGPROBS_MODE, _REPETITION = f"{_ROLLOUT}.logprobs_mode", f"{_ROLLOUT}.repetition_penalty"
_LONG = 60
"""Characters of a value that are shown."""
MODE, SYNC_STEP = "trainer.v1.trainer_mode", "trainer.v1.separate_async.parameter_sync_step"


def _always(host: Mapping[str, Any]) -> bool:
    return True


class _Option(NamedTuple):
    """An option of verl, and which values the plug-in can honour."""

    path: str
    fits: Callable[[Any], bool]
    why: str
    remedy: str
    """What makes it fit."""
    where: Callable[[Mapping[str, Any]], bool] = _always
    """In which configurations it matters."""


def _one_of(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


def _off(value: Any) -> bool:
    return not value


def _shown(value: Any) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."


def _with_topk(host: Mapping[str, Any]) -> bool:
    return _number(host.get(key_of(_TOP_K))) > 0


def _reads_logprobs_mode(host: Mapping[str, Any]) -> bool:
    return host.get(key_of(_NAME)) != "sglang"


def _option(path: str, value: Any, why: str, where: Callable[[Mapping[str, Any]], bool] = _always) -> _Option:
    """An option that must have this value; None stands for not set, too."""
    fits = _off if value in (None, False) else _one_of(value)
    return _Option(path, fits, why, f"set {path}={_shown(value)}", where)


_TRUNCATED = (
    "truncated sampling draws from fewer tokens than the policy that is trained has, so that every distance is off"
)
_UNPROCESSED = "these are not of the distribution that was sampled from"
_BENT = "the server samples from another distribution than the logits at this temperature, which are what is trained"
_FUSED = "fused kernels form no logits, of which the mask reads its numbers"
_PADDED = "static padding moves the rows of the logits away from those of the top-K (verl refuses it with its own, too)"
_SPLIT = "the answers of split servers pass by the plug-in's, without top-K"
_TURNS = "of several turns, verl keeps the top-K of the first only"
_SPECULATIVE = "which policy accepted the tokens, and whose log-probs are reported, differs between engines and methods"
_SECOND = "a second importance weight on a ratio that is taken against the rollout policy already"
_LEAVE_OUT = "leave it out"
_MTP = "multi-token prediction adds a loss of its own, with which the plug-in has not been tried"
_ENTRY = "verl's trainers beside main_ppo replace the policy loss, and make batches of another kind"
_MAIN = "start verl.trainer.main_ppo, of which trainer.v1.trainer_mode=separate_async samples ahead, too"

OPTIONS = (
    # What fully_async_policy and one_step_off_policy add to verl's configuration.
    _Option("async_training", _off, _ENTRY, _MAIN),
    _Option("rollout", _off, _ENTRY, _MAIN),
    _option(
        "trainer.use_v1", True, "the old trainer replaces the policy loss where the rollout's log-probs are the anchor"
    ),
    _Option(
        MODE,
        _one_of("sync", "colocate_async", "separate_async"),
        "a trainer that is not verl's own may count its steps, and the versions of its weights, otherwise",
        f"set {MODE}=sync",
    ),
    _Option(
        "algorithm.adv_estimator",
        lambda value: str(value) != "remax",
        "the baselines of ReMax are greedy responses, which verl's V1 trainer does not sample",
        "set algorithm.adv_estimator=grpo",
    ),
    _option("distillation.enabled", False, "distillation carries its teacher's log-probs in the fields of the top-K"),
    _option(
        f"{_CORRECTION}.bypass_mode",
        True,
        "the anchor would be log-probs that the actor recomputes, and not those of the policy that sampled",
    ),
    _option(f"{_CORRECTION}.rollout_is", None, f"{_SECOND} (verl ignores it under bypass_mode)"),
    _option(
        f"{_CORRECTION}.rollout_rs",
        None,
        "another rule would reject tokens beside the mask (verl ignores it under bypass_mode)",
    ),
    _option(
        "algorithm.use_pf_ppo", False, "verl's V1 trainer resamples the advantages without the responses they belong to"
    ),
    _Option(
        f"{_ACTOR}.strategy",
        _one_of("fsdp", "fsdp2", "megatron"),
        "the plug-in has engines for fsdp, fsdp2 and megatron only, and without one no token is decided on",
        f"set {_ACTOR}.strategy=fsdp2, or model_engine=megatron",
    ),
    _option(f"{_ACTOR}.use_fused_kernels", False, _FUSED),
    _option(f"{_MODEL}.use_fused_kernels", False, _FUSED),
    _option(
        f"{_ACTOR}.use_prefix_grouper", False, "shared prefixes are taken out of the rows that the top-K belongs to"
    ),
    _option(f"{_ACTOR}.fsdp_config.pad_to_length", False, _PADDED)._replace(remedy=f"set {_ACTOR}.pad_to_length=false"),
    _option(f"{_ACTOR}.megatron.pad_to_length", False, _PADDED),
    _option(
        f"{_ACTOR}.megatron.dynamic_context_parallel", False, "verl does not carry a top-K through it, and stops there"
    ),
    _option(f"{_MODEL}.mtp.enable_train", False, _MTP),
    _option(f"{_MODEL}.mtp.enable_rollout", False, _SPECULATIVE),
    _Option(
        _NAME,
        _one_of("vllm", "sglang"),
        "the plug-in has servers that report a top-K for vllm and sglang only",
        f"set {_ROLLOUT}.name=vllm",
    ),
    _option(f"{_ROLLOUT}.calculate_log_probs", True, "without the sampled tokens' log-probs there is no anchor"),
    _option(_LOGPROBS_MODE, "processed_logprobs", _UNPROCESSED, _reads_logprobs_mode),
    _Option(f"{_VLLM}.logprobs_mode", _one_of(None, "processed_logprobs"), _UNPROCESSED, _LEAVE_OUT),
    _Option(
        _TEMPERATURE,
        lambda value: isinstance(value, int | float) and value > 0,
        "at temperature 0 nothing is sampled, and no ratio is defined",
        f"set {_TEMPERATURE}=1",
    ),
    _option(f"{_ROLLOUT}.top_p", 1, _TRUNCATED),
    _Option(f"{_ROLLOUT}.top_k", _one_of(-1, 0), _TRUNCATED, f"set {_ROLLOUT}.top_k=-1"),
    _Option(f"{_VLLM}.logits_processors", _off, _BENT, _LEAVE_OUT),
    _Option(f"{_VLLM}.speculative_config", _off, _SPECULATIVE, _LEAVE_OUT),
    _Option(f"{_ENGINE}.sglang.speculative_algorithm", _off, _SPECULATIVE, _LEAVE_OUT),
    _option(f"{_ROLLOUT}.disaggregation.enabled", False, _SPLIT, _with_topk),
    _option(f"{_ROLLOUT}.multi_turn.enable", False, _TURNS, _with_topk),
    _option(f"{_ROLLOUT}.agent.default_agent_loop", LOSS_MODE, "other agent loops leave the top-K behind", _with_topk),
    _option(
        f"{_ROLLOUT}.agent.agent_loop_manager_class", None, "another manager may run other agent loops", _with_topk
    ),
)
"""To allow a value, change its entry, and what is tested of it."""

_NO_EFFECT = {f"{_ACTOR}.clip_ratio": 0.2, f"{_ACTOR}.clip_ratio_low": 0.2} | {
    f"{_ACTOR}.clip_ratio_high": 0.2,
    f"{_ACTOR}.clip_ratio_c": 3.0,
}
"""verl's defaults of what the loss does not read."""
_DROPOUT = f"{_MODEL}.lora.dropout"
_AVERAGE, _DIVISOR = f"{_ACTOR}.loss_agg_mode", f"{_ACTOR}.loss_scale_factor"

PATHS = (
    # vLLM's as a whole: it takes its arguments in more than one spelling.
    *(option.path for option in OPTIONS if not option.path.startswith(f"{_VLLM}.")),
    _VLLM,
    SYNC_STEP,
    _TOP_K,
    _REPETITION,
    *_NO_EFFECT,
    _DROPOUT,
    _AVERAGE,
    _DIVISOR,
)
"""All that is read of verl's configuration."""


def key_of(path: str) -> str:
    """The name of an option in `policy_loss.host`."""
    return path.removeprefix("actor_rollout_ref.").replace(".", "_")


def hindrances(host: Mapping[str, Any]) -> list[str]:
    """Why predmask cannot train under this configuration, a sentence each: what is set, why not, what to set instead.

    `host` has the values of `PATHS` by `key_of`; what is not in it is not looked at, but an empty one is a hindrance.
    """
    if not host:
        return [
            "policy_loss.host is empty, so that nothing is known of the rest of the configuration: "
            "add what `predmask verl args` prints to the command line"
        ]
    found = [
        f"{spelled} is {_shown(value)}: {option.why}; {option.remedy}"
        for option in OPTIONS
        if option.where(host)
        for spelled, value in _given(option.path, host)
        if not option.fits(value)
    ]
    return found + _beyond_cap(host)


def notes(host: Mapping[str, Any]) -> list[str]:
    """What a user should know of this configuration, a sentence each; nothing of it is refused."""
    return [*_without_effect(host), *_inexact(host)]


def _without_effect(host: Mapping[str, Any]) -> Iterator[str]:
    for path, default in _NO_EFFECT.items():
        if (value := host.get(key_of(path), default)) != default:
            yield (
                f"{path}={_shown(value)} has no effect: the rule decides, and {_ACTOR}.policy_loss.ratio_cap is the "
                "cap of the ratio"
            )
    if (penalty := host.get(key_of(_REPETITION))) not in (None, 1):
        yield f"{_REPETITION}={_shown(penalty)} has no effect: verl samples training responses without one"
    mode = host.get(key_of(_LOGPROBS_MODE), "processed_logprobs")
    if mode != "processed_logprobs" and not _reads_logprobs_mode(host):
        yield f"{_LOGPROBS_MODE}={_shown(mode)} has no effect: verl does not hand it to SGLang"


def _inexact(host: Mapping[str, Any]) -> Iterator[str]:
    if host.get(key_of(_DROPOUT)):
        yield (
            f"{_DROPOUT}={host[key_of(_DROPOUT)]}: dropout makes the policy that trains another one than "
            "samples, which the mask sees as a distance; 0 is better"
        )
    if (temperature := host.get(key_of(_TEMPERATURE))) not in (None, 1):
        yield (
            f"{_TEMPERATURE}={_shown(temperature)}: verl divides the actor's logits by it in their own type; where "
            "that has 16 bits, log-probs are rounded by some hundredths once more, which the mask sees as a distance"
        )
    if host.get(key_of(_AVERAGE)) == "seq-mean-token-sum-norm" and host.get(key_of(_DIVISOR)) is None:
        yield (
            f"{_AVERAGE}=seq-mean-token-sum-norm without {_DIVISOR}: verl divides by the longest response of each "
            "micro-batch, so that the loss depends on the split; set the largest length of a response"
        )


def check_version(version: str) -> str | None:
    """What is wrong with this version of verl; None for nothing."""
    first, end = VERSIONS
    release = re.match(r"\d+(\.\d+)*", version)
    if release and first <= tuple(map(int, release[0].split("."))) < end:
        return None
    first, end = (".".join(map(str, part)) for part in VERSIONS)
    return (
        f"verl {version or '(unknown)'} is not one that the plug-in was tested with: pip install 'verl>={first},<{end}'"
    )


def _given(path: str, host: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """The option as it is spelled, and its value; of vLLM's arguments, spelled with - or _, each that is there."""
    group, _, name = path.rpartition(".")
    if group != _VLLM:
        return [(path, host[key_of(path)])] if key_of(path) in host else []
    arguments = host.get(key_of(_VLLM))
    arguments = arguments if isinstance(arguments, Mapping) else {}
    return [(f"{group}.{key}", value) for key, value in arguments.items() if str(key).replace("-", "_") == name]


def _beyond_cap(host: Mapping[str, Any]) -> list[str]:
    caps = [value for _, value in _given(MAX_LOGPROBS, host) if value is not None]
    # Of several, vLLM takes the last.
    top_k, cap = _number(host.get(key_of(_TOP_K))), _number((caps or [VLLM_LOGPROBS])[-1])
    if host.get(key_of(_NAME)) != "vllm" or cap == -1 or top_k <= cap:
        return []
    return [
        f"{_TOP_K} is {top_k}, and vLLM reports at most max_logprobs={cap}; set ++{MAX_LOGPROBS}={top_k}, "
        "or a smaller K"
    ]


def _number(value: Any) -> float:
    """0 for what is no number, of which others complain."""
    return value if isinstance(value, int | float) else 0
