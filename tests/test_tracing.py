"""What a run records of itself is what it did, and recording changes nothing."""

from __future__ import annotations

import copy
import dataclasses
import functools
import json
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from helpers_traces import TIGHT
from helpers_training import InterruptedEngine, WrappedEngine, small
from predmask.cli import main
from predmask.core import MaskDecision, Reason
from predmask.rollout import Rollout, Sampling
from predmask.traces import SampleTrace, TokenTrace, Trace
from predmask.train import Config, ConfigError, Trainer, run
from predmask.train.options import overrides, read_toml, resolve, to_toml
from predmask.train.run import Display
from predmask.train.trainer import TrainingError
from test_update import FaintEngine, PatchyEngine, advantages_of, patchy

TWO_EPOCHS: dict[str, Any] = {
    "steps": 2,
    "rule": {"delta": 0.02},
    "optimizer": {"learning_rate": 3e-4, "grad_clip": 1.0},
    "update": {"steps_per_rollout": 2, "epochs": 2, "micro_batch_size": 3},
}


def writers_left() -> list[str]:
    """Threads that write traces."""
    return [thread.name for thread in threading.enumerate() if thread.name == "trace-writer"]


@pytest.fixture(autouse=True)
def _in_a_new_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class Listener:
    """Takes what a trainer records, and looks at the policy whenever it is handed tokens."""

    def __init__(self, trainer: Trainer, *, watch: bool = False) -> None:
        self.trainer = trainer
        self.watch = watch
        self.asked: list[int] = []
        self.samples: list[SampleTrace] = []
        self.parts: list[TokenTrace] = []
        self.commits: list[tuple[int, int]] = []
        self.policies: list[tuple[Any, Any]] = []
        """By part, the policy before its optimiser step and after it."""
        self._current: Any = copy.deepcopy(trainer.model) if watch else None
        self._before: Any = None
        self._place: tuple[int, ...] = ()

    def wants(self, step: int) -> bool:
        self.asked.append(step)
        return (step - 1) % self.trainer.config.traces.every == 0

    def add(self, records: TokenTrace | Sequence[SampleTrace]) -> None:
        if not isinstance(records, TokenTrace):
            self.samples += records
            return
        self.parts.append(records)
        if self.watch:
            place = tuple(int(getattr(records, name)[0]) for name in ("step", "epoch", "minibatch"))
            if place != self._place:
                self._place, self._before = place, self._current
                self._current = copy.deepcopy(self.trainer.model)
            self.policies.append((self._before, self._current))

    def commit(self, step: int) -> None:
        self.commits.append((step, len(self.parts)))

    @property
    def tokens(self) -> TokenTrace:
        return TokenTrace.cat(self.parts)


def listened(config: Config, engine_class: Any = PatchyEngine, *, watch: bool = False) -> tuple[Trainer, Listener]:
    """A run that was recorded in memory."""
    trainer = Trainer(config)
    trainer.engine = engine_class(trainer.model)
    trainer.recorder = listener = Listener(trainer, watch=watch)
    for _ in trainer.steps():
        pass
    trainer.close()
    return trainer, listener


def recording(*layers: dict[str, Any], **values: Any) -> Config:
    return patchy(TWO_EPOCHS, *layers, values)


# Recording changes nothing.


def outcome(config: Config, *, record: bool) -> tuple[torch.Tensor, list[dict[str, float]]]:
    trainer = Trainer(config)
    trainer.engine = PatchyEngine(trainer.model)
    if record:
        trainer.recorder = Listener(trainer)
    figures = [result.metrics for result in trainer.steps()]
    trainer.close()
    for record_ in figures:
        del record_["seconds"], record_["tokens_per_second"]
    return torch.cat([parameter.detach().flatten() for parameter in trainer.model.parameters()]), figures


UPDATES: dict[str, dict[str, Any]] = {
    "fused": {"head": "fused"},
    "dense": {"head": "dense"},
    "autocast": {"autocast": True},
}


@functools.cache
def unrecorded(update: str) -> tuple[torch.Tensor, list[dict[str, float]]]:
    return outcome(recording({"update": UPDATES[update]}), record=False)


@pytest.mark.slow
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize(
    "traces",
    [{"enabled": True}, {"after": True}, {"full": True}, {"after": True, "full": True, "responses": 5, "every": 2}],
    ids=lambda traces: "-".join(traces),
)
def test_recording_changes_no_bit_of_a_run(update: str, traces: dict[str, Any]) -> None:
    weights, figures = unrecorded(update)
    assert all(0 < record["mask_frac"] < 1 for record in figures)
    found, same = outcome(recording({"update": UPDATES[update], "traces": traces}), record=True)
    assert torch.equal(found, weights)
    assert same == figures


@pytest.mark.slow
def test_a_whole_run_is_the_same_with_traces(tmp_path: Path) -> None:
    lines, checkpoints = [], []
    for name, layer in (("without", {}), ("with", {"traces": {"after": True, "full": True}})):
        _, directory = run(small({"engine": {"numerics": "int4"}}, layer, output=name))
        records = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
        for record in records:
            for key in ("seconds", "tokens_per_second"):
                record.pop(key, None)
        lines.append(records)
        checkpoints.append((directory / "checkpoint" / "model.safetensors").read_bytes())
    assert lines[0] == lines[1]
    assert checkpoints[0] == checkpoints[1]
    assert not Path("without/traces").exists()
    assert Trace(Path("with")).steps == [1, 2]


# What is recorded is what was done.


@pytest.mark.slow
def test_every_token_of_every_update_is_there_once_and_in_its_place() -> None:
    trainer, listener = listened(recording({"rollout": {"prompts": 4, "group_size": 4}}))
    rollouts = trainer.engine.rollouts
    tokens = listener.tokens
    assert listener.commits == [(1, listener.commits[0][1]), (2, len(listener.parts))]
    for step, rollout in enumerate(rollouts, 1):
        advantages = advantages_of(trainer, rollout)
        assert any(map(math.isnan, advantages))
        lengths = rollout.lengths.tolist()
        starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
        expected = [(sample, position) for sample, length in enumerate(lengths) for position in range(length)]
        for epoch in (0, 1):
            part = tokens[(tokens.step == step) & (tokens.epoch == epoch)]
            places = list(zip(part.sample.tolist(), part.position.tolist(), strict=True))
            assert sorted(places) == expected
            rows = torch.tensor([starts[sample] + position for sample, position in places])
            assert torch.equal(part.id, rollout.tokens[rows])
            assert torch.equal(part.decision.response_mask, rollout.sampled[rows])
            assert torch.equal(part.version, rollout.version[rows])
            torch.testing.assert_close(part.behaviour.logp[:, 0], rollout.logp[rows], rtol=0, atol=0, equal_nan=True)
            assert part.group.tolist() == [sample // 4 for sample, _ in places]
            # What could not be scored counts as 0.
            given = [0.0 if math.isnan(advantages[sample]) else advantages[sample] for sample, _ in places]
            assert part.advantage.tolist() == pytest.approx(given, abs=1e-6)
            # Each response is in one minibatch, and minibatches are equally large.
            minibatches = dict(zip(part.sample.tolist(), part.minibatch.tolist(), strict=True))
            assert sorted(Counter(minibatches.values()).items()) == [(0, 8), (1, 8)]
            assert all(minibatches[s] == m for s, m in zip(part.sample.tolist(), part.minibatch.tolist(), strict=True))
            updates = 4 * (step - 1) + 2 * epoch + part.minibatch
            assert torch.equal(part.optimizer_step, updates)
            assert torch.equal(part.staleness, updates - 4 * (step - 1))
        first, second = (tokens[(tokens.step == step) & (tokens.epoch == epoch)] for epoch in (0, 1))
        assert first.sample.tolist() != second.sample.tolist()
    assert trainer.version == 8


@pytest.mark.slow
def test_responses_say_what_was_asked_and_what_came_of_it() -> None:
    trainer, listener = listened(recording())
    rollouts = trainer.engine.rollouts
    problems = {tuple(trainer.tokenizer.encode(p.prompt)): p for p in trainer.config.task.problems("train")}
    assert [sample.step for sample in listener.samples] == [1] * 16 + [2] * 16
    for step, rollout in enumerate(rollouts, 1):
        texts = trainer.tokenizer.batch_decode(rollout.responses(), skip_special_tokens=True)
        for sample in listener.samples[16 * (step - 1) : 16 * step]:
            i = sample.sample
            problem = problems[rollout.prompts[i]]
            score = trainer.config.task.score(problem, texts[i])
            assert (sample.prompt, sample.group) == (rollout.prompts[i], i // 4)
            assert (sample.length, sample.finished) == (int(rollout.lengths[i]), bool(rollout.finished[i]))
            assert (sample.problem, sample.reference) == (problem.id, str(problem.reference))
            assert sample.reward == pytest.approx(math.nan if score is None else score, nan_ok=True)
            assert sample.advantage == pytest.approx(advantages_of(trainer, rollout)[i], abs=1e-6, nan_ok=True)
        assert [sample.sample for sample in listener.samples if sample.step == step] == list(range(16))
    assert {math.isnan(sample.reward) for sample in listener.samples} == {True, False}


@torch.no_grad()
def rows_of(model: Any, temperature: float, sample: SampleTrace, response: list[int]) -> torch.Tensor:
    """[T, V] log pi at each token of a response, by a plain forward pass."""
    logits = model(input_ids=torch.tensor([[*sample.prompt, *response]]), use_cache=False).logits[0]
    return torch.log_softmax(logits[len(sample.prompt) - 1 : -1].double() / temperature, dim=-1)


def responses_in(part: TokenTrace) -> Iterator[tuple[int, TokenTrace]]:
    """The responses of a part, their tokens in order."""
    for sample in part.sample.unique().tolist():
        response = part[part.sample == sample]
        yield sample, response[response.position.argsort()]


@pytest.mark.slow
@pytest.mark.parametrize("head", ["fused", "dense"])
def test_policies_are_measured_before_and_after_the_optimiser_step(head: str) -> None:
    layer = {"update": {"head": head}, "traces": {"after": True, "full": True}, "optimizer": {"learning_rate": 1e-3}}
    trainer, listener = listened(recording(layer), watch=True)
    rollouts = trainer.engine.rollouts
    samples = {(sample.step, sample.sample): sample for sample in listener.samples}
    temperature, moved = trainer.config.rollout.temperature, 0.0
    for part, policies in zip(listener.parts, listener.policies, strict=True):
        assert part.after is not None
        assert part.full is not None
        assert part.full.after is not None
        for number, response in responses_in(part):
            sample = samples[int(part.step[0]), number]
            ids, valid = response.behaviour.ids, response.behaviour.valid
            for model, support, full in (
                (policies[0], response.policy, response.full.policy),
                (policies[1], response.after, response.full.after),
            ):
                rows = rows_of(model, temperature, sample, response.id.tolist())
                assert support is not None
                assert full is not None
                torch.testing.assert_close(full.double(), rows, rtol=0, atol=2e-4)
                # Nothing need be measured where the policy did not sample.
                on = response.decision.response_mask
                expected = rows.gather(-1, ids).masked_fill(~valid, -math.inf)
                torch.testing.assert_close(support.logp.double()[on], expected[on], rtol=0, atol=2e-4)
                tail = rows.scatter(-1, ids, -math.inf).logsumexp(-1)
                torch.testing.assert_close(support.log_tail.double()[on], tail[on], rtol=0, atol=2e-4)
            change = (response.after.logp - response.policy.logp)[valid]
            moved = max(moved, float(change.nan_to_num(0.0).abs().max()))
            # The engine's rows are those that the support was cut from.
            rollout = rollouts[int(part.step[0]) - 1]
            assert torch.equal(response.full.behaviour, rollout.full_logp[rollout.sequence == number])
    assert moved > 0.01


@pytest.mark.slow
@pytest.mark.parametrize("head", ["fused", "dense", "autocast"])
@pytest.mark.parametrize("rule", [*TIGHT, "predictive on js"])
def test_the_recorded_rule_makes_all_recorded_decisions_again(rule: str, head: str) -> None:
    update = {"autocast": True} if head == "autocast" else {"head": head}
    name = rule.partition(" ")[0]
    settings = TIGHT[name] | ({"divergence": "kl"} if rule == "predictive" else {})
    config = recording({"rule": {"name": name, **settings}, "update": update, "steps": 1})
    trainer, listener = listened(config)
    tokens = listener.tokens
    again = tokens.decide(config.rule)
    for field in dataclasses.fields(MaskDecision):
        found, recorded = getattr(again, field.name), getattr(tokens.decision, field.name)
        torch.testing.assert_close(found, recorded, rtol=0, atol=0, equal_nan=True)
    dropped = Counter(tokens.id[tokens.decision.dropped].tolist())
    assert {row.id: row.count for row in trainer.masked_tokens()} == dropped
    assert bool(dropped) == config.rule.can_fire
    assert {Reason.UNKNOWN, Reason.NOT_TRAINABLE} <= set(tokens.decision.reason.tolist())


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["predictive", "ppo_clip"])
def test_the_figures_of_a_step_follow_from_its_columns(rule: str) -> None:
    config = recording({"rule": {"name": rule, **TIGHT[rule]}, "rollout": {"top_k": 4}}, output="run", traces=True)
    summary, directory = run(config, engine=PatchyEngine(Trainer(config).model))
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    dropped_ids: list[int] = []
    for line in lines[1:]:
        table = pq.read_table(directory / "traces" / f"tokens-{line['step']:06d}.parquet")
        column = {name: np.array(table[name].to_pylist()) for name in table.column_names}
        mu, pi = column["behaviour_logp"], column["policy_logp"]
        with np.errstate(invalid="ignore", over="ignore"):
            log_ratio = pi[:, 0].astype(float) - mu[:, 0]
            on = mu > -np.inf
            kl = np.where(on, np.exp(mu) * (mu - np.where(on, pi, 0)), 0).sum(1)
            tail = np.exp(column["behaviour_log_tail"])
            kl += np.where(tail > 0, tail * (column["behaviour_log_tail"] - column["policy_log_tail"]), 0)
        reason = column["reason"]
        known = column["response"] & (reason != Reason.UNKNOWN) & np.isfinite(log_ratio) & np.isfinite(kl)
        positive, negative = reason == Reason.DROPPED_POSITIVE, reason == Reason.DROPPED_NEGATIVE
        masked, kept = positive | negative, column["keep"]
        fresh = known & (column["optimizer_step"] == column["version"])
        divergence = column["divergence"]
        expected = {
            "mask_frac": masked[known].mean(),
            "mask_frac_pos": positive[known].mean(),
            "mask_frac_neg": negative[known].mean(),
            "divergence_kept_mean": divergence[known & kept].mean(),
            "divergence_kept_max": divergence[known & kept].max(),
            "divergence_masked_mean": divergence[masked].mean(),
            "divergence_masked_max": divergence[masked].max(),
            "behaviour_kl": kl[known].mean(),
            "mismatch_kl": (np.expm1(log_ratio) - log_ratio)[fresh].mean(),
            "entropy": column["entropy"][known].mean(),
            "staleness_mean": (column["optimizer_step"] - column["version"])[known].mean(),
            "staleness_max": (column["optimizer_step"] - column["version"])[known].max(),
            "unknown_logprob_count": (column["response"] & ~known).sum(),
            "overflow_count": 0,
            # Two epochs over each token.
            "tokens": len(reason) / 2,
        }
        assert {name: line[name] for name in expected} == pytest.approx(
            {name: float(value) for name, value in expected.items()}, rel=2e-4
        )
        assert 0 < expected["mask_frac_neg"] < expected["mask_frac"]
        assert expected["unknown_logprob_count"] > 0
        dropped_ids += column["id"][masked].tolist()
    counts = Counter(dropped_ids)
    assert {row["id"]: row["count"] for row in summary.masked_tokens} == {
        token: counts[token] for token in (row["id"] for row in summary.masked_tokens)
    }
    assert sum(counts.values()) > 0
    assert Trace(directory).info.make_rule() == config.rule


@pytest.mark.slow
def test_there_is_no_policy_after_an_update_that_was_not_taken() -> None:
    layer = {"task": {"name": "helpers_training:Constant"}, "traces": {"after": True}}
    trainer, listener = listened(recording(layer))
    tokens = listener.tokens
    assert trainer.version == 0
    assert tokens.optimizer_step.unique().tolist() == [0]
    assert not tokens.decision.keep.any()
    assert tokens.after is not None
    assert tokens.after.logp.isnan().all()
    assert tokens.after.log_tail.isnan().all()


# What is asked for is what is recorded.


@pytest.mark.slow
@pytest.mark.parametrize("responses", [1, 3, 4, 7, 16, 99, "none"])
def test_some_responses_a_step_are_spread_over_its_prompts(responses: Any) -> None:
    trainer, listener = listened(recording({"traces": {"responses": responses}}, steps=1))
    (rollout,) = trainer.engine.rollouts
    wanted = 16 if responses == "none" else min(responses, 16)
    chosen = [sample.sample for sample in listener.samples]
    assert len(set(chosen)) == len(chosen) == wanted
    assert len({sample.group for sample in listener.samples}) == min(wanted, 4)
    tokens = listener.tokens
    assert sorted(tokens.sample.unique().tolist()) == chosen
    # Each of their tokens, once an epoch, under its own number.
    for sample in chosen:
        ids = rollout.tokens[rollout.sequence == sample]
        for epoch in (0, 1):
            part = tokens[(tokens.sample == sample) & (tokens.epoch == epoch)]
            assert torch.equal(part.id[part.position.argsort()], ids)
    if wanted == 16:
        return
    everything = listened(recording(steps=1))[1].tokens
    part = everything[torch.isin(everything.sample, torch.tensor(chosen))]
    torch.testing.assert_close(tokens.policy.logp, part.policy.logp, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(tokens.decision.reason, part.decision.reason)


class KeepingEngine(WrappedEngine):
    """Remembers whether whole distributions were asked for."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__(model)
        self.full: list[bool] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, generator: torch.Generator) -> Rollout:
        self.full.append(sampling.record_full)
        return super().generate(prompts, sampling, generator)


@pytest.mark.slow
def test_steps_are_recorded_as_often_as_asked_and_whole_rows_then_alone() -> None:
    trainer, listener = listened(small({"traces": {"every": 2, "full": True}}, steps=3), KeepingEngine)
    assert listener.asked == [1, 2, 3]
    assert [step for step, _ in listener.commits] == [1, 3]
    assert sorted(listener.tokens.step.unique().tolist()) == [1, 3]
    assert {sample.step for sample in listener.samples} == {1, 3}
    assert trainer.engine.full == [True, False, True]
    assert listener.tokens.full is not None
    assert listener.tokens.after is None
    assert listener.tokens.full.after is None


class RowlessEngine(WrappedEngine):
    """Records no whole distributions, whatever is asked."""

    def change(self, rollout: Rollout) -> Rollout:
        return dataclasses.replace(rollout, full_logp=None)


def test_rows_that_the_engine_does_not_record_are_asked_for_in_vain() -> None:
    with pytest.raises(ConfigError, match=r"traces\.full.*turn it off"):
        listened(small({"traces": {"full": True}}), RowlessEngine)


# Runs that end early, and disks that do.


@pytest.mark.slow
def test_an_interrupted_run_leaves_its_trace() -> None:
    config = small(output="run", traces=True)
    trainer = Trainer(config)
    with pytest.raises(KeyboardInterrupt):
        run(config, engine=InterruptedEngine(trainer.model))
    trace = Trace("run")
    assert trace.steps == [1]
    (tokens,) = trace.tokens()
    assert sorted(tokens.minibatch.unique().tolist()) == [0, 1, 2, 3]
    assert len(trace.samples(1)) == 16
    assert list(Path("run/traces").glob("*.partial")) == []
    assert not writers_left()


@pytest.mark.slow
def test_the_update_that_failed_is_in_the_trace() -> None:
    layer = {
        "rule": "none",
        "rollout": {"top_k": 0},
        "loss": {"ratio_cap": "none"},
        "optimizer": {"learning_rate": 1e-4},
        "traces": {"after": True},
    }
    config = patchy(layer, steps=2, output="run")
    trainer = Trainer(config)
    with pytest.raises(TrainingError, match="the loss is"):
        run(config, engine=FaintEngine(trainer.model))
    trace = Trace("run")
    assert trace.steps == [1, 2]
    (tokens,) = trace.tokens([2])
    ratio = tokens.policy.logp[:, 0] - tokens.behaviour.logp[:, 0]
    assert float(ratio.max()) > 88
    assert not tokens.decision.weight.isfinite().all()
    assert trace.samples(2)


class FullDisk(Display):
    """The disk is full when a file is written; what is said of it is kept."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.said: list[tuple[int, str]] = []
        self.step = 0

    def started(self, trainer: Trainer, directory: Path) -> None:
        (directory / "traces" / f"{self.name}.partial").symlink_to("/dev/full")

    def stepped(self, result: Any, trainer: Trainer) -> None:
        self.step = result.step
        time.sleep(0.2)  # for the writer to find out

    def warned(self, text: str) -> None:
        self.said.append((self.step, text))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_a_full_disk_ends_the_trace_and_not_the_run() -> None:
    display = FullDisk("tokens-000001.parquet")
    summary, directory = run(small(output="run", traces=True, steps=3), display=display)
    assert summary.status == "finished"
    assert summary.steps == 3
    # Said once, and as soon as it is known.
    ((step, text),) = display.said
    assert step <= 2
    assert "No space left" in text
    assert not list((directory / "traces").glob("tokens-*.parquet"))
    assert not writers_left()


@pytest.mark.slow
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
def test_texts_that_cannot_be_written_do_not_end_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Quiet(Display):
        def warned(self, text: str) -> None:
            said.append(text)

    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("pyarrow.parquet.write_table", full)
    summary, _ = run(small(output="run", traces=True, steps=1), display=Quiet())
    assert summary.status == "finished"
    (text,) = said
    assert "No space left" in text


# From the command line to the files.

TINY = [
    "--device=cpu", "--steps=2", "--rollout.prompts=2", "--rollout.group_size=4", "--update.steps_per_rollout=2",
    "--eval.prompts=4", "--eval.samples=1",
]  # fmt: skip


@pytest.mark.slow
def test_a_run_of_the_command_line_records_what_it_did(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "arithmetic", *TINY, "--traces", "--output=Übung 7"]) == 0
    trace = Trace("Übung 7")
    assert trace.steps == [1, 2]
    assert trace.info.run == "Übung 7"
    config = resolve(read_toml("Übung 7/config.toml"))
    assert config.traces.enabled
    assert trace.info.make_rule() == config.rule
    assert (trace.info.top_k, trace.info.temperature) == (config.rollout.top_k, config.rollout.temperature)
    trainer = Trainer(config)
    assert trace.info.vocabulary_size == trainer.model.config.vocab_size
    assert trace.vocabulary.keys() == set(range(len(trainer.tokenizer)))
    tokens = TokenTrace.cat(list(trace.tokens([1])))
    for _, response in responses_in(tokens):
        text = "".join(trace.text(token) for token in response.id.tolist())
        assert text.strip() == trainer.tokenizer.decode(response.id.tolist()).strip()
    # The trace says what the run's figures say.
    record = json.loads(Path("Übung 7/metrics.jsonl").read_text().splitlines()[1])
    assert len(tokens) == record["tokens"]
    assert float(tokens.decision.dropped[tokens.known].float().mean()) == pytest.approx(record["mask_frac"])
    capsys.readouterr()


@pytest.mark.slow
def test_a_run_without_traces_writes_none() -> None:
    assert main(["train", "arithmetic", *TINY, "--output=run"]) == 0
    assert not Path("run/traces").exists()
    assert not writers_left()


def traces_of(*args: str) -> Any:
    return resolve(overrides(args)).traces


def test_traces_are_off_unless_asked_for() -> None:
    assert not Config().traces.enabled
    for args in (
        ["--traces"],
        ["--traces=true"],
        ["--traces", "true"],
        ["--traces", "--steps=3"],
        ["--traces.enabled"],
    ):
        assert traces_of(*args) == dataclasses.replace(Config().traces, enabled=True)
    for args in (["--traces=false"], ["--traces", "--traces=false"], ["--traces.every=2", "--traces=false"]):
        assert not traces_of(*args).enabled


@pytest.mark.parametrize(
    ("option", "value"),
    [("every", 2), ("responses", 5), ("max_mb", 7), ("after", True), ("full", True)],
)
def test_saying_how_to_record_asks_for_it(option: str, value: Any) -> None:
    found = traces_of(f"--traces.{option}={str(value).lower()}")
    assert found == dataclasses.replace(Config().traces, enabled=True, **{option: value})
    assert resolve({"traces": {option: value}}).traces == found
    assert found == traces_of("--traces", f"--traces.{option}={str(value).lower()}")
    # A later layer turns them off, and keeps what was set.
    assert resolve({"traces": {option: value}}, {"traces": False}).traces == dataclasses.replace(found, enabled=False)
    assert not resolve({"traces": {option: value}}, overrides(["--traces=false"])).traces.enabled


@pytest.mark.parametrize(
    "text", ["traces = true", "[traces]\nenabled = true", "[traces]\nevery = 3\nresponses = 'none'"]
)
def test_a_file_may_ask_for_traces(text: str) -> None:
    Path("config.toml").write_text(text)
    config = resolve(read_toml("config.toml"))
    assert config.traces.enabled
    assert config.traces.every == (3 if "every" in text else 1)
    assert resolve(read_toml("config.toml"), overrides(["--traces.max_mb=5"])).traces.max_mb == 5


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--traces=yes"], "traces.enabled is 'yes'; expected true|false"),
        (["--traces="], "traces.enabled is ''; expected true|false"),
        (["--traces.every=0"], "traces.every is 0"),
        (["--traces.max_mb=0"], "traces.max_mb is 0"),
        (["--traces.responses=0"], "traces.responses is 0"),
        (["--traces.max_mb=0.5"], "traces.max_mb is '0.5'; expected int"),
        (["--traces.all"], "unknown option 'traces.all'"),
        (["--trace"], "did you mean 'traces'?"),
        (["--rollout"], "rollout is True, but it is a section"),
    ],
    ids=str,
)
def test_what_cannot_be_recorded_is_named(args: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve(overrides(args))
    assert words in str(caught.value)


@pytest.mark.parametrize("value", ["yes", 1, None, [], 0])
def test_a_section_of_traces_is_a_table_or_a_truth_value(value: Any) -> None:
    with pytest.raises(ConfigError, match=r"traces is .*set one of traces\.enabled"):
        resolve({"traces": value})


def test_a_configuration_with_traces_is_read_back_as_it_was(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["--traces", "--traces.every=3", "--traces.responses=8", "--traces.after"]
    assert main(["config", "arithmetic", *args]) == 0
    Path("config.toml").write_text(capsys.readouterr().out)
    config = resolve(read_toml("config.toml"))
    assert config.traces == traces_of(*args)
    for traces in (config.traces, Config().traces, dataclasses.replace(config.traces, enabled=False)):
        Path("again.toml").write_text(to_toml(dataclasses.replace(config, traces=traces)))
        assert resolve(read_toml("again.toml")).traces == traces


# What it costs.


@pytest.mark.slow
def test_recording_costs_little() -> None:
    def seconds(*, traces: bool) -> float:
        """Of processors, for a step: what else a machine does is not counted."""
        marks: list[float] = []

        class Clock(Display):
            def stepped(self, result: Any, trainer: Trainer) -> None:
                marks.append(time.process_time())

        run(small({"rollout": {"prompts": 8, "group_size": 8}}, steps=4, traces=traces), display=Clock())
        return min(np.diff(marks[:-1]))

    without, with_traces = seconds(traces=False), seconds(traces=True)
    assert with_traces < 1.3 * without + 0.03
