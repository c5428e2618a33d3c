"""The agent loop inside verl: what it asks of servers, and what it puts into the batch; the servers are stand-ins."""

import asyncio
import json
import warnings
from importlib.resources import files
from types import SimpleNamespace

import numpy as np
import pytest
import torch

pytest.importorskip("verl", reason="make test-verl runs these")

from omegaconf import OmegaConf
from transformers import AutoTokenizer

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl's own
    from verl.experimental.agent_loop.agent_loop import AgentLoopWorker, DictConfigWrap
    from verl.utils.dataset.rl_dataset import RLHFDataset
    from verl.workers.rollout.llm_server import FullyAsyncLLMServerClient, LLMServerClient
    from verl.workers.rollout.replica import TokenOutput

    from predmask.plugins.verl import agent_loop
    from predmask.plugins.verl.agent_loop import TopKAgentLoop
from predmask.plugins.verl.payload import PROBLEM, TOP_K

K = 3
MODEL = str(files("predmask") / "data" / "arithmetic")


class Server:
    """A rollout server that answers each request with the next of its outputs."""

    def __init__(self, *outputs):
        self._outputs = iter(outputs)
        self.requests = []
        self.generate = SimpleNamespace(remote=self._generate)

    async def _generate(self, **request):
        request["sampling_params"] = dict(request["sampling_params"])
        self.requests.append(request)
        return next(self._outputs)


def client_of(kind, server):
    """A client of verl's with this one server; load balancing is Ray's."""

    class Client(kind):
        async def _acquire_server(self, request_id, **extra):
            return "server", server

        def _release_server(self, server_id, request_id=None):
            pass

    return Client(config=CONFIG)


def said(tokens, *, version=1, stop="completed", topk=True, **fields):
    """What a server answers: at each token t, id 100 t + j + version is the j-th likeliest, with log-prob -1 - j."""
    if topk:
        ids = (100 * np.array(tokens)[:, None] + np.arange(K) + version).astype(np.int32)
        fields[TOP_K] = {"ids": ids, "logp": np.broadcast_to(-1.0 - np.arange(K, dtype=np.float32), ids.shape)}
    return TokenOutput(
        token_ids=tokens,
        log_probs=[-0.1 * token for token in tokens],
        stop_reason=stop,
        extra_fields={"global_steps": version, **fields},
    )


CONFIG = OmegaConf.create(
    {
        "actor_rollout_ref": {
            "actor": {"policy_loss": {"top_k": K}},
            "rollout": {
                "name": "vllm",
                "prompt_length": 16,
                "response_length": 6,
                "temperature": 1.0,
                "top_p": 1.0,
                "top_k": -1,
            },
        },
        "data": {},
    }
)
SAMPLING = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}


def ran(server, kind=LLMServerClient, *, config=CONFIG, sampling=SAMPLING):
    """The output of the agent loop for one prompt, as verl's workers run it."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"

    async def run():
        loop = TopKAgentLoop(
            trainer_config=DictConfigWrap(config),
            server_manager=client_of(kind, server),
            tokenizer=tokenizer,
            processor=None,
            dataset_cls=RLHFDataset,
            data_config=DictConfigWrap(config.data),
        )
        return await loop.run(sampling, raw_prompt=[{"role": "user", "content": "1 2 + 3 ="}], uid="1", session_id=0)

    return asyncio.run(run())


def rows(output):
    """What verl's conversion puts into the batch."""
    batch = output.as_dict()
    return batch["teacher_ids"], batch["teacher_logprobs"]


def expect_rows(output, versions):
    """The rows of a response whose tokens were sampled by these versions."""
    ids, logp = rows(output)
    prompt, total = len(output.prompt_ids), len(output.prompt_ids) + len(output.response_ids)
    assert prompt > 1
    expected = torch.full((total, K), -1, dtype=torch.int32)
    for place, (token, version) in enumerate(zip(output.response_ids, versions, strict=True)):
        expected[prompt - 1 + place] = 100 * token + torch.arange(K) + version
    torch.testing.assert_close(ids, expected)
    row = torch.where(expected < 0, torch.nan, -1.0 - torch.arange(K))
    torch.testing.assert_close(logp, row, equal_nan=True)


@pytest.mark.parametrize("kind", [LLMServerClient, FullyAsyncLLMServerClient])
def test_the_batch_gets_the_topk(kind):
    server = Server(said([7, 8, 9], version=2))
    output = ran(server, kind)
    assert output.response_ids == [7, 8, 9]
    assert output.response_logprobs == pytest.approx([-0.7, -0.8, -0.9])
    expect_rows(output, [2, 2, 2])
    assert server.requests[0]["sampling_params"]["logprobs"] == K
    fields = output.extra_fields
    assert [fields[f"{name}_global_steps"] for name in ("min", "max")] == [2, 2]
    assert not {name for name in fields if name.startswith("predmask")}
    batch = output.as_dict()
    assert batch["responses"].tolist() == [7, 8, 9]
    assert batch["extra_fields"] == fields


@pytest.mark.parametrize("topk", [True, False])
def test_the_reward_functions_get_no_topk(topk):
    """verl hands extra fields to the reward workers, and merges them into the functions' `extra_info`."""
    sent = []

    async def compute_score(data):
        sent.append(data)
        return {"reward_score": 0.5, "reward_extra_info": {"acc": 1}}

    worker = AgentLoopWorker.__new__(AgentLoopWorker)
    worker.reward_loop_worker_handles = [SimpleNamespace(compute_score=SimpleNamespace(remote=compute_score))]
    worker.processor, worker.mm_processor_kwargs = None, {}
    output = ran(Server(said([7, 8, 9], topk=topk)))
    asyncio.run(worker._compute_score([output], kwargs={"data_source": "here"}))
    (fields,) = sent[0].non_tensor_batch["tool_extra_fields"]
    json.dumps(fields)
    assert not {name for name in fields if name.startswith("teacher")}
    assert (PROBLEM in fields) is not topk
    # And the score reaches the batch beside the top-K.
    batch = output.as_dict()
    assert batch["rm_scores"].tolist() == [0, 0, 0.5]
    assert "teacher_ids" in batch
    if topk:
        expect_rows(output, [1, 1, 1])


def test_a_trace_of_an_output_has_no_topk():
    """verl's traces dump an output's model."""
    assert "teacher" not in str(ran(Server(said([7, 8]))).model_dump())


def test_a_response_is_cut_with_its_rows():
    output = ran(Server(said([7, 8, 9, 7, 8, 9, 7, 8])))
    assert len(output.response_ids) == 6
    expect_rows(output, [1] * 6)


@pytest.mark.parametrize("stop", ["aborted", "abort"])
def test_a_partial_rollout_is_resumed_with_its_topk_and_versions(stop, monkeypatch):
    """vLLM's and SGLang's words for it; one piece is aborted before its first token."""
    monkeypatch.setattr(agent_loop, "_PAUSE", 0.0)
    server = Server(said([7, 8], stop=stop), said([], version=2, stop=stop, topk=False), said([9, 5], version=4))
    output = ran(server, FullyAsyncLLMServerClient)
    assert output.response_ids == [7, 8, 9, 5]
    assert output.response_logprobs == pytest.approx([-0.7, -0.8, -0.9, -0.5])
    expect_rows(output, [1, 1, 4, 4])
    assert [output.extra_fields[f"{name}global_steps"] for name in ("", "min_", "max_")] == [4, 1, 4]
    prompts = [request["prompt_ids"] for request in server.requests]
    assert prompts == [output.prompt_ids, *[[*output.prompt_ids, 7, 8]] * 2]
    assert [request["sampling_params"]["max_tokens"] for request in server.requests] == [6, 4, 4]
    assert [request["sampling_params"]["logprobs"] for request in server.requests] == [K] * 3


def test_a_partial_rollout_ends_as_verls_own_does(monkeypatch):
    """The same servers, asked by verl's client alone: tokens, log-probs and versions agree."""
    monkeypatch.setattr(agent_loop, "_PAUSE", 0.0)

    def outputs():
        experts = [np.arange(count).reshape(-1, 1, 1) * sign for count, sign in ((7, 1), (11, -1))]
        parts = [said([7, 8], stop="aborted", num_cached_tokens=4), said([9, 5, 6, 7], version=3, stop="aborted")]
        for part, routed in zip(parts, experts, strict=True):
            part.routed_experts, part.num_preempted = routed, 1
        return parts

    asked = {"prompt_ids": [1, 2], "sampling_params": SAMPLING}
    original, sleep = Server(*outputs()), asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda _: sleep(0))
    theirs = asyncio.run(client_of(FullyAsyncLLMServerClient, original).generate("1", **asked))
    ours = ran(Server(*outputs()), FullyAsyncLLMServerClient)
    assert ours.response_ids == theirs.token_ids == [7, 8, 9, 5, 6, 7]
    assert ours.response_logprobs == theirs.log_probs
    np.testing.assert_array_equal(ours.routed_experts, theirs.routed_experts[: len(ours.prompt_ids) + 6])
    assert ours.metrics.num_preempted == theirs.num_preempted == 2
    assert {name: ours.extra_fields[name] for name in theirs.extra_fields} == theirs.extra_fields


def test_an_abort_in_the_synchronous_trainer_is_not_resumed():
    output = ran(Server(said([7, 8], stop="aborted")))
    assert output.response_ids == [7, 8]
    expect_rows(output, [1, 1])


@pytest.mark.parametrize(
    ("answer", "match"),
    [
        (said([7, 8], topk=False), "top-K missing"),
        (said([7, 8], topk=False, **{PROBLEM: "vLLM's cap"}), "^vLLM's cap$"),
        (said([7, 8], topk=False, **{TOP_K: {"ids": np.zeros((1, K)), "logp": np.zeros((1, K))}}), "shape"),
        (said([7, 8], topk=False, **{TOP_K: {}}), "KeyError"),
    ],
    ids=["none", "a problem", "shape", "strange"],
)
@pytest.mark.parametrize("kind", [LLMServerClient, FullyAsyncLLMServerClient])
def test_a_faulty_topk_is_reported_not_raised(answer, match, kind):
    """Field case 17; verl drops a group without a word where a loop raises."""
    output = ran(Server(answer.model_copy(deep=True)), kind)
    assert output.response_ids == [7, 8]
    with pytest.raises(RuntimeError, match=match):
        raise RuntimeError(output.as_dict()["extra_fields"][PROBLEM])
    ids, logp = rows(output)
    assert ids.shape == logp.shape == (len(output.prompt_ids) + 2, K)
    assert (ids == -1).all()
    assert logp.isnan().all()


@pytest.mark.parametrize("change", [{"temperature": 0}, {"top_p": 0.7}, {"top_k": 50}], ids=str)
def test_prompts_that_are_sampled_otherwise_need_no_topk(change):
    server = Server(said([7, 8], topk=False))
    output = ran(server, sampling=SAMPLING | change)
    assert server.requests[0]["sampling_params"]["logprobs"] is True
    assert "teacher_ids" not in output.as_dict()
    assert PROBLEM not in output.extra_fields


def test_rules_of_the_sampled_token_ask_as_verl_does():
    config = OmegaConf.merge(CONFIG, {"actor_rollout_ref": {"actor": {"policy_loss": {"top_k": 0}}}})
    server = Server(said([7, 8], topk=False))
    output = ran(server, config=config)
    assert server.requests[0]["sampling_params"]["logprobs"] is True
    assert "teacher_ids" not in output.as_dict()


def test_the_callers_parameters_are_not_changed():
    """verl gives one dictionary to all responses of a group."""
    params = dict(SAMPLING)
    ran(Server(said([7])), sampling=params)
    assert params == SAMPLING
