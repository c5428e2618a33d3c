"""A head that is spread over processes: every process gets what one process with the whole head would have got."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from helpers_ops import (
    LIMITS,
    OperatorCase,
    assert_near,
    assert_same_policy,
    build,
    leaves,
    loss,
    oracle_gradients,
    oracle_logits,
    oracle_loss,
    oracle_policy,
    small_chunks,
    statistics,
)
from helpers_processes import wait_for
from predmask import NoMask, PolicySupport, Predictive, Reason, Rule
from predmask.core.support import first_occurrence
from predmask.ops import Shard, logits_statistics, sweep
from predmask.ops.head import Head
from predmask.ops.statistics import Measured, Tail

SECONDS = 240
"""How long all cases may take."""
WHOLE = Predictive(delta=0.05)
ALL = {"bias": True, "softcap": 3.0, "scale": 1.7, "temperature": 0.6}


@dataclasses.dataclass(frozen=True)
class Spread:
    """A case, and how its vocabulary is spread."""

    case: OperatorCase
    sizes: tuple[int, ...]
    rule: Rule = WHOLE
    members: tuple[int, ...] = (0, 1)
    """Ranks of the group; the default group where it is all."""
    buffer: bool = False
    """Whether the weight's gradient goes to a buffer."""
    frozen: tuple[str, ...] = ()
    small: bool = False

    def rows(self, place: int) -> slice:
        start = sum(self.sizes[:place])
        return slice(start, start + self.sizes[place])


def exact(case: OperatorCase, **changes: Tensor) -> OperatorCase:
    """Inputs on a grid, so that logits are exact in float32 however large the bias is."""
    hidden, weight = ((values * 8).round() / 8 for values in (case.hidden, case.weight))
    return case.replace(hidden=hidden, weight=weight, **changes)


def shifted(*offsets: tuple[slice, float], seed: int, sampled: list[int]) -> OperatorCase:
    """Float32 logits with a constant added to parts of the vocabulary."""
    case = build(11, seed=seed, dtype=torch.float32, sampled=sampled)
    bias = torch.zeros(13)
    for columns, offset in offsets:
        bias[columns] = offset
    # The record's ids must have a probability; and the ratio is e^.1, however faint the token.
    ids = torch.where(torch.isinf(bias[case.behaviour.ids]), case.behaviour.ids[:, :1], case.behaviour.ids)
    behaviour = dataclasses.replace(case.behaviour, ids=ids, valid=case.behaviour.valid & first_occurrence(ids))
    case = exact(case, bias=bias, behaviour=behaviour)
    policy = oracle_policy(case)
    return case.replace(behaviour=dataclasses.replace(behaviour, logp=policy.logp - 0.1, log_tail=policy.log_tail))


def spoilt(where: str) -> OperatorCase:
    case = build(9, seed=5, bias=True)
    if where == "hidden":
        case.hidden[3] = math.nan
    else:
        case.weight[8, 1] = math.nan
    return case


LOW, HIGH = slice(0, 6), slice(6, 13)
CASES: dict[str, Callable[[], Spread]] = {
    "nearly even": lambda: Spread(build(9, seed=1), (7, 6)),
    "one row, every setting": lambda: Spread(build(11, seed=2, **ALL), (1, 12)),
    "every token sampled": lambda: Spread(build(26, seed=3, sampled=list(range(13)), bias=True), (6, 7), NoMask()),
    "sampled alone": lambda: Spread(build(26, seed=3, top_k=0, sampled=list(range(13))), (6, 7), NoMask()),
    "full": lambda: Spread(build(9, seed=4, full=True, temperature=0.5), (4, 9)),
    "16 bits": lambda: Spread(build(40, seed=4, dtype=torch.bfloat16, record_dtype=torch.float32), (5, 8)),
    "no token": lambda: Spread(build(0, bias=True), (6, 7)),
    "no response": lambda: Spread(build(9).replace(response=torch.zeros(9, dtype=torch.bool)), (6, 7)),
    "a NaN token": lambda: Spread(spoilt("hidden"), (6, 7)),
    "a NaN in one shard": lambda: Spread(spoilt("weight"), (6, 7)),
    "buffer": lambda: Spread(build(30, seed=6, bias=True), (6, 7), buffer=True),
    "frozen hidden": lambda: Spread(build(30, seed=6, bias=True), (6, 7), frozen=("hidden",)),
    "frozen head": lambda: Spread(build(30, seed=6, bias=True), (6, 7), frozen=("weight", "bias")),
    "far apart": lambda: Spread(shifted((HIGH, 200.0), seed=7, sampled=[1, 12, 5, 6]), (6, 7), NoMask()),
    "one is impossible": lambda: Spread(shifted((HIGH, -math.inf), seed=8, sampled=[0, 3, 5]), (6, 7), NoMask()),
    "one is impossible, the other low": lambda: Spread(
        shifted((LOW, -math.inf), (HIGH, -200.0), seed=8, sampled=[6, 9, 12]), (6, 7), NoMask()
    ),
    "one is impossible, the other very low": lambda: Spread(
        shifted((LOW, -8192.0), (HIGH, -math.inf), seed=8, sampled=[0, 3, 5]), (6, 7), NoMask()
    ),
    "chunks": lambda: Spread(build(300, seed=10, **ALL), (3, 10), small=True),
    "three": lambda: Spread(build(20, seed=11, sampled=list(range(13)), **ALL), (5, 1, 7), members=(0, 1, 2)),
    "of three, the middle is impossible": lambda: Spread(
        shifted((slice(5, 7), -math.inf), seed=12, sampled=[0, 8]), (5, 2, 6), members=(0, 1, 2)
    ),
    "two of three": lambda: Spread(build(12, seed=13, bias=True), (9, 4), members=(0, 2)),
    "chunks of three": lambda: Spread(
        build(200, seed=14, dtype=torch.float32, sampled=list(range(13))), (1, 2, 10), members=(0, 1, 2), small=True
    ),
}


def cotangent(spread: Spread) -> Tensor:
    shape = spread.case.behaviour.ids.shape
    return torch.randn(shape, generator=torch.Generator().manual_seed(9)).double()


def local(spread: Spread, place: int) -> OperatorCase:
    """What one process holds: some rows of the head, and all of the rest."""
    case, rows = spread.case, spread.rows(place)
    bias = None if case.bias is None else case.bias[rows]
    wanted = {name: name not in spread.frozen for name in ("hidden", "weight", "bias")}
    return leaves(case.replace(weight=case.weight[rows], bias=bias), **wanted)


def tensors(record: Any) -> dict[str, Tensor]:
    return {name: value.detach() for name, value in vars(record).items() if isinstance(value, Tensor)}


def grads(case: OperatorCase) -> dict[str, Tensor | None]:
    found = {"hidden": case.hidden.grad, "weight": case.weight.grad}
    return found if case.bias is None else found | {"bias": case.bias.grad}


WORLD = 3
TEMPERATURE = 0.5


def raw_logits(case: OperatorCase) -> Tensor:
    """[N, rows here] in the precision of the case, to be divided by TEMPERATURE."""
    return torch.tensor(oracle_logits(case)).to(case.dtype) * TEMPERATURE


def work(rank: int, folder: str) -> None:
    """One process: every case in turn, each written down at once."""
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    groups = {members: dist.new_group(list(members)) for members in ((0, 1), (0, 2))}
    for name, make in CASES.items():
        spread = make()
        if rank not in spread.members:
            continue
        group = groups.get(spread.members)
        place = dist.get_rank(group)
        case, again = local(spread, place), local(spread, place)
        shard = Shard.of(case.weight, group)
        with small_chunks(tokens=None if spread.small else 1000):
            if spread.small:
                # So that chunks would differ between processes if each went by its own rows.
                sweep.WORKSPACE_ELEMENTS = 400
            policy = statistics(case, shard=shard)
            from_logits = logits_statistics(raw_logits(case), case.behaviour, temperature=TEMPERATURE, shard=shard)
            if policy.logp.requires_grad:
                torch.where(spread.case.behaviour.valid, policy.logp, 0.0).backward(cotangent(spread).to(policy.logp))
            buffer = torch.full_like(again.weight.detach(), 0.5) if spread.buffer else None
            found = loss(again, spread.rule, shard=shard, weight_grad=buffer)
            found.loss.backward()
        result = {
            "shard": (shard.start, shard.vocabulary_size),
            "policy": tensors(policy),
            "from_logits": tensors(from_logits),
            "by_logp": grads(case),
            "loss": found.loss.detach(),
            "decision": tensors(found.decision),
            "by_loss": grads(again) | ({} if buffer is None else {"weight": buffer - 0.5}),
        }
        torch.save(result, Path(folder) / f"{name} {place}")
    dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What each process found in each case; no process is left behind."""
    found = tmp_path_factory.mktemp("found")
    running: Any = mp.spawn(work, (str(found),), nprocs=WORLD, join=False)
    wait_for(running, SECONDS)
    return found


def assert_as_one(folder: Path, name: str, spread: Spread) -> None:
    """Every process has the values of the whole vocabulary, and the gradients of its rows."""
    case, limit = spread.case, 3 * LIMITS[spread.case.dtype]
    found = [torch.load(folder / f"{name} {place}") for place in range(len(spread.sizes))]
    vocabulary = len(case.weight)
    assert [part["shard"] for part in found] == [(spread.rows(i).start, vocabulary) for i in range(len(found))]
    for part in found:
        for key in ("policy", "from_logits", "decision"):
            for field, value in found[0][key].items():
                # The same in all processes, to the last bit: or their decisions would come apart.
                assert torch.equal(part[key][field].nan_to_num(7.0), value.nan_to_num(7.0)), (key, field)
        assert torch.equal(part["loss"], found[0]["loss"])
        for key in ("by_logp", "by_loss"):
            if part[key]["hidden"] is not None:
                assert torch.equal(part[key]["hidden"], found[0][key]["hidden"])
    some = ~torch.isnan(found[0]["policy"]["log_tail"])
    usable = case.take(some)
    policy = PolicySupport(**found[0]["policy"], vocabulary_size=vocabulary)
    assert_same_policy(
        dataclasses.replace(policy, **{key: value[some] for key, value in found[0]["policy"].items()}),
        oracle_policy(usable),
        limit,
    )
    assert_same_policy(
        PolicySupport(
            **{key: value[some] for key, value in found[0]["from_logits"].items()}, vocabulary_size=vocabulary
        ),
        oracle_policy(usable),
        limit,
    )
    expected = oracle_loss(usable, spread.rule)
    assert torch.equal(found[0]["decision"]["reason"][some], expected.decision.reason)
    assert_near(found[0]["loss"], expected.loss, limit)
    for key, formula in (
        ("by_loss", expected.gradients),
        ("by_logp", oracle_gradients(usable, cotangent(spread)[some].numpy())),
    ):
        parts = {
            field: None
            if any(part[key][field] is None for part in found)
            else torch.cat([p[key][field] for p in found])
            for field in found[0][key]
            if field != "hidden"
        }
        if found[0][key]["hidden"] is not None:
            assert not found[0][key]["hidden"][~some].any()
            parts["hidden"] = found[0][key]["hidden"][some]
        asked = {field for field in ("hidden", "weight", "bias") if parts.get(field) is not None}
        assert asked == {"hidden", "weight", "bias"} - set(spread.frozen) - ({"bias"} if case.bias is None else set())
        for field in asked:
            like = getattr(case, field)
            assert parts[field].dtype == like.dtype
            own = max(LIMITS[like.dtype], 10 * limit)
            assert_near(parts[field], getattr(formula, field), own, f"{key} {field}")


@pytest.mark.parametrize("name", CASES)
def test_processes_are_as_one(folder, name):
    assert_as_one(folder, name, CASES[name]())


def test_the_cases_are_not_trivial():
    """Tokens are sampled from every shard, chunks differ by rank, and the far shard is far indeed."""
    spread = CASES["every token sampled"]()
    assert set(spread.case.behaviour.ids[:, 0].tolist()) == set(range(13))
    assert oracle_policy(CASES["far apart"]().case).logp[:, 0].min() < -190
    assert oracle_loss(CASES["chunks"]().case, WHOLE).decision.dropped.sum() > 20


def test_what_is_not_a_number_in_one_shard_is_unknown_in_all(folder):
    for place in range(2):
        for name, unknown in (("a NaN token", 1), ("a NaN in one shard", 9)):
            found = torch.load(folder / f"{name} {place}")
            case = CASES[name]().case
            expected = torch.isnan(found["policy"]["log_tail"]) & case.response
            assert torch.isnan(found["policy"]["log_tail"]).sum() == unknown
            assert torch.equal(found["decision"]["reason"] == Reason.UNKNOWN, expected)
            for key in ("by_loss", "by_logp"):
                assert all(torch.isfinite(value).all() for value in found[key].values())


@st.composite
def parts_of_a_vocabulary(draw: st.DrawFn) -> tuple[OperatorCase, list[int]]:
    size = draw(st.integers(2, 9))
    case = build(
        draw(st.integers(1, 5)),
        size,
        3,
        draw(st.integers(1, size)),
        seed=draw(st.integers(0, 10**6)),
        bias=True,
        full=draw(st.booleans()),
        size=draw(st.sampled_from([0.0, 1.0, 30.0])),
        **({"softcap": 8.0} if draw(st.booleans()) else {}),
    )
    offsets = draw(st.lists(st.sampled_from([0.0, 0.0, 300.0, -900.0, -math.inf]), min_size=size, max_size=size))
    cuts = draw(st.lists(st.integers(1, size - 1), unique=True, max_size=3))
    return case.replace(bias=case.bias + torch.tensor(offsets)), [0, *sorted(cuts), size]


@given(drawn=parts_of_a_vocabulary())
def test_parts_of_a_vocabulary_merge_into_the_whole(drawn):
    """Wherever it is cut, whatever a part lacks."""
    case, bounds = drawn
    ids, distinct = case.behaviour.ids, first_occurrence(case.behaviour.ids)
    settings = {"softcap": case.settings.get("softcap")}

    def measured(start: int, end: int) -> Measured:
        head = Head(weight=case.weight[start:end], bias=case.bias[start:end], **settings)
        own = sweep.TorchSweep(head, case.hidden, end - start).measure(case.hidden, ids - start, distinct)
        return Measured.unpack(own.pack(), distinct)

    parts = [measured(start, end) for start, end in pairwise(bounds)]
    for order in (parts, parts[::-1]):
        merged = Measured.merge(order).policy(len(case.weight))
        whole = measured(0, len(case.weight)).policy(len(case.weight))
        logp = merged.logp.masked_fill(~case.behaviour.valid, -math.inf)
        some = ~torch.isnan(merged.log_tail)
        merged = dataclasses.replace(merged, logp=logp)
        expected = oracle_policy(case.take(some))
        actual = dataclasses.replace(merged, **{name: value[some] for name, value in tensors(merged).items()})
        # Logits of hundreds, in float64.
        assert_same_policy(actual, expected, 1e-10)
        assert torch.equal(torch.isnan(whole.log_tail), ~some)
        assert torch.isnan(merged.entropy[~some]).all()


def test_an_empty_tail_merges():
    nothing = torch.tensor([[-math.inf, -math.inf]])
    merged = Tail(log_mass=nothing, mean=torch.zeros(1, 2), collision=torch.zeros(1, 2)).merge()
    assert (merged.log_mass.item(), merged.mean.item(), merged.collision.item()) == (-math.inf, 0.0, 0.0)
    one = Tail(
        log_mass=torch.tensor([[-math.inf, 2.0]]),
        mean=torch.tensor([[0.0, 1.5]]),
        collision=torch.tensor([[0.0, 0.25]]),
    ).merge()
    assert (one.log_mass.item(), one.mean.item(), one.collision.item()) == (2.0, 1.5, 0.25)
