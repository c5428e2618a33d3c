"""What the plug-in for verl costs: time added to the actor's update, and the top-K's bytes and time on its way there.

    OMP_NUM_THREADS=1 .venv-verl/bin/python benchmarks/verl_cost.py       # prints, and writes verl_cost.json beside it

`actor`: verl's own TrainingWorker (FSDP2, one process, gloo) takes optimiser steps on the same model and batch, with
verl's loss dppo_tv and with ours, in turn; the model is a Qwen3 of few layers with the real vocabulary, so that the
head, on which the plug-in's time depends, weighs more than in a model that is trained. `payload`: a response of T
tokens with its K = 20 likeliest, from vLLM's record to the actor's packed micro-batch.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests"))
os.environ.setdefault("VERL_PLATFORM", "cpu")
os.environ.setdefault("VERL_USE_EXTERNAL_MODULES", "verl_on_cpu.platform")

import torch  # noqa: E402

TOP_K = 20
LENGTHS = (1_000, 8_000, 32_000)
"""Tokens of a response."""
PROMPT = 256


def write_model(directory: Path, *, layers: int, width: int, vocabulary: int) -> None:
    """A Qwen3 with random weights, and the embedded tokenizer."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from verl_on_cpu import data

    data.write_model(directory)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=width // 8,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)


def make_samples(count: int, tokens: int, vocabulary: int) -> list[dict[str, Any]]:
    """Responses with random ids and records."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(count):
        mass = torch.rand(tokens, TOP_K + 1, generator=generator).log_softmax(-1)
        ids = torch.randint(vocabulary - TOP_K, (tokens, 1), generator=generator) + torch.arange(TOP_K)
        found.append(
            {
                "prompt": torch.randint(vocabulary, (8,), generator=generator),
                "response": ids[:, 0].contiguous(),
                "mask": torch.ones(tokens, dtype=torch.int64),
                "logp": mass[:, 0].contiguous(),
                "advantage": torch.randn(1, generator=generator),
                "topk_ids": ids.int(),
                "topk_logp": mass[:, :TOP_K].contiguous(),
            }
        )
    return found


def actor(rounds: int, *, tokens: int = 256, count: int = 2, layers: int = 4, width: int = 1024) -> dict[str, Any]:
    """Seconds of an update with each loss, in turn."""
    from verl.workers.config import PolicyLossConfig as HostConfig

    from predmask.plugins.verl.settings import PolicyLossConfig
    from verl_on_cpu.actor import join, make_batch, make_worker, train

    vocabulary = 151_936
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "model", layers=layers, width=width, vocabulary=vocabulary)
        join(0, 1, f"{folder}/store")
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        losses = {
            "dppo_tv": HostConfig(loss_mode="dppo_tv"),
            "predmask none": PolicyLossConfig(rule={"name": "none"}, top_k=0, host={"rollout_name": "sglang"}),
            "predmask predictive": PolicyLossConfig(top_k=TOP_K, host={"rollout_name": "sglang"}),
        }
        workers = {name: make_worker(Path(folder) / "model", loss) for name, loss in losses.items()}
        samples = make_samples(count, tokens, vocabulary)
        seconds: dict[str, list[float]] = {name: [] for name in workers}
        for number in range(rounds + 1):
            for name, worker in workers.items():
                batch = make_batch(samples, micro_batch=1)
                begun = time.process_time()
                train(worker, batch)
                if number:  # the first is for warming up
                    seconds[name].append(time.process_time() - begun)
        torch.distributed.destroy_process_group()
    found: dict[str, Any] = {"tokens": tokens * count, "layers": layers, "width": width, "vocabulary": vocabulary}
    base = seconds["dppo_tv"]
    for name, values in seconds.items():
        ratios = sorted(value / other for value, other in zip(values, base, strict=True))
        found[name] = {
            "seconds": statistics.median(values),
            "ratio": statistics.median(ratios),
            "range": [ratios[0], ratios[-1]],
            "ms_a_token": 1e3 * statistics.median(v - b for v, b in zip(values, base, strict=True)) / (tokens * count),
        }
    return found


def timed(work: Callable[[], Any], rounds: int) -> tuple[float, Any]:
    """The median of its seconds, and what it returned."""
    seconds, result = [], None
    for _ in range(rounds):
        begun = time.perf_counter()
        result = work()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds), result


def payload(rounds: int) -> list[dict[str, Any]]:
    """Seconds and bytes of each leg, for one response."""
    import ray
    from vllm.logprobs import FlatLogprobs

    from predmask.plugins.verl.packed import Packed
    from predmask.plugins.verl.payload import TOP_K as FIELD
    from predmask.plugins.verl.payload import Recorded, from_vllm
    from verl_on_cpu.actor import make_batch

    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", object_store_memory=500_000_000)
    found = []
    for tokens in LENGTHS:
        (sample,) = make_samples(1, tokens, 151_936)
        record = FlatLogprobs()
        for ids, logp in zip(sample["topk_ids"].tolist(), sample["topk_logp"].tolist(), strict=True):
            # As vLLM does: the sampled token, then the K likeliest.
            record.append_fast([ids[0], *ids], [logp[0], *logp], range(TOP_K + 1), [None] * (TOP_K + 1))
        response = sample["response"].tolist()
        read, arrays = timed(lambda: from_vllm(response, record, TOP_K), rounds)  # noqa: B023
        moved, there = timed(lambda: ray.get(ray.put(arrays)), rounds)  # noqa: B023

        def lay(arrays: Any = there, response: Any = response) -> Any:
            return Recorded.of([(response, {FIELD: arrays})], TOP_K).rows(PROMPT, response, [1] * len(response))

        laid, rows = timed(lay, rounds)
        batched, batch = timed(lambda: make_batch([sample]), rounds)  # noqa: B023
        packed, _ = timed(lambda: Packed.of(batch, TOP_K), rounds)  # noqa: B023
        size = sum(part.nbytes for part in arrays.values())
        found.append(
            {
                "tokens": tokens,
                "bytes_a_token": size / tokens,
                "batch_bytes_a_token": sum(part.numel() * part.element_size() for part in rows) / tokens,
                "seconds": {
                    "read from vLLM's record": read,
                    "server to agent loop (Ray)": moved,
                    "laid out": laid,
                    "batched": batched,
                    "packed in the actor": packed,
                },
            }
        )
    ray.shutdown()
    return found


def main() -> None:
    """Run, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", choices=["actor", "payload"], help="one part alone; nothing is written")
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    found: dict[str, Any] = {}
    if args.part != "payload":
        found["actor"] = actor(args.rounds)
        for name, values in found["actor"].items():
            if isinstance(values, dict):
                low, high = values["range"]
                print(
                    f"{name:22} {values['seconds']:7.2f} s CPU  {values['ratio']:.3f} ({low:.3f} to {high:.3f}) "
                    f"of dppo_tv  {values['ms_a_token']:+.3f} ms a token"
                )
    if args.part != "actor":
        found["payload"] = payload(args.rounds)
        for row in found["payload"]:
            legs = ", ".join(f"{name} {1e3 * seconds:.1f} ms" for name, seconds in row["seconds"].items())
            print(f"{row['tokens']:6} tokens  {row['bytes_a_token']:.0f} bytes a token  {legs}")
    if args.part is None:
        (HERE / "verl_cost.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
