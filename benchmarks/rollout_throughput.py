"""Tokens per CPU-second of the transformers engine against `transformers.generate`, recording the same top-K.

Both sample at temperature 1 on one thread and record the sampled token's log-prob and the K likeliest ids with
theirs. Rounds alternate which of the two goes first; the table has medians over rounds, and the median of the
rounds' ratios. Only tokens up to the end-of-sequence token count.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from predmask.rollout import Sampling, TransformersEngine
from predmask.tasks import Arithmetic
from predmask.train.evaluate import encode
from predmask.train.models import EMBEDDED, load_policy

TOP_K = (0, 20)


@dataclass(frozen=True)
class Case:
    """A model with prompts of one length, so that neither side needs padding."""

    title: str
    model: Any
    prompts: list[list[int]]
    max_new_tokens: int


def embedded(prompts: int = 16, group: int = 16) -> Case:
    """The embedded model and task, groups of responses as in training."""
    model, tokenizer = load_policy(EMBEDDED, torch.device("cpu"))
    problems = Arithmetic().problems("train")[:prompts]
    repeated = encode(tokenizer, [problem for problem in problems for _ in range(group)])
    return Case(f"embedded model, {prompts} prompts x {group} responses", model, repeated, max_new_tokens=64)


def random_qwen3(
    *, vocabulary: int, hidden: int, layers: int, sequences: int, max_new_tokens: int, prompt_length: int = 16
) -> Case:
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
    return Case(title, model, prompts, max_new_tokens)


def cases() -> list[Case]:
    """The rows of the table."""
    return [
        embedded(),
        random_qwen3(vocabulary=512, hidden=256, layers=5, sequences=64, max_new_tokens=128),
        random_qwen3(vocabulary=151_936, hidden=128, layers=2, sequences=16, max_new_tokens=32),
    ]


def with_engine(case: Case, top_k: int, seed: int) -> int:
    """Sample with the engine; the number of tokens."""
    sampling = Sampling(temperature=1.0, max_new_tokens=case.max_new_tokens, top_k=top_k)
    rollout = TransformersEngine(case.model).generate(case.prompts, sampling, torch.Generator().manual_seed(seed))
    return len(rollout.tokens)


@torch.no_grad()
def with_generate(case: Case, top_k: int, seed: int) -> int:
    """Sample with `generate` and take the records from its logits; the number of tokens."""
    torch.manual_seed(seed)
    prompts = torch.tensor(case.prompts)
    output = case.model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        max_new_tokens=case.max_new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
    )
    tokens = output.sequences[:, prompts.shape[1] :]
    logp, topk_ids, topk_logp = [], [], []
    for step, logits in enumerate(output.logits):
        log_norm = logits.logsumexp(-1, keepdim=True)
        logp.append(logits.gather(-1, tokens[:, step, None]) - log_norm)
        if top_k:
            top = logits.topk(top_k, dim=-1)
            topk_ids.append(top.indices)
            topk_logp.append(top.values - log_norm)
    records = [torch.stack(parts, dim=1) for parts in (logp, topk_ids, topk_logp) if parts]
    ends = tokens == case.model.generation_config.eos_token_id
    valid = (ends.cumsum(-1) - ends.long()) == 0  # up to the first end, that one included
    flat = [record[valid] for record in records]
    return len(flat[0])


def tokens_per_cpu_second(run: Callable[[Case, int, int], int], case: Case, top_k: int, seed: int) -> float:
    """The rate of one run."""
    started = time.process_time()
    tokens = run(case, top_k, seed)
    return tokens / (time.process_time() - started)


def compare(case: Case, top_k: int, rounds: int) -> tuple[float, float, float]:
    """Median rates of engine and `generate`, and the median ratio, after one round that does not count."""
    rates: list[tuple[float, float]] = []
    for index in range(rounds + 1):
        order = [with_engine, with_generate] if index % 2 else [with_generate, with_engine]
        rate = {run: tokens_per_cpu_second(run, case, top_k, seed=index) for run in order}
        if index:
            rates.append((rate[with_engine], rate[with_generate]))
    ours, theirs = zip(*rates, strict=True)
    return median(ours), median(theirs), median(a / b for a, b in rates)


def main() -> None:
    """Measure, and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds of each row (default: %(default)s)")
    rounds = parser.parse_args().rounds
    if rounds < 1:
        parser.error("--rounds must be 1 or more")
    torch.set_num_threads(1)
    print("| workload | K | engine, tokens/CPU-s | generate, tokens/CPU-s | ratio |")
    print("|---|---|---|---|---|")
    for case in cases():
        for top_k in TOP_K:
            ours, theirs, ratio = compare(case, top_k, rounds)
            print(f"| {case.title} | {top_k} | {ours:,.0f} | {theirs:,.0f} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    main()
