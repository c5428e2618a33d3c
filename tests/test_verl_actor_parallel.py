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
    write_policy,
)
from predmask.traces import TokenTrace, Trace

if importlib.util.find_spec("verl") is None:
    pytest.skip("needs verl", allow_module_level=True)

WORLD = 2
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
}
"""Cases whose samples are dealt to the workers in turn."""
SEQUENCE: dict[str, Callable[[], Case]] = {
    "one at a time": lambda: Case(samples=forced()),
    "all at once": lambda: Case(samples=make_samples()[:5], split={"micro_batch": 5}),
    "warm": lambda: Case(samples=make_samples(temperature=0.7), temperature=0.7, split={"micro_batch": 3}),
}
"""Cases whose sequences are cut in two."""


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


def test_the_cuts_are_padded():
    """Some rows are odd in number, so that the host pads them before it cuts."""
    lengths = [sum(pair) for pair in LENGTHS]
    assert {length % WORLD for length in lengths} == {0, 1}
    assert sum(lengths[:5]) % WORLD == 0
    assert sum(lengths[:3]) % WORLD == 0
