"""verl's actor with the mask on two workers: what they train together is what the unsplit batch gives."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from helpers_verl import (
    LENGTHS,
    Case,
    Sample,
    assert_as_expected,
    assert_close,
    assert_follows,
    filled,
    forced,
    joined,
    long_and_short,
    make_samples,
    read_tokens,
    run_processes,
    with_reference,
    write_policy,
)
from predmask.traces import TokenTrace, Trace

if importlib.util.find_spec("verl") is None:
    pytest.skip("needs verl", allow_module_level=True)

WORLD = 2
# Sequences of either kind, so that the host pads before it cuts.
assert {sum(pair) % WORLD for pair in LENGTHS} == {0, 1}
DATA: dict[str, Callable[[], Case]] = {
    "token-mean": lambda: Case(),
    "token-mean, padded": lambda: Case(actor={"use_remove_padding": False}, samples=forced()),
    "token-sum": lambda: Case(actor={"loss_agg_mode": "token-sum"}),
    "seq-mean-token-mean": lambda: Case(samples=forced(), actor={"loss_agg_mode": "seq-mean-token-mean"}),
    "seq-mean-token-sum-norm": lambda: Case(
        samples=forced(), actor={"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 48}
    ),
    "dynamic": lambda: Case(split={"tokens": 12}),
    "2 and 8 tokens": lambda: Case(samples=long_and_short(), rule={"name": "none"}),
    "filled": lambda: Case(samples=filled()),
    "entropy and reference": lambda: Case(
        samples=with_reference(),
        actor={"entropy_coeff": 0.2, "use_kl_loss": True, "kl_loss_coef": 0.3, "kl_loss_type": "low_var_kl"},
        split={"micro_batch": 1, "entropy": True},
    ),
}
"""Cases whose samples are dealt to the workers in turn."""
SEQUENCE: dict[str, Callable[[], Case]] = {
    "one at a time": lambda: Case(samples=forced()),
    "all at once": lambda: Case(samples=make_samples()[:5], split={"micro_batch": 5}),
    "warm": lambda: Case(samples=make_samples(temperature=0.7), temperature=0.7, split={"micro_batch": 3}),
}
"""Cases whose sequences are cut in two."""
PLAIN = Case(samples=forced(), rule={"name": "none"}, ratio_cap=1.5, split={"micro_batch": 2})
"""What any loss of the host can say, too."""


def work(rank: int, folder: str) -> None:
    """One worker: every case in turn, each written down at once."""
    from verl_on_cpu.actor import join

    where = Path(folder)
    join(rank, WORLD, where / "store")
    for name, make in DATA.items():
        torch.save(spread_samples(where, rank, name, make()), where / f"{name} {rank}.pt")
    spread_steps(where, rank)
    for name, make in SEQUENCE.items():
        torch.save(cut_sequences(where, name, make()), where / f"{name} {rank}.pt")
    torch.save(cut_gradients(where), where / f"cut gradients {rank}.pt")
    torch.save(problem_in_one(where, rank), where / f"problem {rank}.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


def spread_samples(where: Path, rank: int, name: str, case: Case) -> dict[str, Any]:
    from predmask.plugins.verl.settings import PolicyLossConfig
    from verl_on_cpu.actor import logged, make_batch, make_worker, train, watch_gradients

    traces = {"directory": str(where / name), "responses": 0}
    worker = make_worker(where / "model", PolicyLossConfig(**case.policy_loss, traces=traces), **case.actor)
    gradients = watch_gradients(worker)
    samples = [{**sample, "uid": str(number)} for number, sample in enumerate(case.samples)]
    batch = make_batch(samples[rank::WORLD], global_batch_size=len(case.samples), **case.split)
    return {"metrics": logged(train(worker, batch)), "gradients": gradients[0]}


def step_samples() -> list[Sample]:
    """Two responses to each of two prompts, of which each worker gets one."""
    samples = make_samples([(3, 4), (3, 6), (2, 5), (2, 3)])
    for number, sample in enumerate(samples):
        sample |= {"prompt": samples[number // 2 * 2]["prompt"], "uid": "ab"[number // 2], "session": number % 2}
    return samples


def spread_steps(where: Path, rank: int) -> None:
    """Two epochs of two mini-batches, of which a part is recorded."""
    from predmask.plugins.verl.settings import PolicyLossConfig
    from verl_on_cpu.actor import make_batch, make_worker, train_step

    for name, responses in (("steps", 0), ("part of the steps", 1)):
        traces = {"directory": str(where / name), "responses": responses}
        worker = make_worker(where / "model", PolicyLossConfig(**Case().policy_loss, traces=traces))
        batch = make_batch(step_samples()[rank::WORLD], micro_batch=1, global_batch_size=2)
        train_step(worker, batch, epochs=2, mini_batch_size=2)


def cut_sequences(where: Path, name: str, case: Case) -> dict[str, Any]:
    from predmask.plugins.verl.settings import PolicyLossConfig
    from verl_on_cpu.actor import infer, logged, make_batch, make_worker, train

    traces = {"directory": str(where / name), "responses": 0}
    settings = PolicyLossConfig(**case.policy_loss, traces=traces)
    worker = make_worker(where / "model", settings, sequence_parallel=WORLD)
    found = infer(worker, make_batch(case.samples, temperature=case.temperature, **case.split))
    metrics = train(worker, make_batch(case.samples, temperature=case.temperature, **case.split))
    return {"log_probs": found and found[0], "metrics": metrics and logged(metrics)}


def cut_gradients(where: Path) -> dict[str, dict[str, Any]]:
    """Of sequences cut in two: by this package's loss, and by one of the host's kind with the same formula."""
    from verl.workers.config import PolicyLossConfig as HostPolicyLossConfig

    from predmask.plugins.verl.settings import PolicyLossConfig
    from verl_on_cpu.actor import logged, make_batch, make_worker, train, watch_gradients

    found = {}
    for name, policy_loss in {
        "masked": PolicyLossConfig(**PLAIN.policy_loss),
        "plain": HostPolicyLossConfig(loss_mode=register_plain_loss()),
    }.items():
        worker = make_worker(where / "model", policy_loss, sequence_parallel=WORLD)
        gradients = watch_gradients(worker)
        metrics = train(worker, make_batch(PLAIN.samples, **PLAIN.split))
        found[name] = {"gradients": gradients[0], "loss": metrics and float(logged(metrics)["actor/pg_loss"])}
    return found


def register_plain_loss() -> str:
    """-min(r, C) · A, with the gradient of -min(r, C) · A · log pi where the factors are constants."""
    from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss

    @register_policy_loss("plain")
    def plain(
        old_log_prob: Any, log_prob: Any, advantages: Any, response_mask: Any, loss_agg_mode: str, config: Any, **_: Any
    ) -> Any:
        weight = (log_prob - old_log_prob).exp().clamp(max=PLAIN.ratio_cap).detach()
        losses = -weight * advantages * (1 + log_prob - log_prob.detach())
        return agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info), {}

    return "plain"


def problem_in_one(where: Path, rank: int) -> str:
    """What is raised where the server's answer to the second worker cannot be used."""
    from predmask.plugins.verl.settings import PolicyLossConfig
    from verl_on_cpu.actor import make_batch, make_worker, train

    samples = make_samples()[rank::WORLD]
    if rank == 1:
        samples[2]["extra"] = {"min_global_steps": 0, "predmask_problem": "no entry at position 3"}
    worker = make_worker(where / "model", PolicyLossConfig(**Case().policy_loss))
    try:
        train(worker, make_batch(samples, global_batch_size=len(LENGTHS)))
    except RuntimeError as error:
        return str(error)
    return "nothing"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the workers found."""
    found = tmp_path_factory.mktemp("found")
    write_policy(found / "model")
    run_processes(work, str(found), count=WORLD)
    return found


@pytest.mark.parametrize("name", DATA)
def test_workers_train_the_unsplit_batch(folder, name):
    """Each with its samples: the same metrics, loss and gradient in both, and one trace of all samples."""
    for rank in range(WORLD):
        found = torch.load(folder / f"{name} {rank}.pt", weights_only=False)
        assert_as_expected(DATA[name](), folder / name, found["metrics"], found["gradients"])


def test_workers_share_one_denominator(folder):
    """Field case 25: 2 tokens of loss 1 in one worker and 8 tokens of loss 3 in the other are 2.6."""
    for rank in range(WORLD):
        found = torch.load(folder / f"2 and 8 tokens {rank}.pt", weights_only=False)["metrics"]
        assert found["actor/pg_loss"] == pytest.approx(2.6, abs=1e-5)


def test_prompts_and_passes_are_numbered_across_workers(folder):
    tokens, samples = TokenTrace.cat(list(Trace(folder / "steps").tokens())), step_samples()
    groups: dict[int, set[int]] = {}
    numbers = tokens.sample.unique().tolist()
    assert numbers == [0, 1, 2, 3]
    for number in numbers:
        mine = tokens[tokens.sample == number]
        (index,) = (i for i, s in enumerate(samples) if s["response"].tolist() * 2 == mine.id.tolist())
        length = len(samples[index]["response"])
        assert mine.epoch.tolist() == [0] * length + [1] * length
        assert set(mine.minibatch.tolist()) == {index // 2}
        assert mine.optimizer_step.tolist() == [index // 2] * length + [2 + index // 2] * length
        groups.setdefault(index // 2, set()).update(mine.group.tolist())
    assert sorted(map(sorted, groups.values())) == [[0], [1]]


def test_each_worker_records_its_part(folder):
    """Responses are a number over all workers, rounded up to the same for each."""
    tokens = TokenTrace.cat(list(Trace(folder / "part of the steps").tokens()))
    for step in range(4):
        assert len(tokens.sample[tokens.optimizer_step == step].unique()) == WORLD


@pytest.mark.parametrize("name", SEQUENCE)
def test_cut_sequences_are_put_together(folder, name):
    """Statistics are those of the host's own log-probs, token by token, and all else follows from them."""
    case = SEQUENCE[name]()
    found, other = (torch.load(folder / f"{name} {rank}.pt", weights_only=False) for rank in range(WORLD))
    assert other == {"log_probs": None, "metrics": None}
    tokens = read_tokens(folder / name, case.samples)
    own = torch.cat(
        [logp[len(sample["prompt"]) - 1 : -1] for sample, logp in zip(case.samples, found["log_probs"], strict=True)]
    )
    sampled = joined(case.samples, "mask") != 0
    assert_close(tokens.policy.logp[sampled, 0], own[sampled], "logp")
    assert tokens.id.tolist() == joined(case.samples, "response").tolist()
    assert_follows(case, tokens, found["metrics"])
    assert tokens.decision.dropped.any()


def test_cut_sequences_have_the_hosts_gradients(folder):
    """Whatever factors the host's cut brings with it."""
    found = [torch.load(folder / f"cut gradients {rank}.pt", weights_only=False) for rank in range(WORLD)]
    assert found[0]["masked"]["loss"] == pytest.approx(found[0]["plain"]["loss"], rel=1e-5)
    for part in found:
        masked, plain = part["masked"]["gradients"], part["plain"]["gradients"]
        assert masked.keys() == plain.keys()
        for key, value in plain.items():
            assert value.abs().max() > 0, key
            assert_close(masked[key], value, key)


def test_a_servers_problem_is_raised_in_every_worker(folder):
    """Also where it is another worker's: none of them waits."""
    texts = [torch.load(folder / f"problem {rank}.pt", weights_only=False) for rank in range(WORLD)]
    assert texts[0] == texts[1]
    assert "top-K of 1 responses of a mini-batch cannot be used: no entry at position 3" in texts[0]
