"""The SGLang engine, without SGLang: its adapter on records of SGLang's structure, its calls on a stand-in.

Every structure here was read from the source of sglang 0.5.21, named beside it; paths are below `sglang/srt/`.
"""

import copy
import importlib.util
import inspect
import json
import math
import os
import sys
import time
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoConfig, AutoModelForCausalLM

from predmask.rollout import RolloutError, Sampling
from predmask.rollout import sglang as adapter
from predmask.rollout.numerics import MISMATCH_TOLERANCES
from predmask.rollout.sglang import SGLangBackend, SGLangConfig, rollout_from_sglang
from predmask.rollout.weights import checkpoint_weights
from predmask.train.config import ConfigError
from predmask.train.options import resolve
from small_models import VOCABULARY, dense_rows, small_model

LOWEST = -3.4028234663852886e38
"""finfo(float32).min, in place of -inf (layers/logprob_processor.py, OutputLogprobProcessor.compute_logprobs)."""
V = 8
ENDS = {3, 5}
LOAD = "update_weights_from_tensor"

# entrypoints/engine.py, class Engine
METHODS = {
    "generate": {"input_ids", "sampling_params", "return_logprob", "logprob_start_len", "top_logprobs_num"},
    "begin_weight_update": {"selector"},
    "end_weight_update": set(),
    "update_weights_from_tensor": {"named_tensors", "load_format", "flush_cache"},
    "flush_cache": set(),
}
"""Those of a method's arguments that could be of use here."""
# arg_groups/fields/*.py, which server_args.py puts together
ENGINE_ARGUMENTS = {
    "model_path": str,
    "load_format": str,
    "dtype": str,
    "context_length": int,
    "skip_tokenizer_init": bool,
    "json_model_override_args": str,
    "mem_fraction_static": float,
    "max_running_requests": int,
    "enable_deterministic_inference": bool,
    "enable_fp32_lm_head": bool,
    "log_level": str,
}
# sampling/sampling_params.py, class SamplingParams
SAMPLING_PARAMS = {
    "max_new_tokens": int,
    "stop_token_ids": list,
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "sampling_seed": int,
}


def meta_info(prompt, finish_reason, tokens, **logprobs):
    """managers/tokenizer_manager.py, _handle_batch_output and add_logprob_to_meta_info."""
    return {
        "id": "5f0c7e6a",
        "finish_reason": finish_reason,
        "prompt_tokens": len(prompt),
        "weight_version": "default",
        "num_retractions": 0,
        **logprobs,
        "reasoning_tokens": 0,
        "completion_tokens": len(tokens),
        "cached_tokens": 0,
        "e2e_latency": 0.1,
    }


def stop(matched):
    """managers/schedule_batch.py, FINISH_MATCHED_TOKEN.to_json."""
    return {"type": "stop", "matched": matched}


def length(count):
    """managers/schedule_batch.py, FINISH_LENGTH.to_json."""
    return {"type": "length", "length": count}


def answer(prompt, tokens, rows=None, *, columns=0, finish_reason=None):
    """What `Engine.generate` returns for one prompt, with `skip_tokenizer_init`.

    `rows` are the log-probs [n, V]. A list of (log-prob, id, None) for the sampled ids, and one of the likeliest ids
    at each position, likeliest first (managers/tokenizer_manager.py, detokenize_logprob_tokens; the ids are
    `torch.topk`'s, the sampled one is not added: layers/logprob_processor.py, get_top_logprobs_raw). No log-prob is
    below `LOWEST`.
    """
    logprobs = {}
    if rows is not None:
        values = [[max(value, LOWEST) for value in row] for row in rows.tolist()]
        logprobs = {
            "input_token_logprobs": [],
            "output_token_logprobs": [(row[token], token, None) for token, row in zip(tokens, values, strict=True)],
            "output_token_logprobs_length": len(tokens),
        }
        if columns:
            order = [sorted(range(len(row)), key=lambda i, row=row: -row[i])[:columns] for row in values]
            logprobs["input_top_logprobs"] = []
            logprobs["output_top_logprobs"] = [
                [(row[i], i, None) for i in ids] for row, ids in zip(values, order, strict=True)
            ]
    if finish_reason is None:
        finish_reason = stop(tokens[-1]) if tokens and tokens[-1] in ENDS else length(len(tokens))
    return {"output_ids": list(tokens), "meta_info": meta_info(prompt, finish_reason, tokens, **logprobs)}


def rows_of(tokens, seed=0):
    return torch.randn(len(tokens), V, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


def sampling(**changes):
    return Sampling(**{"temperature": 1.0, "max_new_tokens": 3, "top_k": 2} | changes)


def adapted(prompts, outputs, **changes):
    return rollout_from_sglang(prompts, outputs, sampling=sampling(**changes), vocabulary_size=V, end_ids=ENDS)


PROMPTS = [[1, 2], [4]]
RESPONSES = [[6, 0, 7], [2, 5]]


def answers(columns=2):
    return [
        answer(prompt, tokens, rows_of(tokens, seed), columns=columns)
        for seed, (prompt, tokens) in enumerate(zip(PROMPTS, RESPONSES, strict=True))
    ]


# --- The adapter


def test_flat_arrays():
    rollout = adapted(PROMPTS, answers()).check(top_k=2, vocabulary_size=V)
    rows = torch.cat([rows_of(tokens, seed) for seed, tokens in enumerate(RESPONSES)])
    assert rollout.prompts == ((1, 2), (4,))
    assert rollout.responses() == RESPONSES
    assert rollout.finished.tolist() == [False, True]
    assert rollout.sampled.all()
    torch.testing.assert_close(rollout.logp, rows.gather(1, rollout.tokens[:, None])[:, 0], rtol=0, atol=0)
    expected = rows.topk(2)
    assert rollout.topk_ids.tolist() == expected.indices.tolist()
    torch.testing.assert_close(rollout.topk_logp, expected.values, rtol=0, atol=0)
    assert rollout.logp.dtype == rollout.topk_logp.dtype == torch.float32
    assert rollout.full_logp is None


@given(st.data())
def test_any_responses(data):
    """Ragged responses, any K from none to all, sampled ids in and outside of the top-K."""
    top_k, full = data.draw(st.integers(0, V)), data.draw(st.booleans())
    responses = data.draw(st.lists(st.lists(st.sampled_from([0, 1, 2, 4, 6, 7]), max_size=3), min_size=1, max_size=4))
    ended = [tokens + [3] * (len(tokens) < 3) for tokens in responses]
    prompts = [[1] * (index + 1) for index in range(len(ended))]
    rows = [rows_of(tokens, data.draw(st.integers(0, 99))) for tokens in ended]
    outputs = [
        answer(prompt, tokens, values, columns=V if full else top_k)
        for prompt, tokens, values in zip(prompts, ended, rows, strict=True)
    ]
    rollout = adapted(prompts, outputs, top_k=top_k, record_full=full).check(top_k=top_k, vocabulary_size=V)
    dense = torch.cat(rows)
    assert rollout.responses() == ended
    assert rollout.finished.tolist() == [tokens[-1] == 3 for tokens in ended]
    assert torch.equal(rollout.logp, dense[range(len(dense)), rollout.tokens])
    assert torch.equal(rollout.topk_logp, dense.topk(top_k).values)
    assert torch.equal(rollout.topk_logp, dense.gather(1, rollout.topk_ids))
    assert torch.equal(rollout.full_logp, dense) if full else rollout.full_logp is None


def test_greedy_tokens_were_certain():
    """Without log-probs: SGLang's, at temperature 1, would not be those of the sampled distribution."""
    outputs = [answer(prompt, tokens) for prompt, tokens in zip(PROMPTS, RESPONSES, strict=True)]
    rollout = adapted(PROMPTS, outputs, temperature=0.0, top_k=0).check(top_k=0, vocabulary_size=V)
    assert rollout.responses() == RESPONSES
    assert rollout.logp.tolist() == [0.0] * 5
    assert rollout.topk_ids.shape == (5, 0)


def test_the_lowest_float_is_minus_infinity():
    rows = rows_of([6, 0, 7])
    rows[1, 1:] = -torch.inf
    rows[1, 0] = 0.0
    whole = adapted([[1]], [answer([1], [6, 0, 7], rows, columns=V)], record_full=True)
    assert torch.equal(whole.full_logp, rows)
    with pytest.raises(RolloutError, match="token 1: 1 of 2 top-K log-probs are finite"):
        whole.check(top_k=2, vocabulary_size=V)
    impossible = adapted([[1]], [answer([1], [6, 4, 7], rows, columns=1)], top_k=1)
    with pytest.raises(RolloutError, match="log-prob -inf"):
        impossible.check(top_k=1, vocabulary_size=V)


def test_the_payload_of_a_long_batch_is_read_in_time():
    """4096 tokens with 20 entries: 256 such responses take some 2 seconds, and this fails at 10."""
    n, columns = 4096, 20
    entries = [[(-float(column + 1), column, None) for column in range(columns)] for _ in range(n)]
    meta = meta_info([1], length(n), range(n), output_token_logprobs=[(-1.0, 0, None)] * n, output_top_logprobs=entries)
    outputs = [{"output_ids": [0] * n, "meta_info": meta}] * 2
    start = time.process_time()
    asked = sampling(max_new_tokens=n, top_k=columns)
    rollout_from_sglang([[1], [1]], outputs, sampling=asked, vocabulary_size=V, end_ids=ENDS)
    assert time.process_time() - start < 10 * 2 / 256


# --- What it refuses


def change(output, **meta):
    return {**output, "meta_info": {**output["meta_info"], **meta}}


def first(**meta):
    """The records, with these in the first answer's `meta_info`."""
    one, other = answers()
    return [change(one, **meta), other]


def without(key):
    one, other = answers()
    return [{**one, "meta_info": {name: value for name, value in one["meta_info"].items() if name != key}}, other]


def sampled_list():
    return answers()[0]["meta_info"]["output_token_logprobs"]


def likeliest_lists():
    return answers()[0]["meta_info"]["output_top_logprobs"]


FAULTS = {
    "an answer is missing": (answers()[:1], "SGLang returned 1 answers to 2 prompts"),
    "another order": (answers()[::-1], "answered a prompt of 1 tokens where it was given one of 2"),
    "text without ids": (
        [{"text": "six", "meta_info": answers()[0]["meta_info"]}, answers()[1]],
        "without its ids, and text cannot be turned back",
    ),
    "no log-probs": (without("output_token_logprobs"), "meta_info has no output_token_logprobs"),
    # What SGLang returns where `top_logprobs_num` was not asked for.
    "no top-K": (without("output_top_logprobs"), "meta_info has no output_top_logprobs"),
    "too few log-probs": (first(output_token_logprobs=sampled_list()[:2]), "3 tokens, but 2 output_token_logprobs"),
    "too many log-probs": (
        first(output_token_logprobs=[*sampled_list(), (-1.0, 3, None)]),
        "3 tokens, but 4 output_token_logprobs",
    ),
    "too few top-K positions": (
        first(output_top_logprobs=likeliest_lists()[1:]),
        "3 tokens, but 2 output_top_logprobs",
    ),
    "K short": (
        first(output_top_logprobs=[*likeliest_lists()[:2], likeliest_lists()[2][:1]]),
        "returned 1 of the likeliest ids at token 2, not 2 as asked",
    ),
    "K long": (
        first(output_top_logprobs=[*likeliest_lists()[:2], [(-0.1, 0, None)] * 3]),
        "returned 3 of the likeliest ids at token 2, not 2 as asked",
    ),
    # detokenize_top_logprobs_tokens has None for a position without entries.
    "no entries at one position": (
        first(output_top_logprobs=[likeliest_lists()[0], None, likeliest_lists()[2]]),
        "returned 0 of the likeliest ids at token 1, not 2 as asked",
    ),
    # As a prompt's first entry is (managers/scheduler_components/logprob_result_processor.py).
    "None for the sampled id": (
        first(output_token_logprobs=[(None, 6, None), *sampled_list()[1:]]),
        "no log-prob of id 6 at token 0",
    ),
    "None in the top-K": (
        first(output_top_logprobs=[*likeliest_lists()[:2], [(-0.1, 0, None), (None, 4, None)]]),
        "no log-prob of id 4 at token 2",
    ),
    "another id": (
        first(output_token_logprobs=[sampled_list()[0], (-1.0, 2, None), sampled_list()[2]]),
        "sampled id 0 at token 1, but the log-prob it returned there is that of id 2",
    ),
    # managers/schedule_batch.py, FINISH_ABORT.to_json
    "aborted": (
        first(
            finish_reason={"type": "abort", "message": "KV cache pool is full", "status_code": 503, "err_type": None}
        ),
        "KV cache pool is full",
    ),
    "not finished": (first(finish_reason=None), "ended a response with None"),
    # managers/schedule_batch.py, _check_vocab_boundary_finish, which overwrites the id with an end id
    "NaN logits": (first(finish_reason=stop("NaN happened")), "NaN happened"),
    "a foreign end": (first(finish_reason=stop(7)), r"its last id is 7: neither one of the end ids \[3, 5\]"),
    "an end that is not the last": (first(finish_reason=stop(3)), "its last id is 7"),
    # managers/scheduler.py, init_req_max_new_tokens, lowers the length to what context and memory hold.
    "cut short": (
        [answer([1, 2], [6, 0], rows_of([6, 0]), columns=2), answers()[1]],
        "after 2 of 3 tokens.* raise engine.mem_fraction_static",
    ),
    "nothing": ([answer([1, 2], [], rows_of([]), columns=2), answers()[1]], "after 0 of 3 tokens"),
}


@pytest.mark.parametrize(("outputs", "match"), FAULTS.values(), ids=FAULTS)
def test_refusals(outputs, match):
    with pytest.raises(RolloutError, match=match):
        adapted(PROMPTS, outputs)


# --- The stand-in


class StandIn:
    """An `sglang.Engine` over transformers, with a prefix cache, sessions for weights, and SGLang's limits."""

    calls: list = []  # noqa: RUF012 - of all of them
    failing = None
    """The name of a call that returns failure."""

    def __init__(self, **arguments):
        self.note("Engine", arguments)
        self.deterministic = arguments["enable_deterministic_inference"]
        config = AutoConfig.from_pretrained(arguments["model_path"])
        config.update(json.loads(arguments["json_model_override_args"]))
        # configs/model_config.py, _get_hf_eos_token_id and _derive_context_length
        self.ends = {config.eos_token_id} - {None}
        longer = arguments["context_length"] > config.max_position_embeddings
        assert not longer or os.environ["SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"] == "1"
        self.context = arguments["context_length"]
        self.model = AutoModelForCausalLM.from_config(config).eval()
        self.cache = {}
        self.session = False

    @classmethod
    def note(cls, name, arguments):
        cls.calls.append((name, arguments))
        return cls.failing != name

    @torch.no_grad()
    def logits(self, ids):
        # layers/sampler.py reads the variable at its import.
        if tuple(ids) not in self.cache:
            self.cache[tuple(ids)] = self.model(input_ids=torch.tensor([ids])).logits[0, -1].float()
        return self.cache[tuple(ids)]

    def generate(
        self, *, input_ids, sampling_params, return_logprob=False, logprob_start_len=None, top_logprobs_num=None
    ):
        self.note(
            "generate",
            {
                "input_ids": input_ids,
                "sampling_params": sampling_params,
                "return_logprob": return_logprob,
                "top_logprobs_num": top_logprobs_num,
            },
        )
        columns = top_logprobs_num or 0
        return [self.one(*pair, return_logprob, columns) for pair in zip(input_ids, sampling_params, strict=True)]

    def one(self, prompt, parameters, return_logprob, columns):
        # managers/utils.py, validate_input_length; managers/scheduler.py, init_req_max_new_tokens;
        # managers/tp_worker.py, get_worker_info
        longest = self.context - 1
        if len(prompt) >= longest - 5:
            raise ValueError(f"Input length ({len(prompt)} tokens) exceeds the maximum allowed length ({longest - 5})")
        room = max(0, min(parameters["max_new_tokens"], longest - len(prompt) - 1))
        greedy = parameters["temperature"] < 1e-6
        # sampling/sampling_batch_info.py: without deterministic inference there is no seed.
        generator = torch.Generator()
        generator.manual_seed(parameters["sampling_seed"]) if self.deterministic else generator.seed()
        ends = self.ends | set(parameters["stop_token_ids"])
        tokens, rows, reason = [], [], length(room)
        for _ in range(room):
            logits = self.logits([*prompt, *tokens])
            row = (logits / (1.0 if greedy else parameters["temperature"])).log_softmax(-1)
            token = int(row.argmax()) if greedy else int(row.exp().multinomial(1, generator=generator))
            tokens.append(token)
            rows.append(logits.log_softmax(-1) if os.environ.get("SGLANG_RETURN_ORIGINAL_LOGPROB") == "1" else row)
            if token in ends:
                reason = stop(token)
                break
        found = torch.stack(rows) if return_logprob else None
        return answer(prompt, tokens, found, columns=columns, finish_reason=reason)

    # managers/scheduler_components/weight_updater.py

    def begin_weight_update(self, selector="all"):
        if not self.note("begin_weight_update", {}) or self.session:
            return False, "a weight-update session is already open; call end_weight_update() first"
        self.session = True
        return True, "Success"

    def update_weights_from_tensor(self, named_tensors, load_format=None, flush_cache=True):
        fine = self.note("update_weights_from_tensor", {"names": [name for name, _ in named_tensors]})
        if not fine or not self.session:
            return (
                False,
                "update_weights_from_tensor must run between begin_weight_update() and end_weight_update()",
            )
        parameters = dict(self.model.named_parameters())  # a tied one once
        for name, tensor in named_tensors:
            assert tensor.dtype == torch.bfloat16
            parameters[name].data.copy_(tensor)
        if flush_cache:
            self.cache.clear()
        return True, "Success"

    def end_weight_update(self):
        if not self.note("end_weight_update", {}) or not self.session:
            return False, "no weight-update session is open; call begin_weight_update() first"
        self.session = False
        return True, "Success"

    def flush_cache(self):
        # managers/io_struct.py, FlushCacheReqOutput
        if not self.note("flush_cache", {}):
            return types.SimpleNamespace(success=False, message="requests are still running")
        self.cache.clear()
        return types.SimpleNamespace(success=True, message="")


@pytest.fixture
def stand_in(monkeypatch):
    """`import sglang` finds a stand-in of its own, whose calls are noted."""
    engine = type("Engine", (StandIn,), {"calls": []})
    monkeypatch.setitem(sys.modules, "sglang", types.SimpleNamespace(Engine=engine, __version__="0.5.21"))
    monkeypatch.setenv("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1")
    return engine


@pytest.fixture
def backend(stand_in, tmp_path):
    return make_backend()


def make_backend(model=None, **changes):
    settings = {
        "config": (model or small_model("qwen3")).config.to_json_string(use_diff=False),
        "vocabulary_size": VOCABULARY,
        "tied": ["lm_head.weight"],
        "dtype": "bfloat16",
        "enable_deterministic_inference": True,
        "mem_fraction_static": 0.3,
        "context_length": 64,
        "max_running_requests": 4,
    }
    return SGLangBackend(**settings | changes)


def weights_of(model):
    return list(checkpoint_weights(model, torch.bfloat16).items())


def calls_of(engine, name):
    return [arguments for called, arguments in engine.calls if called == name]


# --- Its calls


def test_the_engine_is_started_as_sglang_names_it(stand_in, backend, tmp_path):
    (arguments,) = calls_of(stand_in, "Engine")
    assert {name: type(value) for name, value in arguments.items()} == ENGINE_ARGUMENTS
    assert (Path(arguments["model_path"]) / "config.json").is_file()
    # arg_groups/choices.py, LOAD_FORMAT_CHOICES; arg_groups/fields/model.py, dtype
    assert (arguments["load_format"], arguments["dtype"]) == ("dummy", "bfloat16")
    assert arguments["skip_tokenizer_init"]
    assert arguments["enable_fp32_lm_head"]
    assert (arguments["mem_fraction_static"], arguments["max_running_requests"]) == (0.3, 4)


def test_each_request_names_all_that_shapes_its_distribution(stand_in, backend):
    """SGLang has defaults of its own, and may have a model's."""
    asked = Sampling(temperature=0.5, max_new_tokens=3, top_k=2)
    backend.generate([[5, 9], [7]], [11, 2**62 - 1], asked, [3, 4])
    (arguments,) = calls_of(stand_in, "generate")
    assert arguments["input_ids"] == [[5, 9], [7]]
    assert (arguments["return_logprob"], arguments["top_logprobs_num"]) == (True, 2)
    one, other = arguments["sampling_params"]
    assert {name: type(value) for name, value in one.items()} == SAMPLING_PARAMS
    assert one == {
        "temperature": 0.5,
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "max_new_tokens": 3,
        "stop_token_ids": [3, 4],
        "sampling_seed": 11,
    }
    assert other == one | {"sampling_seed": 2**62 - 1}


@pytest.mark.parametrize(
    ("changes", "asked"),
    [
        ({"top_k": 0}, (True, 0)),
        ({"top_k": 5}, (True, 5)),
        ({"top_k": 5, "record_full": True}, (True, VOCABULARY)),
        ({"top_k": 0, "temperature": 0.0}, (False, 0)),
    ],
)
def test_log_probs_asked_for(stand_in, backend, changes, asked):
    backend.load(weights_of(small_model("qwen3")))
    wanted = sampling(**changes)
    rollout = backend.generate([[5, 9], [7]], [1, 2], wanted, [3])
    rollout.check(top_k=wanted.top_k, vocabulary_size=VOCABULARY)
    assert (rollout.full_logp is not None) == wanted.record_full
    (arguments,) = calls_of(stand_in, "generate")
    assert (arguments["return_logprob"], arguments["top_logprobs_num"]) == asked


@pytest.mark.parametrize("temperature", [1e-7, 9.9e-7])
def test_a_temperature_that_sglang_takes_for_greedy(temperature):
    # sampling/sampling_params.py, __post_init__: 0 <= temperature < 1e-6 becomes temperature 1, top_k 1.
    with pytest.raises(ConfigError, match=rf"temperature is {temperature:g}, but engine 'sglang' samples at 1e-06"):
        resolve({"engine": "sglang", "rollout": {"temperature": temperature}})


def test_weights_in_a_session_and_then_no_cache(stand_in, backend, monkeypatch):
    model = small_model("qwen3")
    monkeypatch.setattr(adapter, "_BUCKET_BYTES", 3000)
    weights = weights_of(model)
    backend.load(weights)
    names = [name for name, _ in stand_in.calls[1:]]
    sent = [arguments["names"] for arguments in calls_of(stand_in, LOAD)]
    assert names == [
        "begin_weight_update",
        *["update_weights_from_tensor"] * len(sent),
        "end_weight_update",
        "flush_cache",
    ]
    # models/qwen3.py: the head is the embedding, and its name is unknown.
    assert [name for part in sent for name in part] == [name for name, _ in weights if name != "lm_head.weight"]
    sizes = {name: weight.nbytes for name, weight in weights}
    parts = [sum(sizes[name] for name in part) for part in sent]
    assert len(parts) > 2
    assert all(parts)
    assert all(total <= 3000 or len(part) == 1 for part, total in zip(sent, parts, strict=True))
    # No part could have taken the next one's first weight.
    assert all(total + sizes[after[0]] > 3000 for total, after in zip(parts, sent[1:], strict=False))


def test_an_untied_head_is_sent(stand_in, tmp_path):
    model = small_model("qwen3_untied")
    backend = make_backend(model, tied=[])
    backend.load(weights_of(model))
    (arguments,) = calls_of(stand_in, LOAD)
    assert "lm_head.weight" in arguments["names"]


@pytest.mark.parametrize(
    "call", ["begin_weight_update", "update_weights_from_tensor", "end_weight_update", "flush_cache"]
)
def test_a_failure_that_sglang_returns_is_raised(stand_in, backend, call):
    stand_in.failing = call
    with pytest.raises(RolloutError, match=rf"could not take new weights: {call} said '.+'"):
        backend.load(weights_of(small_model("qwen3")))
    assert stand_in.calls[-1][0] == call


def test_an_sglang_without_sessions_is_too_old(monkeypatch, tmp_path):
    old = types.SimpleNamespace(Engine=type("Engine", (), {}), __version__="0.5.20")
    monkeypatch.setitem(sys.modules, "sglang", old)
    with pytest.raises(RolloutError, match=r"sglang 0\.5\.20 is too old for predmask, which needs 0\.5\.21"):
        make_backend()


@pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="sglang is not installed")
def test_the_installed_sglang_has_these_names():
    sglang = importlib.import_module("sglang")
    fields = importlib.import_module("sglang.srt.server_args").ServerArgs.__struct_fields__
    parameters = importlib.import_module("sglang.srt.sampling.sampling_params").SamplingParams.__struct_fields__
    assert set(fields) >= ENGINE_ARGUMENTS.keys()
    assert set(parameters) >= SAMPLING_PARAMS.keys()
    for method, names in METHODS.items():
        assert set(inspect.signature(getattr(sglang.Engine, method)).parameters) >= names


def test_the_stand_in_has_these_names():
    for method, names in METHODS.items():
        assert set(inspect.signature(getattr(StandIn, method)).parameters) - {"self"} == names


# --- Its configuration


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"mem_fraction_static": 0.0}, "engine.mem_fraction_static is 0.0"),
        ({"mem_fraction_static": 1.0}, "engine.mem_fraction_static is 1.0"),
        ({"mem_fraction_static": math.nan}, "engine.mem_fraction_static is nan"),
        ({"max_length": 0}, "engine.max_length is 0"),
        ({"batch_size": 0}, "engine.batch_size is 0"),
    ],
)
def test_options_that_cannot_be(options, match):
    with pytest.raises(ValueError, match=match):
        SGLangConfig(**options)


def test_numerics_explain_as_much_as_bfloat16_does():
    config = SGLangConfig()
    assert (config.name, config.numerics) == ("sglang", "bfloat16")
    assert config.mismatch_tolerance == MISMATCH_TOLERANCES["bfloat16"]


@pytest.mark.parametrize(
    ("options", "changes", "context"),
    [
        ({}, {}, 512),
        ({"max_length": 512}, {}, 512),
        ({"max_length": 100}, {"context_length": 106}, 100),
        ({"mem_fraction_static": 0.5}, {"mem_fraction_static": 0.5}, 512),
        ({"batch_size": 16}, {"max_running_requests": 16}, 512),
        ({"deterministic": False}, {"enable_deterministic_inference": False}, 512),
    ],
)
def test_options_reach_the_engine(monkeypatch, options, changes, context):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "sglang")
    monkeypatch.setattr(adapter, "RemoteEngine", lambda model, **given: given)
    given = SGLangConfig(**options).start(small_model("qwen3"))
    assert (
        given.pop("settings")
        == {
            "vocabulary_size": VOCABULARY,
            "tied": ["lm_head.weight"],
            "dtype": "bfloat16",
            "enable_deterministic_inference": True,
            "mem_fraction_static": 0.3,
            "context_length": 518,
            "max_running_requests": 256,
        }
        | changes
    )
    # environ.py; context_length is above the model's.
    assert given.pop("environment").items() >= {
        ("SGLANG_RETURN_ORIGINAL_LOGPROB", "0"),
        ("SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN", "1"),
    }
    backend = "predmask.rollout.sglang:SGLangBackend"
    assert given == {
        "name": "sglang",
        "backend": backend,
        "dtype": torch.bfloat16,
        "tolerance": 0.1,
        "temperatures": (1e-6, math.inf),
        "context": context,
    }


def test_a_length_above_the_context(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name == "sglang")
    with pytest.raises(ValueError, match=r"engine\.max_length is 513, but the model's context is 512"):
        SGLangConfig(max_length=513).start(small_model("qwen3"))


def test_without_sglang(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"sglang is not installed.*pip install 'predmask\[sglang\]'"):
        SGLangConfig().start(small_model("qwen3"))


# --- From end to end, with the stand-in in the engine's process

REAL_PROMPTS = [[5, 9, 12], [7], [4, 4, 8, 20, 11, 6, 9, 13, 21], [7]]
CONTEXT = 32


def rounded(model):
    """A copy whose weights went through bfloat16."""
    copied = copy.deepcopy(model)
    for parameter in copied.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return copied


def moved(model, by):
    copied = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(1)
    for parameter in copied.parameters():
        parameter.data += by * torch.randn(parameter.shape, generator=generator)
    return copied


def seeded(seed):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder in which `sglang` is the stand-in; the user has asked SGLang for log-probs before temperature."""
    directory = tmp_path_factory.mktemp("stand_in")
    (directory / "sglang.py").write_text("from test_sglang import StandIn as Engine\n\n__version__ = '0.5.21'\n")
    with pytest.MonkeyPatch.context() as patch:
        search = [str(directory), str(Path(__file__).parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(search))
        patch.syspath_prepend(directory)
        patch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", "1")
        yield


@pytest.fixture(scope="module")
def engine(place):
    # 7 is a likely token: an end by the configuration, and none by the generation settings.
    model = small_model("qwen3")
    model.config.eos_token_id = 7
    started = SGLangConfig(max_length=CONTEXT).start(model)
    yield started
    started.close()


@pytest.mark.slow
@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_log_probs_are_those_of_the_distribution_that_was_sampled_from(engine, temperature):
    model = small_model("qwen3")
    engine.update_weights(model, 3)
    asked = Sampling(temperature=temperature, max_new_tokens=12, top_k=4, record_full=True)
    rollout = engine.generate(REAL_PROMPTS, asked, seeded(0)).check(top_k=4, vocabulary_size=VOCABULARY)
    dense = dense_rows(rounded(model), rollout, temperature)
    np.testing.assert_allclose(rollout.logp, dense.gather(1, rollout.tokens[:, None])[:, 0], atol=1e-4)
    np.testing.assert_allclose(rollout.topk_logp, dense.topk(4).values, atol=1e-4)
    np.testing.assert_allclose(rollout.full_logp, dense, atol=1e-4)
    assert rollout.version.tolist() == [3] * len(rollout.tokens)
    again = engine.generate(REAL_PROMPTS, asked, seeded(0))
    assert torch.equal(again.tokens, rollout.tokens)
    assert not torch.equal(engine.generate(REAL_PROMPTS, asked, seeded(1)).tokens, rollout.tokens)
    # Equal prompts have seeds of their own.
    assert len({tuple(response) for response in engine.generate([[7]] * 8, asked, seeded(0)).responses()}) > 1


@pytest.mark.slow
def test_new_weights_are_answered_with(engine):
    """The probe after each transfer would refuse a stale cache, too."""
    model = small_model("qwen3")
    for version, by in enumerate([0.0, 0.1, 0.2], 5):
        policy = moved(model, by)
        engine.update_weights(policy, version)
        rollout = engine.generate(REAL_PROMPTS, sampling(max_new_tokens=8), seeded(0))
        dense = dense_rows(rounded(policy), rollout)
        np.testing.assert_allclose(rollout.logp, dense.gather(1, rollout.tokens[:, None])[:, 0], atol=1e-4)
        assert rollout.version.tolist() == [version] * len(rollout.tokens)


@pytest.mark.slow
def test_a_response_ends_as_the_model_says_and_may_fill_the_context(engine):
    model = small_model("qwen3", eos_token_id=[2, 3])
    model.config.eos_token_id = 7
    engine.update_weights(model, 1)
    prompts = [[5] * 4] * 64
    rollout = engine.generate(prompts, sampling(max_new_tokens=CONTEXT - 4), seeded(0))
    assert {response[-1] for response in rollout.select(rollout.finished.nonzero()[:, 0]).responses()} == {2, 3}
    assert any(7 in response for response in rollout.responses())
    assert set(rollout.lengths[~rollout.finished].tolist()) <= {CONTEXT - 4}
    one = engine.generate([[5] * (CONTEXT - 1)], sampling(max_new_tokens=1), seeded(0))
    assert one.lengths.tolist() == [1]
    with pytest.raises(RolloutError, match=f"engine takes {CONTEXT}"):
        engine.generate([[5] * CONTEXT], sampling(max_new_tokens=1), seeded(0))


@pytest.mark.slow
def test_greedy_decoding(engine):
    model = small_model("qwen3")
    engine.update_weights(model, 0)
    greedy = sampling(temperature=0.0, top_k=0, max_new_tokens=6)
    rollout = engine.generate(REAL_PROMPTS, greedy, seeded(0))
    assert torch.equal(rollout.tokens, dense_rows(rounded(model), rollout).argmax(-1))
    assert set(rollout.logp.tolist()) == {0.0}
    assert rollout.check(top_k=0, vocabulary_size=VOCABULARY).finished.tolist() == [
        response[-1] == 3 for response in rollout.responses()
    ]
