"""The data sets of the `reasoning-gym` package, each a task."""

from __future__ import annotations

import contextlib
import difflib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from typing_extensions import Doc

from predmask.tasks.base import Problem, Split

if TYPE_CHECKING:
    from reasoning_gym.dataset import ProceduralDataset


@dataclass(frozen=True, kw_only=True)
class ReasoningGym:
    """Generated problems of one reasoning-gym data set, scored by that data set.

    The prompt is the data set's question and nothing else. The answer is the last `<answer>...</answer>` of a
    response, or else the whole response without surrounding space. Scores are the data set's own, from 0 to 1
    with partial credit.

    A few data sets (isomorphic_strings, list_functions, polynomial_multiplication, ransom_note in 0.1.25)
    iterate over sets: to get the same problems in another process, set PYTHONHASHSEED.
    """

    name: ClassVar[str] = "reasoning_gym"
    needs: ClassVar[str] = "extra 'reasoning-gym'"
    inline_verifier: ClassVar[bool] = False

    dataset: Annotated[str, Doc("name of the data set in reasoning-gym, for example leg_counting")]
    train_problems: Annotated[int, Doc("number of training problems")] = 1000
    heldout_problems: Annotated[int, Doc("number of held-out problems, fewer where one repeats a training prompt")] = (
        100
    )
    seed: Annotated[int, Doc("seed of the generator")] = 0

    def __post_init__(self) -> None:
        if self.train_problems < 1 or self.heldout_problems < 1:
            raise ValueError(
                "train_problems and heldout_problems are at least 1, "
                f"not {self.train_problems} and {self.heldout_problems}"
            )

    def prepare(self) -> None:
        """Import the package and build the data set, which a worker does before its first answer is timed."""
        _dataset(self)

    def problems(self, split: Split) -> Sequence[Problem]:
        """The problems of a split; raises `ValueError` for an unknown data set or a split left empty."""
        train, heldout = _splits(self)
        return train if split == "train" else heldout

    def score(self, problem: Problem, response: str) -> float | None:
        """The data set's score of a response."""
        return _dataset(self).score_answer(self.answer(response) or "", problem.reference)

    def answer(self, response: str) -> str | None:
        """The last `<answer>...</answer>`, or else the whole response, without surrounding space; None for nothing."""
        from reasoning_gym.utils import extract_answer

        answer = extract_answer(response)
        return (response.strip() if answer is None else answer) or None


# The caches are the process's, not the task's: the task stays a plain value that travels to the workers.
@functools.cache
def _dataset(task: ReasoningGym) -> ProceduralDataset:
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ImportError(
            f"the task reasoning_gym needs the reasoning-gym package ({error}): "
            "install predmask[reasoning-gym] (in a clone: pip install -e '.[reasoning-gym]')"
        ) from error
    if task.dataset not in DATASETS:
        close = difflib.get_close_matches(task.dataset, DATASETS, n=3)
        hint = f"close: {', '.join(close)}" if close else "see reasoning_gym.factory.DATASETS"
        raise ValueError(f"reasoning-gym has no data set {task.dataset!r} among its {len(DATASETS)}; {hint}")
    size = task.train_problems + task.heldout_problems
    with _generating(task):
        return reasoning_gym.create_dataset(task.dataset, seed=task.seed, size=size)


@functools.cache
def _splits(task: ReasoningGym) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
    # The generator's i-th problem comes from seed + i: two index ranges never share a seed. Small data sets
    # still generate one prompt from several seeds, and such a prompt stays in train only.
    dataset = _dataset(task)
    with _generating(task):
        entries = [dataset[index] for index in range(task.train_problems + task.heldout_problems)]
    problems = [
        Problem(id=f"{task.dataset}/{task.seed}/{index}", prompt=entry["question"], reference=entry)
        for index, entry in enumerate(entries)
    ]
    train = tuple(problems[: task.train_problems])
    seen = {problem.prompt for problem in train}
    heldout = tuple(problem for problem in problems[task.train_problems :] if problem.prompt not in seen)
    if not heldout:
        raise ValueError(
            f"every held-out prompt of {task.dataset!r} is also a training prompt: "
            f"take fewer than {task.train_problems} train_problems"
        )
    return train, heldout


@contextlib.contextmanager
def _generating(task: ReasoningGym) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"reasoning-gym cannot generate {task.dataset!r} in its default configuration "
            f"({type(error).__name__}: {error}); choose another data set"
        ) from error
