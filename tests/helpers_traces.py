"""Small traces of made-up tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from predmask.core import BehaviourSupport, PolicySupport, Predictive, Rule
from predmask.traces import FullRows, SampleTrace, TokenTrace, Trace, TraceInfo, TraceWriter, rule_settings

VOCABULARY = 12

TIGHT: dict[str, Any] = {
    "none": {},
    "ppo_clip": {"eps_low": 0.1, "eps_high": 0.15, "dual_clip": 1.5},
    "cispo": {"eps_low": 0.3, "eps_high": 0.1},
    "icepop": {"low": 0.9, "high": 1.2},
    "dppo": {"divergence": "tv", "support": "binary", "delta": 0.02},
    "predictive": {"divergence": "js", "tail": "aggregated", "delta": 0.01},
}
"""By rule, settings that differ from the defaults and drop some of the made-up tokens."""


def make_tokens(
    rule: Rule | None = None,
    *,
    tokens: int = 60,
    top_k: int = 4,
    seed: int = 0,
    step: int = 1,
    noise: float = 0.8,
    after: bool = False,
    full: bool = False,
    vocabulary_size: int = VOCABULARY,
    length: int = 10,
    **changes: Any,
) -> TokenTrace:
    """Tokens of responses of `length`, two a prompt, four a minibatch; mu and pi are random and `noise` apart."""
    rule = rule or Predictive(delta=0.05)
    generator = torch.Generator().manual_seed(seed + 1000 * step)

    def moved(logp: torch.Tensor, by: float) -> torch.Tensor:
        return (logp + by * torch.randn(logp.shape, generator=generator)).log_softmax(-1)

    mu = (2 * torch.randn(tokens, vocabulary_size, generator=generator)).log_softmax(-1)
    pi = moved(mu, noise)
    sampled = mu.exp().multinomial(1, generator=generator)[:, 0]
    top = mu.topk(top_k)
    behaviour = BehaviourSupport.from_topk(sampled, mu.gather(1, sampled[:, None])[:, 0], top.indices, top.values)
    policy = PolicySupport.from_logits(pi, behaviour)
    sample = torch.arange(tokens) // length
    advantage = torch.randn(int(sample.max()) + 1, generator=generator)[sample].contiguous()
    decision = rule(behaviour, policy, advantage)
    then = moved(pi, 0.1 * noise)
    moved_on = PolicySupport.from_logits(then, behaviour)
    minibatch = sample // 4
    return TokenTrace(
        **{
            "step": torch.full((tokens,), step),
            "epoch": torch.zeros(tokens, dtype=torch.int64),
            "minibatch": minibatch,
            "optimizer_step": 100 * (step - 1) + minibatch,
            "version": torch.full((tokens,), 100 * (step - 1)),
            "sample": sample,
            "group": sample // 2,
            "position": torch.arange(tokens) % length,
            "advantage": advantage,
            "behaviour": behaviour,
            "policy": policy,
            "decision": decision,
            "after": PolicySupport(logp=moved_on.logp, log_tail=moved_on.log_tail, vocabulary_size=vocabulary_size)
            if after
            else None,
            "full": FullRows(behaviour=mu, policy=pi, after=then if after else None) if full else None,
            **changes,
        }
    )


def make_samples(tokens: TokenTrace) -> list[SampleTrace]:
    """The responses that the tokens belong to."""
    found = []
    for sample in tokens.sample.unique().tolist():
        of = tokens.sample == sample
        found.append(
            SampleTrace(
                step=int(tokens.step[0]),
                sample=sample,
                group=sample // 2,
                prompt=(1, 2, 3 + sample % 3),
                reward=float(sample % 2),
                advantage=float(tokens.advantage[of][0]),
                length=int(of.sum()),
                finished=sample % 3 != 0,
                problem=f"problem {sample // 2}",
                reference=str(sample),
            )
        )
    return found


def make_trace(
    directory: Path, rule: Rule | None = None, *, steps: int = 2, texts: dict[int, str] | None = None, **settings: Any
) -> Trace:
    """A trace in `directory/traces`, of `make_tokens` at each step."""
    rule = rule or Predictive(delta=0.05)
    parts = [make_tokens(rule, step=step, **settings) for step in range(1, steps + 1)]
    info = TraceInfo(
        run=directory.name,
        rule=rule_settings(rule),
        vocabulary_size=parts[0].policy.vocabulary_size,
        top_k=parts[0].behaviour.top_k,
    )
    with TraceWriter(directory / "traces", info) as writer:
        writer.write_vocabulary(texts or {i: f" t{i}" for i in range(info.vocabulary_size)})
        for step, part in enumerate(parts, 1):
            writer.add(make_samples(part))
            writer.add(part)
            writer.commit(step)
    assert writer.problem is None
    return Trace(directory)
