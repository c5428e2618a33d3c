"""Traces of a trainer with several processes: which responses are recorded, and how they are numbered."""

from __future__ import annotations

import logging
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from helpers_traces import make_samples, make_tokens
from predmask.core import Predictive
from predmask.plugins.recording import GatheredTrace, Key, Part, TraceSettings, chosen, tokens_of
from predmask.traces import TokenTrace, Trace, TraceInfo, rule_settings

VOCABULARY = 12
LENGTH = 3
INFO = TraceInfo(run="run", rule=rule_settings(Predictive(delta=0.05)), vocabulary_size=VOCABULARY, top_k=4)
KEYS: list[Key] = [(prompt, str(number)) for prompt in "abcd" for number in range(2)]
TOKENIZER = AutoTokenizer.from_pretrained(
    Path(__file__).parents[1] / "src" / "predmask" / "data" / "arithmetic", local_files_only=True
)

keys = st.lists(st.tuples(st.text(max_size=4), st.text(alphabet="0123456789", max_size=2)), max_size=12, unique=True)


def hashed(key: Key) -> int:
    return zlib.crc32(f"{key[0]}/{key[1]}".encode())


@given(names=keys, count=st.one_of(st.integers(0, 15), st.just(float("inf"))), data=st.data())
def test_the_choice_is_of_names_alone(names, count, data):
    """As many as are asked for, and the same in any order: what is left out comes after what is taken, by its hash."""
    taken = {key for key, is_taken in zip(names, chosen(names, count), strict=True) if is_taken}
    assert len(taken) == min(count, len(names))
    order = data.draw(st.permutations(names))
    hashes = [hashed(key) for key in names]
    if len(set(hashes)) == len(hashes):  # of two with the same, the first is taken
        assert {key for key, is_taken in zip(order, chosen(order, count), strict=True) if is_taken} == taken
    assert max(map(hashed, taken), default=0) <= min(map(hashed, set(names) - taken), default=2**32)


def test_the_choice_stays_what_it_is():
    """In every process, and in any release: traces of two runs then have the same responses."""
    taken = [key for key, is_taken in zip(KEYS, chosen(KEYS, 3), strict=True) if is_taken]
    assert taken == [("a", "0"), ("b", "0"), ("c", "0")]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 0}, r"traces\.every is 0; it must be 1 or more"),
        ({"responses": -8}, r"traces\.responses is -8; it must be 0 or more"),
        ({"max_mb": 0}, r"traces\.max_mb is 0; it must be above 0"),
        ({"max_mb": float("nan")}, r"traces\.max_mb is nan; it must be above 0"),
    ],
)
def test_faulty_settings_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        TraceSettings(**settings)


def test_the_least_settings_are_taken():
    assert TraceSettings(every=1, responses=0, max_mb=1e-9).responses == 0


def test_tokens_are_numbered_by_their_responses():
    made = make_tokens(tokens=9, length=3)
    found = tokens_of(
        step=4,
        optimizer_step=11,
        versions=torch.tensor([8, 10, 9]),
        lengths=torch.tensor([2, 0, 7]),
        advantage=made.advantage,
        behaviour=made.behaviour,
        policy=made.policy,
        decision=made.decision,
    )
    assert found.sample.tolist() == found.group.tolist() == [0, 0, *[2] * 7]
    assert found.position.tolist() == [0, 1, 0, 1, 2, 3, 4, 5, 6]
    assert found.version.tolist() == [8, 8, *[9] * 7]
    assert set(found.step.tolist()) == {4}
    assert set(found.optimizer_step.tolist()) == {11}
    assert torch.equal(found.advantage, made.advantage)


def part_of(names: list[Key], step: int, optimizer_step: int) -> Part:
    """What a process recorded of these responses of three tokens."""
    made = make_tokens(tokens=LENGTH * len(names), length=LENGTH, step=step, top_k=4)
    tokens = tokens_of(
        step=step,
        optimizer_step=optimizer_step,
        versions=torch.zeros(len(names), dtype=torch.int64),
        lengths=torch.full((len(names),), LENGTH),
        advantage=made.advantage,
        behaviour=made.behaviour,
        policy=made.policy,
        decision=made.decision,
    )
    # The prompt says whose it is.
    samples = [replace(one, prompt=(KEYS.index(key),)) for one, key in zip(make_samples(made), names, strict=True)]
    return Part(keys=names, samples=samples, tokens=tokens, info=INFO)


def gathered(directory: Path, *, step: int = 1, **settings: Any) -> GatheredTrace:
    return GatheredTrace(TraceSettings(directory=str(directory), **settings), INFO, TOKENIZER, step=step)


def write_steps(trace: GatheredTrace, steps: list[int]) -> None:
    """One optimiser step each, of the first two responses."""
    for number, step in enumerate(steps):
        trace.write([part_of(KEYS[:2], step, number)], KEYS[:2], step, last=True)


def numbers_of(tokens: TokenTrace, name: str) -> list[int]:
    """Of each response's first token."""
    return getattr(tokens, name)[tokens.position == 0].tolist()


def test_responses_are_numbered_over_processes_and_passes(tmp_path):
    """By their names, in the order in which they came; a response is written once."""
    trace = gathered(tmp_path / "trace")
    first, second = [KEYS[4], KEYS[0]], [KEYS[1], KEYS[5]]
    for optimizer_step, names in enumerate((first, second, second, first)):
        parts = [part_of(names[:1], 1, optimizer_step), part_of(names[1:], 1, optimizer_step)]
        trace.write(parts, names, 1, last=optimizer_step == 3)
    found = Trace(tmp_path / "trace")
    tokens = TokenTrace.cat(list(found.tokens([1])))
    assert numbers_of(tokens, "sample") == [0, 1, 2, 3, 2, 3, 0, 1]
    assert numbers_of(tokens, "group") == [0, 1, 1, 0, 1, 0, 0, 1]
    assert numbers_of(tokens, "epoch") == [0, 0, 0, 0, 1, 1, 1, 1]
    assert numbers_of(tokens, "minibatch") == [0, 0, 1, 1, 0, 0, 1, 1]
    assert numbers_of(tokens, "optimizer_step") == [0, 0, 1, 1, 2, 2, 3, 3]
    samples = found.samples(1)
    assert [(one.sample, one.group, one.prompt) for one in samples] == [
        (0, 0, (4,)),
        (1, 1, (0,)),
        (2, 1, (1,)),
        (3, 0, (5,)),
    ]


def test_passes_are_counted_of_all_that_was_trained(tmp_path):
    """Of two in a mini-batch one is recorded, and in the second pass another one than in the first."""
    trace = gathered(tmp_path / "trace")
    steps = [(KEYS[0], KEYS[:2]), (KEYS[2], KEYS[2:4]), (KEYS[1], KEYS[1:3]), (KEYS[3], [KEYS[3], KEYS[0]])]
    for optimizer_step, (recorded, trained) in enumerate(steps):
        trace.write([part_of([recorded], 1, optimizer_step)], trained, 1, last=optimizer_step == 3)
    tokens = TokenTrace.cat(list(Trace(tmp_path / "trace").tokens([1])))
    assert numbers_of(tokens, "sample") == [0, 1, 2, 3]
    assert numbers_of(tokens, "epoch") == [0, 0, 1, 1]
    assert numbers_of(tokens, "minibatch") == [0, 1, 0, 1]


def test_numbers_begin_anew_with_each_step(tmp_path):
    trace = gathered(tmp_path / "trace")
    for step in (1, 2):
        trace.write([part_of(KEYS[step : step + 1], step, step - 1)], KEYS, step, last=True)
    for step in (1, 2):
        (tokens,) = Trace(tmp_path / "trace").tokens([step])
        for name in ("sample", "group", "epoch", "minibatch"):
            assert numbers_of(tokens, name) == [0]


def test_a_trace_that_is_there_is_kept(tmp_path, caplog):
    """A run that is resumed records into a folder of its own, however often it is resumed from there."""
    directory = tmp_path / "trace"
    write_steps(gathered(directory), [1, 2])
    assert not caplog.records
    for name in ("from-000007", "from-000007/from-000007"):
        caplog.clear()
        write_steps(gathered(directory, step=7), [7, 8])
        assert Trace(directory / name).steps == [7, 8]
        assert caplog.messages[-1] == f"predmask: the directory is not empty; this trace goes to {directory / name}"
        assert {record.levelno for record in caplog.records} == {logging.WARNING}
    assert Trace(directory).steps == [1, 2]


def test_what_cannot_be_written_ends_the_trace_with_one_warning(tmp_path, caplog):
    trace = gathered(tmp_path / "trace", max_mb=1e-6)
    write_steps(trace, [1, 2, 3])
    (text,) = caplog.messages
    assert text.startswith("predmask: the trace ended early: a step takes ")
    assert "traces.max_mb" in text


def test_tokens_that_do_not_fit_end_the_trace_with_one_warning(tmp_path, caplog):
    trace = gathered(tmp_path / "trace")
    write_steps(trace, [1])
    trace.write([part_of(KEYS[:2], 2, 1), part_of(KEYS[2:4], 3, 1)], KEYS[:4], 2, last=True)
    write_steps(trace, [4])
    (text,) = caplog.messages
    assert "tokens of the steps [2, 3] were added together" in text
    assert Trace(tmp_path / "trace").steps == [1]


def test_a_trace_that_grows_too_large_is_thinned(tmp_path, caplog):
    """Every second step goes, and the numbers of those that stay are what they were."""
    write_steps(gathered(tmp_path / "whole"), [1])
    room = sum(path.stat().st_size for path in (tmp_path / "whole").glob("*-000001.parquet")) / 1e6
    write_steps(gathered(tmp_path / "trace", max_mb=3.5 * room), list(range(1, 8)))
    assert Trace(tmp_path / "trace").steps == [1, 5]
    assert not caplog.records


def test_a_directory_that_cannot_be_made_is_said_and_the_run_goes_on(tmp_path, caplog):
    (tmp_path / "file").write_text("not a directory")
    write_steps(gathered(tmp_path / "file" / "trace"), [1, 2])
    (text,) = caplog.messages
    assert text.startswith("predmask: there will be no trace: ")
