"""TRL with the predictive divergence mask, on a CPU in about a minute: a tiny model learns to add.

    pip install -e '.[trl]'
    python examples/trl_arithmetic.py

The model and the task come with predmask; nothing is downloaded. The report that the last line names needs
`pip install -e '.[instruments]'` as well.
"""

import argparse
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import PrinterCallback, TrainerCallback

import predmask
from predmask import Predictive
from predmask.plugins.trl import PredmaskGRPOConfig, PredmaskGRPOTrainer
from predmask.tasks.arithmetic import Arithmetic

MODEL = Path(predmask.__file__).parent / "data" / "arithmetic"
TASK = Arithmetic()


def is_right(completions, reference, **_):
    """The reward: 1 for the exact sum after `ANS`."""
    return [float(TASK.answer(text) == right) for text, right in zip(completions, reference, strict=True)]


def questions(split, count):
    """TRL's prompts, with the right answers for the reward."""
    return Dataset.from_list([{"prompt": p.prompt, "reference": p.reference} for p in TASK.problems(split)[:count]])


class Lines(TrainerCallback):
    """Prints a line for each generation, in the place of all that TRL logs."""

    def on_log(self, args, state, control, logs, **_):
        """Once every `logging_steps`."""
        if "reward" in logs:
            dropped = logs["predmask/mask_frac"]
            print(f"step {state.global_step:4}   reward {logs['reward']:.2f}   mask_frac {dropped:.3f}", flush=True)


def main():
    """Evaluate, train, evaluate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=256, help="optimiser steps")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)  # in a model this small, threads wait for each other
    output = Path("runs") / time.strftime("trl-arithmetic-%Y%m%d-%H%M%S")

    trainer = PredmaskGRPOTrainer(
        model=str(MODEL),
        reward_funcs=is_right,
        args=PredmaskGRPOConfig(
            rule=Predictive(delta=0.05),
            traces=str(output / "traces"),
            output_dir=str(output),
            seed=options.seed,
            max_steps=options.steps,
            learning_rate=1e-4,
            lr_scheduler_type="constant",
            per_device_train_batch_size=32,
            num_generations=16,
            steps_per_generation=16,  # the later of these steps are far from what sampled: the mask has work
            max_completion_length=48,
            per_device_eval_batch_size=128,
            num_generations_eval=1,
            logging_steps=16,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            # TRL's defaults are for GPUs.
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
        ),
        train_dataset=questions("train", 4096),
        eval_dataset=questions("heldout", 256),
        callbacks=[Lines()],
    )
    trainer.remove_callback(PrinterCallback)

    before = trainer.evaluate()["eval_reward"]
    print(f"held-out accuracy before: {before:.3f}")
    trainer.train()
    after = trainer.evaluate()["eval_reward"]
    print(f"held-out accuracy after:  {after:.3f}   (it was {before:.3f})")
    print(f"which tokens were dropped, and why:  predmask report {output / 'traces'} --open")


if __name__ == "__main__":
    main()
