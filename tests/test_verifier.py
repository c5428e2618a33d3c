"""Untrusted answers are scored in worker processes: whatever a verifier does, the batch comes back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers_tasks import PROBLEMS, Answering, CannotPrepare, CannotStart, Inline, MathVerify, Scripted
from predmask.tasks.base import Problem
from predmask.tasks.verifier import Grade, Verifier, VerifierError

DEADLINE = 1.0


def score(verifier: Verifier, *responses: str) -> list[float | None]:
    problems = [Problem(id=f"problem {i}", prompt="", reference=None) for i in range(len(responses))]
    return verifier.score(problems, responses)


def grade(verifier: Verifier, *responses: str) -> list[Grade]:
    problems = [Problem(id=f"problem {i}", prompt="", reference=None) for i in range(len(responses))]
    return verifier.grade(problems, responses)


def counts(verifier: Verifier) -> dict[str, int]:
    return {kind: unscored.count for kind, unscored in verifier.unscored.items()}


def gone(pid: int) -> bool:
    """Dead with all its threads, though perhaps not yet waited for."""
    try:
        threads = [stat.read_text() for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return len(threads) <= 1 and all(stat.rpartition(")")[2].split()[0] in "ZX" for stat in threads)


def eventually(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


def both_started(verifier: Verifier) -> bool:
    return eventually(lambda: len(set(score(verifier, *["pid"] * 20))) == 2)


@pytest.fixture(scope="module")
def verifier() -> Iterator[Verifier]:
    with Verifier(Scripted(), workers=2, deadline=DEADLINE) as verifier:
        yield verifier


def test_scores_come_back_in_the_order_of_the_answers(verifier: Verifier) -> None:
    assert score(verifier, *(str(i) for i in range(200))) == [float(i) for i in range(200)]
    assert verifier.unscored == {}
    assert score(verifier) == []


def test_workers_are_processes_that_stay_between_batches(verifier: Verifier) -> None:
    before = set(score(verifier, *["pid"] * 20))
    after = set(score(verifier, *["pid"] * 20))
    assert os.getpid() not in before
    assert len(before | after) <= 2


def test_an_answer_that_cannot_be_scored_is_none_and_counted(verifier: Verifier) -> None:
    assert score(verifier, "1", "none", "0", "raise first", "nan", "raise second", "text", "-inf", "0.5") == [
        1.0, None, 0.0, None, None, None, None, None, 0.5,
    ]  # fmt: skip
    assert counts(verifier) == {"declined": 1, "raised": 2, "not_a_number": 3}
    assert verifier.unscored["raised"].problem_id == "problem 3"
    assert verifier.unscored["raised"].reason == "ZeroDivisionError: first"
    assert score(verifier, "1") == [1.0]
    assert verifier.unscored == {}


def test_cannot_score_is_not_wrong(verifier: Verifier) -> None:
    assert score(verifier, "1", "none", "0", "0") == [1.0, None, 0.0, 0.0]
    assert score(verifier, "1", "timeout it was hard", "raise x", "0") == [1.0, None, None, 0.0]
    assert counts(verifier) == {"late": 1, "raised": 1}
    assert verifier.unscored["late"].reason == "TimeoutError: it was hard"


def test_a_grade_says_what_became_of_a_response(verifier: Verifier) -> None:
    assert grade(verifier, "1", "none", "raise x") == [
        Grade(1.0, None, "", ""),
        Grade(None, None, "declined", "its verifier returned None"),
        Grade(None, None, "raised", "ZeroDivisionError: x"),
    ]
    with Verifier(Answering(), workers=1, deadline=DEADLINE) as answering:
        # An answer may be known though its score is not, and the other way round.
        grades = grade(answering, "1 =34", "0", "raise =5", "none =6", "1 =0", "1 =hang")
        assert [(each.score, each.answer, each.kind) for each in grades] == [
            (1.0, "34", ""), (0.0, None, ""), (None, "5", "raised"), (None, "6", "declined"), (1.0, None, ""),
            (None, None, "late"),
        ]  # fmt: skip


def test_progress_is_told(verifier: Verifier) -> None:
    done: list[int] = []
    problems = [Problem(id=str(i), prompt="", reference=None) for i in range(20)]
    verifier.grade(problems, ["1"] * 20, done.append)
    assert done == sorted(done)
    assert done[-1] == 20


def test_a_worker_that_dies_costs_its_answer_alone(verifier: Verifier) -> None:
    assert score(verifier, "1", "crash", "2", "exit", "3") == [1.0, None, 2.0, None, 3.0]
    assert counts(verifier) == {"died": 2}
    assert verifier.unscored["died"].reason.endswith("signal SIGSEGV")


def test_an_endless_verifier_is_killed_with_its_children(verifier: Verifier, tmp_path: Path) -> None:
    assert both_started(verifier)
    start = time.monotonic()
    assert score(verifier, "1", f"parent {tmp_path / 'pid'}", "2", "3") == [1.0, None, 2.0, 3.0]
    assert DEADLINE <= time.monotonic() - start < DEADLINE + 1.0
    assert counts(verifier) == {"late": 1}
    assert eventually(lambda: gone(int((tmp_path / "pid").read_text())))


def test_nothing_scored_stops_the_run_with_the_first_reason(verifier: Verifier) -> None:
    with pytest.raises(VerifierError, match=r"none of the 8 answers.*'problem 0': ZeroDivisionError: why") as e:
        score(verifier, "raise why", *["raise other"] * 6, "none")
    assert "Scripted" in str(e.value)
    assert counts(verifier) == {"raised": 7, "declined": 1}


def test_one_problem_without_a_score_is_not_a_broken_verifier(verifier: Verifier) -> None:
    problem = Problem(id="faulty", prompt="", reference=None)
    assert score(verifier, "1", "raise x") == [1.0, None]
    assert verifier.score([problem] * 3, ["raise a", "exit", "raise b"]) == [None] * 3
    assert counts(verifier) == {"raised": 2, "died": 1}
    with Verifier(Inline()) as new, pytest.raises(VerifierError, match="none of the 2 answers"):
        new.score([problem] * 2, ["raise a", "raise b"])  # nothing says yet that it can score at all


def test_a_batch_has_a_deadline() -> None:
    with Verifier(Scripted(), workers=2, deadline=60.0, batch_deadline=1.0) as verifier:
        assert both_started(verifier)
        start = time.monotonic()
        grades = grade(verifier, "0", "sleep", "1", "sleep", "2", "3")
        assert 1.0 <= time.monotonic() - start < 2.5
        assert [each.score for each in grades] == [0.0, None, 1.0, None, None, None]
        assert {each.kind for each in grades if each.score is None} == {"batch_late"}
        assert counts(verifier) == {"batch_late": 4}
        assert verifier.unscored["batch_late"].problem_id == "problem 1"
        assert "batch_deadline of 1 s" in verifier.unscored["batch_late"].reason
        assert score(verifier, "4", "5", "6") == [4.0, 5.0, 6.0]


def test_the_start_of_workers_is_not_in_the_deadline_of_a_batch() -> None:
    with Verifier(Scripted(), workers=1, batch_deadline=0.05) as verifier:
        assert score(verifier, "1") == [1.0]


def test_a_batch_that_ends_before_its_first_score_says_so() -> None:
    with Verifier(Scripted(), workers=1, deadline=60.0, batch_deadline=0.3) as verifier:
        with pytest.raises(
            VerifierError, match=r"^the batch_deadline of 0\.3 s passed before any of the 3 answers"
        ) as e:
            score(verifier, "sleep", "1", "2")
        assert [each.kind for each in e.value.grades] == ["batch_late"] * 3
        assert "failed" not in str(e.value)
        with pytest.raises(VerifierError, match=r"before that, 1 failed.*'problem 0': Zero.*: why; raise it"):
            score(verifier, "raise why", "sleep", "2")


def test_a_task_may_decline_every_answer(verifier: Verifier) -> None:
    assert score(verifier, "none", "none", "none", "none") == [None] * 4
    assert counts(verifier) == {"declined": 4}


def test_an_interrupt_leaves_no_stale_answer_behind(verifier: Verifier) -> None:
    assert both_started(verifier)
    threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        score(verifier, "wait 0.5", "wait 0.5")
    assert score(verifier, "1", "2") == [1.0, 2.0]


def test_a_worker_that_died_between_batches_is_replaced(verifier: Verifier) -> None:
    assert both_started(verifier)
    pids = set(score(verifier, *["pid"] * 20))
    for pid in pids:
        os.kill(int(pid or 0), signal.SIGKILL)
    assert eventually(lambda: all(gone(int(pid or 0)) for pid in pids))
    assert score(verifier, "1", "2") == [1.0, 2.0]


def test_threads_take_turns(verifier: Verifier) -> None:
    with ThreadPoolExecutor(4) as pool:
        batches = [[str(10 * i + j) for j in range(10)] for i in range(8)]
        results = list(pool.map(lambda batch: score(verifier, *batch), batches))
    assert results == [[float(text) for text in batch] for batch in batches]


def test_an_alarm_in_the_verifier_works_when_the_caller_is_a_thread() -> None:
    pytest.importorskip("math_verify")
    with Verifier(MathVerify(), workers=1) as verifier, ThreadPoolExecutor(1) as pool:
        responses = [r"so it is \boxed{\frac{2}{6}}", r"\boxed{\frac{2}{5}}", "no answer"]
        assert pool.submit(verifier.score, PROBLEMS * 3, responses).result() == [1.0, 0.0, 0.0]


def test_close_ends_the_processes_and_a_later_batch_starts_new_ones() -> None:
    verifier = Verifier(Scripted(), workers=1)
    (first,) = score(verifier, "pid")
    verifier.close()
    verifier.close()
    assert gone(int(first or 0))
    (second,) = score(verifier, "pid")
    assert second != first
    del verifier  # a verifier that is only dropped must not leave processes either
    assert eventually(lambda: gone(int(second or 0)))


SCRIPT = """
import sys
sys.path.insert(0, {tests!r})
from helpers_tasks import PROBLEMS, Scripted
from predmask.tasks.verifier import Verifier

if __name__ == "__main__":
    verifier = Verifier(Scripted(), workers=1, deadline=1000.0)
    print(int(verifier.score(PROBLEMS * 3, ["print", "deaf", "pid"])[2]), flush=True)
    if sys.argv[1] == "hang":
        verifier.score(PROBLEMS, ["sleep"])
"""


def test_no_process_outlives_the_interpreter_and_no_print_reaches_its_output(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(tests=str(Path(__file__).parent)))
    exits, hangs = (
        subprocess.Popen([sys.executable, script, end], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for end in ("exit", "hang")
    )
    with exits, hangs:
        assert exits.stdout is not None
        assert hangs.stdout is not None
        leaver, orphan = int(exits.stdout.readline()), int(hangs.stdout.readline())
        assert exits.wait(20.0) == 0
        time.sleep(0.2)  # by now the other worker is in its endless verifier
        assert not gone(orphan)
        hangs.kill()
    assert eventually(lambda: gone(leaver) and gone(orphan))


def test_an_inline_verifier_runs_here_with_the_same_rules() -> None:
    with Verifier(Inline()) as verifier:
        assert score(verifier, "pid", "raise x", "nan") == [float(os.getpid()), None, None]
        assert counts(verifier) == {"raised": 1, "not_a_number": 1}
        with pytest.raises(VerifierError, match="ZeroDivisionError: x"):
            score(verifier, "raise x", *["raise y"] * 7)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (CannotPrepare(), "cannot run the task CannotPrepare: ImportError: no module named 'sandbox'"),
        (CannotStart(), "exit code 7 before it was ready"),
    ],
)
def test_a_task_that_cannot_start_in_a_worker_is_an_error(task: Scripted, message: str) -> None:
    with Verifier(task, workers=1) as verifier, pytest.raises(VerifierError, match=message):
        score(verifier, "1")


def test_an_inline_verifier_has_a_deadline_for_a_batch() -> None:
    with Verifier(Inline(), batch_deadline=0.2) as verifier:
        assert score(verifier, "1", "wait 0.3", "2", "3") == [1.0, 0.3, None, None]
        assert counts(verifier) == {"batch_late": 2}


def test_what_cannot_be_pickled_is_refused_by_name(verifier: Verifier) -> None:
    @dataclass(frozen=True)
    class Local(Scripted):
        pass

    with pytest.raises(VerifierError, match=r"the task Local cannot be sent.*top level of a module"):
        Verifier(Local())
    with pytest.raises(VerifierError, match="problem 'p' cannot be sent"):
        verifier.score([Problem(id="p", prompt="", reference=lambda: 0)], ["1"])
    assert score(verifier, "1") == [1.0]


def test_arguments_are_checked(verifier: Verifier) -> None:
    with pytest.raises(ValueError, match="workers"):
        Verifier(Scripted(), workers=0)
    for deadline in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="deadline"):
            Verifier(Scripted(), deadline=deadline)
    for deadline in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="batch_deadline"):
            Verifier(Scripted(), batch_deadline=deadline)
    with pytest.raises(ValueError, match="1 problems but 2 responses"):
        verifier.score(PROBLEMS, ["1", "2"])
