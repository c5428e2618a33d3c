"""A whole run: training, what is shown of it, and what is written down."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from predmask.rollout import Engine
from predmask.traces import token_texts
from predmask.traces.records import DIRECTORY
from predmask.train.config import Config, ConfigError
from predmask.train.directory import RunDirectory, refuse_existing, task_name
from predmask.train.evaluate import Accuracy
from predmask.train.tracing import trace_info
from predmask.train.trainer import StepResult, Trainer

if TYPE_CHECKING:
    from predmask.traces import TraceWriter


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a run came to, as summary.json holds it."""

    status: str
    """`finished`, `interrupted`, or `failed: ` and why."""
    task: str
    rule: str
    seed: int
    steps: int
    optimizer_steps: int
    seconds: float
    accuracy_before: float | None
    """Share of right sampled answers to held-out problems before training (avg@n); None when not measured."""
    accuracy_after: float | None
    """The same after the last step; None when the run ended before it was measured."""
    greedy_before: float | None
    greedy_after: float | None
    mismatch_before: float | None
    """Mean |log mu - log pi| before any update, in nats; None when no step was begun."""
    unscored: dict[str, dict[str, Any]]
    """Sampled answers that could not be scored, by kind (see `Verifier`): count; problem_id and reason of the first."""
    masked_tokens: list[dict[str, Any]]
    """The ten tokens that were masked most often: token, id, count, share, positive, negative (by sign of A)."""


class Display:
    """Shows a run while it goes on; this one shows nothing."""

    def starting(self, config: Config) -> None:
        """The configuration is sound; model and engine are about to be loaded."""

    def started(self, trainer: Trainer, directory: Path) -> None:
        """Model and engine are ready, nothing was sampled yet."""

    def evaluated(self, accuracy: Accuracy) -> None:
        """Accuracy before training was measured."""

    def stepped(self, result: StepResult, trainer: Trainer) -> None:
        """A step was done."""

    def warned(self, text: str) -> None:
        """Something is lost that training can do without."""

    def ended(self, summary: Summary, directory: Path) -> None:
        """Everything is written."""


def run(config: Config, *, display: Display | None = None, engine: Engine | None = None) -> tuple[Summary, Path]:
    """Train as configured and write the run directory; returns the summary and where it lies.

    A run that is interrupted or fails leaves its figures, a summary that says so and the weights it had
    reached, and the exception goes on to the caller. See `Trainer` for `engine`.
    """
    display = display or Display()
    started = time.perf_counter()
    # What can be refused is refused before a model is loaded.
    refuse_existing(config)
    open_scalars = _tensorboard() if config.tensorboard else None
    display.starting(config)
    trainer = Trainer(config, engine=engine)
    directory = RunDirectory(config)
    traces = _traces(trainer, directory.path) if config.traces.enabled else None
    scalars = None if open_scalars is None else open_scalars(directory.path / "tensorboard")
    before: Accuracy | None = None
    last: StepResult | None = None
    told: list[str] = []

    def warn() -> None:
        """Say once that the trace ended early."""
        if traces is not None and traces.problem is not None and traces.problem not in told:
            told.append(traces.problem)
            display.warned(traces.problem)

    def finish(status: str) -> Summary:
        summary = _summarise(trainer, status, time.perf_counter() - started, before, last)
        directory.write_summary(asdict(summary))
        directory.write_checkpoint(trainer.model, trainer.tokenizer)
        if traces is not None:
            traces.close()
            warn()
        display.ended(summary, directory.path)
        return summary

    try:
        display.started(trainer, directory.path)
        before = trainer.evaluate()
        display.evaluated(before)
        directory.append_metrics({"step": 0, "heldout": asdict(before)})
        for last in trainer.steps():
            heldout = {} if last.accuracy is None else {"heldout": asdict(last.accuracy)}
            directory.append_metrics({"step": last.step, **last.metrics, **heldout})
            if scalars is not None:
                _write_scalars(scalars, last)
            display.stepped(last, trainer)
            warn()
    except (KeyboardInterrupt, Exception) as error:
        reason, _, _ = str(error).partition("\n")
        finish("interrupted" if isinstance(error, KeyboardInterrupt) else f"failed: {reason}")
        raise
    finally:
        trainer.close()
        if scalars is not None:
            scalars.close()
    return finish("finished"), directory.path


def _summarise(
    trainer: Trainer, status: str, seconds: float, before: Accuracy | None, last: StepResult | None
) -> Summary:
    after = None if last is None else last.accuracy
    return Summary(
        status=status,
        task=task_name(trainer.config),
        rule=trainer.config.rule.name,
        seed=trainer.config.seed,
        steps=0 if last is None else last.step,
        optimizer_steps=trainer.version,
        seconds=round(seconds, 3),
        accuracy_before=None if before is None else before.sampled,
        accuracy_after=None if after is None else after.sampled,
        greedy_before=None if before is None else before.greedy,
        greedy_after=None if after is None else after.greedy,
        mismatch_before=None if trainer.agreement is None else trainer.agreement.mean,
        unscored={kind: asdict(found) for kind, found in trainer.unscored().items()},
        masked_tokens=[
            {"token": trainer.tokenizer.convert_ids_to_tokens(row.id), **asdict(row)}
            for row in trainer.masked_tokens()[:10]
        ],
    )


def _traces(trainer: Trainer, directory: Path) -> TraceWriter:
    """What records the run's tokens."""
    from predmask.traces import TraceWriter

    settings, size = trainer.config.traces, trainer.model.config.vocab_size
    writer = TraceWriter(
        directory / DIRECTORY,
        trace_info(trainer.config, size, directory.resolve().name),
        every=settings.every,
        max_bytes=settings.max_mb * 1e6,
    )
    writer.write_vocabulary(token_texts(trainer.tokenizer, size))
    trainer.recorder = writer
    return writer


def _tensorboard() -> Callable[[Path], Any]:
    """What opens TensorBoard's writer of a folder; ConfigError when TensorBoard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ConfigError(
            "tensorboard is not installed: install predmask[tensorboard] (in a clone: pip install -e '.[tensorboard]')"
        ) from error
    return SummaryWriter


def _write_scalars(scalars: Any, result: StepResult) -> None:
    """A step's figures, on disk at once."""
    for name, value in result.metrics.items():
        scalars.add_scalar(f"train/{name}", value, result.step)
    if result.accuracy is not None:
        scalars.add_scalar("heldout/sampled", result.accuracy.sampled, result.step)
        scalars.add_scalar("heldout/greedy", result.accuracy.greedy, result.step)
    scalars.flush()
