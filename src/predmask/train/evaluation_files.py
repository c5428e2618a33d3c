"""What an evaluation leaves behind: every answer, a table of the problems, and the figures."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from predmask.train.evaluate import Answer, Evaluation, ProblemResult
from predmask.train.evaluate_model import ModelEvaluation


class AnswersFile:
    """Answers as JSON lines, each on disk as soon as it is added; what the file held before goes with the first."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: IO[str] | None = None

    def __enter__(self) -> AnswersFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            self._file.close()

    def add(self, answer: Answer) -> None:
        """One more line."""
        if self._file is None:
            # A lone surrogate, which JSON may hold and UTF-8 may not, is written as its escape.
            self._file = self._path.open("w", encoding="utf-8", errors="backslashreplace")
        self._file.write(json.dumps(answer_row(answer), ensure_ascii=False) + "\n")
        self._file.flush()


def answer_row(answer: Answer) -> dict[str, Any]:
    """An answer as a row; `sample` is None for the greedy one, `score` where it could not be scored (`why` says it)."""
    grade = answer.grade
    return {
        "problem": answer.problem.id,
        "sample": answer.sample,
        "question": answer.problem.prompt,
        "response": answer.response,
        "gold": str(answer.problem.reference),
        "score": grade.score,
        "extracted": grade.answer,
        "tokens": answer.length,
        "truncated": answer.truncated,
        "why": f"{grade.kind}: {grade.reason}" if grade.score is None else None,
    }


def problem_row(result: ProblemResult, *, voted: bool = True) -> dict[str, Any]:
    """A problem as a row of the table (docs/evaluation.md has the columns); `voted` where answers are known at all."""
    samples, greedy = result.samples, result.greedy
    tied = result.majority_answers
    return {
        "id": result.problem.id,
        "question": result.problem.prompt,
        "gold": str(result.problem.reference),
        "n": len(samples),
        "right": sum(result.hits),
        "avg": result.average,
        "pass": any(result.hits),
        "majority_answer": tied[0] if tied else None,
        "majority_tied": len(tied),
        "majority_right": result.majority if voted else None,
        "greedy_answer": greedy.grade.answer,
        "greedy_right": greedy.right,
        "greedy_truncated": greedy.truncated,
        "greedy_unscored": greedy.grade.score is None,
        "truncated": sum(answer.truncated for answer in samples),
        "unscored": sum(answer.grade.score is None for answer in samples),
        "mean_length": sum(answer.length for answer in samples) / len(samples),
    }


def write_table(evaluation: Evaluation, path: Path) -> None:
    """The problems as Parquet, a row each, in their order."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    kinds = {
        **dict.fromkeys(("id", "question", "gold", "majority_answer", "greedy_answer"), pa.string()),
        **dict.fromkeys(("n", "right", "majority_tied", "truncated", "unscored"), pa.int64()),
        **dict.fromkeys(("avg", "majority_right", "mean_length"), pa.float64()),
        **dict.fromkeys(("pass", "greedy_right", "greedy_truncated", "greedy_unscored"), pa.bool_()),
    }
    voted = evaluation.accuracy.majority is not None
    rows = [
        {name: _sound(value) for name, value in problem_row(result, voted=voted).items()}
        for result in evaluation.results
    ]
    schema = pa.schema([(name, kinds[name]) for name in rows[0]])
    pq.write_table(pa.Table.from_pylist(rows, schema), path)


def to_json(found: ModelEvaluation) -> dict[str, Any]:
    """Every figure with its interval, and under which settings it was measured, ready for JSON."""
    config, accuracy = found.config, found.evaluation.accuracy
    return {
        "model": config.model,
        "task": {"name": getattr(config.task, "name", type(config.task).__name__), **asdict(config.task)},  # pyright: ignore[reportArgumentType]
        "prompt": asdict(config.prompt),
        "engine": {"name": config.engine.name, **asdict(config.engine)},
        "temperature": found.temperature,
        "max_new_tokens": config.rollout.max_new_tokens,
        "seed": config.seed,
        "problems": accuracy.prompts,
        "available": found.available,
        "samples": accuracy.samples,
        "figures": {name: estimate._asdict() for name, estimate in accuracy.figures().items()},
        "truncated": accuracy.truncated,
        "unscored": found.evaluation.unscored(),
        "length": accuracy.length,
        "notes": list(found.notes),
        "seconds": found.seconds,
    }


def _sound(value: Any) -> Any:
    """Text without lone surrogates, which Parquet cannot hold."""
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else value
