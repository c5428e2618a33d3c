"""verl's whole trainer with the plug-in: Ray, two FSDP2 workers, the embedded model and task; then vLLM as its server.

What the mask did is read in its trace, and compared with what verl logged.
"""

import importlib.util
import math

import pytest
import torch

from predmask.core import Predictive
from predmask.plugins.verl.launch import launch_args
from predmask.traces import TokenTrace, Trace
from verl_on_cpu.launch import ACTOR, ROLLOUT, train

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("verl") is None, reason="make test-verl runs these"),
]

RULE = Predictive(delta=0.05)
STEPS, MINI_BATCHES, RATIO_CAP = 4, 8, 5.0
SETTINGS = [
    f"trainer.total_training_steps={STEPS}",
    "data.train_batch_size=16",
    f"{ROLLOUT}.n=16",
    f"{ACTOR}.ppo_mini_batch_size={16 // MINI_BATCHES}",
    f"{ACTOR}.ppo_max_token_len_per_gpu=400",  # several micro-batches
    f"{ACTOR}.optim.lr=3e-4",  # so large that tokens leave the trust region
    f"{ACTOR}.loss_agg_mode=token-mean",
]


@pytest.fixture(scope="module", params=["transformers", "vllm"])
def run(request, tmp_path_factory):
    """A run, and the tokens of its steps."""
    vllm = request.param == "vllm"
    if vllm and importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    directory = tmp_path_factory.mktemp("verl")
    arguments = launch_args(RULE, ratio_cap=RATIO_CAP, traces={"directory": directory / "traces", "responses": 0})
    # vLLM wants a device for each of its servers' workers.
    run = train(directory, *arguments, *SETTINGS, vllm=vllm, workers=1 if vllm else 2)
    assert run.status == 0, run.output[-8000:]
    trace = Trace(directory / "traces")
    return run, trace, [TokenTrace.cat(list(trace.tokens([step]))) for step in trace.steps]


def mini_batches(tokens):
    return [tokens[tokens.minibatch == number] for number in range(MINI_BATCHES)]


def mean(values):
    return math.fsum(values) / len(values)


def test_it_leaves_no_process(run):
    assert run[0].survivors == []


def test_all_responses_are_recorded(run):
    run, trace, steps = run
    assert trace.info.make_rule() == RULE
    assert trace.steps == list(range(1, STEPS + 1))
    for step, logged in zip(trace.steps, run.steps, strict=True):
        samples = trace.samples(step)
        assert len(samples) == 256
        assert mean([sample.reward for sample in samples]) == pytest.approx(logged["critic/score/mean"])
        assert sum(sample.length for sample in samples) == len(steps[step - 1])


def test_what_is_new_is_near(run):
    """Before the first update on its responses, the actor is the policy that sampled: in each step, with new weights.

    A server that kept old weights would be far away from the second step on.
    """
    run, _, steps = run
    for tokens, logged in zip(steps, run.steps, strict=True):
        new = tokens[tokens.staleness == 0]
        assert len(new) > 200
        assert (new.optimizer_step == new.minibatch + new.optimizer_step.min()).all()
        assert new.decision.divergence.max() < 1e-4
        assert not new.decision.dropped.any()
        assert logged["actor/predmask/mismatch_kl"] < 1e-8


def test_staleness_counts_optimiser_steps(run):
    run, _, steps = run
    for number, (tokens, logged) in enumerate(zip(steps, run.steps, strict=True)):
        assert torch.equal(tokens.staleness, tokens.minibatch)
        assert torch.equal(tokens.version, torch.full_like(tokens.version, number * MINI_BATCHES))
        assert logged["actor/predmask/staleness_max"] == MINI_BATCHES - 1


def test_the_recorded_rule_decides_again_as_it_did(run):
    run, _, steps = run
    for tokens, logged in zip(steps, run.steps, strict=True):
        again = RULE(tokens.behaviour, tokens.policy, tokens.advantage, tokens.decision.response_mask)
        assert torch.equal(again.reason, tokens.decision.reason)
        assert torch.equal(again.keep, tokens.decision.keep)
        shares = [float(part.decision.dropped.double().mean()) for part in mini_batches(tokens)]
        assert logged["actor/predmask/mask_frac"] == pytest.approx(mean(shares), abs=1e-9)
    assert run.steps[0]["actor/predmask/mask_frac"] > 0.005


def test_the_loss_is_that_of_the_kept_tokens(run):
    run, _, steps = run
    for tokens, logged in zip(steps, run.steps, strict=True):
        ratio = (tokens.policy.logp[:, 0].double() - tokens.behaviour.logp[:, 0].double()).exp()
        losses = torch.where(tokens.decision.keep, -ratio.clamp(max=RATIO_CAP) * tokens.advantage, 0.0)
        averages = [float(losses[tokens.minibatch == number].mean()) for number in range(MINI_BATCHES)]
        assert logged["actor/pg_loss"] == pytest.approx(mean(averages), abs=1e-7)


def test_reward_rises(run):
    scores = [logged["critic/score/mean"] for logged in run[0].steps]
    assert scores[0] < 0.4
    assert scores[-1] > scores[0] + 0.25


def test_an_interrupted_run_leaves_nothing(tmp_path):
    """Of the processes that this kills, none comes back; see also `helpers_processes`."""
    run = train(tmp_path, *launch_args(RULE), *SETTINGS, seconds=30)
    assert run.status is None
    assert len(run.survivors) > 2
