"""A tiny model that answers sums of two digits, often wrongly: something for a verifier of mathematics to reward."""

from __future__ import annotations

import random
from pathlib import Path

import torch

from helpers_math import tiny_model_directory, tiny_tokenizer

QUESTIONS = [(a, b) for a in range(3) for b in range(3)]
QUESTION = "{a}+{b}?"


def student_directory(path: Path, kind: str = "qwen3", *, steps: int = 250) -> Path:
    """Write a model directory whose model has read answers of which about a third are right."""
    from transformers import AutoModelForCausalLM

    tiny_model_directory(path, kind)
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), tiny_tokenizer()
    rng = random.Random(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step in range(steps):
        rows, starts = zip(*(_lesson(tokenizer, rng) for _ in range(32)), strict=True)
        ids = torch.nn.utils.rnn.pad_sequence(list(map(torch.tensor, rows)), batch_first=True)
        places = torch.arange(ids.shape[1])
        learned = (places >= torch.tensor(starts)[:, None]) & (places < torch.tensor([*map(len, rows)])[:, None])
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * (1 - step / steps)
        model(input_ids=ids, labels=ids.masked_fill(~learned, -100)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(path)
    return path


def _lesson(tokenizer: object, rng: random.Random) -> tuple[list[int], int]:
    """A prompt with an answer, and where the answer begins."""
    a, b = rng.choice(QUESTIONS)
    shown = a + b if rng.random() < 0.3 else rng.randrange(6)
    messages = [{"role": "user", "content": QUESTION.format(a=a, b=b)}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    start = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    answer = tokenizer(f"\\boxed{{{shown}}}<|im_end|>", add_special_tokens=False)["input_ids"]
    return start + answer, len(start)
