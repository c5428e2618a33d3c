"""SGLang, on GPUs (package `sglang`, 0.5.21)."""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from typing_extensions import Doc

from predmask.rollout.columns import Response, certain, paired, rollout_from_columns, scored
from predmask.rollout.engine import Engine, Sampling, check_counts, context_within
from predmask.rollout.numerics import MISMATCH_TOLERANCES
from predmask.rollout.records import Rollout, RolloutError
from predmask.rollout.remote import RemoteEngine
from predmask.rollout.serve import model_directory

_RESERVED = 6
"""SGLang keeps this many positions of its context free besides those of a prompt and its first token."""

_BUCKET_BYTES = 1 << 30
"""Weights pass through the GPU's memory in parts of about this size."""

_IMPOSSIBLE = torch.finfo(torch.float32).min
"""What SGLang returns for a log-prob of -inf."""


@dataclass(frozen=True, kw_only=True)
class SGLangConfig:
    """Sample with SGLang, in a process of its own on this machine.

    Untested on hardware: SGLang has no build for CPUs, so this was checked against its documented interface and
    its records' structure only. It computes in bfloat16, with logits in float32, and is not quantised: SGLang's
    online fp8 cannot take new bfloat16 weights.
    """

    name: ClassVar[str] = "sglang"
    summary: ClassVar[str] = "SGLang in a process of its own; untested on hardware, built from its documented interface"
    needs: ClassVar[str] = "extra 'sglang' and a GPU"
    startup: ClassVar[str] = "a process of its own, which takes some minutes"
    # Below, it decodes greedily.
    temperatures: ClassVar[tuple[float, float]] = (1e-6, math.inf)

    mem_fraction_static: Annotated[
        float, Doc("share of the GPU memory free at its start that weights and key-value cache take")
    ] = 0.3
    max_length: Annotated[int | None, Doc("longest prompt with response, in tokens; none: the model's context")] = None
    batch_size: Annotated[int, Doc("responses sampled at once")] = 256
    deterministic: Annotated[
        bool,
        Doc("the same seed gives the same tokens, by kernels that are slower; false: SGLang draws by itself"),
    ] = True

    def __post_init__(self) -> None:
        if not 0 < self.mem_fraction_static < 1:
            raise ValueError(
                f"engine.mem_fraction_static is {self.mem_fraction_static}; it must be between 0 and 1, such as 0.3"
            )
        check_counts(self, "batch_size", "max_length")

    @property
    def numerics(self) -> str:
        """What it computes in, in a few words."""
        return "bfloat16"

    @property
    def mismatch_tolerance(self) -> float:
        """Mean |Δ log-prob| against the trainer, in nats, that these numerics explain."""
        return MISMATCH_TOLERANCES[self.numerics]

    def start(self, model: nn.Module) -> Engine:
        """An engine that answers with the weights of `model`, a Hugging Face causal language model.

        Raises ValueError when SGLang is not installed or cannot serve the model.
        """
        if importlib.util.find_spec("sglang") is None:
            raise ValueError(
                "sglang is not installed; it needs a GPU and comes with: pip install 'predmask[sglang]' (in a clone: "
                "pip install -e '.[sglang]'). Without a GPU take engine vllm or transformers"
            )
        checkpoint: Any = model
        context = context_within(model, self.max_length)
        return RemoteEngine(
            model,
            name=self.name,
            backend=f"{__name__}:SGLangBackend",
            settings={
                "vocabulary_size": checkpoint.config.vocab_size,
                "tied": sorted(checkpoint.all_tied_weights_keys),
                "dtype": "bfloat16",
                "enable_deterministic_inference": self.deterministic,
                "mem_fraction_static": self.mem_fraction_static,
                "context_length": context + _RESERVED,
                "max_running_requests": self.batch_size,
            },
            environment=_ENVIRONMENT,
            dtype=torch.bfloat16,
            tolerance=self.mismatch_tolerance,
            context=context,
            temperatures=self.temperatures,
        )


_ENVIRONMENT = {
    "SGLANG_RETURN_ORIGINAL_LOGPROB": "0",  # log-probs after temperature, whatever the user has set
    "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the reserved positions, which no request reaches
    "HF_HUB_OFFLINE": "1",  # configuration and weights come from the trainer
}
"""What SGLang's processes read at their start."""


class SGLangBackend:
    """SGLang inside its own process (see `serve.Backend`).

    Args:
        config: the text of the model's config.json.
        vocabulary_size: V, rows of the model's head.
        tied: names of weights that are the same as another one, which SGLang must not be sent.
        settings: further arguments of `sglang.Engine`.
    """

    def __init__(self, *, config: str, vocabulary_size: int, tied: Sequence[str], **settings: Any) -> None:
        sglang: Any = importlib.import_module("sglang")
        if not hasattr(sglang.Engine, "begin_weight_update"):
            raise RolloutError(f"sglang {sglang.__version__} is too old for predmask, which needs 0.5.21")
        self._vocabulary_size = vocabulary_size
        self._tied = frozenset(tied)
        self._engine = sglang.Engine(
            model_path=model_directory(config),
            **settings,
            skip_tokenizer_init=True,
            load_format="dummy",
            # As the trainer's head: else log-probs would be those of logits rounded to bfloat16.
            enable_fp32_lm_head=True,
            # Each request names the ids that end it; the model's configuration would add its own.
            json_model_override_args='{"eos_token_id": null}',
            log_level="warning",
        )

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling, end_ids: Sequence[int]
    ) -> Rollout:
        """See `serve.Backend`."""
        outputs = self._engine.generate(
            input_ids=[list(prompt) for prompt in prompts],
            sampling_params=[
                {
                    "temperature": sampling.temperature,
                    "top_p": 1.0,
                    "top_k": -1,
                    "min_p": 0.0,
                    "max_new_tokens": sampling.max_new_tokens,
                    "stop_token_ids": list(end_ids),
                    "sampling_seed": seed,  # read in deterministic inference only
                }
                for seed in seeds
            ],
            return_logprob=sampling.temperature > 0,
            top_logprobs_num=_columns(sampling, self._vocabulary_size),
        )
        return rollout_from_sglang(
            prompts, outputs, sampling=sampling, vocabulary_size=self._vocabulary_size, end_ids=frozenset(end_ids)
        )

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `serve.Backend`."""
        engine = self._engine
        device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
        _done("begin_weight_update", *engine.begin_weight_update())
        for bucket in _buckets((name, weight) for name, weight in weights if name not in self._tied):
            named = [(name, weight.to(device)) for name, weight in bucket]
            _done("update_weights_from_tensor", *engine.update_weights_from_tensor(named, flush_cache=False))
        _done("end_weight_update", *engine.end_weight_update())
        flushed = engine.flush_cache()  # an object that is true even where it failed
        _done("flush_cache", flushed.success, flushed.message)


def rollout_from_sglang(
    prompts: Sequence[Sequence[int]],
    outputs: Sequence[Mapping[str, Any]],
    *,
    sampling: Sampling,
    vocabulary_size: int,
    end_ids: Set[int],
) -> Rollout:
    """A rollout from what `sglang.Engine.generate` returns: ids, and lists of (log-prob, id, text) in `meta_info`.

    Args:
        prompts: B prompts, as asked.
        outputs: B answers of one response each.
        sampling: as asked. Greedy decoding has no log-probs: its tokens were certain.
        vocabulary_size: V, how many of the likeliest ids were asked for where the whole distribution was.
        end_ids: the ids that end a response.

    Raises RolloutError for missing or miscounted answers, ids and log-probs, and for responses that neither ended
    by themselves nor at their length.
    """
    columns = _columns(sampling, vocabulary_size)
    responses = [_response(*pair, sampling, columns, end_ids) for pair in paired("SGLang", prompts, outputs)]
    return rollout_from_columns(prompts, responses, top_k=sampling.top_k, full=sampling.record_full)


def _response(
    prompt: Sequence[int], output: Mapping[str, Any], sampling: Sampling, columns: int, end_ids: Set[int]
) -> Response:
    meta = output["meta_info"]
    if meta["prompt_tokens"] != len(prompt):
        raise RolloutError(
            f"SGLang answered a prompt of {meta['prompt_tokens']} tokens where it was given one of {len(prompt)}"
        )
    if "output_ids" not in output:
        raise RolloutError("SGLang returned a response without its ids, and text cannot be turned back into them")
    tokens = torch.tensor(list(output["output_ids"]), dtype=torch.int64)
    finished = _finished(meta["finish_reason"], tokens, sampling.max_new_tokens, end_ids)
    if sampling.temperature == 0:
        return certain(tokens, finished=finished)
    entries = _entries(meta, len(tokens), columns)
    logp, ids = [entry[0] for entry in entries], [entry[1] for entry in entries]
    response = scored("SGLang", tokens, ids, logp, columns=columns, finished=finished)
    unknown = torch.nonzero(response.logp.isnan())
    if unknown.numel():
        place, column = unknown[0].tolist()
        raise RolloutError(f"SGLang returned no log-prob of id {int(response.ids[place, column])} at token {place}")
    return response._replace(logp=response.logp.masked_fill(response.logp <= _IMPOSSIBLE, -torch.inf))


def _finished(reason: Mapping[str, Any] | None, tokens: Tensor, length: int, end_ids: Set[int]) -> bool:
    """Whether the response ended by itself; False: at its length."""
    last = int(tokens[-1]) if len(tokens) else None
    match reason:
        case {"type": "stop", "matched": matched} if matched == last and matched in end_ids:
            return True
        case {"type": "length"} if len(tokens) == length:
            return False
        case {"type": "length"}:
            raise RolloutError(
                f"SGLang cut a response after {len(tokens)} of {length} tokens: its key-value cache holds no more; "
                "raise engine.mem_fraction_static"
            )
    raise RolloutError(
        f"SGLang ended a response with {reason}, and its last id is {last}: neither one of the end ids "
        f"{sorted(end_ids)} nor its length"
    )


def _entries(meta: Mapping[str, Any], count: int, columns: int) -> list[tuple[float | None, int, Any]]:
    """The n · (1 + columns) entries (log-prob, id, text): at each position the sampled one, then the likeliest."""
    sampled = _per_token(meta, "output_token_logprobs", count)
    likeliest = _per_token(meta, "output_top_logprobs", count) if columns else [()] * count
    for place, row in enumerate(likeliest):
        found = len(row or ())  # None stands for none
        if found != columns:
            raise RolloutError(f"SGLang returned {found} of the likeliest ids at token {place}, not {columns} as asked")
    return [entry for first, row in zip(sampled, likeliest, strict=True) for entry in (first, *row)]


def _per_token(meta: Mapping[str, Any], name: str, count: int) -> Sequence[Any]:
    found = meta.get(name)
    if found is None:
        raise RolloutError(f"SGLang returned a response without log-probs: its meta_info has no {name}")
    if len(found) != count:
        raise RolloutError(f"SGLang returned {count} tokens, but {len(found)} {name}")
    return found


def _columns(sampling: Sampling, vocabulary_size: int) -> int:
    """How many of the likeliest ids are asked for at each position."""
    return vocabulary_size if sampling.record_full else sampling.top_k


def _buckets(weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
    """The same weights in lists of at most about `_BUCKET_BYTES`, but of one weight at least."""
    bucket, size = [], 0
    for name, weight in weights:
        if bucket and size + weight.nbytes > _BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, weight))
        size += weight.nbytes
    if bucket:
        yield bucket


def _done(call: str, success: bool, message: str) -> None:
    """SGLang does not raise, it returns."""
    if not success:
        raise RolloutError(f"SGLang could not take new weights: {call} said {message!r}")
