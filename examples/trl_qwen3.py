"""TRL with the predictive divergence mask on GPUs: Qwen3-4B-Base on DAPO-Math-17k, completions by vLLM.

    pip install -e '.[trl,math,vllm]'
    python examples/trl_qwen3.py                                  # or: accelerate launch examples/trl_qwen3.py

It was not run: no GPU was at hand. Tested are that its options construct, that none is refused, and the reward. The
values are those of the preset `qwen3-4b-dapo` of `predmask train`, which says where each comes from (docs/recipes.md);
what concerns memory is a guess. Weights, gradients and Adam's moments of 4B parameters take 64 GB in float32, before
activations and vLLM: a GPU of 141 GB. `--model Qwen/Qwen3-0.6B-Base` takes 10 GB. Model and data come from the hub.
"""

import argparse
import os

from datasets import Dataset
from transformers import AutoTokenizer

from predmask import Predictive
from predmask.plugins.trl import PredmaskGRPOConfig, PredmaskGRPOTrainer
from predmask.tasks import Problem
from predmask.tasks.math import Math
from predmask.tasks.verifier import Verifier

MAX_PROMPT, MAX_COMPLETION = 1024, 8192
PROMPTS, GROUP, STEPS, MICRO_BATCH = 64, 8, 4, 2
"""Of a generation: prompts, completions of each, and optimiser steps; completions that a GPU takes at once.

The number of GPUs must be a power of two.
"""


def make_config(output: str, **more) -> PredmaskGRPOConfig:
    """TRL's options; those given win."""
    micro_batches = PROMPTS * GROUP // (MICRO_BATCH * int(os.environ.get("WORLD_SIZE", "1")))
    options = {
        "rule": Predictive(delta=0.15, tail="aggregated"),
        "behaviour_top_k": 20,
        "ratio_cap": 5.0,
        "traces": f"{output}/traces",
        "traces_every": 10,
        "output_dir": output,
        "max_steps": 800 * STEPS,
        "per_device_train_batch_size": MICRO_BATCH,
        "gradient_accumulation_steps": micro_batches // STEPS,
        "steps_per_generation": micro_batches,  # TRL counts micro-batches
        "num_generations": GROUP,
        "max_completion_length": MAX_COMPLETION,
        "loss_type": "dr_grpo",
        "scale_rewards": "none",
        "learning_rate": 1e-6,
        "lr_scheduler_type": "constant",
        "adam_beta2": 0.999,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "bf16": True,
        "gradient_checkpointing": True,
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.3,
        "vllm_max_model_length": MAX_PROMPT + MAX_COMPLETION,
        "vllm_enable_sleep_mode": True,
        "logging_steps": 1,
        "save_steps": 50 * STEPS,
        "report_to": "none",
    }
    return PredmaskGRPOConfig(**{**options, **more})


def make_dataset(task: Math, tokenizer) -> Dataset:
    """Each question once, as a chat, without the questions of the held-out data and those that are too long."""
    rows = []
    for problem in task.problems("train"):
        chat = [{"role": "user", "content": problem.prompt}]
        if len(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)) <= MAX_PROMPT:
            rows.append({"prompt": chat, "id": problem.id, "reference": problem.reference})
    return Dataset.from_list(rows)


def make_reward(verifier: Verifier):
    """1 for the right answer, by math-verify; None, which TRL leaves out, where that could not be decided."""

    def is_right(prompts, completions, id, reference, **_):  # columns, by name
        problems = [Problem(*known) for known in zip(id, map(str, prompts), reference, strict=True)]
        return verifier.score(problems, [completion[0]["content"] for completion in completions])

    return is_right


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="Qwen/Qwen3-4B-Base")
    parser.add_argument("--output", default="runs/trl-qwen3", help="checkpoints, and traces for `predmask report`")
    options = parser.parse_args()
    task = Math(
        data=("BytedTsinghua-SIA/DAPO-Math-17k@train",),
        heldout_data=("HuggingFaceH4/aime_2024@train", "math-ai/aime25@test"),
    )
    with Verifier(task, workers=4) as verifier:
        trainer = PredmaskGRPOTrainer(
            model=options.model,
            reward_funcs=make_reward(verifier),
            args=make_config(options.output),
            train_dataset=make_dataset(task, AutoTokenizer.from_pretrained(options.model)),
        )
        trainer.train()


if __name__ == "__main__":
    main()
