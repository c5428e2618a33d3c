"""A trace comes back as it was written, whatever was in it and however it was cut."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from helpers_traces import TIGHT, VOCABULARY, make_samples, make_tokens, make_trace
from predmask.core import RULES, Reason, Rule
from predmask.traces import SampleTrace, TokenTrace, Trace, TraceError, TraceInfo, TraceWriter, rule_settings
from predmask.traces.schema import ROW_GROUP

ODD = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-45, -3e38])


def info_of(tokens: TokenTrace, rule: Rule | None = None, run: str = "run") -> TraceInfo:
    return TraceInfo(
        run=run,
        rule=rule_settings(rule or RULES["none"]()),
        vocabulary_size=tokens.policy.vocabulary_size,
        top_k=tokens.behaviour.top_k,
    )


def written(directory: Path, parts: Sequence[TokenTrace], info: TraceInfo | None = None) -> Trace:
    """A trace of one step, added in parts."""
    with TraceWriter(directory, info or info_of(parts[0])) as writer:
        for part in parts:
            writer.add(part)
        writer.commit(int(parts[0].step[0]))
    assert writer.problem is None
    return Trace(directory)


def everything(trace: Trace) -> TokenTrace:
    return TokenTrace.cat(list(trace.tokens()))


def differences(first: Any, second: Any, path: str = "") -> list[str]:
    """Names of the fields that are not the same to the last bit; NaN is the same as NaN."""
    if dataclasses.is_dataclass(first) and type(first) is type(second):
        return [
            name
            for field in dataclasses.fields(first)
            for name in differences(getattr(first, field.name), getattr(second, field.name), f"{path}.{field.name}")
        ]
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.dtype != second.dtype or first.shape != second.shape:
            return [f"{path}: {first.dtype} {tuple(first.shape)}, {second.dtype} {tuple(second.shape)}"]
        bits = [values.contiguous().view(torch.uint8) for values in (first, second)]
        return [] if torch.equal(*bits) else [path]
    return [] if type(first) is type(second) and first == second else [f"{path}: {first!r}, {second!r}"]


def spoiled(tokens: TokenTrace, seed: int) -> TokenTrace:
    """The tokens with numbers among them that are none, zeros below zero, and the smallest and largest ones."""
    generator = torch.Generator().manual_seed(seed)

    def spoil(values: Tensor | None) -> Tensor | None:
        if values is None or not values.is_floating_point():
            return values
        odd = ODD[torch.randint(len(ODD), values.shape, generator=generator)]
        return torch.where(torch.rand(values.shape, generator=generator) < 0.3, odd, values)

    def spoil_all(record: Any) -> Any:
        if record is None:
            return None
        names = [field.name for field in dataclasses.fields(record)]
        return dataclasses.replace(
            record, **{n: spoil(getattr(record, n)) for n in names if isinstance(getattr(record, n), Tensor)}
        )

    # In the behaviour's slots, -inf means that the slot is not valid.
    behaviour = spoil_all(tokens.behaviour)
    unknown = torch.rand(behaviour.logp.shape, generator=generator) < 0.2
    logp = tokens.behaviour.logp.masked_fill(unknown & tokens.behaviour.valid, math.nan)
    logp[torch.rand(len(logp), generator=generator) < 0.2, 0] = -math.inf  # the sampled token's slot is always valid
    behaviour = dataclasses.replace(behaviour, logp=logp)
    return dataclasses.replace(
        tokens,
        advantage=spoil(tokens.advantage),
        behaviour=behaviour,
        policy=spoil_all(tokens.policy),
        decision=spoil_all(tokens.decision),
        after=spoil_all(tokens.after),
        full=spoil_all(tokens.full),
    )


@st.composite
def traced(draw: st.DrawFn) -> tuple[Rule, TokenTrace]:
    """Tokens that a rule decided, with or without what is optional."""
    name = draw(st.sampled_from(sorted(RULES)))
    rule = RULES[name](**draw(st.sampled_from([{}, TIGHT[name]])))
    tokens = make_tokens(
        rule,
        tokens=draw(st.integers(1, 90)),
        top_k=draw(st.integers(1 if rule.needs_topk else 0, VOCABULARY)),
        seed=draw(st.integers(0, 10**6)),
        step=draw(st.integers(1, 2000)),
        noise=draw(st.sampled_from([0.0, 0.3, 5.0])),
        after=draw(st.booleans()),
        full=draw(st.booleans()),
    )
    measured = draw(st.sampled_from([(), ("entropy",), ("tail_sum_squares", "entropy")]))
    if not rule.needs_sum_squares:
        tokens = dataclasses.replace(tokens, policy=dataclasses.replace(tokens.policy, **dict.fromkeys(measured)))
    return rule, tokens


@given(traced(), st.integers(0, 10**6))
def test_tokens_come_back_to_the_last_bit(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Rule, TokenTrace], seed: int
) -> None:
    rule, tokens = drawn
    for number, part in enumerate((tokens, spoiled(tokens, seed))):
        trace = written(tmp_path_factory.mktemp("trace") / str(number), [part], info_of(part, rule))
        assert trace.steps == [int(part.step[0])]
        assert trace.size == len(part)
        assert differences(everything(trace), part) == []


@given(traced())
def test_the_recorded_rule_decides_recorded_tokens_as_it_did(
    tmp_path_factory: pytest.TempPathFactory, drawn: tuple[Rule, TokenTrace]
) -> None:
    rule, tokens = drawn
    # What a rule must not see as a number, and what was not sampled, is among them.
    logp, sampled = tokens.behaviour.logp.clone(), torch.arange(len(tokens)) % 7 != 1
    logp[::5, 0] = math.nan
    tokens = dataclasses.replace(tokens, behaviour=dataclasses.replace(tokens.behaviour, logp=logp))
    decision = rule(tokens.behaviour, tokens.policy, tokens.advantage, sampled)
    trace = written(
        tmp_path_factory.mktemp("trace"), [dataclasses.replace(tokens, decision=decision)], info_of(tokens, rule)
    )
    assert trace.info.make_rule() == rule
    found = everything(trace)
    assert differences(found.decide(trace.info.make_rule()), decision) == []
    assert differences(found.decision, decision) == []


def test_the_made_up_tokens_have_every_reason(tmp_path: Path) -> None:
    for name, settings_ in TIGHT.items():
        rule = RULES[name](**settings_)
        tokens = make_tokens(rule, tokens=200)
        dropped = int(tokens.decision.dropped.sum())
        assert (0 < dropped < 200) == rule.can_fire, name


@pytest.mark.parametrize(("after", "full"), [(False, False), (True, False), (False, True), (True, True)])
def test_the_columns_say_what_the_tensors_say(tmp_path: Path, after: bool, full: bool) -> None:
    tokens = make_tokens(tokens=50, top_k=3, after=after, full=full)
    written(tmp_path / "t", [tokens], info_of(tokens, run="seven"))
    table = pq.read_table(tmp_path / "t" / "tokens-000001.parquet")
    behaviour, policy, decision = tokens.behaviour, tokens.policy, tokens.decision
    expected: dict[str, Tensor] = {
        **{
            name: getattr(tokens, name)
            for name in (
                "step", "epoch", "minibatch", "optimizer_step", "version", "sample", "group", "position", "advantage",
            )
        },
        "id": behaviour.ids[:, 0],
        "response": decision.response_mask,
        "support_ids": behaviour.ids,
        "behaviour_logp": behaviour.logp,
        "behaviour_log_tail": behaviour.log_tail,
        "behaviour_log_kth": behaviour.log_kth,
        "policy_logp": policy.logp,
        "policy_log_tail": policy.log_tail,
        "tail_sum_squares": policy.tail_sum_squares,
        "entropy": policy.entropy,
        **{name: getattr(decision, name) for name in ("divergence", "rate", "outside", "keep", "reason", "weight")},
    }  # fmt: skip
    if tokens.after is not None:
        expected |= {"after_logp": tokens.after.logp, "after_log_tail": tokens.after.log_tail}
    if tokens.full is not None:
        expected |= {"full_behaviour": tokens.full.behaviour, "full_policy": tokens.full.policy}
        if after:
            expected["full_after"] = tokens.full.after
    assert set(table.column_names) == {"run", *expected}
    assert set(table["run"].to_pylist()) == {"seven"}
    for name, values in expected.items():
        column = np.array(table[name].to_pylist())
        assert column.shape == tuple(values.shape), name
        np.testing.assert_array_equal(column, values.numpy(), err_msg=name)
    width = {name: table.schema.field(name).type.list_size for name in ("support_ids", "behaviour_logp", "policy_logp")}
    assert width == {"support_ids": 4, "behaviour_logp": 4, "policy_logp": 4}


def test_a_file_says_what_holds_for_its_tokens(tmp_path: Path) -> None:
    rule = RULES["dppo"](divergence="tv", delta=0.07)
    tokens = make_tokens(rule, top_k=3)
    info = dataclasses.replace(info_of(tokens, rule, run="gpu-7"), temperature=0.7)
    trace = written(tmp_path / "t", [tokens], info)
    assert trace.info == info
    metadata = pq.read_schema(tmp_path / "t" / "tokens-000001.parquet").metadata
    assert json.loads(metadata[b"predmask_trace"]) == {
        "format_version": 1,
        "run": "gpu-7",
        "rule": {"name": "dppo", "divergence": "tv", "support": "topk", "delta": 0.07},
        "vocabulary_size": 12,
        "top_k": 3,
        "temperature": 0.7,
    }


def test_not_a_number_is_no_empty_entry(tmp_path: Path) -> None:
    tokens = make_tokens()
    advantage = tokens.advantage.clone()
    advantage[3] = math.nan
    written(tmp_path / "t", [dataclasses.replace(tokens, advantage=advantage)])
    column = pq.read_table(tmp_path / "t" / "tokens-000001.parquet")["advantage"]
    assert column.null_count == 0
    assert np.isnan(column.to_numpy()).tolist() == [i == 3 for i in range(60)]


@given(
    cuts=st.lists(st.integers(0, 400), max_size=6).map(sorted),
    row_group=st.sampled_from([7, 64, 200, ROW_GROUP]),
    with_rows=st.booleans(),
)
@settings(max_examples=20)
def test_parts_row_groups_and_chunks_do_not_change_the_tokens(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int], row_group: int, with_rows: bool
) -> None:
    tokens = make_tokens(tokens=400, full=with_rows, after=with_rows)
    edges = [0, *cuts, 400]
    parts = [tokens[low:high] for low, high in itertools.pairwise(edges)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("predmask.traces.schema.ROW_GROUP", row_group)
        trace = written(tmp_path_factory.mktemp("trace"), [part for part in parts if len(part)])
        chunks = list(trace.tokens())
    assert sum(map(len, chunks)) == 400
    assert max(map(len, chunks)) <= row_group
    assert differences(TokenTrace.cat(chunks), tokens) == []


def test_long_steps_are_written_and_read_in_bounded_chunks(tmp_path: Path) -> None:
    one = make_tokens(tokens=1000)
    many = one[torch.arange(70_000) % 1000]
    many = dataclasses.replace(many, position=torch.arange(70_000))
    trace = written(tmp_path / "t", [many[:20_000], many[20_000:69_999], many[69_999:]])
    chunks = list(trace.tokens())
    assert max(map(len, chunks)) <= ROW_GROUP == 32_768
    assert torch.equal(torch.cat([chunk.position for chunk in chunks]), torch.arange(70_000))
    assert differences(TokenTrace.cat(chunks), many) == []
    parquet = pq.read_metadata(tmp_path / "t" / "tokens-000001.parquet")
    assert parquet.num_row_groups >= 3
    assert max(parquet.row_group(i).num_rows for i in range(parquet.num_row_groups)) <= ROW_GROUP


NAMES = [
    "run 7",
    "Lauf-Übung",
    "実験/三",
    "🙂\u200d🔥",
    "a\tb\n'\"\\",
    "",
    "\u202eright to left",
    "<script>alert(1)</script>",
]


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_names_and_texts_are_any_text(tmp_path: Path, name: str) -> None:
    tokens = make_tokens()
    sample = dataclasses.replace(make_samples(tokens)[0], problem=name, reference=name)
    with TraceWriter(tmp_path / "t", info_of(tokens, run=name)) as writer:
        writer.write_vocabulary({0: name, 5: "x"})
        writer.add([sample])
        writer.add(tokens)
        writer.commit(1)
    assert writer.problem is None
    trace = Trace(tmp_path / "t")
    assert trace.info.run == name
    assert trace.vocabulary == {0: name, 5: "x"}
    assert (trace.text(0), trace.text(5), trace.text(7)) == (name, "x", "⟨7⟩")
    assert trace.samples(1) == [sample]
    assert set(pq.read_table(tmp_path / "t" / "tokens-000001.parquet")["run"].to_pylist()) == {name}


def test_a_directory_that_is_no_text_has_a_trace(tmp_path: Path) -> None:
    tokens = make_tokens()
    trace = written(tmp_path / "t", [tokens], info_of(tokens, run="x\udcff"))
    assert differences(everything(trace), tokens) == []
    trace.info.run.encode()


@given(
    st.lists(
        st.builds(
            SampleTrace,
            step=st.just(1),
            sample=st.integers(0, 2**31 - 1),
            group=st.integers(0, 1000),
            prompt=st.lists(st.integers(0, 2**31 - 1), max_size=5).map(tuple),
            reward=st.floats(width=32, allow_nan=False),
            advantage=st.floats(width=32, allow_nan=False),
            length=st.integers(0, 10**6),
            finished=st.booleans(),
            problem=st.text(st.characters(exclude_categories=["Cs"])),
            reference=st.text(st.characters(exclude_categories=["Cs"])),
        ),
        min_size=1,
        max_size=8,
    )
)
def test_responses_come_back_as_they_were(tmp_path_factory: pytest.TempPathFactory, samples: list[SampleTrace]) -> None:
    directory, tokens = tmp_path_factory.mktemp("trace"), make_tokens(tokens=3)
    with TraceWriter(directory, info_of(tokens)) as writer:
        writer.add(samples[:2])
        writer.add(tokens)
        writer.add(samples[2:])
        writer.commit(1)
    assert Trace(directory).samples(1) == samples


def test_an_unscored_response_is_not_a_number(tmp_path: Path) -> None:
    tokens = make_tokens()
    sample = dataclasses.replace(make_samples(tokens)[0], reward=math.nan, advantage=math.nan)
    with TraceWriter(tmp_path / "t", info_of(tokens)) as writer:
        writer.add(tokens)
        writer.add([sample])
        writer.commit(1)
    (found,) = Trace(tmp_path / "t").samples(1)
    assert math.isnan(found.reward)
    assert math.isnan(found.advantage)


def test_steps_are_read_one_at_a_time_or_all(tmp_path: Path) -> None:
    trace = make_trace(tmp_path, steps=12, tokens=25)
    assert trace.steps == list(range(1, 13))
    assert trace.size == 12 * 25
    for directory in (tmp_path, tmp_path / "traces", str(tmp_path)):
        assert Trace(directory).steps == trace.steps
    assert torch.cat([part.step for part in trace.tokens()]).tolist() == [s for s in range(1, 13) for _ in range(25)]
    assert torch.cat([part.step for part in trace.tokens([11, 2])]).tolist() == [11] * 25 + [2] * 25
    assert [sample.step for sample in trace.samples(10)] == [10] * 3
    assert list(trace.tokens([])) == []
    for wrong in (lambda: list(trace.tokens([13])), lambda: trace.samples(0)):
        with pytest.raises(TraceError, match=r"step (13|0) was not recorded; the trace has steps 1 to 12$"):
            wrong()


def test_steps_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    tokens = make_tokens(tokens=5)
    steps = [2, 30, 999_999, 1_000_000, 10_000_000]
    with TraceWriter(tmp_path, info_of(tokens)) as writer:
        for step in steps:
            writer.add(dataclasses.replace(tokens, step=torch.full((5,), step)))
            writer.commit(step)
    trace = Trace(tmp_path)
    assert trace.steps == steps
    assert torch.cat([part.step for part in trace.tokens()]).tolist() == [step for step in steps for _ in range(5)]


def test_columns_that_are_not_wanted_are_not_read(tmp_path: Path) -> None:
    tokens = make_tokens(after=True, full=True)
    trace = written(tmp_path / "t", [tokens])
    assert {"entropy", "after_logp", "full_after"} <= trace.columns
    without = ("after_logp", "after_log_tail", "full_behaviour", "full_policy", "full_after", "entropy")
    (part,) = trace.tokens(without=without)
    expected = dataclasses.replace(
        tokens, after=None, full=None, policy=dataclasses.replace(tokens.policy, entropy=None)
    )
    assert differences(part, expected) == []
    (part,) = trace.tokens(without=["full_after"])
    assert part.full is not None
    assert part.full.after is None


@pytest.mark.parametrize("column", ["after_logp", "after_log_tail", "full_policy", "full_behaviour"])
def test_of_columns_that_belong_together_all_are_left_out(tmp_path: Path, column: str) -> None:
    trace = written(tmp_path / "t", [make_tokens(after=True, full=True)])
    (part,) = trace.tokens(without=[column])
    assert (part.after is None) == column.startswith("after")
    assert (part.full is None) == column.startswith("full")


@pytest.mark.parametrize("column", ["reason", "nonsense"])
def test_what_cannot_be_left_out_is_named(tmp_path: Path, column: str) -> None:
    trace = written(tmp_path / "t", [make_tokens()])
    with pytest.raises((TraceError, KeyError), match=column):
        list(trace.tokens(without=[column]))


def test_a_trace_of_another_trainer_may_be_bare(tmp_path: Path) -> None:
    rule = RULES["ppo_clip"]()
    tokens = make_tokens(rule, top_k=0)
    tokens = dataclasses.replace(tokens, policy=dataclasses.replace(tokens.policy, entropy=None, tail_sum_squares=None))
    trace = written(tmp_path / "t", [tokens], info_of(tokens, rule))
    assert trace.samples(1) == []
    assert trace.vocabulary == {}
    assert trace.text(3) == "⟨3⟩"
    assert trace.columns.isdisjoint({"entropy", "tail_sum_squares", "after_logp", "full_policy"})
    found = everything(trace)
    assert differences(found, tokens) == []
    assert differences(found.decide(trace.info.make_rule()), tokens.decision) == []


def test_further_columns_are_left_alone(tmp_path: Path) -> None:
    make_trace(tmp_path, steps=1)
    for name in ("tokens-000001.parquet", "samples-000001.parquet"):
        file = tmp_path / "traces" / name
        table = pq.read_table(file)
        order = ["mine", *reversed(table.column_names)]
        pq.write_table(table.append_column("mine", pa.array(["x"] * len(table))).select(order), file)
    trace = Trace(tmp_path)
    assert differences(everything(trace), make_tokens()) == []
    assert trace.samples(1) == make_samples(make_tokens())


def test_parts_of_tokens_and_what_follows_from_them() -> None:
    tokens = make_tokens(tokens=80, after=True, full=True, top_k=3)
    logp = tokens.policy.logp.clone()
    logp[5, 0], logp[6, 0] = math.nan, -math.inf
    tokens = dataclasses.replace(tokens, policy=dataclasses.replace(tokens.policy, logp=logp))
    assert tokens.id.tolist() == tokens.behaviour.ids[:, 0].tolist()
    assert tokens.staleness.tolist() == (tokens.optimizer_step.numpy() - tokens.version.numpy()).tolist()
    with np.errstate(invalid="ignore"):
        ratio = logp[:, 0].numpy() - tokens.behaviour.logp[:, 0].numpy()
    reason = tokens.decision.reason.numpy()
    known = tokens.decision.response_mask.numpy() & (reason != Reason.UNKNOWN) & np.isfinite(ratio)
    assert tokens.known.tolist() == (known & np.isfinite(tokens.decision.divergence.numpy())).tolist()
    assert not tokens.known[5]
    assert not tokens.known[6]
    part = tokens[tokens.sample == 3]
    assert len(part) == 10
    assert part.full is not None
    assert part.full.after is not None
    assert part.full.after.shape == (10, VOCABULARY)
    assert part.behaviour.top_k == 3
    assert differences(TokenTrace.cat([tokens[:30], tokens[30:]]), tokens) == []
    order = torch.randperm(80, generator=torch.Generator().manual_seed(0))
    assert differences(tokens[order][order.argsort()], tokens) == []


# The writer.


SIXTY = make_tokens()


def step_tokens(step: int) -> TokenTrace:
    """Cheap to make: the writer has no time to breathe."""
    return dataclasses.replace(SIXTY, step=torch.full((60,), step))


def writers_left() -> list[str]:
    """Threads that write traces."""
    return [thread.name for thread in threading.enumerate() if thread.name == "trace-writer"]


def recorded(writer: TraceWriter, steps: Sequence[int], *, ask: bool = True, pause: float = 0.0) -> list[int]:
    """The steps that were written, after those were offered."""
    wanted = []
    for step in steps:
        if not ask or writer.wants(step):
            wanted.append(step)
            writer.add(step_tokens(step))
            writer.commit(step)
            time.sleep(pause)
    writer.close()
    return wanted


def on_disk(directory: Path) -> list[int]:
    return sorted(int(file.stem.removeprefix("tokens-")) for file in directory.glob("tokens-*.parquet"))


@pytest.fixture(scope="module")
def step_bytes(tmp_path_factory: pytest.TempPathFactory) -> int:
    """How much a step of `step_tokens` takes."""
    directory = tmp_path_factory.mktemp("one")
    written(directory, [step_tokens(1)])
    return sum(file.stat().st_size for file in directory.iterdir())


@pytest.mark.parametrize("every", [1, 2, 5])
def test_every_so_many_steps_are_wanted(tmp_path: Path, every: int) -> None:
    with TraceWriter(tmp_path, info_of(make_tokens()), every=every) as writer:
        assert recorded(writer, range(1, 12)) == [step for step in range(1, 12) if (step - 1) % every == 0]
    assert on_disk(tmp_path) == list(range(1, 12, every))


@pytest.mark.parametrize("pause", [0.0, 0.01], ids=["at once", "with pauses"])
@pytest.mark.parametrize(("every", "last"), [(1, 64), (1, 50), (3, 127), (4, 90)])
def test_a_full_trace_covers_the_run_evenly(
    tmp_path: Path, step_bytes: int, pause: float, every: int, last: int
) -> None:
    bound = int(6.5 * step_bytes)
    writer = TraceWriter(tmp_path, info_of(make_tokens()), every=every, max_bytes=bound)
    recorded(writer, range(1, last + 1), pause=pause)
    assert writer.problem is None
    left = on_disk(tmp_path)
    assert left[0] == 1
    (gap,) = set(np.diff(left).tolist())
    assert gap % every == 0
    assert last - left[-1] <= gap
    assert 4 <= len(left) <= 6  # of seven, every second one was deleted
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) <= bound
    assert torch.cat([part.step for part in Trace(tmp_path).tokens()]).unique().tolist() == left


@pytest.mark.parametrize("steps", [range(10, 400, 10), range(2, 60, 2), range(40), range(1000, 1030)], ids=str)
def test_steps_of_another_trainer_are_thinned_evenly_too(tmp_path: Path, step_bytes: int, steps: range) -> None:
    writer = TraceWriter(tmp_path, info_of(make_tokens()), max_bytes=6.5 * step_bytes)
    recorded(writer, steps, ask=False, pause=0.005)
    left = on_disk(tmp_path)
    assert left[0] == steps[0]
    assert len(set(np.diff(left).tolist())) == 1
    assert left[-1] > steps[len(steps) // 2]


@pytest.mark.parametrize("ask", [True, False])
def test_a_step_above_the_bound_ends_the_trace(tmp_path: Path, step_bytes: int, ask: bool) -> None:
    writer = TraceWriter(tmp_path, info_of(make_tokens()), max_bytes=step_bytes / 2)
    recorded(writer, range(1, 9), ask=ask, pause=0.01)
    assert writer.problem is not None
    assert "a step takes" in writer.problem
    assert not writer.wants(100)
    # No bound would be kept by going on.
    assert on_disk(tmp_path) == [1]
    assert not writers_left()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(TraceError, match="is not empty"):
        TraceWriter(tmp_path, info_of(make_tokens()))
    assert [file.name for file in tmp_path.iterdir()] == ["note.txt"]
    assert not writers_left()


def ended_early(directory: Path, work: Callable[[TraceWriter], None]) -> str:
    """Why a trace ended early: as the writer knows it, and as it tells at its end."""
    writers: list[TraceWriter] = []

    def write() -> None:
        with TraceWriter(directory, info_of(SIXTY)) as writer:
            writers.append(writer)
            work(writer)

    with pytest.raises(TraceError) as caught:
        write()
    (writer,) = writers
    assert writer.problem == str(caught.value)
    assert "\n" not in writer.problem
    assert not writer.wants(1000)
    assert not writers_left()
    return writer.problem


def test_a_step_is_committed_once(tmp_path: Path) -> None:
    def work(writer: TraceWriter) -> None:
        for part in (step_tokens(1), step_tokens(1)[:7]):
            writer.add(part)
            writer.commit(1)

    assert "step 1 " in ended_early(tmp_path, work)
    assert differences(everything(Trace(tmp_path)), step_tokens(1)) == []


@pytest.mark.parametrize("tokens", [60, ROW_GROUP + 1])
def test_tokens_of_another_step_are_refused(tmp_path: Path, tokens: int) -> None:
    def work(writer: TraceWriter) -> None:
        writer.add(SIXTY[torch.arange(tokens) % 60])
        writer.commit(4)

    problem = ended_early(tmp_path, work)
    assert "step 1 " in problem
    assert "step 4 " in problem
    assert on_disk(tmp_path) == []


@pytest.mark.parametrize("together", [True, False])
def test_tokens_of_two_steps_are_refused(tmp_path: Path, together: bool) -> None:
    def work(writer: TraceWriter) -> None:
        parts = [step_tokens(1), step_tokens(2)]
        for part in [TokenTrace.cat(parts)] if together else parts:
            writer.add(part)
        writer.commit(2)

    assert "[1, 2]" in ended_early(tmp_path, work)
    assert on_disk(tmp_path) == []


def test_parts_of_a_step_have_the_same_columns(tmp_path: Path) -> None:
    def work(writer: TraceWriter) -> None:
        writer.add(SIXTY)
        writer.add(dataclasses.replace(SIXTY, policy=dataclasses.replace(SIXTY.policy, entropy=None)))
        writer.commit(1)

    assert "entropy" in ended_early(tmp_path, work)
    assert on_disk(tmp_path) == []


def test_a_commit_without_tokens_writes_nothing(tmp_path: Path) -> None:
    tokens = step_tokens(3)
    with TraceWriter(tmp_path, info_of(tokens)) as writer:
        writer.commit(1)
        writer.add(tokens[:0])
        writer.add([])
        writer.commit(2)
        writer.add(tokens)
        writer.commit(3)
    assert writer.problem is None
    assert [file.name for file in tmp_path.iterdir()] == ["tokens-000003.parquet"]
    assert differences(everything(Trace(tmp_path)), tokens) == []


def test_responses_of_a_step_without_tokens_do_not_slip_into_the_next(tmp_path: Path) -> None:
    tokens = step_tokens(2)
    with TraceWriter(tmp_path, info_of(tokens)) as writer:
        writer.add(make_samples(step_tokens(1)))
        writer.commit(1)
        writer.add(make_samples(tokens))
        writer.add(tokens)
        writer.commit(2)
    assert Trace(tmp_path).steps == [2]
    assert Trace(tmp_path).samples(2) == make_samples(tokens)


def test_a_step_that_was_not_committed_is_left_out(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, info_of(step_tokens(1)))
    writer.add(step_tokens(1))
    writer.commit(1)
    writer.add(make_samples(step_tokens(2)))
    writer.add(step_tokens(2)[:33])
    writer.close()
    writer.close()
    assert writer.problem is None
    assert Trace(tmp_path).steps == [1]
    assert list(tmp_path.glob("*.partial")) == []
    assert not writers_left()


def test_a_forgotten_commit_is_said(tmp_path: Path) -> None:
    with (
        pytest.raises(TraceError, match="step 2 was never committed"),
        TraceWriter(tmp_path, info_of(step_tokens(2))) as writer,
    ):
        writer.add(step_tokens(2))


def test_a_committed_step_is_readable_while_the_writer_goes_on(tmp_path: Path) -> None:
    with TraceWriter(tmp_path, info_of(make_tokens())) as writer:
        writer.add(step_tokens(1))
        writer.commit(1)
        deadline = time.monotonic() + 10
        while not on_disk(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.005)
        writer.add(step_tokens(2)[:5])
        assert differences(everything(Trace(tmp_path)), step_tokens(1)) == []
        writer.commit(2)


def spoilt(record: str, name: str, values: Tensor) -> TokenTrace:
    """Sixty tokens with other values in one place."""
    if not record:
        return dataclasses.replace(SIXTY, **{name: values})
    return dataclasses.replace(SIXTY, **{record: dataclasses.replace(getattr(SIXTY, record), **{name: values})})


MISFITS: dict[str, tuple[TokenTrace, str]] = {
    "K": (make_tokens(top_k=3), "K = 3"),
    "V": (make_tokens(vocabulary_size=13), "V = 13"),
    "a width": (spoilt("policy", "logp", torch.zeros(60, 9)), "policy_logp"),
    "an id": (spoilt("behaviour", "ids", SIXTY.behaviour.ids + 9), "vocabulary of 12"),
    "a negative id": (spoilt("behaviour", "ids", SIXTY.behaviour.ids - 12), "vocabulary of 12"),
    "a large integer": (spoilt("", "optimizer_step", torch.full((60,), 2**33 + 5)), "optimizer_step"),
    "a double": (spoilt("", "advantage", SIXTY.advantage.double() / 3), "advantage is float64"),
    # The reader would refuse them: what can be written can be read.
    "a negative place": (spoilt("", "version", torch.full((60,), -1)), "version"),
    "an unknown reason": (spoilt("decision", "reason", SIXTY.decision.reason + 5), "reason"),
    "a contradiction": (spoilt("decision", "keep", ~SIXTY.decision.keep), "keep"),
}


@pytest.mark.parametrize("misfit", MISFITS)
def test_tokens_that_do_not_fit_end_the_trace_with_what_is_wrong(tmp_path: Path, misfit: str) -> None:
    tokens, words = MISFITS[misfit]

    def work(writer: TraceWriter) -> None:
        for step, part in enumerate((SIXTY, tokens, SIXTY), 1):
            writer.add(dataclasses.replace(part, step=torch.full((60,), step)))
            writer.commit(step)

    assert words in ended_early(tmp_path, work)
    assert Trace(tmp_path).steps == [1]
    assert differences(everything(Trace(tmp_path)), SIXTY) == []


def test_wait_returns_when_all_is_on_the_disk(tmp_path: Path) -> None:
    """For a process that may be killed right after."""
    writer = TraceWriter(tmp_path, info_of(step_tokens(1)))
    writer.add(step_tokens(1))
    writer.commit(1)
    writer.wait()
    assert (tmp_path / "tokens-000001.parquet").is_file()
    writer.close()


def test_a_closed_writer_takes_nothing(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path, info_of(SIXTY))
    writer.close()
    assert not writer.wants(1)
    with pytest.raises(TraceError, match="closed"):
        writer.add(SIXTY)
    with pytest.raises(TraceError, match="closed"):
        writer.commit(1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("step", [np.int64(1), torch.tensor(1), np.int32(1)], ids=["int64", "tensor", "int32"])
def test_a_step_may_be_any_integer(tmp_path: Path, step: Any) -> None:
    with TraceWriter(tmp_path, info_of(SIXTY)) as writer:
        assert writer.wants(step)
        writer.add(SIXTY)
        writer.commit(step)
    assert Trace(tmp_path).steps == [1]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"temperature": 0}, "temperature is 0"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"rule": {"delta": 1.0}}, "its name"),
        ({"top_k": 13}, "0 <= K <= V"),
    ],
)
def test_a_description_that_no_reader_would_take_is_refused_at_once(
    tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(TraceError, match=words):
        TraceWriter(tmp_path / "t", dataclasses.replace(info_of(SIXTY), **changes))
    assert not (tmp_path / "t").exists()
    assert not writers_left()


def test_a_rule_is_not_its_name() -> None:
    with pytest.raises(TraceError, match="rule_settings"):
        dataclasses.replace(info_of(SIXTY), rule="predictive")  # pyright: ignore[reportArgumentType]
    with pytest.raises(TraceError, match="instance"):
        rule_settings("predictive")  # pyright: ignore[reportArgumentType]


def test_numpy_numbers_and_a_path_as_text_will_do(tmp_path: Path) -> None:
    info = dataclasses.replace(info_of(SIXTY), vocabulary_size=np.int64(12), top_k=np.int64(4), temperature=1)
    with TraceWriter(str(tmp_path / "t"), info) as writer:
        writer.add(SIXTY)
        writer.commit(1)
    assert Trace(str(tmp_path / "t")).size == 60


def test_responses_of_another_step_are_refused(tmp_path: Path) -> None:
    def work(writer: TraceWriter) -> None:
        writer.add([dataclasses.replace(sample, step=2) for sample in make_samples(SIXTY)])
        writer.add(SIXTY)
        writer.commit(1)

    assert "responses of step 2 were added" in ended_early(tmp_path, work)


def test_steps_without_tokens_leave_the_others_when_the_trace_is_thinned(tmp_path: Path) -> None:
    sizes = tmp_path / "sizes"
    with TraceWriter(sizes, info_of(SIXTY)) as writer:
        writer.add(SIXTY)
        writer.commit(1)
    one = sum(file.stat().st_size for file in sizes.iterdir())
    with TraceWriter(tmp_path / "t", info_of(SIXTY), max_bytes=3.5 * one) as writer:
        for step in range(1, 21):
            if writer.wants(step):
                if step % 2 == 0:
                    writer.add(dataclasses.replace(SIXTY, step=torch.full((60,), step)))
                writer.commit(step)
                time.sleep(0.01)
    steps = Trace(tmp_path / "t").steps
    assert steps[0] == 2
    assert 1 <= len(steps) <= 3
