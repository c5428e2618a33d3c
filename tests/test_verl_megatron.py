"""Megatron's cuts of the vocabulary and of sequences, with its own process groups over gloo and verl's own pieces."""

from __future__ import annotations

import os
from dataclasses import dataclass
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
from predmask.core import Reason

WORLD = 2
VOCABULARY, IDS = 24, 22
"""Of the head, and of the tokenizer."""
LAYOUTS = {"tensor": (2, 1), "context": (1, 2)}
"""Sizes of tensor and context parallelism."""
FORMATS = {"thd": None, "bshd": 17}
"""Packed sequences, or padded ones, and the length of the mini-batch's longest, which is in another micro-batch."""
TEMPERATURE = 0.7


@dataclass(frozen=True)
class Case:
    """A micro-batch."""

    lengths: tuple[tuple[int, int], ...] = ((3, 4), (2, 7), (5, 1), (1, 6))
    """Of prompts and responses."""
    sampled_ids: int = IDS
    forced: bool = False
    """The policy sampled nothing of it."""
    entropy: bool = False
    """verl computes the entropy, too."""


CASES = {
    "four responses": Case(),
    "entropy beside": Case(entropy=True),
    # Context parallelism is a zigzag: of four quarters, one process has the outer two.
    "tokens in one process": Case(lengths=((7, 1), (7, 1))),
    "ids in one process": Case(sampled_ids=VOCABULARY // WORLD),
    "padding alone": Case(lengths=((7, 1),), forced=True),
}


def samples(case: Case) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for prompt, response in case.lengths:
        mu = torch.randn(response, VOCABULARY, generator=generator)
        mu[:, case.sampled_ids :] = -torch.inf  # such as what a larger head has beyond the real ids
        mu = mu.log_softmax(-1)
        ids = torch.multinomial(mu.exp(), 1, generator=generator)[:, 0]
        top = mu.topk(5)
        found.append(
            {
                "prompt": torch.randint(IDS, (prompt,), generator=generator),
                "response": ids,
                "mask": torch.full((response,), int(not case.forced)),
                "logp": mu.gather(1, ids[:, None])[:, 0],
                "advantage": torch.randn(1, generator=generator),
                "topk_ids": top.indices.int(),
                "topk_logp": top.values,
            }
        )
    if len(found) == 4:
        found[1]["mask"][2] = 0  # a token that the policy did not sample
    return found


def logits_of(case: Case) -> list[torch.Tensor]:
    """[P + T, V] of each sample, near its behaviour policy nowhere."""
    return [
        torch.randn(sum(pair), VOCABULARY, generator=torch.Generator().manual_seed(100 + index))
        for index, pair in enumerate(case.lengths)
    ]


def work(rank: int, folder: str) -> None:
    from megatron.core import parallel_state

    from predmask.plugins.verl.megatron import MaskedMegatronEngine
    from verl_on_cpu.actor import join

    join(rank, WORLD, f"{folder}/store")
    engine = MaskedMegatronEngine.__new__(MaskedMegatronEngine)
    engine.engine_config = SimpleNamespace(dynamic_context_parallel=False, entropy_from_logits_with_chunking=False)
    engine.tf_config = SimpleNamespace(fp8=None)
    found: dict[str, Any] = {"refusals": refusals(engine)}
    for layout, (tensor, context) in LAYOUTS.items():
        parallel_state.initialize_model_parallel(tensor, context_parallel_size=context)
        for kind in FORMATS:
            found |= {f"{name}, {layout}, {kind}": pass_through(engine, case, kind) for name, case in CASES.items()}
        parallel_state.destroy_model_parallel()
    torch.save(found, Path(folder) / str(rank))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def pass_through(engine: Any, case: Case, data_format: str) -> dict[str, Any]:
    """What verl does with a micro-batch between the model and the loss, with the hook in it."""
    from megatron.core import parallel_state
    from verl.models.mcore import util
    from verl.utils import tensordict_utils as tu

    from predmask.plugins.verl.hook import Hook
    from predmask.plugins.verl.loss import DECIDED
    from predmask.plugins.verl.settings import PolicyLossConfig
    from verl_on_cpu.actor import jagged, make_batch

    batch, here = make_batch(samples(case), temperature=TEMPERATURE), []
    packed, longest = data_format == "thd", FORMATS[data_format]
    if not packed:
        tu.assign_non_tensor(batch, forced_max_seqlen=longest)

    def cut(values: torch.Tensor, *more: Any) -> torch.Tensor:
        marks = engine._predmask_cut(values, *more)
        here.append(int((marks > 0).sum()))
        return marks

    def pieces(values: torch.Tensor, **more: Any) -> Any:
        if packed:
            return util.preprocess_thd_engine(values, pre_process=True, **more)
        return util.preprocess_bshd_engine(values, pre_process=True, forced_max_seqlen=longest, **more)

    hook = Hook(
        lambda **_: DECIDED.get(),
        PolicyLossConfig(top_k=5, rule={"name": "predictive", "delta": 0.1}, host={"rollout_name": "vllm"}),
        cut=cut,
        shard=engine._predmask_shard,
        vocabulary_size=IDS,
        progress=SimpleNamespace(staleness=lambda *_: None, record=lambda *_: None),
    )
    logits, how, _ = pieces(jagged(logits_of(case)))
    label, *_ = pieces(batch["input_ids"], need_roll=True)
    part = logits.shape[-1] // parallel_state.get_tensor_model_parallel_world_size()
    start = part * parallel_state.get_tensor_model_parallel_rank()
    output = engine._lm_head_logits_processor(
        logits[..., start : start + part].contiguous(),
        label,
        torch.full(label.shape, TEMPERATURE),
        calculate_sum_pi_squared=False,
        calculate_entropy=case.entropy,
        distillation_use_topk=True,
        distillation_only=False,
        logits_processor_func=hook,
        batch=batch,
        data_format=data_format,
    )
    if packed:
        whole = {
            name: util.postprocess_thd_engine(values, how, batch["input_ids"], len(case.lengths))
            for name, values in output.items()
        }
    else:
        whole = {name: util.postprocess_bshd_engine(values, how) for name, values in output.items()}
    decided = hook(model_output=whole, data=batch)
    return {
        "policy": {name: value for name, value in vars(decided.policy).items() if value is not None},
        "reason": decided.decision.reason,
        "entropy": whole["entropy"].values()[decided.packed.row] if case.entropy else None,
        "here": here[0],
    }


def refusals(engine: Any) -> list[str]:
    """What is said of settings under which rows would lie elsewhere."""
    texts = []
    for dynamic, variant in ((True, None), (False, "dsv4_hybrid"), (False, None)):
        engine.engine_config.dynamic_context_parallel = dynamic
        engine.tf_config.experimental_attention_variant = variant
        try:
            engine._predmask_check()
            texts.append("nothing")
        except ValueError as error:
            texts.append(str(error))
    return texts


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of the two processes found."""
    folder = tmp_path_factory.mktemp("found")
    host = {"VERL_PLATFORM": "cpu", "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu.platform"}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in host.items():
            patch.setenv(name, value)
        patch.setenv("PYTHONWARNINGS", "ignore")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]))
        mp.spawn(work, (str(folder),), nprocs=WORLD)
    return [torch.load(folder / str(rank), weights_only=True) for rank in range(WORLD)]


def rows_of(case: Case) -> torch.Tensor:
    """[N, V] that predict the response tokens, at the temperature."""
    parts = [logits[p - 1 : p - 1 + t] for logits, (p, t) in zip(logits_of(case), case.lengths, strict=True)]
    return torch.cat(parts).double() / TEMPERATURE


@pytest.mark.parametrize("data_format", FORMATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CASES)
def test_every_process_has_the_whole_policy_at_each_token(found, name, layout, data_format):
    case = CASES[name]
    everything = samples(case)
    behaviour = BehaviourSupport.from_topk(
        *(torch.cat([sample[name] for sample in everything]) for name in ("response", "logp", "topk_ids", "topk_logp"))
    )
    sampled = torch.cat([sample["mask"] for sample in everything]) != 0
    # Ids beyond the real vocabulary are not sampled.
    expected = PolicySupport.from_logits(
        rows_of(case)[:, :IDS], each(behaviour, lambda v: v.double() if v.is_floating_point() else v)
    )
    advantage = torch.cat([s["advantage"].expand(len(s["response"])) for s in everything])
    decision = Predictive(delta=0.1)(behaviour, expected, advantage, sampled)
    for process in found:
        part = process[f"{name}, {layout}, {data_format}"]
        policy = PolicySupport(**part["policy"])
        if sampled.any():
            assert_same_policy(each(policy, lambda v: v[sampled]), each(expected, lambda v: v[sampled]), 1e-5)
        assert torch.isnan(policy.logp[~sampled][:, 0]).all()
        assert torch.equal(part["reason"], decision.reason)
        if case.entropy:
            logp = rows_of(case).log_softmax(-1)
            torch.testing.assert_close(part["entropy"].double(), -(logp.exp() * logp).sum(-1), rtol=1e-5, atol=1e-5)


def test_the_cases_are_what_they_are_called(found):
    """Reasons differ in the first; there are processes without tokens, and without any of their ids."""
    assert len(found[0]["four responses, tensor, thd"]["reason"].unique()) > 3

    def tokens_of(name: str) -> list[int]:
        return [part[name]["here"] for part in found]

    assert tokens_of("tokens in one process, tensor, thd") == tokens_of("tokens in one process, tensor, bshd") == [2, 2]
    # Row 6 of 8 is in the last quarter, and of 17, padded to 20, in the second.
    assert tokens_of("tokens in one process, context, thd") == [2, 0]
    assert tokens_of("tokens in one process, context, bshd") == [0, 2]
    assert tokens_of("padding alone, context, thd") == [0, 0]
    assert set(found[0]["padding alone, context, thd"]["reason"].tolist()) == {Reason.NOT_TRAINABLE}
    ids = torch.cat([sample["topk_ids"].flatten() for sample in samples(CASES["ids in one process"])])
    assert ids.max() < VOCABULARY // WORLD


def test_rows_that_lie_elsewhere_are_refused(found):
    for part in found:
        dynamic, variant, fine = part["refusals"]
        assert "set dynamic_context_parallel=False" in dynamic
        assert "another attention variant than dsv4_hybrid" in variant
        assert fine == "nothing"
