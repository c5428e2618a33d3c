"""TRL's trainer with the mask on two processes: one average, one set of figures, one trace."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("trl")

import torch

from helpers_trl import (
    NO_MASK,
    TOP_K,
    Step,
    assert_gradients,
    exact_model,
    expect,
    join,
    joined,
    policy_model,
    rows_of,
    run_processes,
    shares,
    train,
)
from predmask.core import NoMask, Predictive, Rule, mask_metrics
from predmask.plugins.trl.trainer import SAMPLE, VERSION
from predmask.traces import TokenTrace, Trace

pytestmark = pytest.mark.slow

WORLD = 2
RULE = Predictive(delta=0.02)
OFF_POLICY: dict[str, Any] = {"rule": RULE, "max_steps": 4, "num_iterations": 2, "learning_rate": 0.5}
CASES: dict[str, dict[str, Any]] = {
    **{f"{name}, accumulation 2": {"loss_type": name, "gradient_accumulation_steps": 2} for name in ("grpo", "bnpo")},
    "dr_grpo, accumulation 1": {"loss_type": "dr_grpo"},
    "dapo, accumulation 1": {"loss_type": "dapo"},
    "dapo, accumulation 4": {"loss_type": "dapo", "gradient_accumulation_steps": 4},
    "dapo, 4 of a generation": {"loss_type": "dapo", "gradient_accumulation_steps": 2, "steps_per_generation": 4},
    "dapo, only finished": {"loss_type": "dapo", "gradient_accumulation_steps": 2, "mask_truncated_completions": True},
}
"""Groups of 4 completions, of which each process has 2 in a micro-batch."""
MASKED: dict[str, dict[str, Any]] = {name: CASES[name] for name in ("grpo, accumulation 2", "dapo, accumulation 4")}
SPLIT = {"per_device_train_batch_size": 2}


def work(rank: int, folder: str) -> None:
    """Everything in one group, each result written down at once."""
    where = Path(folder)
    join(rank)

    def keep(name: str, **settings: Any) -> None:
        run = train(where / f"out-{name}", **SPLIT, **settings)
        found = {key: getattr(run, key) for key in ("generations", "batches", "states", "logs")}
        torch.save(
            {**found, "completions": run.completions(), "steps": [vars(step) for step in run.steps]},
            where / f"{name}-{rank}.pt",
        )

    for name, settings in CASES.items():
        keep(f"stock {name}", stock=True, **settings)
        keep(f"none {name}", **settings, **NO_MASK)
    for name, settings in MASKED.items():
        traces = str(where / f"traces {name}")
        keep(f"masked {name}", traces=traces, traces_responses=0, **settings, **OFF_POLICY)
    keep("part", traces=str(where / "traces part"), traces_responses=2, gradient_accumulation_steps=2, **OFF_POLICY)
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = tmp_path_factory.mktemp("found")
    run_processes(work, str(found), count=WORLD)
    return found


def load(folder: Path, name: str) -> list[dict[str, Any]]:
    """What each process found."""
    found = [torch.load(folder / f"{name}-{rank}.pt", weights_only=False) for rank in range(WORLD)]
    for one in found:
        one["steps"] = [Step(**step) for step in one["steps"]]
    return found


@pytest.mark.parametrize("name", CASES)
def test_without_a_mask_it_is_the_stock_trainer(folder, name):
    stock, ours = load(folder, f"stock {name}"), load(folder, f"none {name}")
    for theirs, mine in zip(stock, ours, strict=True):
        assert mine["completions"] == theirs["completions"]
        assert torch.equal(mine["batches"][0]["advantages"], theirs["batches"][0]["advantages"])
        assert_gradients(mine["steps"][0].gradients, theirs["steps"][0].gradients)
    assert ours[0]["completions"] != ours[1]["completions"]
    assert ours[0]["logs"][0]["loss"] == pytest.approx(stock[0]["logs"][0]["loss"], rel=1e-4, abs=1e-6)
    assert_trained(ours, NoMask(), None, **CASES[name])


@pytest.mark.parametrize("name", MASKED)
def test_the_mask_is_one(folder, name):
    """Averages and figures are those of all processes' tokens; ratios are no longer 1 in the second pass."""
    found = load(folder, f"masked {name}")
    assert_trained(found, RULE, 5.0, **MASKED[name])
    assert [log["predmask/staleness_max"] for log in found[0]["logs"]] == [0, 1, 0, 1]
    assert found[0]["logs"][1]["predmask/mask_frac"] > 0.05


def assert_trained(found: list[dict[str, Any]], rule: Rule, cap: float | None, **settings: Any) -> None:
    """Each optimiser step is that of the processes' micro-batches taken together."""
    steps = settings.get("gradient_accumulation_steps", 1)
    cut = steps / settings.get("steps_per_generation", steps)
    for number in range(len(found[0]["steps"])):
        part = slice(number * steps, (number + 1) * steps)
        exact = exact_model(policy_model(), found[0]["states"][part][0])
        loss, parts, ages = 0.0, [], []
        for batch in itertools.chain(*(one["batches"][part] for one in found)):
            expected = expect(exact, batch, rule=rule, cap=cap)
            # Each token counts alike, wherever it is; the other averages are of each process, and their mean is taken.
            share = shares(expected.lengths, settings["loss_type"], steps=steps, window=_window(batch, cut))
            share = share if settings["loss_type"] == "dapo" else share / WORLD
            (share * expected.losses * expected.logp).sum().backward()
            loss += float((share * expected.losses).sum())
            parts.append(expected)
            ages.append((number - batch[VERSION]).repeat_interleave(torch.tensor(expected.lengths)))
        wanted = {name: weight.grad for name, weight in exact.named_parameters()}
        figures = mask_metrics(*joined(parts), staleness=torch.cat(ages)).compute()
        for one in found:
            assert_gradients(one["steps"][number].gradients, wanted)
            log = one["logs"][number]
            assert log["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
            logged = {key.removeprefix("predmask/"): value for key, value in log.items() if key.startswith("predmask/")}
            assert logged == pytest.approx(figures, rel=1e-4, abs=2e-6)


def _window(batch: dict[str, Any], cut: float) -> float:
    return float(batch["num_items_in_batch"]) * cut


@pytest.mark.parametrize("name", MASKED)
def test_one_trace_has_all_completions(folder, name):
    found, trace = load(folder, f"masked {name}"), Trace(folder / f"traces {name}")
    assert trace.steps == [1, 2]
    assert trace.info.top_k == TOP_K
    for step in trace.steps:
        tokens, samples = TokenTrace.cat(list(trace.tokens([step]))), trace.samples(step)
        generations = [one["generations"][step - 1] for one in found]
        expected = {
            int(number): (prompt, completion, float(advantage))
            for generated in generations
            for number, (prompt, completion), advantage in zip(
                generated[SAMPLE], rows_of(generated), generated["advantages"], strict=True
            )
        }
        assert sorted(expected) == list(range(len(samples)))
        recorded = []
        for sample in samples:
            mine = tokens[tokens.sample == sample.sample]
            assert mine.epoch.unique().tolist() == [0, 1]
            recorded.append((list(sample.prompt), mine[mine.epoch == 0].id.tolist(), sample.advantage))
            assert sample.reward == pytest.approx(sum(recorded[-1][1]) % 7 / 7)
            assert mine.optimizer_step.unique().tolist() == [2 * step - 2, 2 * step - 1]
        assert sorted(recorded) == sorted(expected.values())
        # Groups of 4 lie across the processes or not; a group has one prompt.
        assert sorted(s.group for s in samples) == sorted([*range(len(samples) // 4)] * 4)
        assert len({(s.group, s.prompt) for s in samples}) == len(samples) // 4
    tokens = TokenTrace.cat(list(trace.tokens()))
    assert torch.equal(tokens.decide(RULE).reason, tokens.decision.reason)


def test_a_part_of_each_process_is_recorded(folder):
    """Two completions of each generation: one of either process."""
    found, trace = load(folder, "part"), Trace(folder / "traces part")
    for step in trace.steps:
        tokens = TokenTrace.cat(list(trace.tokens([step])))
        recorded = [tokens[(tokens.sample == s.sample) & (tokens.epoch == 0)].id.tolist() for s in trace.samples(step)]
        by_process = [
            sum(completion in recorded for _, completion in rows_of(one["generations"][step - 1])) for one in found
        ]
        assert len(recorded) == 2
        assert by_process == [1, 1]
