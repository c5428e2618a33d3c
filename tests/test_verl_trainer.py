"""verl's whole trainer with the plug-in: Ray, two FSDP2 workers, the embedded model and task; then vLLM as its server;
then the asynchronous trainer, whose new weights cut responses that are under way.

What the mask did is read in its trace, and compared with what verl logged and with what the server sampled.
"""

import importlib.util
import math
from typing import NamedTuple

import pytest
import torch

from predmask.core import Predictive
from predmask.plugins.verl.launch import launch_args
from predmask.traces import TokenTrace, Trace
from verl_on_cpu import pieces
from verl_on_cpu.launch import ACTOR, ROLLOUT, Run, train

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


ASYNCHRONOUS = [
    "trainer.v1.trainer_mode=colocate_async",
    "trainer.v1.colocate_async.num_warmup_batches=0.5",  # ahead; the batches then mix ages
    "++data.gen_batch_size=8",
    f"{ACTOR}.shuffle=True",  # else the oldest come first
    f"+{ROLLOUT}.engine_kwargs.transformers.hold=4",
]


class Trained(NamedTuple):
    """A run, and its tokens."""

    run: Run
    trace: Trace
    steps: list[TokenTrace]
    sampled: list[tuple[torch.Tensor, torch.Tensor]]
    """Of each step's tokens: the version of the weights that sampled each, and the oldest of its response."""


def trained(directory, *overrides, **more):
    arguments = launch_args(RULE, ratio_cap=RATIO_CAP, traces={"directory": directory / "traces", "responses": 0})
    run = train(directory, *arguments, *SETTINGS, *overrides, **more)
    assert run.status is not None, f"it was interrupted, after:\n{run.output[-4000:]}"
    assert run.status == 0, run.output[-8000:]
    trace = Trace(directory / "traces")
    return Trained(run, trace, [TokenTrace.cat(list(trace.tokens([step]))) for step in trace.steps], [])


@pytest.fixture(scope="module")
def transformers(tmp_path_factory):
    return trained_with_transformers(tmp_path_factory.mktemp("verl"))


@pytest.fixture(scope="module")
def asynchronous(tmp_path_factory):
    return trained_with_transformers(tmp_path_factory.mktemp("verl"), *ASYNCHRONOUS)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory):
    if importlib.util.find_spec("vllm") is None:
        pytest.skip("vLLM is not installed")
    # vLLM wants a device for each of its servers' workers.
    found = trained(tmp_path_factory.mktemp("verl"), vllm=True, workers=1)
    newest = [torch.full((len(tokens),), number) for number, tokens in enumerate(found.steps)]
    return found._replace(sampled=[(one, one) for one in newest])


def trained_with_transformers(directory, *overrides):
    """What was sampled by which weights is what the server says."""
    found = trained(directory, *overrides)
    said = pieces.read(directory)
    samples = map(found.trace.samples, found.trace.steps)
    return found._replace(sampled=list(map(pieces.versions, [said] * STEPS, samples, found.steps)))


@pytest.fixture(scope="module", params=["transformers", "vllm", "asynchronous"])
def run(request):
    return request.getfixturevalue(request.param)


def mean(values):
    return math.fsum(values) / len(values)


def test_it_leaves_no_process(run):
    assert run.run.survivors == []


def test_all_responses_are_recorded(run):
    run, trace, steps, _ = run
    assert trace.info.make_rule() == RULE
    assert trace.steps == list(range(1, STEPS + 1))
    for step, logged in zip(trace.steps, run.steps, strict=True):
        samples = trace.samples(step)
        assert len(samples) == 256
        assert mean([sample.reward for sample in samples]) == pytest.approx(logged["critic/score/mean"])
        assert sum(sample.length for sample in samples) == len(steps[step - 1])


def test_what_is_new_is_near(run):
    """Before the first update, the actor is the policy whose weights were sent last: in each step, with new ones.

    A server that kept old weights would be far away from the second step on. What older ones sampled is far away.
    """
    for number, (tokens, (version, _), logged) in enumerate(zip(run.steps, run.sampled, run.run.steps, strict=True)):
        first = tokens.minibatch == 0
        new, old = tokens[first & (version == number)], tokens[first & (version >= 0) & (version < number)]
        assert len(new) > 200
        assert new.decision.divergence.max() < 1e-4
        assert not new.decision.dropped.any()
        assert logged["actor/predmask/mismatch_kl"] < 1e-8
        assert not len(old) or old.decision.divergence.mean() > 1e-3


def test_staleness_counts_optimiser_steps(run):
    """Since the oldest version of a response."""
    for number, (tokens, (_, oldest), logged) in enumerate(zip(run.steps, run.sampled, run.run.steps, strict=True)):
        assert torch.equal(tokens.optimizer_step, number * MINI_BATCHES + tokens.minibatch)
        assert torch.equal(tokens.version, oldest * MINI_BATCHES)
        assert logged["actor/predmask/staleness_max"] == tokens.staleness.max()
        assert logged["actor/predmask/staleness_mean"] == pytest.approx(float(tokens.staleness.double().mean()))


def test_new_weights_cut_responses(asynchronous):
    """verl counts versions likewise; what is sampled after the cut is new, and counted with its response as old."""
    resumed = 0
    zipped = zip(asynchronous.steps, asynchronous.sampled, asynchronous.run.steps, strict=True)
    for number, (tokens, (version, oldest), logged) in enumerate(zipped):
        responses = [tokens.sample == sample for sample in tokens.sample.unique()]
        begun = [int(oldest[places][0]) for places in responses]
        spans = [int(version[places].max()) - first + 1 for places, first in zip(responses, begun, strict=True)]
        assert logged["training/off_policy/trajectory_spans/mean"] == pytest.approx(mean(spans))
        worst = logged["training/off_policy/trajectory_staleness_worst/mean"]
        assert worst == pytest.approx(mean([number - first for first in begun]))
        late = tokens[(tokens.minibatch == 0) & (version == number) & (oldest < number)]
        assert (late.staleness >= MINI_BATCHES).all()
        resumed += len(late)
    assert resumed > 50


def test_the_recorded_rule_decides_again_as_it_did(run):
    run, _, steps, _ = run
    for tokens, logged in zip(steps, run.steps, strict=True):
        again = RULE(tokens.behaviour, tokens.policy, tokens.advantage, tokens.decision.response_mask)
        assert torch.equal(again.reason, tokens.decision.reason)
        assert torch.equal(again.keep, tokens.decision.keep)
        share = float(tokens.decision.dropped.double().mean())
        assert logged["actor/predmask/mask_frac"] == pytest.approx(share, abs=1e-9)
    assert run.steps[0]["actor/predmask/mask_frac"] > 0.005


def test_the_loss_is_that_of_the_kept_tokens(run):
    run, _, steps, _ = run
    for tokens, logged in zip(steps, run.steps, strict=True):
        ratio = (tokens.policy.logp[:, 0].double() - tokens.behaviour.logp[:, 0].double()).exp()
        losses = torch.where(tokens.decision.keep, -ratio.clamp(max=RATIO_CAP) * tokens.advantage, 0.0)
        averages = [float(losses[tokens.minibatch == number].mean()) for number in range(MINI_BATCHES)]
        assert logged["actor/pg_loss"] == pytest.approx(mean(averages), abs=1e-7)


def test_reward_rises(run):
    scores = [logged["critic/score/mean"] for logged in run.run.steps]
    assert scores[0] < 0.4
    assert scores[-1] > scores[0] + 0.25


def test_an_interrupted_run_leaves_nothing(tmp_path):
    """Of the processes that this kills, none comes back; see also `helpers_processes`."""
    run = train(tmp_path, *launch_args(RULE), *SETTINGS, seconds=30)
    assert run.status is None
    assert len(run.survivors) > 2
