"""Small batches for verl's actor, and what must come of them: a dense forward pass, a rule, and plain arithmetic."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from helpers_processes import wait_for
from predmask.core import RULES, BehaviourSupport, MaskDecision, PolicySupport, Rule, mask_metrics
from predmask.traces import TokenTrace, Trace
from verl_on_cpu.data import write_model

IDS, ROWS = 66, 72
"""Of the tokenizer, and of the model's larger head."""
TOP_K = 5
LENGTHS = [(3, 4), (2, 7), (5, 1), (1, 6), (4, 3), (2, 5)]
"""Of prompts and responses."""
Sample = dict[str, Any]


@functools.cache
def policy_model() -> Any:
    """The policy of all tests: its answers depend on the positions before, and some are likely."""
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=ROWS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        initializer_range=0.3,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()


def write_policy(directory: Path) -> None:
    write_model(directory)
    policy_model().save_pretrained(directory)


def dense_logits(model: Any, prompt: Tensor, response: Tensor) -> Tensor:
    """[T, ROWS] of one sequence, without padding."""
    return model(input_ids=torch.cat([prompt, response])[None], use_cache=False).logits[0, len(prompt) - 1 : -1]


@functools.cache
def _samples(
    lengths: tuple[tuple[int, int], ...], seed: int, apart: float, temperature: float, ids: int
) -> list[Sample]:
    generator = torch.Generator().manual_seed(seed)
    model, found = policy_model(), []
    for prompt_length, length in lengths:
        prompt = torch.randint(3, 60, (prompt_length,), generator=generator)
        response = prompt[:0]
        for _ in range(length):
            logits = dense_logits(model, prompt, torch.cat([response, prompt[:1]]))[-1, :ids]
            response = torch.cat([response, torch.multinomial(logits.softmax(-1), 1, generator=generator)])
        logits = dense_logits(model, prompt, response)
        logits = logits.double() / temperature + apart * torch.randn(logits.shape, generator=generator)
        mu = logits[:, :ids].log_softmax(-1).float()
        top = mu.topk(TOP_K)
        found.append(
            {
                "prompt": prompt,
                "response": response,
                "mask": torch.ones(length, dtype=torch.int64),
                "logp": mu.gather(1, response[:, None])[:, 0],
                "advantage": torch.randn(1, generator=generator),
                "topk_ids": top.indices.int(),
                "topk_logp": top.values,
            }
        )
    return found


@torch.no_grad()
def make_samples(
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    *,
    seed: int = 2,
    apart: float = 1.0,
    temperature: float = 1.0,
    ids: int = ROWS,
) -> list[Sample]:
    """Responses of the policy, recorded by one whose logits are `apart` from its own, over the first `ids` ids."""
    found = _samples(tuple(lengths), seed, apart, temperature, ids)
    return [{key: value.clone() for key, value in sample.items()} for sample in found]


def forced() -> list[Sample]:
    """Tokens inside a response that the policy did not sample, of which nothing is known."""
    samples = make_samples()
    for sample, places in ((samples[1], [2, 3]), (samples[4], [0])):
        sample["mask"][places] = 0
        sample["logp"][places] = 0.0
        sample["topk_ids"][places] = -1
        sample["topk_logp"][places] = math.nan
    return samples


def filled() -> list[Sample]:
    """With what verl adds where a batch cannot be divided among its workers: one token that nobody sampled."""
    eos, rows = 1, 128
    return [
        *make_samples()[:5],
        {
            "prompt": torch.full((rows - 1,), eos),
            "response": torch.full((1,), eos),
            "mask": torch.zeros(1, dtype=torch.int64),
            "logp": torch.zeros(1),
            "advantage": torch.zeros(1),
            "topk_ids": torch.full((1, TOP_K), eos, dtype=torch.int32),
            "topk_logp": torch.zeros(1, TOP_K),
            "teacher_ids": torch.full((rows, TOP_K), eos, dtype=torch.int32),
            "teacher_logprobs": torch.zeros(rows, TOP_K),
        },
    ]


def with_reference() -> list[Sample]:
    """Forced tokens inside, and a reference policy's log-probs of all tokens."""
    generator = torch.Generator().manual_seed(5)
    return [{**s, "ref": s["logp"] + 0.5 * torch.randn(s["logp"].shape, generator=generator)} for s in forced()]


def without_topk() -> list[Sample]:
    return [{key: value for key, value in sample.items() if "topk" not in key} for sample in make_samples()]


def long_and_short() -> list[Sample]:
    """Field case 25: 2 tokens of loss 1, 8 tokens of loss 3."""
    samples = make_samples([(3, 2), (2, 8)], apart=0.0)
    return [{**sample, "advantage": torch.tensor([value])} for sample, value in zip(samples, (-1.0, -3.0), strict=True)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """A batch, and the settings by which it is trained on."""

    samples: list[Sample] = dataclasses.field(default_factory=make_samples)
    rule: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"name": "predictive"})
    top_k: int = TOP_K
    ratio_cap: float | None = 5.0
    sampled_ids: int | None = None
    """Ids that the server samples from, where the host knows that they are not all of the head's."""
    temperature: float = 1.0
    actor: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """verl's actor settings."""
    split: Mapping[str, Any] = dataclasses.field(default_factory=lambda: {"micro_batch": 1})

    @property
    def policy_loss(self) -> dict[str, Any]:
        """The fields of `PolicyLossConfig`."""
        server = "sglang" if self.sampled_ids is None else "vllm"
        host = {"rollout_name": server}
        return {"rule": dict(self.rule), "top_k": self.top_k, "ratio_cap": self.ratio_cap, "host": host}

    def make_rule(self) -> Rule:
        fields = dict(self.rule)
        return RULES[fields.pop("name")](**fields)


@dataclasses.dataclass(frozen=True)
class Expected:
    """All in float64; tokens in the order of the samples, with those outside the response mask."""

    behaviour: BehaviourSupport
    policy: PolicySupport
    decision: MaskDecision
    losses: Tensor
    """[N] -keep · min(r, C) · A."""
    loss: float
    """Their average."""
    beside: dict[str, float]
    """Entropy and distance to the reference policy, averaged likewise."""
    total: float
    """What is differentiated, with these two."""
    metrics: dict[str, float]
    gradients: dict[str, Tensor]


@functools.cache
def _exact_model() -> Any:
    return copy.deepcopy(policy_model()).double()


def joined(samples: Sequence[Sample], key: str) -> Tensor:
    """[N] of all response tokens."""
    if key == "advantage":
        return torch.cat([sample[key].expand(len(sample["response"])) for sample in samples])
    return torch.cat([sample[key] for sample in samples])


def expect(case: Case) -> Expected:
    """What the unsplit batch gives: dense log-probs, the rule, and the losses' average."""
    model, samples = _exact_model(), case.samples
    model.zero_grad()
    rows = torch.cat([dense_logits(model, sample["prompt"], sample["response"]) for sample in samples])
    rows = rows / case.temperature
    topk = [joined(samples, key) for key in ("topk_ids", "topk_logp")] if case.top_k else []
    behaviour = BehaviourSupport.from_topk(
        joined(samples, "response"),
        joined(samples, "logp").double(),
        *[t.double() if t.is_floating_point() else t for t in topk],
    )
    policy = PolicySupport.from_logits(rows[:, : case.sampled_ids].detach(), behaviour)
    advantage, mask = joined(samples, "advantage").double(), joined(samples, "mask")
    decision = case.make_rule()(behaviour, policy, advantage, mask != 0)
    weight = decision.weight.clamp(max=case.ratio_cap or math.inf)
    factors = torch.where(decision.keep, -weight * advantage, 0.0)
    shares = averages(case.samples, **case.actor)
    # The host's own log-probs are what is differentiated: over the whole head.
    logp = rows.log_softmax(-1).gather(1, behaviour.ids[:, :1])[:, 0]
    beside, extra = _beside(case, rows, logp, shares)
    ((shares * factors * logp).sum() + extra).backward()
    loss = float((shares * factors).sum())
    return Expected(
        behaviour=behaviour,
        policy=policy,
        decision=decision,
        losses=factors,
        loss=loss,
        beside=beside,
        total=loss + extra.item(),
        metrics=mask_metrics(behaviour, policy, decision, staleness=torch.zeros(len(mask))).compute(),
        gradients={name: weights.grad.clone() for name, weights in model.named_parameters()},
    )


def _beside(case: Case, rows: Tensor, logp: Tensor, shares: Tensor) -> tuple[dict[str, float], Tensor]:
    """The averages of H and of exp(d) - d - 1, d = log ref - log pi, and their sum with verl's coefficients."""
    found, total = {}, torch.zeros((), dtype=torch.float64)
    if case.split.get("entropy"):
        entropy = (shares * -(rows.softmax(-1) * rows.log_softmax(-1)).sum(-1)).sum()
        found["actor/entropy_loss"] = entropy.item()
        total = total - case.actor["entropy_coeff"] * entropy
    if case.actor.get("use_kl_loss"):
        apart = joined(case.samples, "ref").double() - logp
        distance = (shares * (apart.exp() - apart - 1)).sum()
        found["kl_loss"] = distance.item()
        total = total + case.actor["kl_loss_coef"] * distance
    return found, total


def averages(
    samples: Sequence[Sample], loss_agg_mode: str = "token-mean", loss_scale_factor: float | None = None, **_: Any
) -> Tensor:
    """[N] each token's share in the average of the whole batch, as verl's modes are defined."""
    total, found = sum(int(sample["mask"].sum()) for sample in samples), []
    for sample in samples:
        share = {
            "token-mean": 1 / total,
            "token-sum": 1.0,
            "seq-mean-token-mean": 1 / len(samples) / max(1, int(sample["mask"].sum())),
            "seq-mean-token-sum": 1 / len(samples),
            "seq-mean-token-sum-norm": 1 / len(samples) / (loss_scale_factor or 1.0),
        }[loss_agg_mode]
        found.append(sample["mask"].double() * share)
    return torch.cat(found)


def read_tokens(directory: Path, samples: Sequence[Sample]) -> TokenTrace:
    """The trace of one optimiser step, in the order of the samples: numbered as they are, whatever the trace said.

    Responses of which nothing was sampled are not in it.
    """
    tokens = TokenTrace.cat(list(Trace(directory).tokens()))
    recorded = {tuple(tokens.id[tokens.sample == n].tolist()): int(n) for n in tokens.sample.unique()}
    order = [recorded[tuple(sample["response"].tolist())] for sample in samples if sample["mask"].any()]
    assert sorted(order) == list(range(len(recorded)))
    return TokenTrace.cat([tokens[tokens.sample == n] for n in order])


def assert_as_expected(case: Case, traces: Path, metrics: Mapping[str, float], gradients: Mapping[str, Tensor]) -> None:
    """What was recorded, logged and trained is what the unsplit batch gives."""
    expected, tokens = expect(case), read_tokens(traces, case.samples)
    there = torch.cat([sample["mask"].any().expand(len(sample["mask"])) for sample in case.samples])
    assert torch.equal(tokens.behaviour.ids, expected.behaviour.ids[there])
    assert torch.equal(tokens.behaviour.valid, expected.behaviour.valid[there])
    assert torch.equal(tokens.decision.reason, expected.decision.reason[there])
    assert torch.equal(tokens.decision.keep, expected.decision.keep[there])
    sampled = joined(case.samples, "mask") != 0
    assert torch.equal(tokens.decision.response_mask, sampled[there])
    recorded = sampled[there]
    for field in ("logp", "log_tail", "tail_sum_squares", "entropy"):
        assert_close(getattr(tokens.policy, field)[recorded], getattr(expected.policy, field)[sampled], field)
    for field in ("divergence", "rate", "weight"):
        assert_close(getattr(tokens.decision, field)[recorded], getattr(expected.decision, field)[sampled], field)
    logged = {key.removeprefix("predmask/"): value for key, value in metrics.items() if "predmask" in key}
    assert logged == pytest.approx(expected.metrics, rel=1e-4, abs=2e-6)
    assert metrics["actor/pg_loss"] == pytest.approx(expected.loss, rel=1e-5, abs=1e-6)
    assert {name: metrics[name] for name in expected.beside} == pytest.approx(expected.beside, rel=1e-5, abs=1e-6)
    assert metrics["loss"] == pytest.approx(expected.total, rel=1e-5, abs=1e-6)
    assert gradients.keys() == expected.gradients.keys()
    for key, value in expected.gradients.items():
        assert_close(gradients[key], value, key)


def assert_follows(case: Case, tokens: TokenTrace, metrics: Mapping[str, float]) -> None:
    """Decisions, metrics and the loss are those of the recorded statistics, and these are of a whole policy."""
    sampled = tokens.decision.response_mask
    mass = torch.cat([tokens.policy.logp, tokens.policy.log_tail[:, None]], 1).double().exp().sum(1)
    assert_close(mass[sampled], torch.ones(int(sampled.sum())), "mass")
    again = tokens.decide(case.make_rule())
    assert torch.equal(again.reason, tokens.decision.reason)
    expected = mask_metrics(tokens.behaviour, tokens.policy, again, staleness=torch.zeros(len(tokens))).compute()
    assert {name: metrics[f"predmask/{name}"] for name in expected} == pytest.approx(expected, rel=1e-5, abs=1e-7)
    losses = torch.where(again.keep, -again.weight.clamp(max=case.ratio_cap or math.inf) * tokens.advantage, 0.0)
    loss = float((averages(case.samples, **case.actor) * losses).sum())
    assert metrics["actor/pg_loss"] == pytest.approx(loss, rel=1e-5, abs=1e-6)


def assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    """As float32 sums are."""
    expected = expected.to(actual.dtype)
    scale = float(expected[torch.isfinite(expected)].abs().max()) if torch.isfinite(expected).any() else 0.0
    torch.testing.assert_close(
        actual, expected, rtol=1e-4, atol=1e-5 * scale + 3e-7, equal_nan=True, msg=lambda text: f"{what}: {text}"
    )


@contextmanager
def verl_on_cpu() -> Iterator[None]:
    """The environment by which verl, in a new process, finds the platform for CPUs."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VERL_PLATFORM", "cpu")
        patch.setenv("VERL_USE_EXTERNAL_MODULES", "verl_on_cpu.platform")
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        yield


def run_processes(work: Callable[..., None], *arguments: Any, count: int, seconds: float = 240) -> None:
    """Run `work(rank, *arguments)` in new processes; none is left behind."""
    with verl_on_cpu():
        running: Any = mp.spawn(work, arguments, nprocs=count, join=False)
    wait_for(running, seconds)
