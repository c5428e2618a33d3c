"""verl's servers with the top-K, without Ray: on vLLM itself, and on a stand-in for SGLang."""

import asyncio
import gc
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import re
import sys
import types
import warnings
from contextlib import contextmanager
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="make test-verl runs these")

from predmask.plugins.verl.payload import PROBLEM, TOP_K
from predmask.train.models import EMBEDDED
from small_models import small_model

# vLLM's engine leaves sockets to the garbage collector.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
MODEL = str(files("predmask") / "data" / "arithmetic")


@contextmanager
def their_warnings():
    """Around the code of vLLM and verl, whose warnings are theirs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# --- vLLM itself


class Settings(dict):
    """A configuration that is read by attribute and by `get`."""

    __getattr__ = dict.__getitem__


def served(kind, **attributes):
    """A server that was not launched: what `generate` reads of it, and no Ray."""
    server = kind.__new__(kind)
    settings = {
        "max_model_len": 128,
        "prompt_length": 32,
        "response_length": 24,
        "full_determinism": False,
        "enable_rollout_routing_replay": False,
        "mtp": None,
    }
    state = {
        "config": Settings(settings),
        "model_config": SimpleNamespace(processor=None, lora_rank=0, lora={}),
        "replica_rank": 0,
        "node_rank": 0,
        "global_steps": 7,
        "_disaggregation_role": "null",
        "_pd_decode_peers": [],
        "_submission_paused": False,
        "_rejecting": False,
        "_admitting": 0,
    }
    for name, value in (state | attributes).items():
        setattr(server, name, value)
    return server


def params(logprobs, **more):
    return {"temperature": 0.8, "top_p": 1.0, "top_k": -1, "logprobs": logprobs, "max_tokens": 24} | more


ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_HOST_IP": "127.0.0.1",
    "GLOO_SOCKET_IFNAME": "lo",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TORCHDYNAMO_DISABLE": "1",
}


@pytest.fixture(scope="module")
def vllm_server(tmp_path_factory):
    """(a function that runs coroutines, a `TopKServer` over a real engine); of verl, only Ray is missing."""
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("needs vLLM")
    with pytest.MonkeyPatch.context() as patch, their_warnings():
        for name, value in ENVIRONMENT.items():
            patch.setenv(name, value)
        if not list(importlib.metadata.distributions(name="vllm")):
            # verl asks for a distribution of this name, and the build for CPUs has another.
            version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
            info = tmp_path_factory.mktemp("distributions") / f"vllm-{version}.dist-info"
            info.mkdir()
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
            patch.syspath_prepend(str(info.parent))
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        from predmask.plugins.verl.vllm import TopKServer

        arguments = AsyncEngineArgs(
            model=MODEL,
            dtype="float32",
            enforce_eager=True,
            logprobs_mode="processed_logprobs",
            max_model_len=128,
            kv_cache_memory_bytes=int(2e8),
            gpu_memory_utilization=0.01,
            generation_config="vllm",
            disable_log_stats=True,
        )
        with asyncio.Runner() as runner:

            async def start():
                server = served(TopKServer, engine=AsyncLLM.from_engine_args(arguments))
                server._resume_event = asyncio.Event()
                server._resume_event.set()
                return server

            server = runner.run(start())
            try:
                yield runner.run, server
            finally:
                server.engine.shutdown()
                del server._engine
                gc.collect()  # here, and not within another test or at exit


PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 5]] * 4


def dense(prompt, tokens, temperature=0.8):
    """[T, V] log-probs of a forward pass by transformers."""
    with torch.no_grad():
        logits = small_model(EMBEDDED)(torch.tensor([prompt + tokens])).logits[0].float()
    return torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)


def test_vllm_returns_the_topk_of_what_it_samples_from(vllm_server):
    """Requests of all kinds at once; field case 10: the sampled token is another one than the likeliest, at times."""
    run, server = vllm_server
    kinds = [8, True, False, 5]

    async def ask():
        asked = enumerate(PROMPTS)
        requests = [server.generate(list(p), params(kinds[i % 4], seed=i), f"mixed{i}", priority=0) for i, p in asked]
        return await asyncio.gather(*requests)

    outputs = run(ask())
    surprises = 0
    for i, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        kind, fields = kinds[i % 4], output.extra_fields
        assert len(output.token_ids) == 24
        if kind is False:
            assert output.log_probs is None
        else:
            expected = dense(prompt, output.token_ids)
            sampled = expected.gather(1, torch.tensor(output.token_ids)[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(output.log_probs), sampled, atol=1e-4, rtol=0)
        if isinstance(kind, bool):
            assert fields.keys() == {"global_steps", "num_cached_tokens"}
        else:
            assert fields.keys() == {"global_steps", "num_cached_tokens", TOP_K}
            ids, logp = torch.from_numpy(fields[TOP_K]["ids"]).long(), torch.from_numpy(fields[TOP_K]["logp"])
            assert logp.shape == (24, kind)
            torch.testing.assert_close(logp, expected.topk(kind).values, atol=1e-4, rtol=0)
            torch.testing.assert_close(logp, expected.gather(1, ids), atol=1e-4, rtol=0)
            surprises += int((ids[:, 0] != torch.tensor(output.token_ids)).sum())
    assert surprises > 5


def test_vllm_samples_the_same_tokens_with_and_without_topk(vllm_server):
    run, server = vllm_server
    for stop in ([], ["="]):
        plain = run(server.generate([5, 6, 7], params(True, seed=3, stop=stop), f"plain{stop}"))
        asked = run(server.generate([5, 6, 7], params(8, seed=3, stop=stop), f"asked{stop}"))
        assert (asked.token_ids, asked.log_probs) == (plain.token_ids, plain.log_probs)
        assert asked.stop_reason == "completed"
        assert asked.extra_fields[TOP_K]["ids"].shape == (len(plain.token_ids), 8)


def test_a_request_of_vllm_after_one_for_the_topk_is_verls(vllm_server):
    run, server = vllm_server

    async def one_after_the_other():
        return [await server.generate([5], params(kind), f"then {kind}") for kind in (8, False)]

    asked, plain = run(one_after_the_other())
    assert TOP_K in asked.extra_fields
    assert plain.log_probs is None


def test_vllms_cap_is_named(vllm_server):
    """Field case 12: the request is served, and the actor raises the problem."""
    run, server = vllm_server
    given = params(21)
    output = run(server.generate([5], given, "cap"))
    assert len(output.log_probs) == len(output.token_ids) == 24
    assert TOP_K not in output.extra_fields
    assert (
        "max_logprobs=20; set ++actor_rollout_ref.rollout.engine_kwargs.vllm.max_logprobs=21"
        in (output.extra_fields[PROBLEM])
    )
    assert given == params(21)


def test_vllms_aborted_requests_keep_what_they_have(vllm_server):
    """As before new weights: requests under way end early, one that comes meanwhile waits, another is rejected."""
    run, server = vllm_server

    async def abort():
        long = params(4, max_tokens=120, ignore_eos=True)
        under_way = [asyncio.create_task(server.generate([5, 6, i], dict(long), f"abort{i}")) for i in range(4)]
        states = server.engine.output_processor.request_states
        while len(states) < 4 or sum(len(state.detokenizer.output_token_ids) for state in states.values()) <= 4:
            await asyncio.sleep(0.001)
        server._submission_paused = True
        server._resume_event.clear()
        await server.engine.pause_generation()
        late = asyncio.create_task(server.generate([5], params(4), "late"))
        ended = await asyncio.gather(*under_way)
        assert not late.done()
        await server.resume_generation()
        in_time = await late
        server._submission_paused = server._rejecting = True
        rejected = await server.generate([5], params(4), "rejected")
        await server.resume_generation()
        return ended, in_time, rejected

    ended, late, rejected = run(abort())
    for i, output in enumerate(ended):
        count = len(output.token_ids)
        assert (output.stop_reason, count < 120) == ("aborted", True)
        logp = torch.from_numpy(output.extra_fields[TOP_K]["logp"])
        expected = dense([5, 6, i], output.token_ids).topk(4).values if count else torch.empty(0, 4)
        torch.testing.assert_close(logp, expected, atol=1e-4, rtol=0)
    assert sum(len(output.token_ids) for output in ended) > 4
    assert late.extra_fields[TOP_K]["ids"].shape == (24, 4)
    assert (rejected.stop_reason, rejected.token_ids) == ("aborted", [])
    assert rejected.extra_fields[TOP_K]["ids"].shape == (0, 4)


def test_a_cancelled_request_leaves_vllm(vllm_server):
    run, server = vllm_server

    async def cancel():
        request = asyncio.create_task(server.generate([5], params(4, max_tokens=120, ignore_eos=True), "cancelled"))
        unfinished = server.engine.output_processor.get_num_unfinished_requests
        while not unfinished():
            await asyncio.sleep(0.001)
        assert not request.done()
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        return unfinished()

    assert run(cancel()) == 0


def test_verl_is_handed_the_sampled_tokens_alone(vllm_server, monkeypatch):
    """Its own loop over vLLM's records would build an object for each entry, and stop all requests meanwhile."""
    run, server = vllm_server
    from vllm.logprobs import FlatLogprobs

    monkeypatch.setattr(FlatLogprobs, "__getitem__", lambda *_: pytest.fail("built"))
    output = run(server.generate([5, 6, 7], params(8), "cheap"))
    assert len(output.log_probs) == len(output.token_ids) == 24
    assert output.extra_fields[TOP_K]["ids"].shape == (24, 8)


@contextmanager
def without(server, *names):
    """vLLM as a version whose sampling parameters lack these."""
    from verl.workers.rollout.vllm_rollout import vllm_async_server

    class Older:
        def __init__(self, **values):
            vars(self)["theirs"] = kind(**values)

        def __getattr__(self, name):
            if name in names:
                raise AttributeError(name)
            return getattr(self.theirs, name)

        def __setattr__(self, name, value):
            if name in names:
                raise AttributeError(name)
            setattr(self.theirs, name, value)

    def generate(*, sampling_params, **arguments):
        return engine.generate(sampling_params=sampling_params.theirs, **arguments)

    kind, engine = vllm_async_server.SamplingParams, server.engine
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_async_server, "SamplingParams", Older)
        patch.setattr(server, "engine", SimpleNamespace(model_config=engine.model_config, generate=generate))
        yield


def test_a_vllm_without_flat_records_is_read_as_well(vllm_server):
    run, server = vllm_server
    flat = run(server.generate([5, 6, 7], params(8, seed=3), "flat"))
    with without(server, "flat_logprobs"):
        mappings = run(server.generate([5, 6, 7], params(8, seed=3), "mappings"))
    assert (mappings.token_ids, mappings.log_probs) == (flat.token_ids, flat.log_probs)
    for name in ("ids", "logp"):
        np.testing.assert_array_equal(mappings.extra_fields[TOP_K][name], flat.extra_fields[TOP_K][name])


def test_a_vllm_that_cannot_be_asked_is_a_problem(vllm_server):
    """verl would drop the group without a word."""
    run, server = vllm_server
    with without(server, "detokenize"):
        output = run(server.generate([5, 6, 7], params(8), "strange"))
    assert len(output.log_probs) == len(output.token_ids) == 24
    assert output.extra_fields[PROBLEM] == "AttributeError: detokenize"
    assert TOP_K not in output.extra_fields
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(server, "engine", SimpleNamespace(generate=server.engine.generate))
        output = run(server.generate([5, 6, 7], params(8), "no configuration"))
    assert len(output.log_probs) == 24
    assert "AttributeError" in output.extra_fields[PROBLEM]
    assert "model_config" in output.extra_fields[PROBLEM]


def test_vllms_replica_starts_this_server(vllm_server):
    from predmask.plugins.verl import vllm

    replica = vllm.TopKReplica.__new__(vllm.TopKReplica)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm.vLLMReplica, "__init__", lambda self, *arguments, **more: None)
        replica.__init__(0, None, None)
    assert replica.server_class.__ray_metadata__.modified_class.__mro__[1] is vllm.TopKServer


# --- SGLang, of which everything is a stand-in but verl's server


class Anything(types.ModuleType):
    """A module that has whatever it is asked for."""

    __path__ = ()

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (SimpleNamespace,), {})


class StandIns(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `sglang` and all that is below it."""

    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name.split(".")[0] == "sglang" else None

    def create_module(self, spec):
        return Anything(spec.name)

    def exec_module(self, module):
        pass


class Manager:
    """SGLang's tokenizer manager: answers with as much as was asked for, after a moment."""

    def __init__(self):
        self.requests = {}
        self.server_status = "down"

    async def generate_request(self, request, http_request):
        self.requests[request.rid] = request
        await asyncio.sleep(0)
        count = getattr(request, "top_logprobs_num", 0)
        aborted = request.rid.startswith("abort")
        tokens = [] if request.rid == "abort at once" else [8, 9]
        meta = {"prompt_tokens": len(request.input_ids), "finish_reason": {"type": "abort" if aborted else "length"}}
        if request.return_logprob:
            meta["output_token_logprobs"] = [(-9.0, token, None) for token in tokens]
            meta["output_top_logprobs"] = [[(-1.0 - j, token + j + 1, None) for j in range(count)] for token in tokens]
        if request.rid == "short":
            meta["output_top_logprobs"][1].pop()
        yield {"output_ids": tokens} if request.rid == "bare" else {"output_ids": tokens, "meta_info": meta}


@pytest.fixture
def sglang_server(monkeypatch):
    """(a function that runs coroutines, a `TopKServer`, its manager)"""
    before = set(sys.modules)
    monkeypatch.setattr(sys, "meta_path", [StandIns(), *sys.meta_path])
    with their_warnings():
        from predmask.plugins.verl.sglang import TopKServer

    manager = Manager()
    server = served(TopKServer, tokenizer_manager=manager)
    yield asyncio.run, server, manager
    for name in set(sys.modules) - before:
        if "sglang" in name:
            del sys.modules[name]


def test_sglang_returns_the_topk(sglang_server):
    run, server, manager = sglang_server

    async def ask():
        names = {"four": 4, "plain": True, "none": False, "two": 2, "abort": 2, "abort at once": 2}
        requests = [server.generate([1, 2, 3], params(kind), name) for name, kind in names.items()]
        return dict(zip(names, await asyncio.gather(*requests), strict=True))

    outputs = run(ask())
    for name, count in (("four", 4), ("two", 2), ("abort", 2)):
        found = outputs[name].extra_fields[TOP_K]
        assert (outputs[name].token_ids, outputs[name].log_probs) == ([8, 9], [-9.0, -9.0])
        np.testing.assert_array_equal(found["ids"], np.array([[8], [9]]) + np.arange(1, count + 1))
        np.testing.assert_array_equal(found["logp"], -np.arange(1.0, count + 1) * np.ones((2, 1)))
        assert manager.requests[name].return_logprob is True
    assert outputs["plain"].log_probs == [-9.0, -9.0]
    assert outputs["none"].log_probs is None
    for name in ("plain", "none"):
        assert outputs[name].extra_fields == {"global_steps": 7}
        assert not hasattr(manager.requests[name], "top_logprobs_num")
    assert outputs["abort"].stop_reason == outputs["abort at once"].stop_reason == "abort"
    assert outputs["abort at once"].extra_fields[TOP_K]["ids"].shape == (0, 2)


def test_a_request_of_sglang_after_one_for_the_topk_is_verls(sglang_server):
    run, server, manager = sglang_server

    async def one_after_the_other():
        return [await server.generate([1], params(kind), f"then {kind}") for kind in (2, True)]

    run(one_after_the_other())
    assert manager.requests["then 2"].top_logprobs_num == 2
    assert not hasattr(manager.requests["then True"], "top_logprobs_num")


def test_sglangs_faulty_records_are_a_problem(sglang_server):
    run, server, _ = sglang_server
    output = run(server.generate([1], params(3), "short"))
    assert output.token_ids == [8, 9]
    assert "2 of the likeliest ids at token 1, not 3" in output.extra_fields[PROBLEM]


def test_an_answer_of_sglang_without_records_is_a_problem(sglang_server):
    run, server, _ = sglang_server
    assert run(server.generate([1], params(3), "bare")).extra_fields[PROBLEM] == "KeyError: 'meta_info'"


@pytest.mark.parametrize(
    ("value", "temperature", "fine"),
    [("1", 0.8, False), ("True", 0.8, False), ("yes", 1.2, False), ("0", 0.8, True), ("1", 1.0, True)],
)
def test_sglangs_log_probs_before_the_temperature_are_a_problem(sglang_server, monkeypatch, value, temperature, fine):
    run, server, manager = sglang_server
    monkeypatch.setenv("SGLANG_RETURN_ORIGINAL_LOGPROB", value)
    fields = run(server.generate([1], params(3, temperature=temperature), "original")).extra_fields
    assert (TOP_K in fields) is fine
    if not fine:
        said = rf"SGLANG_RETURN_ORIGINAL_LOGPROB={value} .* sampled at {temperature}; unset it .*rollout.temperature=1"
        assert re.search(said, fields[PROBLEM])
        assert not hasattr(manager.requests["original"], "top_logprobs_num")


def test_sglangs_manager_is_verls_outside_a_request(sglang_server):
    """verl sets its status, and hands it to the HTTP server."""
    _, server, manager = sglang_server
    assert server.tokenizer_manager is manager
    del server._engine
    assert getattr(server, "tokenizer_manager", None) is None
