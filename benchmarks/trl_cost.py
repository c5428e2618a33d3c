"""What the plug-in for TRL costs: the same job with TRL's GRPOTrainer and with ours, on a CPU.

    OMP_NUM_THREADS=1 python benchmarks/trl_cost.py         # prints, and writes trl_cost.json beside it

Model, data, batch, seed and number of steps are the same. A round is one generation of each trainer with the optimiser
steps on it, in turn; the first round is for warming up. `loss` is what is left of it without generation, scoring and
optimiser: forward and backward passes. Peak memory is that of one round beyond what the trainer holds between two, each
trainer in a process of its own, in which one round ran before. The model is a Qwen3 of few layers with the real
vocabulary, so that the head, on which the plug-in's time depends, weighs more than in a model that is trained.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

# As predmask's command line sets it: waiting threads sleep, large tensors lie on huge pages.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import torch
from datasets import Dataset
from transformers import AutoTokenizer, PrinterCallback, Qwen3Config, Qwen3ForCausalLM, TrainerCallback
from trl.trainer.grpo_config import GRPOConfig
from trl.trainer.grpo_trainer import GRPOTrainer

from predmask.core import NoMask, Predictive
from predmask.plugins.trl import PredmaskGRPOConfig, PredmaskGRPOTrainer

HERE = Path(__file__).parent
TOKENIZER = HERE.parent / "src" / "predmask" / "data" / "arithmetic"
VOCABULARY, LAYERS, WIDTH = 151_936, 4, 512
COMPLETIONS, TOKENS = 8, 64
"""Of a generation."""
JOBS = {"1 step a generation": 1, "4 steps a generation": 4}
"""Optimiser steps; each takes its share of the completions."""
TRAINERS: dict[str, dict[str, Any] | None] = {
    "TRL": None,
    "predmask none": {"rule": NoMask(), "behaviour_top_k": 0},
    "predmask predictive": {"rule": Predictive(), "behaviour_top_k": 20},
}
"""What ours are given beside TRL's options."""
Clock = dict[str, float]


def write_model(directory: Path) -> None:
    """A Qwen3 with random weights, which never ends a completion, and the embedded tokenizer."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=3 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=WIDTH // 8,
        tie_word_embeddings=True,
        eos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(directory)
    AutoTokenizer.from_pretrained(TOKENIZER).save_pretrained(directory)


def make_trainer(name: str, steps: int, folder: Path) -> GRPOTrainer:
    """One that trains for one generation at each call of `train`."""
    ours = TRAINERS[name]
    options: dict[str, Any] = {
        "output_dir": str(folder / "out"),
        "max_steps": steps,
        "steps_per_generation": steps,
        "per_device_train_batch_size": COMPLETIONS // steps,
        "num_generations": COMPLETIONS,
        "max_completion_length": TOKENS,
        "learning_rate": 1e-6,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
    }
    arguments: dict[str, Any] = {
        "model": str(folder / "model"),
        "reward_funcs": lambda completions, **_: [float(number % 2) for number in range(len(completions))],
        "train_dataset": Dataset.from_list([{"prompt": "1 2 3 4 + 5 6 7 8 ="}] * 64),
    }
    if ours is None:
        trainer = GRPOTrainer(args=GRPOConfig(**options), **arguments)
    else:
        trainer = PredmaskGRPOTrainer(args=PredmaskGRPOConfig(**options, **ours), **arguments)
    trainer.remove_callback(PrinterCallback)
    return trainer


class Clocks(TrainerCallback):
    """CPU and wall seconds of a trainer's parts, since they were last set to zero."""

    def __init__(self, trainer: Any) -> None:
        self.cpu: Clock = defaultdict(float)
        self.wall: Clock = defaultdict(float)
        self._begun = (0.0, 0.0)
        trainer.add_callback(self)
        trainer._generate_and_score_completions = self._timed("generation", trainer._generate_and_score_completions)
        trainer.training_step = self._timed("generation and loss", trainer.training_step)

    def clear(self) -> None:
        """Set them to zero."""
        self.cpu.clear()
        self.wall.clear()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """TRL's call before an optimiser step, generation included."""
        self._begun = time.process_time(), time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """TRL's call after it."""
        self._add("whole", *self._begun)

    def _timed(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(work)
        def timed(*arguments: Any, **more: Any) -> Any:
            begun = time.process_time(), time.perf_counter()
            result = work(*arguments, **more)
            self._add(name, *begun)
            return result

        return timed

    def _add(self, name: str, cpu: float, wall: float) -> None:
        self.cpu[name] += time.process_time() - cpu
        self.wall[name] += time.perf_counter() - wall


def times(steps: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Of each trainer: medians of seconds, and of ratios to TRL's in the same round."""
    trainers = {name: make_trainer(name, steps, folder) for name in TRAINERS}
    clocks = {name: Clocks(trainer) for name, trainer in trainers.items()}
    measured: dict[str, list[dict[str, float]]] = {name: [] for name in trainers}
    for number in range(rounds + 1):
        names = list(trainers)
        for name in names[number % 3 :] + names[: number % 3]:  # each begins in turn
            clocks[name].clear()
            trainers[name].train()
            if number:
                measured[name].append(_parts(clocks[name]))
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return {name: _summary(values, measured["TRL"]) for name, values in measured.items()}


def _parts(clocks: Clocks) -> dict[str, float]:
    found = {}
    for kind, clock in (("cpu", clocks.cpu), ("wall", clocks.wall)):
        found[f"whole {kind}"] = clock["whole"]
        found[f"loss {kind}"] = clock["generation and loss"] - clock["generation"]
        found[f"generation {kind}"] = clock["generation"]
    return found


def _summary(values: list[dict[str, float]], base: list[dict[str, float]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for part in values[0]:
        ratios = sorted(value[part] / other[part] for value, other in zip(values, base, strict=True))
        found[part] = {
            "seconds": statistics.median(value[part] for value in values),
            "ratio": statistics.median(ratios),
            "range": [ratios[0], ratios[-1]],
        }
    return found


def peak(name: str, steps: int, folder: Path) -> dict[str, int]:
    """Bytes of a round in this process, beyond what was there before; of generation and of the rest."""
    trainer = make_trainer(name, steps, folder)
    trainer.train()
    generate, before, found = trainer._generate_and_score_completions, _status("VmRSS"), {"generation": 0}

    def heard(inputs: Any) -> Any:
        batch = generate(inputs)
        found["generation"] = _status("VmHWM") - before
        _clear()
        return batch

    trainer._generate_and_score_completions = heard
    _clear()
    trainer.train()
    found["rest"] = _status("VmHWM") - before
    return found


def _clear() -> None:
    Path("/proc/self/clear_refs").write_text("5")  # from now on the peak counts from here


def _status(name: str) -> int:
    (line,) = (line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def peak_in_new_process(name: str, steps: int, folder: Path) -> dict[str, int]:
    """See `peak`."""
    command = [sys.executable, __file__, "--peak", name, str(steps), str(folder)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, print, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count (default: 5)")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    warnings.filterwarnings("ignore", category=FutureWarning)
    if args.peak:
        name, steps, folder = args.peak
        print(json.dumps(peak(name, int(steps), Path(folder))))
        return
    shape = {"completions": COMPLETIONS, "tokens": TOKENS, "vocabulary": VOCABULARY, "layers": LAYERS, "width": WIDTH}
    found: dict[str, Any] = {"shape": shape, "rounds": args.rounds}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model")
        for job, steps in JOBS.items():
            found[job] = times(steps, args.rounds, folder)
            for trainer, values in found[job].items():
                values["peak bytes"] = peak_in_new_process(trainer, steps, folder)
            _print(job, found[job])
    (HERE / "trl_cost.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def _print(job: str, found: dict[str, Any]) -> None:
    parts = ["whole cpu", "whole wall", "generation cpu", "loss cpu"]
    print(f"\n{job}\n\n| | {' | '.join(parts)} | peak memory |\n|{'---|' * (len(parts) + 2)}")
    for name, values in found.items():
        cells = [f"{values[part]['seconds']:.2f} s ({values[part]['ratio']:.2f})" for part in parts]
        memory = max(values["peak bytes"].values())
        print(f"| {name} | {' | '.join(cells)} | {memory / 1e6:,.0f} MB |", flush=True)


if __name__ == "__main__":
    main()
