"""verl's actor without Ray: a TrainingWorker in this process, and batches as its trainer hands them over."""

import os
from functools import partial
from itertools import chain

import torch
from verl.trainer.config import CheckpointConfig
from verl.utils import tensordict_utils as tu
from verl.utils.metric import Metric, reduce_metrics
from verl.workers.config import FSDPActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.config.engine import TrainingWorkerConfig
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss

TOKENS = 4096
"""Of a dynamic micro-batch, unless a test says otherwise."""


def join(rank, world, store):
    """What Ray's worker group does for a worker."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}  # read, but the group is there already
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=world)


def make_worker(model, policy_loss, *, lr=0.0, sequence_parallel=1, **actor):
    """An actor with FSDP2 whose loss is `policy_loss`."""
    actor = {"loss_agg_mode": "token-mean", **actor}
    remove_padding, precision = actor.pop("use_remove_padding", True), actor.pop("precision", "fp32")
    model_config = HFModelConfig(
        path=str(model),
        use_remove_padding=remove_padding,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    engine = FSDPEngineConfig(
        strategy="fsdp2",
        dtype="float32",
        mixed_precision={"param_dtype": precision, "reduce_dtype": "fp32", "buffer_dtype": "fp32"},
        use_torch_compile=False,
        ulysses_sequence_parallel_size=sequence_parallel,
    )
    config = FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        fsdp_config=engine,
        policy_loss=policy_loss,
        use_torch_compile=False,
        **actor,
    )
    worker = TrainingWorker(
        config=TrainingWorkerConfig(
            model_type="language_model",
            model_config=model_config,
            engine_config=engine,
            optimizer_config=FSDPOptimizerConfig(lr=lr, weight_decay=0.0, clip_grad=1e9, total_training_steps=100),
            checkpoint_config=CheckpointConfig(),
        )
    )
    worker.reset()
    worker.set_loss_fn(partial(ppo_loss, config=config))
    return worker


def jagged(rows):
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def make_batch(
    samples,
    *,
    micro_batch=None,
    tokens=TOKENS,
    global_batch_size=None,
    temperature=1.0,
    entropy=False,
    last=True,
):
    """A mini-batch from samples: dicts of prompt, response, mask, logp, advantage, and with top-K ids and logp.

    In micro-batches of `micro_batch` samples, or dynamically of `tokens` tokens.
    """
    fields = {
        "prompts": jagged([s["prompt"] for s in samples]),
        "responses": jagged([s["response"] for s in samples]),
        "input_ids": jagged([torch.cat([s["prompt"], s["response"]]) for s in samples]),
        "position_ids": jagged([torch.arange(len(s["prompt"]) + len(s["response"])) for s in samples]),
        "response_mask": jagged([s["mask"] for s in samples]),
        "loss_mask": jagged([s["mask"] for s in samples]),
        "old_log_probs": jagged([s["logp"] for s in samples]),
        "advantages": jagged([s["advantage"].expand(len(s["response"])).contiguous() for s in samples]),
        "rm_scores": jagged([s["logp"] * 0 for s in samples]),
        "uid": [s.get("uid", str(i)) for i, s in enumerate(samples)],
        "session_id": [s.get("session", 0) for s in samples],
        "global_steps": [s.get("step", 1) for s in samples],
        "extra_fields": [s.get("extra", {"min_global_steps": 0, "max_global_steps": 0}) for s in samples],
        "reward_model": [s.get("reward_model", {"ground_truth": "7"}) for s in samples],
    }
    if "ref" in samples[0]:
        fields["ref_log_prob"] = jagged([s["ref"] for s in samples])
    if "topk_ids" in samples[0]:
        for name, key, blank in (("teacher_ids", "topk_ids", -1), ("teacher_logprobs", "topk_logp", torch.nan)):
            fields[name] = jagged([s[name] if name in s else _rows(s, s[key], blank) for s in samples])
    flags = {
        "temperature": temperature,
        "global_batch_size": global_batch_size or len(samples),
        "use_dynamic_bsz": micro_batch is None,
        "micro_batch_size_per_gpu": micro_batch or 1,
        "max_token_len_per_gpu": tokens,
        "calculate_entropy": entropy,
        "distillation_use_topk": False,
        "distillation_only": False,
        "update_lr_scheduler": last,
    }
    batch = tu.get_tensordict(fields, flags)
    tu.assign_non_tensor(
        batch, global_token_num=tu.NonTensorData([len(s["prompt"]) + len(s["response"]) for s in samples])
    )
    return batch


def train(worker, batch):
    """One optimiser step; its metrics, where this process answers for those that see the same tokens."""
    output = worker.train_batch(batch)
    return None if output is None else tu.get(output, "metrics")


def infer(worker, batch):
    """A forward pass without a loss; nested log-probs [B, P + T] and the metrics, where this process answers."""
    tu.assign_non_tensor(batch, compute_loss=False)
    output = worker.infer_batch(batch)
    return None if output is None else (output["log_probs"].unbind(), tu.get(output, "metrics"))


def train_step(worker, batch, *, epochs, mini_batch_size, shuffle=False, seed=42):
    """All optimiser steps of one step of verl's trainer; what it logs of them."""
    tu.assign_non_tensor(
        batch, epochs=epochs, mini_batch_size=mini_batch_size, seed=seed, dataloader_kwargs={"shuffle": shuffle}
    )
    return reduce_metrics(tu.get(worker.train_mini_batch(batch), "metrics"))


def logged(metrics):
    """What verl's trainer logs of the metrics of one optimiser step."""
    flat = {
        name: Metric.aggregate_dp(value) if isinstance(value[0], Metric) else list(chain.from_iterable(value))
        for name, value in metrics.items()
        if isinstance(value, list)
    }
    return reduce_metrics(metrics | flat)


def micro_batches(metrics):
    """How many there were."""
    return len(metrics["actor/pg_loss"][0].values)


def watch_gradients(worker):
    """A list to which each optimiser step will add the gradients, whole, by the names of the parameters."""
    found, parameters = [], dict(worker.engine.module.named_parameters())

    def note(*_):
        found.append({name: weights.grad.full_tensor() for name, weights in parameters.items()})

    worker.engine.optimizer.register_step_pre_hook(note)
    return found


def _rows(sample, values, blank):
    """[P + T, K] with row t for the token at t + 1."""
    rows = torch.full((len(sample["prompt"]) + len(sample["response"]), values.shape[1]), blank, dtype=values.dtype)
    start = len(sample["prompt"]) - 1
    rows[start : start + len(values)] = values
    return rows
