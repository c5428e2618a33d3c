"""Statistics of logits that are there already, against float64 formulas."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers_memory import peak_growth
from helpers_ops import (
    LIMITS,
    SHAPES,
    OperatorCase,
    assert_same_policy,
    build,
    each,
    oracle_logits,
    oracle_policy,
    small_chunks,
)
from predmask import BehaviourSupport, PolicySupport
from predmask.ops import logits_statistics

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def logits_of(case: OperatorCase, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.tensor(oracle_logits(case)).to(dtype)


def expected(logits: torch.Tensor, behaviour: BehaviourSupport) -> PolicySupport:
    """The formulas' statistics of these very logits."""
    tokens, vocabulary = logits.shape
    identity = build(tokens, vocabulary, vocabulary, spoilt=False)
    return oracle_policy(
        identity.replace(
            hidden=logits.double(), weight=torch.eye(vocabulary, dtype=torch.float64), bias=None, behaviour=behaviour
        )
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_statistics_are_those_of_the_formulas(shape, dtype):
    case = build(**shape)
    logits = logits_of(case, dtype)
    before = logits.clone()
    found = logits_statistics(logits, case.behaviour)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {v.dtype for v in vars(found).values() if isinstance(v, torch.Tensor)} == {wide}
    assert_same_policy(found, expected(logits, case.behaviour), LIMITS[wide])
    assert torch.equal(logits, before)
    assert not found.logp.requires_grad


@given(
    tokens=st.integers(1, 40),
    vocabulary=st.integers(2, 30),
    top_k=st.integers(0, 8),
    chunk=st.integers(1, 7),
    temperature=st.floats(0.2, 5.0),
    seed=st.integers(0, 9),
)
def test_chunks_rows_and_temperature(tokens, vocabulary, top_k, chunk, temperature, seed):
    """Any rows in any order, however they are cut."""
    case = build(tokens, vocabulary, top_k=top_k, seed=seed, size=3.0)
    order = torch.from_numpy(np.random.default_rng(seed).permutation(tokens))
    spread = torch.full((2 * tokens, vocabulary), math.nan, dtype=torch.float64)
    spread[2 * order] = logits_of(case) * temperature
    with small_chunks(tokens=chunk):
        found = logits_statistics(spread, case.behaviour, rows=2 * order, temperature=temperature)
    assert_same_policy(found, oracle_policy(case), 10 * LIMITS[torch.float64])


@pytest.mark.parametrize("dtype", DTYPES)
def test_ids_beyond_the_vocabulary_have_no_share(dtype):
    """Logits [2, 1, 0 | 3, 3] of three real ids: log pi of id 0 is -.408 (NeMo-RL 237, vLLM 13175)."""
    logits = torch.tensor([[2.0, 1.0, 0.0, 3.0, 3.0]], dtype=dtype)
    behaviour = BehaviourSupport.from_topk(torch.tensor([0]), torch.tensor([-0.408]))
    found = logits_statistics(logits, behaviour, vocabulary_size=3)
    assert found.logp[0, 0].item() == pytest.approx(-0.4076, abs=1e-4)
    assert found.vocabulary_size == 3
    assert_same_policy(found, expected(logits[:, :3], behaviour), LIMITS[torch.float32])
    assert logits_statistics(logits, behaviour).logp[0, 0].item() == pytest.approx(-1.937, abs=1e-3)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_rows_without_a_norm_are_unknown(broken):
    case = build(5, spoilt=False)
    logits = logits_of(case)
    logits[2] = logits[2] if broken == math.inf else broken
    if broken == math.inf:
        logits[2, 4] = broken
    found = logits_statistics(logits, case.behaviour)
    others = torch.tensor([0, 1, 3, 4])
    for name in ("log_tail", "tail_sum_squares", "entropy"):
        assert torch.isnan(getattr(found, name)[2])
    assert torch.isnan(found.logp[2][case.behaviour.valid[2]]).all()
    assert_same_policy(each(found, lambda v: v[others]), oracle_policy(case.take(others)), LIMITS[torch.float64])


def test_impossible_ids_and_faint_tails():
    logits = torch.tensor([[0.0, -math.inf, -math.inf, 1.0], [0.0, -400.0, -401.0, -500.0]], dtype=torch.float64)
    behaviour = BehaviourSupport.from_topk(torch.tensor([0, 0]), torch.tensor([-1.3, -0.1], dtype=torch.float64))
    found = logits_statistics(logits, behaviour)
    assert found.log_tail.tolist() == pytest.approx([1.0 - math.log1p(math.e), -400 + math.log1p(math.exp(-1))])
    assert found.entropy[0].item() == pytest.approx(
        -sum(p * math.log(p) for p in (1 / (1 + math.e), math.e / (1 + math.e)))
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"logits": torch.zeros(4, 13)}, ["(4, 13)", "one row for each token"]),
        ({"logits": torch.zeros(5, 2, 13)}, ["(5, 2, 13)", "[M, V]"]),
        ({"logits": torch.zeros(5, 13, dtype=torch.int64)}, ["int64"]),
        ({"rows": torch.arange(4)}, ["rows (4,)"]),
        ({"temperature": 0.0}, ["temperature is 0.0"]),
        ({"vocabulary_size": 14}, ["vocabulary_size is 14", "13 columns"]),
        ({"vocabulary_size": 0}, ["vocabulary_size is 0"]),
        ({"vocabulary_size": 2}, ["outside the vocabulary of 2"]),
    ],
    ids=lambda value: str(value)[:30],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], words):
    case = build(5)
    arguments = {"logits": logits_of(case), "behaviour": case.behaviour, **change}
    with pytest.raises(ValueError, match="".join(f"(?=.*{re.escape(word)})" for word in words)):
        logits_statistics(arguments.pop("logits"), **arguments)


@pytest.mark.slow
def test_memory_beyond_the_logits_does_not_grow():
    """1,024 rows of 50,000 logits in bfloat16 are .1 GB; all of them in float32 would be twice that."""
    logits = torch.zeros(1024, 50_000, dtype=torch.bfloat16)
    behaviour = BehaviourSupport.from_topk(torch.zeros(1024, dtype=torch.int64), torch.full((1024,), -1.0))
    assert peak_growth(lambda: logits_statistics(logits, behaviour)) < 100e6
