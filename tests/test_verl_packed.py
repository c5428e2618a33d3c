"""A micro-batch of the verl plug-in as one row of tokens: whatever the lengths, the masks and the cuts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from predmask.core import PolicySupport
from predmask.core.support import each_tensor
from predmask.plugins.verl.packed import Packed, columns, policy_from

TOP_K = 3
Batch = list[dict[str, Tensor]]


def jagged(rows: list[Tensor]) -> Tensor:
    """As nested tensors are made where nothing is compiled: from their rows one after the other."""
    lengths = torch.tensor([0, *(len(row) for row in rows)])
    return torch.nested.nested_tensor_from_jagged(torch.cat(rows), lengths.cumsum(0))


def make_batch(shapes: list[tuple[int, list[bool]]], seed: int = 0) -> Batch:
    """Samples by the length of the prompt and the mask of the response; no id occurs twice."""
    generator = torch.Generator().manual_seed(seed)
    fresh = iter(range(10**6))
    batch: Batch = []
    for prompt, mask in shapes:
        places = prompt + len(mask)
        rows = torch.tensor([[next(fresh) for _ in range(TOP_K)] for _ in range(places)])
        batch.append(
            {
                "prompts": torch.tensor([next(fresh) for _ in range(prompt)]),
                "responses": torch.tensor([next(fresh) for _ in mask]),
                "response_mask": torch.tensor(mask).long(),
                "old_log_probs": -4 - torch.rand(len(mask), generator=generator),
                "advantages": torch.randn(len(mask), generator=generator),
                "teacher_ids": rows.int(),
                "teacher_logprobs": -3 - torch.rand(rows.shape, generator=generator),
            }
        )
    return batch


def nested(batch: Batch) -> dict[str, Any]:
    fields: dict[str, Any] = {key: jagged([sample[key] for sample in batch]) for key in batch[0]}
    fields["input_ids"] = jagged([torch.cat([sample["prompts"], sample["responses"]]) for sample in batch])
    return fields


shapes = st.lists(st.tuples(st.integers(1, 4), st.lists(st.booleans(), min_size=1, max_size=5)), min_size=1, max_size=4)
batches = st.builds(make_batch, shapes, st.integers(0, 99))


@given(batch=batches, top_k=st.sampled_from([0, TOP_K]))
def test_each_token_has_its_own_record(batch, top_k):
    """The row before a token's own has its distribution, at any length of prompt and response."""
    packed = Packed.of(nested(batch), top_k)
    place = begun = 0
    for sample in batch:
        for token in range(len(sample["responses"])):
            row = len(sample["prompts"]) + token - 1
            assert packed.behaviour.ids[place, 0] == sample["responses"][token]
            assert packed.behaviour.logp[place, 0] == sample["old_log_probs"][token]
            assert packed.behaviour.ids[place, 1:].tolist() == sample["teacher_ids"][row].tolist()[:top_k]
            assert torch.equal(packed.behaviour.logp[place, 1:], sample["teacher_logprobs"][row, :top_k])
            assert packed.advantage[place] == sample["advantages"][token]
            assert packed.response_mask[place] == (sample["response_mask"][token] != 0)
            assert packed.row[place] == begun + row
            place += 1
        begun += len(sample["prompts"]) + len(sample["responses"])
    assert len(packed.row) == len(packed.advantage) == place
    assert packed.lengths.tolist() == [len(sample["responses"]) for sample in batch]


@given(batch=batches)
def test_marks_number_the_sampled_tokens(batch):
    """In the row that predicts a token stands its number, from 1; nothing elsewhere."""
    expected, number = [], 0
    for sample in batch:
        rows = [0] * (len(sample["prompts"]) + len(sample["responses"]))
        for token, asked in enumerate(sample["response_mask"].tolist()):
            number += 1
            rows[len(sample["prompts"]) + token - 1] = number if asked else 0
        expected.append(rows)
    assert [row.tolist() for row in Packed.of(nested(batch), 0).marks.unbind()] == expected


@given(batch=batches, wider=st.integers(0, 2))
def test_padded_and_flat_are_inverse(batch, wider):
    """Zeros stand behind each response, and every value's gradient comes back to it."""
    packed = Packed.of(nested(batch), 0)
    lengths = [len(sample["responses"]) for sample in batch]
    width = max(lengths) + wider
    values = torch.arange(1.0, sum(lengths) + 1).requires_grad_()
    padded = packed.padded(values, width)
    ends = torch.tensor(lengths).cumsum(0).tolist()
    assert padded.tolist() == [
        [*map(float, range(end - length + 1, end + 1)), *[0.0] * (width - length)]
        for end, length in zip(ends, lengths, strict=True)
    ]
    assert torch.equal(packed.flat(padded), values)
    factors = torch.arange(float(padded.numel())).reshape(padded.shape) + 1
    (padded * factors).sum().backward()
    assert torch.equal(values.grad, packed.flat(factors))


def policy_of(packed: Packed) -> PolicySupport:
    generator = torch.Generator().manual_seed(1)
    tokens, support = packed.behaviour.ids.shape
    logp = torch.randn(tokens, support, generator=generator)
    tail, squares, entropy = torch.randn(3, tokens, generator=generator)
    return PolicySupport(logp=logp, log_tail=tail, vocabulary_size=99, tail_sum_squares=squares, entropy=entropy)


def carry(packed: Packed, policy: PolicySupport, pieces: list[Tensor]) -> dict[str, Tensor]:
    """What the host does: each process forms the columns of its piece, which are put together again."""
    rows = packed.marks.values().numel()
    found = [columns(each_tensor(policy, lambda v, p=piece: v[p[p > 0] - 1]), piece) for piece in pieces]
    whole = {name: torch.cat([part[name].flatten() for part in found])[:rows] for name in found[0]}
    return {name: torch.nested.nested_tensor_from_jagged(v, packed.offsets) for name, v in whole.items()}


@given(batch=batches, top_k=st.sampled_from([0, TOP_K]), data=st.data())
def test_statistics_come_back_whatever_the_cuts(batch, top_k, data):
    packed = Packed.of(nested(batch), top_k)
    policy, marks = policy_of(packed), packed.marks.values()
    padding = data.draw(st.integers(0, 3), label="padding")
    marks = torch.cat([marks, marks.new_zeros(padding)])
    cuts = data.draw(st.lists(st.integers(0, len(marks)), max_size=3).map(sorted), label="cuts")
    pieces = [marks[start:end][None] for start, end in zip([0, *cuts], [*cuts, len(marks)], strict=True)]
    output = {"log_probs": marks, **carry(packed, policy, pieces)}
    found = policy_from(output, packed, 99)
    assert set(output) == {"log_probs"}  # the host sees its own outputs alone
    assert found.vocabulary_size == 99
    asked = packed.response_mask
    for name in ("logp", "log_tail", "tail_sum_squares", "entropy"):
        assert torch.equal(getattr(found, name)[asked], getattr(policy, name)[asked])
        assert torch.isnan(getattr(found, name)[~asked]).all()


def test_an_entry_that_is_not_valid_has_no_mass():
    batch = make_batch([(2, [True, True])])
    batch[0]["teacher_ids"][1, 2] = -1
    packed = Packed.of(nested(batch), TOP_K)
    found = policy_from(carry(packed, policy_of(packed), [packed.marks.values()]), packed, 99)
    assert found.logp[0, 3] == -math.inf
    assert torch.isfinite(found.logp).sum() == found.logp.numel() - 1


def test_16_bit_records_are_widened():
    fields = nested(make_batch([(2, [True])]))
    for key in ("old_log_probs", "advantages", "teacher_logprobs"):
        fields[key] = torch.nested.nested_tensor_from_jagged(fields[key].values().bfloat16(), fields[key].offsets())
    packed = Packed.of(fields, TOP_K)
    assert {packed.behaviour.logp.dtype, packed.advantage.dtype} == {torch.float32}


FAULTS: dict[str, tuple[Callable[[dict[str, Any]], Any], int, str]] = {
    "padded": (lambda f: f.update(response_mask=torch.ones(2, 3)), TOP_K, r"set trainer\.use_v1=True"),
    "padded ids": (lambda f: f.update(input_ids=torch.ones(2, 5)), TOP_K, r"set trainer\.use_v1=True"),
    "no ids": (lambda f: f.pop("teacher_ids"), TOP_K, "top-K missing: the batch has no teacher_ids; set"),
    "no log-probs": (lambda f: f.pop("teacher_logprobs"), TOP_K, "no teacher_logprobs; set .*agent_loop=predmask"),
    "another K": (lambda f: None, 2, r"shapes \(7, 3\) and \(7, 3\), and policy_loss\.top_k is 2"),
    "another shape": (lambda f: f.update(teacher_ids=f["input_ids"]), TOP_K, r"shapes \(7,\) and \(7, 3\)"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_faulty_batch_is_refused(name):
    change, top_k, words = FAULTS[name]
    fields = nested(make_batch([(2, [True, False]), (1, [True, True])]))
    change(fields)
    with pytest.raises(ValueError, match=words):
        Packed.of(fields, top_k)
