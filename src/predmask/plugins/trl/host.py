"""What TRL must not be asked beside a rule, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from importlib import metadata
from typing import Any, NamedTuple

from predmask.core import Rule

VERSIONS = (1, 16), (1, 17)
"""From the first of TRL's versions on, and before the second: the methods that are overridden are private."""
LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")
"""Those of TRL's loss types that are averages; the others are objectives of their own."""


class HostError(ValueError):
    """Options of TRL that cannot be honoured; the text names each with its value and the remedy."""


class _Option(NamedTuple):
    name: str
    fits: Callable[[Any], bool]
    why: str
    remedy: str


def _off(value: Any) -> bool:
    return not value


def _only(*values: Any) -> Callable[[Any], bool]:
    return lambda value: value in values


_TRUNCATED = "completions would be sampled from another distribution than the policy that is trained"
_THRESHOLDS = "thresholds are the rule's own"
_OPTIONS = (
    _Option(
        "loss_type",
        _only(*LOSS_TYPES),
        "it is an objective of its own, and not an average",
        f"one of {', '.join(LOSS_TYPES)}; for CISPO use rule=CISPO()",
    ),
    _Option("importance_sampling_level", _only("token"), "the rules decide token by token", "token"),
    _Option("epsilon", _only(0.2), _THRESHOLDS, "0.2, and give rule=PPOClip(eps_low=...) or another"),
    _Option("epsilon_high", _only(None), _THRESHOLDS, "None, and give rule=PPOClip(eps_high=...) or another"),
    _Option("delta", _only(None), _THRESHOLDS, "None, and give rule=Predictive(delta=...) or another"),
    _Option("beta", _off, "a KL term to a reference is not part of the masked loss", "0.0"),
    _Option("use_liger_kernel", _off, "its fused loss would replace the rule's", "False"),
    _Option("top_p", _only(None, 1), _TRUNCATED, "1.0"),
    _Option("top_k", _only(None, 0, -1), _TRUNCATED, "0 (the K that is recorded is behaviour_top_k)"),
    _Option("min_p", _off, _TRUNCATED, "None"),
    _Option("repetition_penalty", _only(None, 1), _TRUNCATED, "1.0"),
    _Option("generation_kwargs", _off, "they may change the distribution that is sampled from", "None"),
    _Option("vllm_structured_outputs_regex", _off, "it forbids tokens that the policy gives a probability", "None"),
    _Option(
        "vllm_importance_sampling_correction",
        _off,
        "it is a second importance weight on a ratio that is taken against the policy that sampled already",
        "False",
    ),
    _Option("off_policy_mask_threshold", _off, "it is a second mask beside the rule's", "None"),
    _Option("top_entropy_quantile", _only(1), "it is a second mask beside the rule's", "1.0"),
    _Option("entropy_coef", _off, "an entropy bonus is not part of the masked loss", "0.0"),
    _Option("use_adaptive_entropy", _off, "an entropy bonus is not part of the masked loss", "False"),
    _Option(
        "use_transformers_continuous_batching",
        _off,
        "it reports no log-probs, and the anchor is what the engine reported when it sampled",
        "False",
    ),
    _Option("use_transformers_paged", _off, "it reports no log-probs", "False"),
)
_NEUTRAL = {
    "min_length": 0,
    "min_new_tokens": 0,
    "num_beams": 1,
    "top_h": None,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "encoder_repetition_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "bad_words_ids": None,
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "suppress_tokens": None,
    "begin_suppress_tokens": None,
    "sequence_bias": None,
    "guidance_scale": 1.0,
    "watermarking_config": None,
}
"""Of a model's own generation settings, those that TRL leaves as they are; a value (or None) that changes nothing."""


def refuse(args: Any) -> None:
    """Raise HostError for options under which another objective would be trained."""
    if found := list(_hindrances(args)):
        raise HostError("predmask cannot train under these options:\n- " + "\n- ".join(found))


def refuse_functions(given: Mapping[str, Any]) -> None:
    """Raise HostError for functions by which completions come about otherwise, among a trainer's arguments."""
    found = [
        f"{name} is given: only completions that this trainer samples itself have a recorded top-K"
        for name in ("tools", "rollout_func", "environment_factory")
        if given.get(name)
    ]
    if found:
        raise HostError("predmask cannot train this:\n- " + "\n- ".join(found))


def refuse_model(trainer: Any) -> None:
    """Raise HostError for a model that takes another way than the masked loss, and for what it is sampled with."""
    if found := [*_model_hindrances(trainer), *_server_hindrances(trainer)]:
        raise HostError("predmask cannot train this:\n- " + "\n- ".join(found))


def check_version() -> None:
    """Raise HostError for a version of TRL that the overridden methods were not tested with."""
    version = metadata.version("trl")
    release = tuple(int(part) for part in version.split(".")[:2])
    first, end = VERSIONS
    if not first <= release < end:
        spelled = [".".join(map(str, part)) for part in VERSIONS]
        raise HostError(
            f"TRL {version} is not one that predmask was tested with: pip install 'trl>={spelled[0]},<{spelled[1]}'"
        )


def _hindrances(args: Any) -> Iterator[str]:
    for option in _OPTIONS:
        value = getattr(args, option.name)
        if not option.fits(value):
            yield f"{option.name} is {value!r}: {option.why}; set {option.name}={option.remedy}"
    if not args.temperature > 0:
        yield f"temperature is {args.temperature}: at temperature 0 nothing is sampled; set temperature=1.0"
    if not isinstance(args.rule, Rule):
        yield f"rule is {args.rule!r}; give an instance, such as Predictive(delta=0.15)"
    elif args.rule.needs_topk and args.behaviour_top_k < 1:
        yield f"rule {args.rule.name!r} reads the top-K: set behaviour_top_k=20 (it is {args.behaviour_top_k})"
    if args.behaviour_top_k < 0:
        yield f"behaviour_top_k is {args.behaviour_top_k}; it must be 0 or more"
    if args.ratio_cap is not None and not args.ratio_cap > 0:
        yield f"ratio_cap is {args.ratio_cap}; it must be above 0 (None for no cap)"
    if args.use_vllm and args.vllm_mode == "colocate" and args.behaviour_top_k > 20:
        yield (
            f"behaviour_top_k is {args.behaviour_top_k}: TRL leaves vLLM's cap max_logprobs at 20 in colocate mode; "
            "set 20, or use a server started with --max-logprobs -1"
        )


def _model_hindrances(trainer: Any) -> Iterator[str]:
    if trainer._is_vlm:
        yield "the model reads images: vision is not supported"
    if trainer.aux_loss_enabled:
        yield "the router's auxiliary loss is on, which the masked loss has not; set router_aux_loss_coef=0.0"
    kinds = [
        getattr(config, "is_prompt_learning", False) for config in getattr(trainer.model, "peft_config", {}).values()
    ]
    if any(kinds):
        yield "the adapters learn a prompt, which moves the rows of the logits; use LoRA"
    rows = trainer.model.get_output_embeddings().weight.shape[0]
    if trainer.args.behaviour_top_k > rows:
        yield f"behaviour_top_k is {trainer.args.behaviour_top_k}, but the model has {rows} ids; set {rows} or less"
    if not trainer.use_vllm:
        for name, neutral in _NEUTRAL.items():
            value = getattr(trainer.model.generation_config, name, None)
            if value is not None and value != neutral:
                yield (
                    f"the model's generation_config has {name}={value!r}: {_TRUNCATED}; "
                    f"set model.generation_config.{name} = {neutral}"
                )
    if any(hasattr(parameter, "ds_id") for parameter in trainer.model.parameters()):
        yield "DeepSpeed ZeRO-3 takes the head apart; use ZeRO-2 or FSDP"


def _server_hindrances(trainer: Any) -> Iterator[str]:
    if not trainer.use_vllm or trainer.vllm_mode != "server" or not trainer.accelerator.is_main_process:
        return
    config = trainer.vllm_generation.vllm_client.get_server_info()["model_config"]
    top_k, mode, most = trainer.args.behaviour_top_k, config["logprobs_mode"], config["max_logprobs"]
    if mode != "processed_logprobs":
        yield (
            f"the vLLM server runs with --logprobs-mode {mode}, which is not what it samples from; restart it with "
            "--logprobs-mode processed_logprobs"
        )
    if 0 <= most < top_k:
        yield f"the vLLM server returns {most} log-probs at most; restart it with --max-logprobs {top_k}"
