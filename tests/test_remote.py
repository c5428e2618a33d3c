"""An engine in a process of its own: it answers, it fails with clear words, and nothing of it is left behind."""

import os
import random
import signal
import subprocess
import sys
import threading
import time
from multiprocessing import Pipe
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers_processes import MARK, comes_true, offspring
from predmask.rollout import RolloutError, Sampling
from predmask.rollout import process as process_module
from predmask.rollout.messages import Channel, pack_request, unpack_rollout
from predmask.rollout.process import EngineProcess

TESTS = str(Path(__file__).parent)
PROMPTS = [[5, 9, 12], [7]]
REQUEST = pack_request(PROMPTS, torch.tensor([3, 9]), Sampling(temperature=0.5, max_new_tokens=1, top_k=2), {3, 4})


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch, tmp_path):
    """Engines find these tests, and have folders of their own for their files."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [TESTS, os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv(MARK, str(tmp_path))
    for name in ("usual", "shared"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "usual"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "usual"))
    monkeypatch.setattr(process_module, "_SHARED_MEMORY", tmp_path / "shared")
    yield
    for left in offspring():
        os.kill(left, signal.SIGKILL)


@pytest.fixture
def engine():
    """Starts engines, and ends them after the test."""
    started = []

    def start(*at_request, at_start=()):
        settings = {"at_start": at_start, "at_request": at_request}
        made = EngineProcess(name="fake", backend="helpers_backends:FakeBackend", settings=settings, environment={})
        started.append(made)
        return made

    yield start
    for made in started:
        made.close()


def left():
    """The files that engines have left, as names under one of their two places."""
    places = [Path(os.environ[MARK]) / name for name in ("usual", "shared")]
    return sorted(path.relative_to(place.parent) for place in places for path in place.rglob("*"))


def kept_log(error):
    """The one file that is left: the log that the error names."""
    (log,) = left()
    path = Path(os.environ[MARK]) / log
    assert f"its log is {path}" in str(error)
    return path.read_text()


TRAINER = f"""
import os
from pathlib import Path

import torch
from predmask.rollout import Sampling, process
from predmask.rollout.messages import pack_request

process._SHARED_MEMORY = Path(os.environ["{MARK}"]) / "shared"
request = pack_request([[5]], torch.tensor([3]), Sampling(temperature=1, max_new_tokens=1, top_k=0), {{3}})

def start(*at_request, at_start=()):
    settings = dict(at_start=at_start, at_request=at_request)
    made = process.EngineProcess(
        name="fake", backend="helpers_backends:FakeBackend", settings=settings, environment=dict()
    )
    print("started", flush=True)
    return made

"""


def script(text):
    """Another trainer, which runs this text."""
    search = os.pathsep.join([str(Path(process_module.__file__).parents[2]), os.environ["PYTHONPATH"]])
    return subprocess.Popen(
        [sys.executable, "-c", TRAINER + text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": search},
    )


# --- Messages


@pytest.fixture
def ends():
    both = tuple(map(Channel, Pipe()))
    yield both
    for end in both:
        end.close()


def test_messages_arrive_as_they_were_sent(ends):
    table = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    sent = {
        "ids": torch.tensor([2**62, -1]),
        "flags": torch.tensor([True, False]),
        "view": table[:, 1:3],  # not contiguous, and of one storage with the next
        "column": table[:, 0],
        "one": table[:1, 0],
        "none": torch.empty(0, 5),
        "special": torch.tensor([torch.nan, -torch.inf]),
    }
    ends[0].send({"do": "generate", "text": "Ḋ\n", "number": 0.1, "nothing": None}, sent)
    message, tensors = ends[1].receive()
    assert message == {"do": "generate", "text": "Ḋ\n", "number": 0.1, "nothing": None}
    assert tensors.keys() == sent.keys()
    for name, tensor in sent.items():
        assert tensors[name].dtype == tensor.dtype
        torch.testing.assert_close(tensors[name], tensor, rtol=0, atol=0, equal_nan=True)
    ends[1].send({})
    assert ends[0].receive() == ({}, {})


def test_a_channel_that_was_closed(ends):
    ends[1].close()
    with pytest.raises(EOFError):
        ends[0].receive()
    with pytest.raises(OSError, match="Broken pipe"):
        ends[0].send({})


# --- Answers


def test_request_and_rollout(engine):
    process = engine()
    _, tensors = process.ask(*REQUEST)
    rollout = unpack_rollout(PROMPTS, tensors, 4)
    assert rollout.prompts == ((5, 9, 12), (7,))
    assert rollout.tokens.tolist() == [3, 2]
    assert rollout.logp.tolist() == [-0.5, -0.5]
    assert rollout.topk_ids.tolist() == [[3, 4], [3, 4]]
    assert (rollout.version.tolist(), rollout.finished.tolist(), rollout.full_logp) == ([4, 4], [False, False], None)
    process.close()
    assert not offspring()
    assert not left()
    process.close()


def test_nothing_of_the_trainer_changes(engine):
    def state():
        return (
            torch.get_num_threads(),
            threading.active_count(),
            len(os.listdir("/proc/self/fd")),
            random.getstate(),
            np.random.get_state()[1].tolist(),
            torch.get_rng_state().tolist(),
            dict(os.environ),
            signal.getsignal(signal.SIGINT),
        )

    engine().close()  # what is imported late is imported now
    before = state()
    process = engine()
    process.ask(*REQUEST)
    process.close()
    del process
    for deeds in ({"at_start": ["fail"]}, {"at_start": ["exit"]}):
        with pytest.raises(RolloutError):
            engine(**deeds)
    assert state() == before


def test_a_module_of_the_working_directory_is_not_taken_for_a_package(engine, monkeypatch, tmp_path):
    (tmp_path / "helpers_backends.py").write_text("raise SystemExit")
    (tmp_path / "torch.py").write_text("raise SystemExit")
    monkeypatch.chdir(tmp_path)
    engine().ask(*REQUEST)


# --- What goes wrong


def test_a_refusal_is_passed_on_and_the_engine_goes_on(engine):
    process = engine("refuse")
    for _ in range(2):
        with pytest.raises(RolloutError, match=r"^not at this temperature$"):
            process.ask(*REQUEST)
    assert offspring() == [process.pid]
    process.close()
    assert not left()


def test_a_failure_names_its_reason_and_its_log(engine):
    process = engine("talk", "fail")
    for _ in range(2):
        with pytest.raises(RolloutError, match="the fake engine failed: RuntimeError: no such kernel") as caught:
            process.ask(*REQUEST)
    process.close()
    assert "a line of the engine's own\nTraceback" in kept_log(caught.value)
    assert not offspring()


@pytest.mark.parametrize(
    ("deed", "match"),
    [
        ("exit", "fake engine's process ended with exit code 3"),
        ("be killed", r"was ended by SIGKILL \(out of memory\?"),
    ],
)
def test_a_crash_names_its_kind_and_its_log(engine, deed, match):
    process = engine("talk", deed)
    with pytest.raises(RolloutError, match=match) as caught:
        process.ask(*REQUEST)
    assert ("| a line of the engine's own" in str(caught.value)) == (deed == "exit")  # a killed one has no last words
    assert kept_log(caught.value) == "a line of the engine's own\n"
    with pytest.raises(RolloutError, match="closed"):
        process.ask(*REQUEST)
    process.close()
    kept_log(caught.value)


@pytest.mark.parametrize(
    ("deed", "match"),
    [
        ("fail", "the fake engine failed: RuntimeError: no such kernel"),
        ("refuse", "^not at this temperature$"),
        ("exit", "ended with exit code 3"),
        ("be killed", "SIGKILL"),
    ],
)
def test_an_engine_that_cannot_start(engine, deed, match):
    with pytest.raises(RolloutError, match=match) as kept:  # what an error refers to is not dropped
        engine(at_start=["have a child", deed])
    assert comes_true(lambda: not offspring(), 1)
    assert kept


def test_an_unknown_backend(engine):
    with pytest.raises(RolloutError, match="ModuleNotFoundError: No module named 'nowhere'"):
        EngineProcess(name="fake", backend="nowhere:Backend", settings={}, environment={})


def test_after_close_nothing_is_asked(engine):
    process = engine()
    process.close()
    with pytest.raises(RolloutError, match="closed"):
        process.ask(*REQUEST)


# --- No process is left


def test_an_engine_that_does_not_end_is_ended(engine, monkeypatch):
    monkeypatch.setattr(process_module, "_CLOSE_SECONDS", 0.5)
    process = engine(at_start=["have a child"])
    os.kill(process.pid, signal.SIGSTOP)
    assert len(offspring()) == 2
    process.close()
    assert comes_true(lambda: not offspring(), 2)


def test_closed_while_it_is_busy(engine, monkeypatch):
    """From another thread than the one that waits for the answer."""
    monkeypatch.setattr(process_module, "_CLOSE_SECONDS", 0.5)
    process = engine("hang")
    found = []

    def ask():
        try:
            process.ask(*REQUEST)
        except RolloutError as error:
            found.append(str(error))

    waiting = threading.Thread(target=ask)
    waiting.start()
    time.sleep(0.5)
    process.close()
    waiting.join(10)
    assert found == ["the fake engine was closed"]
    assert not offspring()


@pytest.mark.parametrize("deed", ["exit", "be killed"])
def test_children_end_with_an_engine_that_crashed(engine, deed):
    process = engine(deed, at_start=["have a child"])
    with pytest.raises(RolloutError):
        process.ask(*REQUEST)
    process.close()
    assert comes_true(lambda: not offspring(), 2)


def test_children_end_with_an_engine_that_is_closed(engine):
    process = engine(at_start=["have a child"])
    assert len(offspring()) == 2
    process.close()
    assert comes_true(lambda: not offspring(), 2)


def test_interrupted_while_it_waits(engine):
    """The engine ends at once; an answer that comes late is never taken for the next one."""
    process = engine("hang", at_start=["have a child"])
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        process.ask(*REQUEST)
    assert comes_true(lambda: not offspring(), 1)
    with pytest.raises(RolloutError):
        process.ask(*REQUEST)
    process.close()


@pytest.mark.parametrize("deeds", ["'hang', ", ""], ids=["busy", "idle"])
def test_trainer_killed(deeds):
    with script(f"engine = start({deeds}at_start=['have a child'])\nengine.ask(*request)\ninput()\n") as trainer:
        trainer.stdout.readline()
        time.sleep(0.5)
        assert len(offspring()) == 3
        assert left()
        trainer.kill()
    assert comes_true(lambda: not offspring())
    assert not left()


def test_forgotten_close():
    with script("engine = start(at_start=['have a child'])\nengine.ask(*request)\n") as trainer:
        _, complaints = trainer.communicate(timeout=60)
    assert (trainer.returncode, complaints) == (0, "")
    assert comes_true(lambda: not offspring(), 2)
    assert not left()


def test_dropped_engine():
    """Without a reference to it, an engine ends, here a first one when a second takes its name."""
    text = "for _ in range(2):\n    engine = start()\ndel engine\nprint('gone', flush=True)\ninput()\n"
    with script(text) as trainer:
        while trainer.stdout.readline() != "gone\n":
            pass
        assert comes_true(lambda: offspring() == [trainer.pid], 2)
        trainer.kill()
