"""A rollout server for verl that samples with transformers, in the place of vLLM's, which takes longer to start.

verl imports this in each process, after the platform (VERL_USE_EXTERNAL_MODULES).
"""

import asyncio
import os

import numpy as np
import ray
import torch
from transformers import AutoModelForCausalLM
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry, TokenOutput

from predmask.plugins.verl import register as register  # before this, since it registers a server for vLLM, too
from predmask.rollout import Sampling, TransformersEngine
from verl_on_cpu import pieces

QUIET = 0.05
"""Seconds without a new request, after which those that wait become a batch."""


class Server:
    """Answers the requests that wait, batch by batch, with the weights that it was given last.

    Where `hold` is above 0, those of every so many prompts take until the next abort: they are then under way, and
    are answered as vLLM answers them, with the tokens so far (here the first half).
    """

    def __init__(self, model, response_length, seed, hold):
        self._model = AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa")
        self._engine = TransformersEngine(self._model)
        self._response_length = response_length
        self._generator = torch.Generator().manual_seed(seed)
        self._steps = None
        self._waiting = []
        self._hold = hold
        self._prompts = {}
        self._under_way = []
        self._open = asyncio.Event()
        self._open.set()

    async def generate(self, prompt_ids, sampling_params, **_):
        await self._open.wait()
        answer = asyncio.get_running_loop().create_future()
        self._waiting.append((list(prompt_ids), sampling_params, answer))
        if len(self._waiting) == 1:
            await self._quiet()
            batch, self._waiting = self._waiting, []
            try:
                self._answer(batch)
            except Exception as error:  # noqa: BLE001 - whatever it is, all that wait are told
                for _, _, waiting in batch:
                    waiting.set_exception(error)
        return await answer

    async def _quiet(self):
        seen = 0
        while len(self._waiting) > seen:
            seen = len(self._waiting)
            await asyncio.sleep(QUIET)

    def _answer(self, batch):
        if not batch:  # all were aborted meanwhile
            return
        params = batch[0][1]  # the requests of one step are alike
        asked = params["logprobs"]
        top_k = 0 if isinstance(asked, bool) else asked
        lengths = [params.get("max_tokens", self._response_length) for _, params, _ in batch]
        sampling = Sampling(temperature=params["temperature"], max_new_tokens=max(lengths), top_k=top_k)
        rollout = self._engine.generate([prompt for prompt, _, _ in batch], sampling, self._generator)
        for index, ((prompt, _, answer), length) in enumerate(zip(batch, lengths, strict=True)):
            one = rollout.select(torch.tensor([index]))
            output = TokenOutput(
                token_ids=one.tokens.tolist(),
                log_probs=one.logp.tolist() if asked else None,
                stop_reason="completed",
                extra_fields={"global_steps": self._steps},
            )
            if top_k:
                ids, logp = one.topk_ids.numpy().astype(np.int32), one.topk_logp.numpy()
                output.extra_fields["predmask_topk"] = {"ids": ids, "logp": logp}
            _cut(output, length)
            if self._takes_long(prompt) and length == self._response_length and len(output.token_ids) > 1:
                self._under_way.append((prompt, output, answer))
            else:
                self._send(prompt, output, answer)

    def _takes_long(self, prompt):
        """The number of a prompt, in the order in which they came, decides: of all its requests."""
        number = self._prompts.setdefault(tuple(prompt), len(self._prompts))
        return self._hold > 0 and number % self._hold == 0

    def _send(self, prompt, output, answer):
        pieces.write(prompt, output.token_ids, output.extra_fields["global_steps"])
        answer.set_result(output)

    async def abort_all_requests(self, **_):
        """As vLLM's: what comes from now on waits until `resume_generation`."""
        self._open.clear()
        under_way, self._under_way = self._under_way, []
        for prompt, output, answer in under_way:
            _cut(output, len(output.token_ids) // 2)
            output.stop_reason = "aborted"
            self._send(prompt, output, answer)
        waiting, self._waiting = self._waiting, []
        for _, _, answer in waiting:
            extra = {"global_steps": self._steps}
            answer.set_result(TokenOutput(token_ids=[], stop_reason="aborted", extra_fields=extra))

    async def resume_generation(self):
        self._open.set()

    async def update_weights(self, weights, global_steps):
        self._model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in weights.items()})
        self._steps = global_steps

    async def wake_up(self):
        pass

    sleep = clear_kv_cache = wake_up


def _cut(output, length):
    """Keep the first tokens of an answer."""
    output.token_ids = output.token_ids[:length]
    output.log_probs = output.log_probs and output.log_probs[:length]
    found = output.extra_fields.get("predmask_topk", {})
    output.extra_fields |= {"predmask_topk": {name: values[:length] for name, values in found.items()}} if found else {}


class TransformersReplica(RolloutReplica):
    """One server, which needs no device."""

    async def launch_servers(self):
        server = ray.remote(Server).options(name=_name(self.replica_rank), num_cpus=1)
        hold = self.config.engine_kwargs.get("transformers", {}).get("hold", 0)
        self._server_handle = server.remote(
            self.model_config.path, self.config.response_length, self.replica_rank, hold
        )
        self._server_address = _name(self.replica_rank)
        self.servers = [self._server_handle]


class Adapter(BaseRollout):
    """The trainer's side of a server: the first worker of each replica sends the weights."""

    async def update_weights(self, weights, global_steps=None, **_):
        arrays = {name: weight.detach().numpy() for name, weight in weights}  # every worker takes part in gathering
        workers = self.config.tensor_model_parallel_size
        replica, place = divmod(int(os.environ["RANK"]), workers)
        if place == 0:
            await ray.get_actor(_name(replica)).update_weights.remote(arrays, global_steps)

    async def resume(self, tags):
        pass

    async def release(self):
        pass


def _name(replica_rank):
    return f"transformers_server_{replica_rank}"


RolloutReplicaRegistry.register("vllm", lambda: TransformersReplica)
_ROLLOUT_REGISTRY["vllm", "async"] = f"{__name__}.{Adapter.__name__}"
