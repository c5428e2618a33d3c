"""Tasks, how they are named, the order of their prompts, and what their scores say."""

from __future__ import annotations

import itertools
import math
import pickle
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from predmask.tasks import TASKS, Problem, Task, parse_task, task_class
from predmask.tasks.arithmetic import Arithmetic
from predmask.tasks.reasoning_gym import ReasoningGym
from predmask.tasks.sampling import PromptSampler
from predmask.tasks.scores import average_at_k, majority_at_k, most_given, pass_at_k
from predmask.tasks.verifier import Verifier

DATA = Path(__file__).parent / "data"
COUNTS = {"train_problems": 60, "heldout_problems": 30}
# Each task of the table with 60 problems to train on and at most 30 held out.
SMALL: dict[str, dict[str, Any]] = {
    "arithmetic": COUNTS,
    "math": {"data": (str(DATA / "sums-train.jsonl"),), "heldout_data": (str(DATA / "sums-heldout.jsonl"),)},
    "reasoning_gym": {"dataset": "leg_counting", **COUNTS},
}


def make(name: str) -> Task:
    return TASKS[name](**SMALL[name])


# --- every task of the table ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TASKS)
def test_splits_are_stable_and_share_no_problem(name: str) -> None:
    task = make(name)
    train, heldout = task.problems("train"), task.problems("heldout")
    assert len(train) == 60
    assert 0 < len(heldout) <= 30
    assert make(name).problems("train") == train
    ids = [problem.id for problem in (*train, *heldout)]
    assert len(set(ids)) == len(ids)
    assert not {problem.prompt for problem in train} & {problem.prompt for problem in heldout}


@pytest.mark.parametrize("name", TASKS)
@given(response=st.text(max_size=30) | st.sampled_from(["<answer>3</answer>", "ANS 0 0 0 1 2", "12"]))
def test_scores_are_numbers_from_0_to_1(name: str, response: str) -> None:
    task = make(name)
    score = task.score(task.problems("train")[0], response)
    assert score is not None
    assert 0.0 <= score <= 1.0


@pytest.mark.parametrize("name", TASKS)
def test_tasks_are_values_that_travel(name: str) -> None:
    task = make(name)
    task.problems("train")
    assert pickle.loads(pickle.dumps(task)) == task
    assert hash(task) == hash(make(name))
    assert task_class(name) is TASKS[name]


# --- reasoning-gym -------------------------------------------------------------------------------------------


def test_reasoning_gym_asks_the_question_alone_and_reads_the_tagged_answer() -> None:
    task = ReasoningGym(dataset="leg_counting", train_problems=5, heldout_problems=5)
    problem = task.problems("train")[0]
    right = problem.reference["answer"]
    assert problem.prompt == problem.reference["question"]
    assert task.score(problem, f" {right}\n") == 1.0
    assert task.score(problem, f"<answer>0</answer> no, <answer> {right} </answer>, I think") == 1.0
    assert task.score(problem, f"<answer></answer> {right}") == 0.0
    assert task.score(problem, "0") == 0.0
    assert ReasoningGym(dataset="leg_counting", seed=99).problems("train")[0].prompt != problem.prompt


def test_reasoning_gym_answers_count_as_equal_by_the_tagged_text() -> None:
    task = ReasoningGym(dataset="leg_counting")
    assert task.answer("<answer>1</answer> no, <answer> 4\n</answer>!") == "4"
    assert task.answer(" 4\n") == "4"
    assert task.answer(" \n") is None
    assert task.answer("4 <answer> </answer>") is None


def test_reasoning_gym_keeps_partial_credit() -> None:
    task = ReasoningGym(dataset="basic_arithmetic", train_problems=1, heldout_problems=1)
    problem = Problem(id="x", prompt="", reference={"answer": "12", "question": "", "metadata": {}})
    assert task.score(problem, "it is 12") == pytest.approx(2 / 8)


def test_reasoning_gym_keeps_repeated_prompts_out_of_heldout() -> None:
    task = ReasoningGym(dataset="coin_flip", train_problems=150, heldout_problems=150)
    seen = {problem.prompt for problem in task.problems("train")}
    heldout = task.problems("heldout")
    assert 0 < len(heldout) < 150  # the data set is small enough to repeat itself
    assert not seen & {problem.prompt for problem in heldout}


def test_reasoning_gym_scores_in_a_worker() -> None:
    task = ReasoningGym(dataset="leg_counting", train_problems=2, heldout_problems=1)
    problems = task.problems("train")
    with Verifier(task, workers=1) as verifier:
        right = [problem.reference["answer"] for problem in problems]
        assert verifier.score([*problems, problems[0]], [*right, "0"]) == [1.0, 1.0, 0.0]


def test_reasoning_gym_errors_name_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"no data set 'leg_count' among its 1\d\d; close: .*leg_counting"):
        ReasoningGym(dataset="leg_count").problems("train")
    with pytest.raises(ValueError, match="cannot generate 'composite'"):
        ReasoningGym(dataset="composite").problems("train")
    with pytest.raises(ValueError, match="at least 1"):
        ReasoningGym(dataset="leg_counting", heldout_problems=0)
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ImportError, match=r"install predmask\[reasoning-gym\]"):
        ReasoningGym(dataset="leg_counting", seed=12345).problems("train")


# --- names ---------------------------------------------------------------------------------------------------


def test_a_task_is_named_by_the_table_a_data_set_or_an_import_path() -> None:
    from helpers_tasks import Scripted

    assert parse_task("arithmetic") == (Arithmetic, {})
    assert parse_task("reasoning_gym") == (ReasoningGym, {})
    assert parse_task("reasoning_gym:leg_counting") == (ReasoningGym, {"dataset": "leg_counting"})
    assert parse_task("helpers_tasks:Scripted") == (Scripted, {})


def test_a_task_of_your_own_is_found_in_the_current_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "task_found_in_cwd.py").write_text("from helpers_tasks import Scripted as Mine")
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    monkeypatch.chdir(tmp_path)
    assert task_class("task_found_in_cwd:Mine").__name__ == "Scripted"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("arithmetics", "unknown task 'arithmetics', did you mean 'arithmetic'?: .*reasoning_gym.*package"),
        ("", "unknown task ''"),
        ("no_such_module:Task", "'no_such_module' cannot be imported .* run from its directory or install"),
        (":Task", "cannot be imported"),
        ("helpers_tasks:Missing", "helpers_tasks has no class 'Missing'"),
        ("helpers_tasks:PROBLEMS", "has no class 'PROBLEMS'"),
        ("helpers_tasks:NotADataclass", "not a frozen dataclass"),
        ("helpers_tasks:NotFrozen", "not a frozen dataclass"),
        ("helpers_tasks:NoScore", "a task without a verifier"),
        ("helpers_tasks:NoProblems", "has no problems"),
    ],
)
def test_a_wrong_name_is_an_error_with_its_remedy(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        parse_task(name)


# --- the order of prompts ------------------------------------------------------------------------------------


def numbered(count: int) -> list[Problem]:
    return [Problem(id=str(i), prompt="", reference=None) for i in range(count)]


def test_a_resumed_run_takes_the_prompts_of_the_uninterrupted_one() -> None:
    problems = numbered(20)
    sampler = PromptSampler(problems, seed=7)
    steps = [sampler.take(4) for _ in range(5)]
    resumed = PromptSampler(problems, seed=7, position=8)
    assert [resumed.take(4) for _ in range(3)] == steps[2:]
    assert sorted(problem.id for problem in itertools.chain(*steps)) == sorted(p.id for p in problems)


@given(
    count=st.integers(1, 12),
    seed=st.integers(),
    sizes=st.lists(st.integers(0, 15), max_size=6),
    stop=st.integers(0, 6),
)
def test_each_problem_once_an_epoch_however_the_run_is_cut(count: int, seed: int, sizes: list[int], stop: int) -> None:
    problems = numbered(count)
    sampler = PromptSampler(problems, seed)
    batches = [sampler.take(size) for size in sizes]
    taken = list(itertools.chain(*batches))
    assert [len(batch) for batch in batches] == sizes
    assert sampler.position == len(taken)
    for epoch in range(0, len(taken), count):
        visits = Counter(problem.id for problem in taken[epoch : epoch + count])
        assert set(visits.values()) == {1}
    resumed = PromptSampler(problems, seed, position=sum(sizes[:stop]))
    assert [resumed.take(size) for size in sizes[stop:]] == batches[stop:]


def test_epochs_and_seeds_shuffle_differently() -> None:
    problems = numbered(30)
    orders = [
        tuple(problem.id for problem in PromptSampler(problems, seed, position=30 * epoch).take(30))
        for seed in range(3)
        for epoch in range(3)
    ]
    assert len({*orders, tuple(problem.id for problem in problems)}) == 10


def test_the_sampler_refuses_what_it_cannot_do() -> None:
    with pytest.raises(ValueError, match="no problems"):
        PromptSampler([], seed=0)
    with pytest.raises(ValueError, match="position"):
        PromptSampler(numbered(1), seed=0, position=-1)
    with pytest.raises(ValueError, match="-1 problems"):
        PromptSampler(numbered(1), seed=0).take(-1)


# --- scores of many responses --------------------------------------------------------------------------------


def test_pass_at_k_of_known_cases() -> None:
    assert pass_at_k(8, 2, 4) == pytest.approx(0.7857, abs=5e-5)
    assert pass_at_k(8, 2, 8) == 1.0
    assert pass_at_k(8, 0, 4) == 0.0
    assert pass_at_k(8, 2, 1) == average_at_k([1.0] * 2 + [0.0] * 6, 8) == 0.25
    # For c = 1 it is k / n: no digits are lost to a subtraction from 1, and nothing overflows.
    assert pass_at_k(10_000, 1, 2) == 2e-4
    assert pass_at_k(20_000, 1, 10_000) == 0.5


@given(st.data())
def test_pass_at_k_is_the_share_of_draws_with_a_right_one(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 9))
    c = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    draws = [any(draw) for draw in itertools.combinations([True] * c + [False] * (n - c), k)]
    assert pass_at_k(n, c, k) == sum(draws) / len(draws)


@pytest.mark.parametrize(
    ("n", "c", "k"), [(8, 2, 9), (8, 9, 4), (8, -1, 4), (8, 2, 0), (8, 2, -1), (0, 0, 1), (-1, 0, 1)]
)
def test_pass_at_k_refuses_what_has_no_estimate(n: int, c: int, k: int) -> None:
    with pytest.raises(ValueError, match=r"responses"):
        pass_at_k(n, c, k)


def test_average_at_k() -> None:
    assert average_at_k([0.5, 0.0, 1.0, 0.5], 2) == 0.5
    for scores, k in (([1.0], 2), ([], 1), ([1.0], 0), ([1.0, None], 1), ([1.0, math.nan], 1)):
        with pytest.raises(ValueError, match=r"responses|not a score"):
            average_at_k(scores, k)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("answers", "scores", "expected"),
    [
        (["3", "4", "3"], [1.0, 0.0, 1.0], 1.0),
        (["3", "4", "4"], [1.0, 0.0, 0.0], 0.0),
        (["3", "4"], [1.0, 0.0], 0.5),  # a tie: either, with the same probability
        (["3", "4", "5", None], [1.0, 0.0, 0.0, 0.0], 1 / 3),
        ([None, None, None, "3"], [0.0, 0.0, 0.0, 1.0], 1.0),  # who gives no answer does not vote
        ([None, None], [0.0, 0.0], 0.0),
        (["", "", "3"], [0.0, 0.0, 1.0], 0.0),  # an empty answer is one
        (["3"], [0.25], 0.25),
        (["3", "3", "4"], [1.0, 0.0, 1.0], 0.5),  # the same answer, scored twice
        ([], [], 0.0),
    ],
)
def test_majority_at_k_of_known_cases(answers: list[str | None], scores: list[float], expected: float) -> None:
    assert majority_at_k(answers, scores) == pytest.approx(expected)


@given(st.lists(st.sampled_from(["1", "2", "3", None]), max_size=8), st.data())
def test_majority_at_k_is_the_expected_score_of_a_random_winner(answers: list[str | None], data: st.DataObject) -> None:
    of = {answer: data.draw(st.sampled_from([0.0, 0.5, 1.0])) for answer in ("1", "2", "3")}
    scores = [of.get(answer, 0.0) if answer else 0.0 for answer in answers]
    counts = {answer: answers.count(answer) for answer in of if answer in answers}
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    expected = sum(of[answer] for answer in winners) / len(winners) if winners else 0.0
    assert majority_at_k(answers, scores) == pytest.approx(expected)
    assert sorted(most_given(answers)) == winners
    order = data.draw(st.permutations(range(len(answers))))
    assert majority_at_k([answers[i] for i in order], [scores[i] for i in order]) == pytest.approx(expected)


def test_tied_answers_come_in_the_order_in_which_they_were_given() -> None:
    assert most_given(["9", None, "1", "9", "1", "5"]) == ["9", "1"]


@pytest.mark.parametrize(
    ("answers", "scores"), [(["3"], []), (["3", None], [1.0]), (["3"], [None]), (["3"], [math.nan])]
)
def test_majority_at_k_refuses_what_has_no_score(answers: list[str | None], scores: list[Any]) -> None:
    with pytest.raises(ValueError, match="maj@k"):
        majority_at_k(answers, scores)
