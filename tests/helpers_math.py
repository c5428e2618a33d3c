"""Tiny mathematics data of every layout, and tiny random models with a tokenizer that knows every text."""

from __future__ import annotations

import csv
import gzip
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

# --- models --------------------------------------------------------------------------------------------------

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Ids 256, 257 and 258; the ids before are bytes."""
VOCABULARY = 300
"""Rows of the models' heads: more than the tokenizer has ids, as in Qwen's."""
CONTEXT = 512

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

_KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"intermediate_size": 128, "tie_word_embeddings": True},
    "qwen3_moe": {
        "intermediate_size": 128,
        "moe_intermediate_size": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": False,
    },
}


def tiny_tokenizer() -> Any:
    """Byte-level: one token a byte, so that any text is encoded without loss; ChatML as its chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=SPECIAL[0],
        pad_token=SPECIAL[0],
        model_max_length=CONTEXT,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def tiny_model_directory(path: Path, kind: str = "qwen3", *, seed: int = 0, **settings: Any) -> Path:
    """Write a random model (`qwen3` or `qwen3_moe`) and its tokenizer as a model directory; returns `path`.

    `settings` go over those of the model's configuration, for example `num_hidden_layers=1`. A response ends with
    <|endoftext|> or <|im_end|>.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    tokenizer = tiny_tokenizer()
    config = AutoConfig.for_model(
        kind,
        **{
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": CONTEXT,
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
            "initializer_range": 0.1,
            **_KINDS[kind],
            **settings,
        },
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids([SPECIAL[2], SPECIAL[0]])
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


# --- data ----------------------------------------------------------------------------------------------------


def _chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


LAYOUTS: dict[str, Callable[[str, str], dict[str, Any]]] = {
    "dapo": lambda question, answer: {
        "data_source": "math_dapo",
        "prompt": _chat(question),
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule"},
    },
    "gsm8k": lambda question, answer: {"question": question, "answer": f"Count on <<1+1=2>>fingers.\n#### {answer}"},
    "math": lambda question, answer: {
        "problem": question,
        "level": "Level 1",
        "type": "Algebra",
        "solution": f"First \\boxed{{0}}, no: it is $\\boxed{{{answer}}}$.",
    },
    "math500": lambda question, answer: {"problem": question, "solution": "See \\boxed{elsewhere}.", "answer": answer},
    "aime": lambda question, answer: {"Problem": question, "Answer": answer},
    "plain": lambda question, answer: {"prompt": question, "answer": answer},
}
"""Rows of the layouts in use, by name: from a question and its gold answer."""
FLAT = ("gsm8k", "math", "math500", "aime", "plain")
"""The layouts that CSV can hold."""


def sums(count: int, *, start: int = 0) -> list[tuple[str, str]]:
    """Questions that all differ, each with its gold answer."""
    return [(f"What is {number} + {number}?", str(2 * number)) for number in range(start, start + count)]


def laid_out(layout: str, questions: Sequence[tuple[str, str]]) -> list[dict[str, Any]]:
    """Rows of a layout."""
    return [LAYOUTS[layout](question, answer) for question, answer in questions]


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    """Write rows in the format that the file's name asks for; returns `path`."""
    match path.name.partition(".")[2]:
        case "parquet":
            import pyarrow
            import pyarrow.parquet

            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)
        case "json":
            path.write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")
        case "jsonl":
            path.write_text(_lines(rows), encoding="utf-8")
        case "jsonl.gz":
            path.write_bytes(gzip.compress(_lines(rows).encode()))
        case "csv":
            with path.open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        case suffix:
            raise ValueError(f"no writer for .{suffix}")
    return path


def _lines(rows: Sequence[dict[str, Any]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


# --- verifiers, by import path -------------------------------------------------------------------------------


def contains(response: str, reference: str) -> float:
    """A verifier of one's own: 1.0 where the gold answer stands anywhere in the response."""
    return float(reference in response)


def even_length(response: str, reference: str) -> float:
    """Rewards about half of what any model says, so that a random one has something to learn from."""
    return float(len(response) % 2 == 0)
