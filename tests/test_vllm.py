"""vLLM's answers become rollouts, or are refused: on answers that scripts/record_vllm.py recorded."""

import copy
import json
import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from predmask.rollout import ENGINES, RolloutError, VLLMConfig, rollout_from_entries
from predmask.rollout.numerics import MISMATCH_TOLERANCES
from predmask.rollout.vllm import rollout_from_vllm
from small_models import VOCABULARY, dense_logp, small_model

RECORDS = json.loads((Path(__file__).parent / "data" / "vllm_outputs.json").read_text(encoding="utf-8"))
PROMPTS = RECORDS["prompts"]
NAN, INF = math.nan, math.inf


def answer(prompt, tokens, entries, *, finish_reason="stop"):
    """A `RequestOutput`, of the parts that are read; `entries` are (id, log-prob) pairs at each position, or None."""
    logprobs = None
    if entries is not None:
        ends = [sum(map(len, entries[: index + 1])) for index in range(len(entries))]
        logprobs = {
            "start_indices": [end - len(row) for end, row in zip(ends, entries, strict=True)],
            "end_indices": ends,
            "token_ids": [token for row in entries for token, _ in row],
            "logprobs": [logp for row in entries for _, logp in row],
        }
    recorded = {"prompt_token_ids": prompt, "token_ids": tokens, "finish_reason": finish_reason, "logprobs": logprobs}
    return as_output(recorded)


def as_output(recorded):
    """A recorded answer with the attributes of vLLM's classes."""
    logprobs = recorded["logprobs"]
    response = SimpleNamespace(
        token_ids=recorded["token_ids"],
        finish_reason=recorded["finish_reason"],
        logprobs=None if logprobs is None else SimpleNamespace(**logprobs),
    )
    return SimpleNamespace(prompt_token_ids=recorded["prompt_token_ids"], outputs=[response])


def outputs(case):
    return [as_output(recorded) for recorded in copy.deepcopy(RECORDS["cases"][case]["answers"])]


def recorded(case, columns, top_k):
    return rollout_from_vllm(PROMPTS, outputs(case), columns=columns, top_k=top_k)


# --- Recorded answers


@pytest.mark.parametrize(("case", "columns"), [("sampled only", 0), ("top 5", 5)])
@pytest.mark.parametrize("top_k", [0, 2, 5])
def test_recorded_answers(case, columns, top_k):
    if top_k > columns:
        pytest.skip("not recorded")
    rollout = recorded(case, columns, top_k).check(top_k=top_k, vocabulary_size=VOCABULARY)
    answers = RECORDS["cases"][case]["answers"]
    assert rollout.prompts == tuple(map(tuple, PROMPTS))
    assert rollout.responses() == [said["token_ids"] for said in answers]
    assert rollout.finished.tolist() == [True, True, True, False]
    assert rollout.sampled.all()
    assert (rollout.version.tolist(), rollout.full_logp) == ([0] * len(rollout.tokens), None)
    assert rollout.logp.dtype == rollout.topk_logp.dtype == torch.float32
    assert rollout.topk_ids.dtype == torch.int64
    row = 0
    for said in answers:
        found = said["logprobs"]
        for token, start in zip(said["token_ids"], found["start_indices"], strict=True):
            likeliest = slice(start + 1, start + 1 + top_k)
            assert found["token_ids"][start] == token
            assert rollout.logp[row].item() == pytest.approx(found["logprobs"][start], abs=1e-6)
            assert rollout.topk_ids[row].tolist() == found["token_ids"][likeliest]
            assert rollout.topk_logp[row].tolist() == pytest.approx(found["logprobs"][likeliest], abs=1e-6)
            row += 1
    assert row == len(rollout.tokens)


@pytest.mark.parametrize(("case", "columns"), [("sampled only", 0), ("top 5", 5)])
def test_recorded_log_probs_are_those_of_the_temperature(case, columns):
    """What vLLM was asked for (processed log-probs) is what it gave: those of the model's logits / temperature."""
    rollout = recorded(case, columns, columns)
    model, temperature = small_model(RECORDS["model"]), RECORDS["cases"][case]["settings"]["temperature"]
    pairs = zip(rollout.prompts, rollout.responses(), strict=True)
    dense = torch.cat([dense_logp(model, prompt, response, temperature) for prompt, response in pairs])
    for ids, found in ((rollout.tokens[:, None], rollout.logp[:, None]), (rollout.topk_ids, rollout.topk_logp)):
        torch.testing.assert_close(found.double(), dense.gather(1, ids), atol=1e-4, rtol=0)


def test_what_is_recorded_changes_no_draw():
    assert recorded("sampled only", 0, 0).responses() == recorded("top 5", 5, 5).responses()


def test_recorded_greedy_answers():
    rollout = recorded("greedy", None, 0).check(top_k=0, vocabulary_size=VOCABULARY)
    assert rollout.responses() == [[15, 3], [2, 13, 2, 2, 2, 2], [3], [2, 13, 2, 2, 2, 2]]
    assert rollout.logp.tolist() == [0.0] * 15
    assert rollout.topk_logp.shape == (15, 0)
    assert rollout.finished.tolist() == [True, False, True, False]


def test_truncated_sampling_is_refused():
    """Field case 9: its -inf padding, on ids that nobody ranked, is named for what it is."""
    rollout = recorded("truncated", 5, 5)
    assert torch.isinf(rollout.topk_logp).any()
    with pytest.raises(RolloutError, match=r"top-K log-probs are finite.*truncate its sampling.*top_p, top_k, min_p"):
        rollout.check(top_k=5, vocabulary_size=VOCABULARY)


def test_the_cap_of_log_probs_is_refused():
    """Field case 12: 50 asked for, 20 finite."""
    row = [(7, -1.0), *((i, -1.0 - i) for i in range(20)), *((i, -INF) for i in range(20, 50))]
    rollout = rollout_from_vllm([[1]], [answer([1], [7], [row])], columns=50, top_k=50)
    with pytest.raises(RolloutError, match=r"20 of 50 top-K log-probs are finite; .*cap its log-probs at 20.*max_logp"):
        rollout.check(top_k=50, vocabulary_size=64)


@pytest.mark.parametrize("reverse", [False, True])
def test_answers_as_dictionaries(reverse):
    """The structure without `flat_logprobs`: K + 1 entries, or K where the sampled id is among the likeliest."""
    answers = RECORDS["cases"]["top 5 as dictionaries"]["answers"]
    entries = [[{int(i): logp for i, (logp, _) in row.items()} for row in said["logprobs"]] for said in answers]
    assert {len(row) for rows in entries for row in rows} == {5, 6}
    if reverse:  # found by id, wherever it stands
        entries = [[dict(reversed(row.items())) for row in rows] for rows in entries]
    responses = [said["token_ids"] for said in answers]
    finished = [said["finish_reason"] == "stop" for said in answers]
    found = rollout_from_entries(PROMPTS, responses, entries, top_k=5, finished=finished)
    assert_same(found.check(top_k=5, vocabulary_size=VOCABULARY), recorded("top 5", 5, 5))
    only = RECORDS["cases"]["sampled only as dictionaries"]["answers"]
    entries = [[{int(i): logp for i, (logp, _) in row.items()} for row in said["logprobs"]] for said in only]
    assert_same(
        rollout_from_entries(PROMPTS, responses, entries, top_k=0, finished=finished), recorded("sampled only", 0, 0)
    )


def assert_same(found, expected):
    for name in ("prompts", "lengths", "tokens", "logp", "topk_ids", "topk_logp", "sampled", "version", "finished"):
        one, other = getattr(found, name), getattr(expected, name)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


# --- By hand


def by_hand(**changes):
    """Two responses of 2 and 1 tokens; K = 2; the sampled id is the first, none and the second of the likeliest."""
    first = [[(4, -0.3), (4, -0.3), (6, -1.5)], [(9, -2.5), (6, -0.2), (4, -1.9)]]
    answers = [answer([1, 2], [4, 9], first), answer([3], [5], [[(5, -1.2), (0, -0.5), (5, -1.2)]])]
    return rollout_from_vllm(**{"prompts": [[1, 2], [3]], "outputs": answers, "columns": 2, "top_k": 2} | changes)


def test_values_by_hand():
    rollout = by_hand()
    assert (rollout.lengths.tolist(), rollout.tokens.tolist()) == ([2, 1], [4, 9, 5])
    assert rollout.logp.tolist() == pytest.approx([-0.3, -2.5, -1.2])
    assert rollout.topk_ids.tolist() == [[4, 6], [6, 4], [0, 5]]
    torch.testing.assert_close(rollout.topk_logp, torch.tensor([[-0.3, -1.5], [-0.2, -1.9], [-0.5, -1.2]]))
    assert rollout.check(top_k=2, vocabulary_size=10) is rollout
    assert by_hand(top_k=1).topk_ids.tolist() == [[4], [6], [0]]
    assert by_hand(top_k=0).topk_ids.shape == (3, 0)


def test_the_whole_vocabulary_by_hand():
    rows = [[(1, -0.5), (2, -0.1), (1, -0.5), (0, -7.0)], [(0, -7.5), (1, -0.2), (2, -0.4), (0, -7.5)]]
    rollout = rollout_from_vllm([[1]], [answer([1], [1, 0], rows)], columns=3, top_k=1, full=True)
    torch.testing.assert_close(rollout.full_logp, torch.tensor([[-7.0, -0.5, -0.1], [-7.5, -0.2, -0.4]]))
    assert rollout.topk_ids.tolist() == [[2], [1]]
    torch.testing.assert_close(rollout.logp, torch.tensor([-0.5, -7.5]))


@given(st.data())
def test_any_answers(data):
    """Ragged responses of any K, with the sampled id anywhere: entry by entry what was returned."""
    columns = data.draw(st.integers(0, 4))
    top_k = data.draw(st.integers(0, columns))
    entries = st.tuples(st.integers(0, 99), st.floats(-30, 0, width=32))
    rows = st.lists(st.lists(entries, min_size=columns + 1, max_size=columns + 1), max_size=4)
    responses = data.draw(st.lists(rows, min_size=1, max_size=3))
    prompts = [[index] for index in range(len(responses))]
    answers = [
        answer(prompt, [row[0][0] for row in response], response)
        for prompt, response in zip(prompts, responses, strict=True)
    ]
    rollout = rollout_from_vllm(prompts, answers, columns=columns, top_k=top_k)
    flat = [row for response in responses for row in response]
    assert rollout.lengths.tolist() == list(map(len, responses))
    assert rollout.tokens.tolist() == [row[0][0] for row in flat]
    assert rollout.logp.tolist() == [row[0][1] for row in flat]
    assert rollout.topk_ids.shape == (len(flat), top_k)
    assert rollout.topk_ids.tolist() == [[token for token, _ in row[1 : top_k + 1]] for row in flat]
    assert rollout.topk_logp.tolist() == [[logp for _, logp in row[1 : top_k + 1]] for row in flat]


# --- Unknown log-probs


@pytest.mark.parametrize("unknown", [None, NAN])
def test_an_unknown_log_prob_is_not_probability_one(unknown):
    """Field case 11."""
    first = [[(4, -0.3), (4, -0.3)], [(9, unknown), (6, -0.2)]]
    rollout = rollout_from_vllm([[1]], [answer([1], [4, 9], first)], columns=1, top_k=1)
    assert rollout.logp[0].item() == pytest.approx(-0.3)
    assert math.isnan(rollout.logp[1])
    rollout.check(top_k=1, vocabulary_size=10)  # it is counted, and left out of the loss


@pytest.mark.parametrize("unknown", [None, NAN])
def test_an_unknown_entry_among_the_likeliest_is_refused(unknown):
    rollout = rollout_from_vllm([[1]], [answer([1], [4], [[(4, -0.3), (4, -0.3), (6, unknown)]])], columns=2, top_k=2)
    with pytest.raises(RolloutError, match="1 of 2 top-K log-probs are finite"):
        rollout.check(top_k=2, vocabulary_size=10)


# --- What is refused


ROW = [(4, -0.3), (4, -0.3), (6, -1.5)]
GOOD = answer([3], [4], [ROW])


@pytest.mark.parametrize(
    ("found", "match"),
    [
        ([], "0 answers to 1 prompts"),
        ([GOOD, GOOD], "2 answers to 1 prompts"),
        ([answer([3, 3], [4], [ROW])], "another prompt than it was given, or in another order"),
        ([answer(None, [4], [ROW])], "another prompt"),
        ([SimpleNamespace(prompt_token_ids=[3], outputs=[])], "0 responses to a prompt, where 1"),
        ([SimpleNamespace(prompt_token_ids=[3], outputs=GOOD.outputs * 2)], "2 responses to a prompt, where 1"),
        ([answer([3], [4], None)], "without log-probs"),
        ([answer([3], [4, 4], [ROW])], "2 tokens, but log-probs of 1"),
        ([answer([3], [4], [ROW, ROW])], "1 tokens, but log-probs of 2"),
        ([answer([3], [], [ROW])], "0 tokens, but log-probs of 1"),
        ([answer([3], [4], [ROW[:2]])], "1 of the likeliest ids where 2 were asked for; is its max_logprobs lower"),
        ([answer([3], [4, 4], [ROW, ROW[:1]])], "0 of the likeliest ids where 2"),
        ([answer([3], [4, 4], [ROW, [*ROW, (7, -9.0)]])], "3 of the likeliest ids where 2"),
        ([answer([3], [4, 4], [ROW[:2], [*ROW, (7, -9.0)]])], "1 of the likeliest ids where 2"),  # six in all
        ([answer([3], [5], [ROW])], "sampled id 5 at token 0, but the log-prob it returned there is that of id 4"),
        ([answer([3], [4, 6], [ROW, ROW])], "sampled id 6 at token 1, .* that of id 4"),
        ([answer([3], [4], [ROW], finish_reason="abort")], "ended a response with 'abort'"),
        ([answer([3], [4], [ROW], finish_reason="error")], "ended a response with 'error'"),
        ([answer([3], [4], [ROW], finish_reason=None)], "ended a response with None"),
    ],
)
def test_answers_that_are_refused(found, match):
    with pytest.raises(RolloutError, match=match):
        rollout_from_vllm([[3]], found, columns=2, top_k=2)


def test_answers_in_another_order_are_refused():
    with pytest.raises(RolloutError, match="another order"):
        rollout_from_vllm(PROMPTS, outputs("top 5")[::-1], columns=5, top_k=5)


def test_log_probs_of_one_position_early_are_refused():
    """Field case 22, as far as ids tell."""
    shifted = outputs("top 5")
    for output in shifted:
        found = output.outputs[0].logprobs
        found.token_ids = found.token_ids[6:] + found.token_ids[:6]
    with pytest.raises(RolloutError, match="sampled id"):
        rollout_from_vllm(PROMPTS, shifted, columns=5, top_k=5)


# --- The configuration


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"quantization": "fp8_per_channel", "dtype": "float32"}, r"engine\.quantization is fp8_per_channel.*bfloat16"),
        ({"kv_cache_gb": 0}, r"engine\.kv_cache_gb is 0; it must be above 0"),
        ({"kv_cache_gb": -1.0}, r"engine\.kv_cache_gb is -1\.0"),
        ({"kv_cache_gb": NAN}, r"engine\.kv_cache_gb is nan"),
        ({"kv_cache_gb": INF}, r"engine\.kv_cache_gb is inf"),
        ({"batch_size": 0}, r"engine\.batch_size is 0; it must be 1 or more"),
        ({"max_length": 0}, r"engine\.max_length is 0; it must be 1 or more"),
    ],
)
def test_impossible_configurations(settings, match):
    with pytest.raises(ValueError, match=match):
        VLLMConfig(**settings)


@pytest.mark.parametrize(
    ("settings", "numerics", "tolerance"),
    [
        ({}, "bfloat16", "bfloat16"),
        ({"dtype": "float32"}, "float32", "float32"),
        ({"quantization": "fp8_per_channel"}, "bfloat16, fp8_per_channel", "fp8"),
        ({"kv_cache": "fp8"}, "bfloat16, fp8 cache", "fp8"),
        ({"kv_cache": "fp8", "dtype": "float32"}, "float32, fp8 cache", "fp8"),
        ({"kv_cache": "fp8", "quantization": "fp8_per_block"}, "bfloat16, fp8_per_block, fp8 cache", "fp8"),
    ],
)
def test_numerics(settings, numerics, tolerance):
    config = VLLMConfig(**settings)
    assert (config.numerics, config.mismatch_tolerance) == (numerics, MISMATCH_TOLERANCES[tolerance])


def test_configurations_are_values():
    assert ENGINES["vllm"] is VLLMConfig
    assert replace(VLLMConfig(), batch_size=3) == VLLMConfig(batch_size=3) != VLLMConfig()
    assert hash(VLLMConfig()) == hash(VLLMConfig())


def test_without_vllm(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"vllm is not installed; .*pip install 'predmask\[vllm\]'.*docs/engines\.md"):
        VLLMConfig().start(small_model("qwen3"))
