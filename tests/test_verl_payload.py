"""The top-K on its way from a rollout server to verl's batch: read, checked, laid out."""

import asyncio
import math
import re
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from predmask.plugins.verl.payload import (
    PROBLEM,
    TOP_K,
    Recorded,
    asked,
    blank_rows,
    from_sglang,
    from_vllm,
)
from predmask.plugins.verl.servers import Request
from predmask.rollout import RolloutError

NAN, INF = math.nan, math.inf
# Sampled are 9, which is among the two likeliest, and 5, which is not.
TOKENS = [9, 5]
LIKELIEST = [[(4, -0.2), (9, -2.5)], [(7, -0.5), (1, -1.25)]]
SAMPLED = [-2.5, -4.0]
IDS, LOGP = [[4, 9], [7, 1]], [[-0.2, -2.5], [-0.5, -1.25]]


def entries(tokens=TOKENS, sampled=SAMPLED, likeliest=LIKELIEST):
    """(id, log-prob) at each position as engines return them: the sampled one, then the likeliest."""
    return [[(token, logp), *row] for token, logp, row in zip(tokens, sampled, likeliest, strict=True)]


def flat(positions):
    """vLLM's `FlatLogprobs`, of the parts that are read."""
    ends = [sum(map(len, positions[: index + 1])) for index in range(len(positions))]
    return SimpleNamespace(
        start_indices=[0, *ends[:-1]],
        end_indices=ends,
        token_ids=[token for row in positions for token, _ in row],
        logprobs=[logp for row in positions for _, logp in row],
    )


def mappings(positions):
    """vLLM's mappings id -> `Logprob`, in which the sampled id stands once."""
    return [{token: SimpleNamespace(logprob=logp) for token, logp in row} for row in positions]


def meta_info(positions):
    """SGLang's `meta_info`."""
    triples = [[(logp, token, None) for token, logp in row] for row in positions]
    return {
        "id": "1",
        "finish_reason": {"type": "stop", "matched": 5},
        "prompt_tokens": 3,
        "output_token_logprobs": [row[0] for row in triples],
        "output_top_logprobs": [row[1:] or None for row in triples],
    }


READERS = {
    "flat": lambda tokens, positions, count: from_vllm(tokens, flat(positions), count),
    "mappings": lambda tokens, positions, count: from_vllm(tokens, mappings(positions), count),
    "sglang": lambda tokens, positions, count: from_sglang(tokens, meta_info(positions), count),
}
read_by_all = pytest.mark.parametrize("read", READERS.values(), ids=READERS)


def expect(record, ids, logp):
    assert record["ids"].dtype == np.int32
    assert record["logp"].dtype == np.float32
    np.testing.assert_array_equal(record["ids"], np.array(ids, np.int32))
    np.testing.assert_array_equal(record["logp"], np.array(logp, np.float32))


# --- Reading


@read_by_all
def test_records_are_read(read):
    expect(read(TOKENS, entries(), 2), IDS, LOGP)


@pytest.mark.parametrize("order", [[4, 9], [9, 4]])
def test_the_sampled_token_is_found_by_id(order):
    """Field case 10: in either order, and an error without it."""
    values = {4: -0.2, 9: -2.5}
    position = {token: SimpleNamespace(logprob=values[token]) for token in order}
    expect(from_vllm([9], [position], 2), [[4, 9]], [[-0.2, -2.5]])
    del position[9]
    with pytest.raises(RolloutError, match="sampled id 9 is not among"):
        from_vllm([9], [position], 1)


@pytest.mark.parametrize("name", ["flat", "sglang"])
def test_another_id_in_the_sampled_ones_place_is_refused(name):
    positions = entries()
    positions[1][0] = (6, -4.0)
    with pytest.raises(RolloutError, match=r"sampled id 5 at token 1.* id 6"):
        READERS[name](TOKENS, positions, 2)


@read_by_all
def test_entries_below_the_count_are_refused(read):
    """Field case 12: fewer entries, or entries of -inf, as from an engine with a cap."""
    with pytest.raises(RolloutError, match=r"\b50\b"):
        read([10], [[(10, -5.0), *((10 + i, -5.0) for i in range(20))]], 50)
    padded = [(10 + i, -5.0 if i < 20 else -INF) for i in range(50)]
    with pytest.raises(RolloutError, match=r"20 of 50 .* are finite.* cap .* 20 .*max_logprobs"):
        read([10], [[(10, -5.0), *padded]], 50)


@pytest.mark.parametrize("name", ["flat", "sglang"])
def test_a_missing_topk_is_refused(name):
    """Field case 17: records of the sampled token alone."""
    with pytest.raises(RolloutError, match="0 of the likeliest ids"):
        READERS[name]([3], [[(3, -1.0)]], 2)


@read_by_all
@pytest.mark.parametrize(
    ("second", "match"),
    [([(7, -0.5), (1, -0.6)], "sum to"), ([(7, -0.5), (2**31, -1.25)], "holds id 2147483648")],
    ids=["mass", "id"],
)
def test_faulty_entries_are_refused(read, second, match):
    with pytest.raises(RolloutError, match=match):
        read(TOKENS, entries(likeliest=[LIKELIEST[0], second]), 2)


# A mapping has one log-prob of each id, and is sorted here.
@pytest.mark.parametrize("name", ["flat", "sglang"])
@pytest.mark.parametrize(
    ("sampled", "match"),
    [([-2.0, -4.0], "id 9 has log-prob -2, .* top-K is -2.5"), ([-2.5, -0.8], "id 5 .* top-K is missing")],
    ids=["two values", "likelier than the likeliest"],
)
def test_a_sampled_token_that_does_not_fit_the_topk_is_refused(name, sampled, match):
    with pytest.raises(RolloutError, match=match):
        READERS[name](TOKENS, entries(sampled=sampled), 2)


@pytest.mark.parametrize("name", ["flat", "sglang"])
def test_an_id_that_is_repeated_is_refused(name):
    with pytest.raises(RolloutError, match="an id twice"):
        READERS[name](TOKENS, entries(likeliest=[LIKELIEST[0], [(7, -1.5), (7, -1.5)]]), 2)


@read_by_all
def test_another_number_of_tokens_is_refused(read):
    with pytest.raises(RolloutError, match="3 tokens"):
        read([9, 5, 5], entries(), 2)


# --- Asking and reporting


@pytest.mark.parametrize(
    ("params", "count"),
    [({}, 0), ({"logprobs": None}, 0), ({"logprobs": False}, 0), ({"logprobs": True}, 0), ({"logprobs": 20}, 20)],
)
def test_only_a_number_asks_for_the_topk(params, count):
    assert asked(params) == count


def output(tokens):
    return SimpleNamespace(token_ids=tokens, extra_fields={"global_steps": 3})


def reported(tokens, records, count, read=from_vllm, problem=None):
    """The extra fields that a request's report leaves."""
    answered = output(tokens)
    asyncio.run(Request(count, records, problem).report(answered, read))
    assert answered.extra_fields.pop("global_steps") == 3
    return answered.extra_fields


def test_a_report_has_the_topk():
    fields = reported(TOKENS, flat(entries()), 2)
    assert fields.keys() == {TOP_K}
    expect(fields[TOP_K], IDS, LOGP)


@pytest.mark.parametrize(
    ("records", "count", "match"),
    [
        (flat(entries()), 3, "2 of the likeliest ids where 3 were asked for"),
        (object(), 2, "^AttributeError: "),
        (None, 2, "^top-K missing: .*without log-probs"),
    ],
    ids=["faulty", "strange", "none"],
)
def test_a_report_has_the_problem(records, count, match):
    fields = reported(TOKENS, records, count)
    assert fields.keys() == {PROBLEM}
    assert re.search(match, fields[PROBLEM])


def test_the_first_problem_is_reported_and_nothing_read():
    request = Request(2, flat(entries()))
    for error in (RolloutError("not today"), KeyError("later")):
        with request.noting():
            raise error
    assert reported(TOKENS, request.records, 2, problem=request.problem) == {PROBLEM: "not today"}


def test_a_request_does_not_swallow_its_cancellation():
    with pytest.raises(asyncio.CancelledError), Request(2).noting():
        raise asyncio.CancelledError


def test_no_tokens_need_no_reading():
    """A request that was rejected, or aborted before its first token."""
    found = reported([], None, 4, read=lambda *_: pytest.fail("read"))[TOP_K]
    assert found["ids"].shape == found["logp"].shape == (0, 4)


def test_other_requests_go_on_while_one_is_read():
    async def read_beside_another():
        answered, gone_on, loop = output(TOKENS), threading.Event(), asyncio.get_running_loop()

        def read(*_):
            loop.call_soon_threadsafe(gone_on.set)
            return {"gone on": np.array(gone_on.wait(10))}

        await Request(2, True).report(answered, read)
        return answered.extra_fields[TOP_K]["gone on"]

    assert asyncio.run(read_beside_another())


# --- Laying out


def piece(tokens, first):
    """A piece of a response, whose j-th likeliest id at token t is 100 t + j, counted from `first`."""
    ids = np.array([[100 * (first + t) + j for j in range(2)] for t in range(len(tokens))], np.int32)
    fields = {"ids": ids.reshape(-1, 2), "logp": -ids.reshape(-1, 2).astype(np.float32)}
    return tokens, {TOP_K: fields, "global_steps": first}


def expect_rows(rows, expected):
    """`expected` has the id of the likeliest at each position, None where there is no distribution."""
    ids, logp = rows
    assert (ids.dtype, logp.dtype) == (torch.int32, torch.float32)
    wanted = torch.tensor([[-1, -1] if first is None else [first, first + 1] for first in expected])
    torch.testing.assert_close(ids.long(), wanted)
    torch.testing.assert_close(logp, torch.where(wanted < 0, NAN, -wanted.float()), equal_nan=True)


def test_row_t_has_the_distribution_of_token_t_plus_1():
    recorded = Recorded.of([piece([8, 9], 1)], 2)
    expect_rows(recorded.rows(3, [8, 9], [1, 1]), [None, None, 100, 200, None])


def test_pieces_follow_each_other():
    """Pieces of two versions of the policy, and between them one that was aborted before its first token."""
    recorded = Recorded.of([piece([8, 9], 1), ([], {"global_steps": 2}), piece([5], 3)], 2)
    assert recorded.tokens == (8, 9, 5)
    expect_rows(recorded.rows(1, [8, 9, 5], [1, 1, 1]), [100, 200, 300, None])


def test_a_response_that_was_cut_keeps_its_rows():
    recorded = Recorded.of([piece([8, 9, 5], 1)], 2)
    expect_rows(recorded.rows(2, [8, 9], [1, 1]), [None, 100, 200, None])
    expect_rows(recorded.rows(2, [], []), [None, None])


def test_tokens_that_were_not_sampled_have_no_rows():
    """Field case 14: the host inserts tokens, with mask 0, before and behind sampled ones."""
    recorded = Recorded.of([piece([8, 9], 1)], 2)
    expect_rows(recorded.rows(2, [6, 8, 6, 9, 1], [0, 1, 0, 1, 0]), [None, None, 100, None, 200, None, None])


def test_other_tokens_than_were_sampled_are_refused():
    recorded = Recorded.of([piece([8, 9], 1)], 2)
    for response in ([8, 8], [9], [8, 9, 9]):
        with pytest.raises(RolloutError, match="not the first of the 2"):
            recorded.rows(2, response, [1] * len(response))


def test_an_empty_prompt_is_refused():
    with pytest.raises(RolloutError, match="empty prompt"):
        Recorded.of([piece([8], 1)], 2).rows(0, [8], [1])


def test_a_piece_without_topk_is_refused():
    """Field case 17: no silent fall-back to the sampled token."""
    with pytest.raises(RolloutError, match="top-K missing"):
        Recorded.of([piece([8], 1), ([9], {"global_steps": 1})], 2)


def test_a_problem_of_any_piece_is_the_responses():
    with pytest.raises(RolloutError, match=r"^not today$"):
        Recorded.of([piece([8], 1), ([9], {PROBLEM: "not today"})], 2)


def test_a_topk_of_another_shape_is_refused():
    with pytest.raises(RolloutError, match=r"\(1, 2\), where \(1, 3\)"):
        Recorded.of([piece([8], 1)], 3)
    tokens, fields = piece([8], 1)
    with pytest.raises(RolloutError, match=r"\(1, 2\), where \(2, 2\)"):
        Recorded.of([([*tokens, 9], fields)], 2)


def test_blank_rows():
    expect_rows(blank_rows(3, 2), [None, None, None])
