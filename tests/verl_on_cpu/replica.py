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

QUIET = 0.05
"""Seconds without a new request, after which those that wait become a batch."""


class Server:
    """Answers the requests that wait, batch by batch, with the weights that it was given last."""

    def __init__(self, model, response_length, seed):
        self._model = AutoModelForCausalLM.from_pretrained(model, attn_implementation="sdpa")
        self._engine = TransformersEngine(self._model)
        self._response_length = response_length
        self._generator = torch.Generator().manual_seed(seed)
        self._steps = None
        self._waiting = []

    async def generate(self, prompt_ids, sampling_params, **_):
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
        params = batch[0][1]  # the requests of one step are alike
        asked = params["logprobs"]
        top_k = 0 if isinstance(asked, bool) else asked
        sampling = Sampling(temperature=params["temperature"], max_new_tokens=self._response_length, top_k=top_k)
        rollout = self._engine.generate([prompt for prompt, _, _ in batch], sampling, self._generator)
        for index, (_, _, answer) in enumerate(batch):
            one = rollout.select(torch.tensor([index]))
            extra = {"global_steps": self._steps}
            if top_k:
                ids, logp = one.topk_ids.numpy().astype(np.int32), one.topk_logp.numpy()
                extra["predmask_topk"] = {"ids": ids, "logp": logp}
            answer.set_result(
                TokenOutput(
                    token_ids=one.tokens.tolist(),
                    log_probs=one.logp.tolist() if asked else None,
                    stop_reason="completed",
                    extra_fields=extra,
                )
            )

    async def update_weights(self, weights, global_steps):
        self._model.load_state_dict({name: torch.from_numpy(array.copy()) for name, array in weights.items()})
        self._steps = global_steps

    async def wake_up(self):
        pass

    sleep = clear_kv_cache = wake_up


class TransformersReplica(RolloutReplica):
    """One server, which needs no device."""

    async def launch_servers(self):
        server = ray.remote(Server).options(name=_name(self.replica_rank), num_cpus=1)
        self._server_handle = server.remote(self.model_config.path, self.config.response_length, self.replica_rank)
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
