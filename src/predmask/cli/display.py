"""How a run looks on a terminal, and in a log file."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import wrap
from typing import Any

import torch
from tqdm import tqdm

from predmask.analysis.text import percent, visible
from predmask.bootstrap import LEAST_CLUSTERS
from predmask.traces.records import DIRECTORY
from predmask.train.config import Config
from predmask.train.directory import task_name
from predmask.train.evaluate import Accuracy
from predmask.train.evaluate_model import ModelEvaluation
from predmask.train.run import Display, Summary
from predmask.train.trainer import StepResult, Trainer

_MANY_TRUNCATED = 0.1
"""Share of truncated samples from which on a word is said about it."""


class Console(Display):
    """One line a step, with a progress bar under it where the output is a terminal."""

    def __init__(self) -> None:
        self._bar: tqdm[Any] | None = None
        self._told: set[str] = set()

    def starting(self, config: Config) -> None:
        """A line where there is something to wait for."""
        if config.engine.startup:
            print(f"starting {config.engine.name}: {config.engine.startup}", flush=True)

    def started(self, trainer: Trainer, directory: Path) -> None:
        """Say what is about to be trained, and warn of what cannot work."""
        config = trainer.config
        parameters = sum(parameter.numel() for parameter in trainer.model.parameters())
        print(f"task     {task_name(config)}: {len(trainer.heldout)} held-out problems")
        print(f"model    {config.model}, {_count(parameters)} parameters, on {_device(trainer.device)}")
        print(f"engine   {config.engine.name}, {config.engine.numerics}")
        print(f"rule     {config.rule.name}: {config.rule.summary}")
        print(f"run      {directory}")
        for note in trainer.notes:
            print(f"note     {note}")
        self._bar = tqdm(
            total=config.steps, unit="step", leave=False, dynamic_ncols=True, disable=not sys.stderr.isatty()
        )

    def evaluated(self, accuracy: Accuracy) -> None:
        """Accuracy before training."""
        self._print(f"before training: {_accuracy(accuracy)}")

    def stepped(self, result: StepResult, trainer: Trainer) -> None:
        """The step's line; after the first, whether engine and trainer agreed before any update."""
        if result.step == 1 and trainer.agreement is not None:
            found, tolerance = trainer.agreement, trainer.config.mismatch_tolerance
            self._print(f"engine and trainer before any update: {found}")
            if found.mean > tolerance:
                self._print(
                    f"WARNING: that is more than the numerics explain (mean {tolerance:g}); do both use the same "
                    "weights, padding and dropout?"
                )
            if found.unknown:
                self._print("WARNING: tokens whose log-probs are unknown are not trained on; see the engine's records")
        for kind, found in trainer.unscored().items():
            if kind not in self._told:
                self._told.add(kind)
                self._print(
                    f"WARNING: answers could not be scored ({kind}) and are left out, first to problem "
                    f"{found.problem_id}: {visible(found.reason)}"
                )
        self._print(step_line(result, trainer.config.steps))
        if self._bar is not None:
            self._bar.update()

    def warned(self, text: str) -> None:
        """A line of its own."""
        self._print(f"WARNING: {text}")

    def ended(self, summary: Summary, directory: Path) -> None:
        """Before and after, and what to try next."""
        if self._bar is not None:
            self._bar.close()
        for line in closing_lines(summary, directory):
            print(line)

    def _print(self, line: str) -> None:
        # Above the bar, if there is one.
        tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()


def step_line(result: StepResult, steps: int) -> str:
    """A step's figures in one line; a figure over no token is a dash."""
    figures = result.metrics

    def show(name: str, form: str) -> str:
        return format(figures[name], form) if name in figures else "-"

    line = (
        f"step {result.step:>{len(str(steps))}}/{steps}"
        f"  reward {show('reward', '.3f')}"
        f"  acc {show('accuracy', '6.1%')}"
        f"  masked A>0 {show('mask_frac_pos', '.2%')} A<0 {show('mask_frac_neg', '.2%')}"
        f"  D kept {show('divergence_kept_mean', '.1e')} masked {show('divergence_masked_mean', '.1e')}"
        f"  mismatch {show('mismatch_kl', '.1e')}"
        f"  entropy {show('entropy', '.3f')}"
        f"  {show('tokens_per_second', '.0f')} tok/s"
    )
    if figures.get("unscored_count"):
        line += f"  not scored {figures['unscored_count']:.0f}"
    return line if result.accuracy is None else f"{line}  held-out {_accuracy(result.accuracy)}"


def closing_lines(summary: Summary, directory: Path) -> list[str]:
    """The table of a run: before, after, what was masked, where everything lies, what to try next."""

    def row(name: str, before: float | None, after: float | None) -> str:
        return f"{name:<20}" + "".join(f"{'-' if value is None else f'{value:.1%}':>8}" for value in (before, after))

    lines = [
        "",
        f"{'held-out accuracy':<20}{'before':>8}{'after':>8}",
        row("sampled", summary.accuracy_before, summary.accuracy_after),
        row("greedy", summary.greedy_before, summary.greedy_after),
        "",
    ]
    if summary.masked_tokens:
        rows = ", ".join(
            f"{row['token']!r} {row['share']:.0%} (A>0: {row['positive']}, A<0: {row['negative']})"
            for row in summary.masked_tokens[:4]
        )
        lines.append(f"masked most often  {rows}")
    unscored = ", ".join(f"{found['count']} {kind}" for kind, found in summary.unscored.items())
    if unscored:
        lines.append(f"not scored         {unscored}")
    if summary.steps and not summary.optimizer_steps:
        why = ", or an answer could not be scored" if unscored else ""
        lines.append(f"note               nothing was learned: in every group all rewards were equal{why}")
    # The reason of a failure is the last thing that is said.
    status, _, _ = summary.status.partition(":")
    lines += [
        f"{status:<18} {_many(summary.steps, 'step')}, {_many(summary.optimizer_steps, 'optimiser step')}, "
        f"{summary.seconds:.0f} s",
        f"run directory      {directory}",
    ]
    commands = [f"report {directory}    (of a run with --traces: its tokens, too)", f"eval {directory}"]
    traced = list((directory / DIRECTORY).glob("tokens-*.parquet"))
    if traced:
        size = sum(file.stat().st_size for file in (directory / DIRECTORY).iterdir()) / 1e6
        lines.append(f"traces             {len(traced)} of {summary.steps} steps, {size:.1f} MB")
        commands = [f"{verb} {directory}" for verb in ("report", "show", "replay", "eval")]
    if summary.task == "arithmetic":
        commands.append(f"train arithmetic --rule {'ppo_clip' if summary.rule == 'dppo' else 'dppo'}")
        if summary.rule != "none":
            commands.append("train arithmetic-stress --rule none    (without a mask it collapses)")
    heads = ["try next", *[""] * len(commands)]
    return lines + [f"{head:<18} {command()} {each}" for head, each in zip(heads, commands, strict=False)]


def evaluation_lines(found: ModelEvaluation) -> Iterator[str]:
    """An evaluation by itself: what was asked of what, the table, and what was cut or could not be scored."""
    config, accuracy = found.config, found.evaluation.accuracy
    limit = config.rollout.max_new_tokens
    asked = f"{accuracy.prompts} held-out problems"
    if accuracy.prompts < found.available:
        asked = f"{accuracy.prompts} of {found.available} held-out problems"
    yield f"model    {visible(config.model)}"
    yield f"task     {visible(task_name(config))}: {asked}"
    yield f"engine   {_engine(config)}"
    yield (
        f"answers  1 greedy and {accuracy.samples} sampled each at temperature {found.temperature:g}, of at most "
        f"{limit} tokens; seed {config.seed}, {found.seconds:.1f} s"
    )
    for note in found.notes:
        yield from wrap(visible(note), 100, initial_indent="note     ", subsequent_indent=" " * 9)
    yield ""
    yield from accuracy_lines(accuracy)
    yield ""
    yield from _not_counted(found)


def accuracy_lines(accuracy: Accuracy) -> Iterator[str]:
    """The table of shares, each with its interval."""
    enough = accuracy.prompts >= LEAST_CLUSTERS
    yield f"{'':<10}{'share':>8}{'   95 % interval (bootstrap over problems)' if enough else ''}"
    for name, (share, low, high) in accuracy.figures().items():
        between = "   none: all problems are alike" if enough else ""
        if low is not None and high is not None:
            between = f"   [{low:6.1%}, {high:6.1%}]"
        yield f"{name:<10}{percent(share, 1):>8}{between}"
    if accuracy.majority is None:
        yield f"{f'maj@{accuracy.samples}':<10}{'-':>8}   no sample has an answer that could be compared"
    if not enough:
        yield f"no intervals: {LEAST_CLUSTERS} problems are the fewest to resample"


def _not_counted(found: ModelEvaluation) -> Iterator[str]:
    """Answers that were cut, answers that could not be scored, and how long answers are."""
    accuracy, answers = found.evaluation.accuracy, found.evaluation.answers
    samples, limit = accuracy.prompts * accuracy.samples, found.config.rollout.max_new_tokens
    cut = sum(answer.truncated for answer in answers if answer.sample is not None)
    cut_greedy = sum(answer.truncated for answer in answers if answer.sample is None)
    yield (
        f"truncated    {cut} of {samples} sampled answers ({percent(cut / samples, 1)}), {cut_greedy} of "
        f"{accuracy.prompts} greedy ones, were cut at {limit} tokens"
    )
    kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(found.evaluation.unscored().items()))
    because = f": {kinds}; they count as not right" if kinds else ""
    yield f"not scored   {accuracy.unscored} of {len(answers)} answers{because}"
    yield f"mean length  {accuracy.length:.1f} tokens, of the sampled answers"
    if accuracy.truncated > _MANY_TRUNCATED:
        yield "hint         many answers were cut: set a higher limit by --rollout.max_new_tokens"


def _engine(config: Config) -> str:
    numerics = f"{config.engine.name}, {config.engine.numerics}"
    return f"the policy itself ({numerics})" if config.eval.engine == "policy" else numerics


def command() -> str:
    """What the user types to start this program: its name, or its path where no PATH leads to it."""
    return "predmask" if shutil.which("predmask") or not sys.argv[0].endswith("predmask") else sys.argv[0]


def _accuracy(accuracy: Accuracy) -> str:
    return f"{accuracy.sampled:.1%} sampled, {accuracy.greedy:.1%} greedy"


def _many(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _count(number: int) -> str:
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return str(number)


def _device(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"{device.type}, {threads} thread{'s' if threads > 1 else ''}"
