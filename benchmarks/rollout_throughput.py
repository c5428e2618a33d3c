"""What sampling costs: our engines and `transformers.generate`, all recording the same K likeliest ids.

    OMP_NUM_THREADS=1 python benchmarks/rollout_throughput.py

Every engine samples at temperature 1 on one thread and returns the sampled tokens' log-probs and the K likeliest ids
with theirs. CPU time is that of all processes that take part. All engines go once per round, each round starting with
another; before each turn the engine gets its weights anew, which empties its caches and is timed for itself. A round
that does not count comes first, for whatever is compiled at first use. Numbers go to benchmarks/rollout.json after each
workload. vLLM takes part where it is installed (docs/engines.md); the whole then takes about ten minutes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

# As the command line sets it: large tensors lie on huge pages. Engines' processes have it from here.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from predmask.rollout import Engine, Rollout, Sampling, TransformersEngine, VLLMConfig
from predmask.tasks import Arithmetic
from predmask.train.config import PromptConfig
from predmask.train.models import EMBEDDED, load_policy
from predmask.train.prompts import Prompts

DATA = Path(__file__).parent / "rollout.json"
TOP_K = (0, 20, 100)


class Generate:
    """`transformers.generate` as an engine, with the records taken from its logits."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, generator: torch.Generator) -> Rollout:
        """Sample one response a prompt; all prompts have one length."""
        torch.manual_seed(generator.initial_seed())
        ids = torch.tensor(prompts)
        output = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=sampling.max_new_tokens,
            return_dict_in_generate=True,
            output_logits=True,
        )
        tokens = output.sequences[:, ids.shape[1] :]
        logp, topk_ids, topk_logp = [], [], []
        for step, logits in enumerate(output.logits):
            log_norm = logits.logsumexp(-1, keepdim=True)
            top = logits.topk(sampling.top_k, dim=-1)
            logp.append((logits.gather(-1, tokens[:, step, None]) - log_norm)[:, 0])
            topk_ids.append(top.indices)
            topk_logp.append(top.values - log_norm)
        ends = tokens == self._model.generation_config.eos_token_id
        valid = (ends.cumsum(-1) - ends.long()) == 0  # up to the first end, that one included
        return Rollout(
            prompts=tuple(map(tuple, prompts)),
            lengths=valid.sum(-1),
            tokens=tokens[valid],
            logp=torch.stack(logp, dim=1)[valid],
            topk_ids=torch.stack(topk_ids, dim=1)[valid],
            topk_logp=torch.stack(topk_logp, dim=1)[valid],
            sampled=torch.ones_like(tokens[valid], dtype=torch.bool),
            version=torch.zeros_like(tokens[valid]),
            finished=ends.any(-1),
        )

    def update_weights(self, model: nn.Module, version: int) -> None:
        """It reads the model's own, and keeps nothing between calls."""

    def close(self) -> None:
        """Nothing to free."""


BASELINE = "generate"
COMPETITORS: dict[str, Callable[[Any], Engine]] = {BASELINE: Generate, "our loop": TransformersEngine}
"""How to start each engine with a model; in float32 and without compiling, unless the name says otherwise."""
if importlib.util.find_spec("vllm") is not None:
    COMPETITORS |= {
        "vLLM": VLLMConfig(dtype="float32", eager=True, kv_cache_gb=0.5).start,
        "vLLM bfloat16": VLLMConfig(dtype="bfloat16", eager=True, kv_cache_gb=0.5).start,
        "vLLM compiled": VLLMConfig(dtype="float32", eager=False, kv_cache_gb=0.5).start,
    }


@dataclass(frozen=True)
class Workload:
    """A model with prompts of one length, so that no engine needs padding."""

    title: str
    model: Any
    prompts: list[list[int]]
    max_new_tokens: int


def embedded(prompts: int = 16, group: int = 16) -> Workload:
    """The embedded model and task, groups of responses as in training."""
    model, tokenizer = load_policy(EMBEDDED, torch.device("cpu"))
    problems = Arithmetic().problems("train")[:prompts]
    repeated = Prompts(tokenizer, PromptConfig()).encode([problem for problem in problems for _ in range(group)])
    return Workload(f"embedded model, {prompts} prompts x {group} responses", model, repeated, max_new_tokens=64)


def random_qwen3(
    *, vocabulary: int, hidden: int, layers: int, sequences: int, max_new_tokens: int, prompt_length: int = 16
) -> Workload:
    """A random Qwen3 that never ends its response, and prompts that all differ."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 64,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    # No such id: every response goes on to its length limit.
    model.generation_config.eos_token_id = vocabulary
    model.generation_config.pad_token_id = 0
    prompts = torch.randint(vocabulary, (sequences, prompt_length)).tolist()
    millions = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    title = f"random Qwen3, {millions:.1f}M parameters, V = {vocabulary:,}, {sequences} x {max_new_tokens} tokens"
    return Workload(title, model, prompts, max_new_tokens)


WORKLOADS: tuple[Callable[[], Workload], ...] = (
    embedded,
    partial(random_qwen3, vocabulary=512, hidden=256, layers=5, sequences=64, max_new_tokens=128),
    partial(random_qwen3, vocabulary=151_936, hidden=128, layers=2, sequences=16, max_new_tokens=32),
)
"""The rows of the tables."""


class Seconds(NamedTuple):
    """A time, or a point in time."""

    cpu: float
    wall: float

    def __sub__(self, other: Seconds) -> Seconds:
        return Seconds(self.cpu - other.cpu, self.wall - other.wall)


def now(engine: Engine | None = None) -> Seconds:
    """CPU time is that of this process and, where the engine has one, of its process with all that it started."""
    pid = getattr(engine, "pid", None)
    return Seconds(time.process_time() + (0 if pid is None else _group_seconds(pid)), time.perf_counter())


def _group_seconds(group: int) -> float:
    """CPU time of the processes of a group, and of those that they started and that have ended."""
    total = 0.0
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        try:
            if os.getpgid(pid) == group:
                # Its own clock (clock_getcpuclockid(3)), which is finer than the hundredths in its stat file; from
                # that, cutime and cstime (proc_pid_stat(5)), which are the 13th and 14th field after the name.
                total += time.clock_gettime(~pid << 3 | 2)
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += sum(map(int, fields[13:15])) / os.sysconf("SC_CLK_TCK")
        except OSError:
            continue  # it has ended meanwhile
    return total


@dataclass
class Result:
    """What was measured of one workload."""

    title: str
    starts: dict[str, Seconds] = field(default_factory=dict)
    """Of each engine."""
    updates: dict[str, list[Seconds]] = field(default_factory=dict)
    """Of each engine; all that were measured, whatever K came after them."""
    rates: dict[int, dict[str, list[Seconds]]] = field(default_factory=dict)
    """Tokens per second of each round, by K and engine."""


def measure(workload: Workload, rounds: int) -> Result:
    """Start all engines, and time the rounds of each K that the vocabulary has."""
    result = Result(workload.title)
    engines: dict[str, Engine] = {}
    _progress(workload.title)
    with ExitStack() as stack:
        for name, start in COMPETITORS.items():
            _progress(f"  starting {name}")
            before = now()
            engines[name] = stack.enter_context(closing(start(workload.model)))
            result.starts[name] = now(engines[name]) - before
            result.updates[name] = []
        for top_k in (k for k in TOP_K if k <= workload.model.config.vocab_size):
            result.rates[top_k] = {name: [] for name in engines}
            for index in range(rounds + 1):
                _progress(f"  K = {top_k}, round {index} of {rounds}")
                first = index % len(engines)
                for name in [*engines][first:] + [*engines][:first]:
                    update, rate = _turn(engines[name], workload, top_k, seed=index)
                    if index:
                        result.updates[name].append(update)
                        result.rates[top_k][name].append(rate)
    return result


def _turn(engine: Engine, workload: Workload, top_k: int, seed: int) -> tuple[Seconds, Seconds]:
    """The time of an update, and tokens per second of sampling."""
    sampling = Sampling(temperature=1.0, max_new_tokens=workload.max_new_tokens, top_k=top_k)
    generator = torch.Generator().manual_seed(seed)
    begin = now(engine)
    engine.update_weights(workload.model, seed)
    updated = now(engine)
    rollout = engine.generate(workload.prompts, sampling, generator)
    sampled = now(engine) - updated
    tokens = len(rollout.check(top_k=top_k, vocabulary_size=workload.model.config.vocab_size).tokens)
    return updated - begin, Seconds(tokens / sampled.cpu, tokens / sampled.wall)


def rates_table(results: Sequence[Result], clock: str) -> str:
    """Median rates, each with the median of its rounds' ratios to the baseline."""
    names = list(results[0].starts)
    lines = [_row("workload", "K", *names), _row(*["---"] * (2 + len(names)))]
    for result in results:
        for top_k, rates in result.rates.items():
            values = {name: [getattr(rate, clock) for rate in rates[name]] for name in names}
            ratios = {
                name: median(a / b for a, b in zip(values[name], values[BASELINE], strict=True)) for name in names
            }
            cells = [f"{median(values[name]):,.0f} ({ratios[name]:.2f})" for name in names]
            lines.append(_row(result.title, top_k, *cells))
    return "\n".join(lines)


def costs_table(results: Sequence[Result]) -> str:
    """Starts and median updates, in CPU and wall seconds."""
    lines = [_row("workload", "engine", "start", "update"), _row(*["---"] * 4)]
    for result in results:
        for name, start in result.starts.items():
            update = [median(times) for times in zip(*result.updates[name], strict=True)]
            lines.append(_row(result.title, name, *("{:.2f} / {:.2f}".format(*cost) for cost in (start, update))))
    return "\n".join(lines)


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _progress(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    """Measure, and print Markdown tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each row (default: %(default)s)")
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error("--rounds must be 1 or more")
    torch.set_num_threads(1)
    packages = ("torch", "transformers", *metadata.packages_distributions().get("vllm", []))
    versions = {"Python": platform.python_version()} | {name: metadata.version(name) for name in packages}
    results: list[Result] = []
    for workload in WORKLOADS:
        results.append(measure(workload(), rounds))
        document = {"versions": versions, "results": [asdict(result) for result in results]}
        DATA.write_text(json.dumps(document, indent=1) + "\n")
    print(", ".join(" ".join(pair) for pair in versions.items()))
    print(f"\nTokens per CPU-second (ratio to {BASELINE}):\n\n{rates_table(results, 'cpu')}")
    print(f"\nTokens per second (ratio to {BASELINE}):\n\n{rates_table(results, 'wall')}")
    print(f"\nSeconds, CPU / wall:\n\n{costs_table(results)}")


if __name__ == "__main__":
    main()
