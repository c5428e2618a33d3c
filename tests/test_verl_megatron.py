"""Megatron's cuts of the vocabulary and of sequences, with its own process groups over gloo and verl's own pieces."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

pytest.importorskip("verl")
pytest.importorskip("megatron.core")

from helpers_ops import assert_same_policy, each
from predmask import BehaviourSupport, PolicySupport, Predictive

WORLD = 2
VOCABULARY = 24
LAYOUTS = {"tensor": (2, 1), "context": (1, 2)}
"""Sizes of tensor and context parallelism."""
LENGTHS = [(3, 4), (2, 7), (5, 1), (1, 6)]
"""Of prompts and responses."""
TEMPERATURE = 0.7


def samples() -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for prompt, response in LENGTHS:
        mu = torch.randn(response, VOCABULARY, generator=generator)
        mu[:, 22:] = -torch.inf  # what a larger head has beyond the real ids
        mu = mu.log_softmax(-1)
        ids = torch.multinomial(mu.exp(), 1, generator=generator)[:, 0]
        top = mu.topk(5)
        found.append(
            {
                "prompt": torch.randint(22, (prompt,), generator=generator),
                "response": ids,
                "mask": torch.ones(response, dtype=torch.int64),
                "logp": mu.gather(1, ids[:, None])[:, 0],
                "advantage": torch.randn(1, generator=generator),
                "topk_ids": top.indices.int(),
                "topk_logp": top.values,
            }
        )
    found[1]["mask"][2] = 0  # a token that the policy did not sample
    return found


def logits_of(index: int) -> torch.Tensor:
    """[P + T, V] of a sample, near its behaviour policy nowhere."""
    generator = torch.Generator().manual_seed(100 + index)
    return torch.randn(sum(LENGTHS[index]), VOCABULARY, generator=generator)


def work(rank: int, folder: str, tensor: int, context: int) -> None:
    from megatron.core import parallel_state
    from verl.models.mcore.util import postprocess_thd_engine, preprocess_thd_engine

    from predmask.plugins.verl.hook import Hook
    from predmask.plugins.verl.loss import DECIDED
    from predmask.plugins.verl.megatron import MaskedMegatronEngine
    from predmask.plugins.verl.settings import PolicyLossConfig
    from verl_on_cpu.actor import jagged, join, make_batch

    join(rank, WORLD, f"{folder}/store")
    parallel_state.initialize_model_parallel(tensor, context_parallel_size=context)
    engine = MaskedMegatronEngine.__new__(MaskedMegatronEngine)
    engine.engine_config = SimpleNamespace(dynamic_context_parallel=False)
    engine.tf_config = SimpleNamespace(fp8=None)
    batch = make_batch(samples(), temperature=TEMPERATURE)
    hook = Hook(
        lambda **_: DECIDED.get(),
        PolicyLossConfig(top_k=5, rule={"name": "predictive", "delta": 0.1}, host={"rollout_name": "vllm"}),
        cut=engine._predmask_cut,
        shard=engine._predmask_shard,
        vocabulary_size=22,
        progress=SimpleNamespace(staleness=lambda *_: None, record=lambda *_: None),
    )
    wide = jagged([logits_of(i) for i in range(len(LENGTHS))])
    here, packing, _ = preprocess_thd_engine(wide, pre_process=True)
    label, *_ = preprocess_thd_engine(batch["input_ids"], pre_process=True, need_roll=True)
    part = VOCABULARY // tensor
    columns = slice(part * parallel_state.get_tensor_model_parallel_rank(), None)
    output = engine._lm_head_logits_processor(
        here[..., columns][..., :part].contiguous(),
        label,
        torch.full(label.shape, TEMPERATURE),
        calculate_sum_pi_squared=False,
        calculate_entropy=False,
        distillation_use_topk=True,
        distillation_only=False,
        logits_processor_func=hook,
        batch=batch,
        data_format="thd",
    )
    whole = {name: postprocess_thd_engine(v, packing, batch["input_ids"], len(LENGTHS)) for name, v in output.items()}
    decided = hook(model_output=whole, data=batch)
    kept = {name: value for name, value in vars(decided.policy).items() if value is not None}
    torch.save({"policy": kept, "reason": decided.decision.reason}, Path(folder) / str(rank))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module", params=LAYOUTS, ids=LAYOUTS)
def found(request: Any, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes found."""
    folder = tmp_path_factory.mktemp("found")
    host = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu.platform"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in host.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONWARNINGS", "ignore")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        mp.spawn(work, (str(folder), *LAYOUTS[request.param]), nprocs=WORLD)
    return [torch.load(folder / str(rank), weights_only=True) for rank in range(WORLD)]


def test_every_process_has_the_whole_policy_at_each_token(found):
    everything = samples()
    logits = torch.cat(
        [logits_of(i)[p - 1 : p - 1 + t, :22] / TEMPERATURE for i, (p, t) in enumerate(LENGTHS)]
    ).double()
    behaviour = BehaviourSupport.from_topk(
        *(torch.cat([sample[name] for sample in everything]) for name in ("response", "logp", "topk_ids", "topk_logp"))
    )
    # Ids beyond the real vocabulary of 22 are not sampled.
    sampled = torch.cat([sample["mask"] for sample in everything]) != 0
    expected = PolicySupport.from_logits(logits, each(behaviour, lambda v: v.double() if v.is_floating_point() else v))
    advantage = torch.cat([s["advantage"].expand(len(s["response"])) for s in everything])
    decision = Predictive(delta=0.1)(behaviour, expected, advantage, sampled)
    assert len(decision.reason.unique()) > 3
    for part in found:
        policy = PolicySupport(**part["policy"])
        assert_same_policy(each(policy, lambda v: v[sampled]), each(expected, lambda v: v[sampled]), 1e-5)
        assert torch.isnan(policy.logp[~sampled][:, 0]).all()
        assert torch.equal(part["reason"], decision.reason)
