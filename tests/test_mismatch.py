"""Mismatch: what engine and trainer say of the same tokens, before any update."""

from __future__ import annotations

import copy
import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers_traces import make_tokens
from helpers_training import (
    ForgetfulEngine,
    NoisyEngine,
    RawTemperatureEngine,
    SampledOnlyEngine,
    ShiftedEngine,
    ShuffledEngine,
    WrappedEngine,
    small,
)
from predmask.analysis.mismatch import Mismatch, Spread, measure
from predmask.analysis.mismatch.figure import draw
from predmask.analysis.mismatch.sample import Sample, judge, sample
from predmask.analysis.mismatch.view import lines, to_json
from predmask.cli import main
from predmask.core import DPPO, BehaviourSupport, NoMask, PolicySupport, PPOClip, Predictive, Rule
from predmask.rollout import Rollout, RolloutError, Sampling, TransformersConfig, TransformersEngine
from predmask.traces import TokenTrace
from predmask.train import Config, run
from predmask.train.config import ConfigError
from predmask.train.heads import HeadError
from predmask.train.models import load_policy
from small_models import dense_rows, small_model

CPU = torch.device("cpu")


class RecordingEngine(WrappedEngine):
    """A real engine whose last rollout can be looked at."""

    def __init__(self, model: torch.nn.Module, numerics: Any = "float32") -> None:
        super().__init__(model)
        self.inner = TransformersEngine(model, numerics=numerics)
        self.closed = 0

    def change(self, rollout: Rollout) -> Rollout:
        self.rollout = rollout
        return rollout

    def close(self) -> None:
        self.closed += 1


class ToolEngine(WrappedEngine):
    """Says that every other token is a tool's, which the policy did not sample."""

    def change(self, rollout: Rollout) -> Rollout:
        sampled = torch.arange(len(rollout.tokens)) % 2 == 0
        return dataclasses.replace(rollout, sampled=sampled, logp=rollout.logp.masked_fill(~sampled, 0.0))


class BlindEngine(WrappedEngine):
    """Knows no log-prob at all."""

    def change(self, rollout: Rollout) -> Rollout:
        return dataclasses.replace(rollout, logp=torch.full_like(rollout.logp, torch.nan))


class FailingEngine(RecordingEngine):
    """Fails while it samples."""

    def change(self, rollout: Rollout) -> Rollout:
        raise RolloutError("the engine is gone")


@pytest.fixture(scope="module")
def embedded() -> Any:
    return load_policy("embedded", CPU)[0]


def config(rule: Rule | None = None, **layers: Any) -> Config:
    rule = rule or Predictive(delta=0.05)
    settings = small({"engine": {"numerics": "float32"}}, {"rule": rule.name}, layers)
    return dataclasses.replace(settings, rule=rule)


def sampled_only(**rollout: Any) -> Config:
    return config(PPOClip(), rollout={"top_k": 0, **rollout})


def spread(values: np.ndarray) -> list[float]:
    return [values.mean(), np.median(values), np.quantile(values, 0.99), values.max()]


def numbers(found: Spread | None) -> list[float]:
    assert found is not None
    return [found.mean, found.median, found.p99, found.largest]


def top_k_kl(rollout: Rollout, dense: np.ndarray) -> np.ndarray:
    """[N] KL(mu‖pi) of the sampled token, the other top-K and the rest, in float64."""
    found = []
    for token, logp, ids, values, pi in zip(
        rollout.tokens.tolist(),
        rollout.logp.tolist(),
        rollout.topk_ids.tolist(),
        rollout.topk_logp.tolist(),
        dense,
        strict=True,
    ):
        mu = {**dict(zip(ids, values, strict=True)), token: logp}
        p = np.exp([*mu.values()])
        q = np.exp(pi[[*mu]])
        tails = (1 - p.sum(), 1 - q.sum())
        rest = tails[0] * np.log(tails[0] / tails[1]) if min(tails) > 1e-6 else 0.0
        found.append(float((p * np.log(p / q)).sum() + rest))
    return np.array(found)


def outside_of(rule: Rule, rollout: Rollout, dense: np.ndarray) -> np.ndarray:
    """[N] whether tokens are outside, by the formulas of the papers."""
    mu, pi = np.exp(rollout.logp.double().numpy()), np.exp(dense[np.arange(len(dense)), rollout.tokens])
    if isinstance(rule, PPOClip):
        return (pi / mu < 1 - rule.eps_low) | (pi / mu > 1 + rule.eps_high)
    if isinstance(rule, DPPO):  # total variation of the sampled token against the rest
        return abs(mu - pi) > rule.delta
    assert isinstance(rule, Predictive)
    return top_k_kl(rollout, dense) > rule.delta


@pytest.mark.parametrize(
    ("numerics", "temperature", "rule"),
    [
        ("float32", 1.0, Predictive(delta=0.05)),
        ("bfloat16", 0.7, PPOClip(eps_low=0.02, eps_high=0.03)),
        ("fp8", 1.0, DPPO(divergence="tv", support="binary", delta=0.01)),
        ("int4", 1.3, Predictive(delta=0.02)),
    ],
)
def test_every_figure_is_that_of_a_dense_forward_pass(
    numerics: str, temperature: float, rule: Rule, embedded: Any
) -> None:
    engine = RecordingEngine(embedded, numerics)
    settings = config(rule, rollout={"prompts": 12, "temperature": temperature}, update={"micro_batch_size": 5})
    got = sample(settings, engine=engine)
    found = measure(got.tokens, worst=7)
    rollout = engine.rollout
    dense = dense_rows(embedded, rollout, temperature).numpy()
    mu, pi = rollout.logp.double().numpy(), dense[np.arange(len(dense)), rollout.tokens]
    gap, response = abs(mu - pi), rollout.sequence.numpy()
    close: Callable[[Any], Any] = lambda value: pytest.approx(value, abs=4e-5, rel=1e-3)  # noqa: E731
    assert (found.tokens, found.unknown, found.responses, found.top_k) == (len(mu), 0, 48, 20)
    assert numbers(found.gap) == close(spread(gap))
    assert numbers(found.kl) == close(spread(top_k_kl(rollout, dense)))
    assert found.signed == close((mu - pi).mean())
    # Resampling whole responses shows the same spread of the mean as the formula.
    sums, counts = np.bincount(response, mu - pi), np.bincount(response)
    drawn = np.random.default_rng(0).integers(48, size=(4000, 48))
    assert found.signed_error == pytest.approx((sums[drawn].sum(1) / counts[drawn].sum(1)).std(), rel=0.15, abs=1e-7)
    outside = outside_of(rule, rollout, dense)
    assert found.outside == outside.mean()
    assert (outside.sum() > 0) == (numerics != "float32")
    for name, values, edges, labels in (
        ("probability", np.exp(mu), [0.01, 0.1, 0.5, 0.9], ["<.01", ".01-.1", ".1-.5", ".5-.9", "≥.9"]),
        ("position", rollout.position.numpy(), [4, 16, 64, 256], ["0-3", "4-15", "16-63", "64-255", "≥256"]),
    ):
        index = np.digitize(values, edges)
        assert list(found.groups[name]) == [label for number, label in enumerate(labels) if (index == number).any()]
        for label, bucket in found.groups[name].items():
            inside = index == labels.index(label)
            assert (bucket.tokens, bucket.outside) == (inside.sum(), outside[inside].mean())
            assert bucket.gap == close(gap[inside].mean())
    assert len(found.worst) == 7
    assert [abs(token.difference) for token in found.worst] == close(np.sort(gap)[:-8:-1])
    for token in found.worst:
        place = np.flatnonzero((response == token.response) & (rollout.position.numpy() == token.position))[0]
        assert token.id == rollout.tokens[place]
        assert (token.mu, token.pi) == close((np.exp(mu[place]), np.exp(pi[place])))
        assert token.difference == close(mu[place] - pi[place])
    assert found.worst[0].divergence == pytest.approx(
        got.tokens.decision.divergence[(got.tokens.sample == found.worst[0].response)][found.worst[0].position]
    )
    assert engine.closed == 1
    assert got.verdict is not None
    assert got.verdict.passed == (gap.mean() <= 1e-3)


def test_micro_batches_change_nothing(embedded: Any) -> None:
    parts = []
    for size in (3, 16):
        got = sample(config(update={"micro_batch_size": size}), engine=RecordingEngine(embedded, "int4"))
        assert got.tokens.sample.tolist() == sorted(got.tokens.sample.tolist())
        parts.append(got.tokens)
    one, other = parts
    assert one.id.tolist() == other.id.tolist()
    assert one.position.tolist() == other.position.tolist()
    torch.testing.assert_close(one.policy.logp, other.policy.logp, rtol=0, atol=1e-4)


def test_prompts_are_held_out_and_samples_those_of_the_seed(embedded: Any) -> None:
    engine = RecordingEngine(embedded)
    settings = config()
    sample(settings, engine=engine)
    first = engine.rollout
    _, tokenizer = load_policy("embedded", CPU)
    problems = settings.task.problems("heldout")[:4]
    assert [list(prompt) for prompt in first.prompts[::4]] == tokenizer([p.prompt for p in problems])["input_ids"]
    sample(settings, engine=engine)
    assert engine.rollout.tokens.tolist() == first.tokens.tolist()
    sample(dataclasses.replace(settings, seed=1), engine=engine)
    assert engine.rollout.tokens.tolist() != first.tokens.tolist()


def test_responses_are_no_longer_than_the_context(embedded: Any) -> None:
    engine = RecordingEngine(embedded)
    got = sample(config(rollout={"max_new_tokens": 5000}), engine=engine)
    longest = max(map(len, engine.rollout.prompts))
    assert got.config.rollout.max_new_tokens == embedded.config.max_position_embeddings - longest
    assert sample(config(rollout={"max_new_tokens": 3}), engine=engine).config.rollout.max_new_tokens == 3
    assert engine.rollout.lengths.max() == 3


# Figures


def responses(*, length: int, **settings: Any) -> TokenTrace:
    return make_tokens(DPPO(delta=0.1), length=length, **settings)


@given(st.integers(0, 2**32 - 1))
def test_unknown_tokens_are_in_no_figure(seed: int) -> None:
    tokens = responses(length=10, tokens=80, seed=seed % 1000)
    lost = np.random.default_rng(seed).random(80) < 0.4
    lost[0] = True
    broken = torch.tensor(np.random.default_rng(seed).choice([np.nan, np.inf, -np.inf], 80), dtype=torch.float32)
    spoil = torch.tensor(lost)
    mu, pi = tokens.behaviour.logp.clone(), tokens.policy.logp.clone()
    mu[spoil & (broken != torch.inf), 0] = torch.nan
    pi[spoil & (broken == torch.inf), 0] = -torch.inf
    behaviour = dataclasses.replace(tokens.behaviour, logp=mu)
    policy = dataclasses.replace(tokens.policy, logp=pi)
    decision = DPPO(delta=0.1)(behaviour, policy, torch.ones(()))
    found = measure(dataclasses.replace(tokens, behaviour=behaviour, policy=policy, decision=decision))
    rest = measure(tokens[~spoil])
    assert (found.tokens, found.unknown) == (80 - lost.sum(), lost.sum())
    assert dataclasses.replace(found, unknown=0) == rest


def test_the_standard_error_is_that_of_independent_responses() -> None:
    # Of responses of one length it is the standard error of the mean of their means.
    tokens = responses(length=10, tokens=200)
    differences = (tokens.behaviour.logp - tokens.policy.logp)[:, 0].double().numpy()
    means = differences.reshape(20, 10).mean(1)
    found = measure(tokens)
    assert found.signed == pytest.approx(means.mean())
    assert found.signed_error == pytest.approx(means.std(ddof=1) / np.sqrt(20))
    # One response has none.
    assert measure(tokens[:10]).signed_error is None


def test_without_top_k_there_is_no_top_k_divergence() -> None:
    tokens = responses(length=10, top_k=4)
    behaviour, policy = tokens.behaviour.binary(), tokens.policy.binary()
    binary = dataclasses.replace(
        tokens, behaviour=behaviour, policy=policy, decision=PPOClip()(behaviour, policy, torch.ones(()))
    )
    found = measure(binary)
    assert found.kl is None
    assert found.gap == measure(tokens).gap


def test_greedy_tokens_are_certain_to_the_engine(embedded: Any, tmp_path: Path) -> None:
    rollout = TransformersEngine(embedded).generate(
        [[1, 2, 3]] * 2, Sampling(temperature=0.0, max_new_tokens=6, top_k=0), torch.Generator()
    )
    behaviour = rollout.behaviour()
    policy = PolicySupport.from_logits(dense_rows(embedded, rollout).float(), behaviour)
    none = torch.zeros_like(rollout.tokens)
    tokens = TokenTrace(
        step=none,
        epoch=none,
        minibatch=none,
        optimizer_step=none,
        version=none,
        sample=rollout.sequence,
        group=none,
        position=rollout.position,
        advantage=torch.ones(len(none)),
        behaviour=behaviour,
        policy=policy,
        decision=NoMask()(behaviour, policy, torch.ones(())),
    )
    found = measure(tokens)
    assert list(found.groups["probability"]) == ["≥.9"]
    assert found.signed == pytest.approx(-float(policy.logp.mean()), rel=1e-5)
    assert found.kl is None
    draw(tokens, NoMask(), tmp_path / "greedy.png")
    assert (tmp_path / "greedy.png").stat().st_size > 1000


def test_tokens_that_the_policy_did_not_sample_are_left_out(embedded: Any) -> None:
    found = measure(sample(config(), engine=ToolEngine(embedded)).tokens)
    assert found.unknown == 0
    assert {token.position % 2 for token in measure(sample(sampled_only(), engine=ToolEngine(embedded)).tokens).worst}
    whole = measure(sample(config(), engine=RecordingEngine(embedded)).tokens)
    assert found.tokens == pytest.approx(whole.tokens / 2, abs=1)
    assert found.gap is not None
    assert found.gap.largest < 1e-4


# Verdicts


def verdict_lines(got: Sample) -> list[str]:
    text = list(lines(got, measure(got.tokens)))
    assert max(map(len, text)) <= 100
    return text[next(n for n, line in enumerate(text) if line.startswith("verdict")) :]


def test_a_shift_is_named(embedded: Any) -> None:
    got = sample(sampled_only(), engine=ShiftedEngine(embedded))
    assert got.verdict is not None
    assert got.verdict.fault is not None
    assert not got.verdict.passed
    shown = " ".join(line.strip() for line in verdict_lines(got))
    assert "FAULT: the engine's log-probs are shifted by one position" in shown
    assert "align them where the rollout is recorded" in shown


def test_another_temperature_is_named(embedded: Any) -> None:
    got = sample(config(rollout={"temperature": 0.7}), engine=RawTemperatureEngine(embedded))
    assert got.verdict is not None
    assert not got.verdict.passed
    assert "belong to a temperature 1.43 times the trainer's" in " ".join(map(str.strip, verdict_lines(got)))


def test_what_nothing_explains_gives_a_list_of_what_to_look_at(embedded: Any) -> None:
    got = sample(config(), engine=NoisyEngine(embedded))
    assert got.verdict is not None
    assert got.verdict.agreement is not None
    assert not got.verdict.passed
    shown = "\n".join(verdict_lines(got))
    assert "MORE than the numerics explain (mean disagreement 0.2" in shown
    for word in ("weights", "numerics", "prompts", "padding", "dropout", "sampling"):
        assert f"  {word}: " in shown


def test_unknown_log_probs_are_counted_and_said(embedded: Any) -> None:
    got = sample(config(), engine=ForgetfulEngine(embedded))
    found = measure(got.tokens)
    assert found.unknown == len(range(0, found.tokens + found.unknown, 3))
    assert got.verdict is not None
    assert got.verdict.passed
    assert f"{found.unknown:,} unknown (not trained on: look at" in " ".join(lines(got, found))


def test_an_engine_that_knows_nothing(embedded: Any, tmp_path: Path) -> None:
    got = sample(config(), engine=BlindEngine(embedded))
    found = measure(got.tokens)
    assert (found.responses, found.tokens, found.unknown) == (0, 0, len(got.tokens))
    assert (found.gap, found.signed, found.signed_error, found.kl, found.outside) == (None,) * 5
    assert found.worst == []
    assert found.groups == {"probability": {}, "position": {}}
    assert "FAULT: the engine returned no known log-prob" in "\n".join(verdict_lines(got))
    json.dumps(to_json(got, found), allow_nan=False)
    draw(got.tokens, got.config.rule, tmp_path / "none.svg")
    assert "known to both sides" in (tmp_path / "none.svg").read_text()


def test_the_tolerance_is_that_of_the_numerics_and_of_autocast(embedded: Any) -> None:
    plain = config()
    autocast = config(update={"autocast": True})
    assert plain.mismatch_tolerance == plain.engine.mismatch_tolerance == 1e-3
    assert autocast.mismatch_tolerance == pytest.approx(0.101)
    got = sample(autocast, engine=RecordingEngine(embedded))
    assert 1e-5 < numbers(measure(got.tokens).gap)[0] < 0.05
    assert got.verdict is not None
    assert got.verdict.passed
    # What is exactly as much as the numerics explain is within.
    assert got.verdict.agreement is not None
    assert judge(got.tokens, got.verdict.agreement.mean).passed
    assert not judge(got.tokens, 0.99 * got.verdict.agreement.mean).passed


# Engines that fail


@pytest.mark.parametrize(
    ("engine", "settings", "message"),
    [
        (ShuffledEngine, config(), "other prompts than it was given"),
        (SampledOnlyEngine, config(), "top-K missing"),
        (ShiftedEngine, config(), "do both belong to one position"),
    ],
)
def test_records_that_cannot_be_trained_on_are_refused(
    engine: type[WrappedEngine], settings: Config, message: str, embedded: Any
) -> None:
    with pytest.raises(RolloutError, match=message):
        sample(settings, engine=engine(embedded))


def test_the_engine_is_closed_when_it_fails(embedded: Any) -> None:
    engine = FailingEngine(embedded)
    with pytest.raises(RolloutError, match="the engine is gone"):
        sample(config(), engine=engine)
    assert engine.closed == 1


# Text


def test_text_of_others_is_shown_and_not_obeyed(embedded: Any) -> None:
    got = sample(config(), engine=RecordingEngine(embedded))
    found = measure(got.tokens)
    odd = dict.fromkeys(got.texts, "\x1b[2J\n語" + 40 * "wide")
    text = "\n".join(lines(dataclasses.replace(got, texts=odd), found))
    assert "\x1b" not in text
    assert "⏎語" in text
    assert max(map(len, text.splitlines())) <= 100
    # An id beyond the tokenizer's has no text.
    assert "'⟨" in "\n".join(lines(dataclasses.replace(got, texts={}), found))


def test_the_summary_needs_no_trainer() -> None:
    code = (
        "import sys, predmask.analysis.mismatch; "
        "assert not {'predmask.train', 'transformers', 'matplotlib'} & {*sys.modules}, sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


# The command line

SMALL_OPTIONS = ["--device", "cpu", "--rollout.prompts", "3", "--rollout.group_size", "3", "--rollout.max_new_tokens"]


def command(*argv: str) -> int:
    """The exit code, whether `main` returns it or argparse ends the process."""
    try:
        return main(["mismatch", *argv, *SMALL_OPTIONS, "30"])
    except SystemExit as error:
        return int(error.code or 0)


def save(model: Any, directory: Path) -> str:
    model.save_pretrained(directory)
    load_policy("embedded", CPU)[1].save_pretrained(directory)
    return str(directory)


@pytest.fixture(scope="module")
def run_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("runs") / "mine"
    settings = small(steps=1, engine={"numerics": "int4"}, rule={"name": "dppo", "delta": 0.07}, output=str(output))
    run(settings)
    return output


@pytest.mark.parametrize("suffix", ["svg", "png"])
def test_the_embedded_model(suffix: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, figure = tmp_path / "found.json", tmp_path / f"found.{suffix}"
    options = ["--engine", "transformers", "--engine.numerics", "fp8", "--worst", "3"]
    assert command("embedded", *options, "--json", str(file), "--figure", str(figure)) == 0
    captured = capsys.readouterr()
    out = captured.out.splitlines()
    assert max(map(len, out)) <= 100
    assert out[1] == "engine    mu: transformers, fp8"
    assert "The 3 tokens that differ most" in out
    assert out[-1].startswith("verdict   within what the numerics explain (mean disagreement 0.00")
    assert captured.err.splitlines()[:2] == ["loading embedded", "starting engine transformers"]
    assert figure.stat().st_size > 5000
    if suffix == "svg":
        svg = figure.read_text()
        for text in ("log-odds of mu", "position in the response", "delta 0.15"):
            assert text in svg
    found = json.loads(file.read_text())
    assert found["engine"] == {"name": "transformers", "numerics": "fp8", "batch_size": 256}
    assert (found["model"], found["other"], found["responses"]) == ("embedded", None, 9)
    assert found["verdict"]["passed"] is True
    assert found["verdict"]["tolerance"] == TransformersConfig(numerics="fp8").mismatch_tolerance
    assert len(found["worst"]) == 3
    assert all(row["text"] == f" {row['text'].strip()}" for row in found["worst"])
    assert found["gap"].keys() == {"mean", "median", "p99", "largest"}
    assert f"{found['gap']['mean']:.3g}" in captured.out
    assert {field.name for field in dataclasses.fields(Mismatch)} <= found.keys()


def test_a_run_is_looked_into_as_it_was_trained(
    run_directory: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert command(str(run_directory)) == 0
    out = capsys.readouterr().out
    assert "engine    mu: transformers, int4\n" in out
    assert "dppo (divergence kl, support topk, delta 0.07)" in out
    file = tmp_path / "over.toml"
    file.write_text('model = "nowhere"\n[engine]\nnumerics = "fp8"\n[rule]\ndelta = 0.08\n')
    options = ["--config", str(file), "--rule.delta", "0.09", "--json", str(tmp_path / "found.json")]
    assert command(str(run_directory), *options) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["model"] == str(run_directory / "checkpoint")
    assert (found["engine"]["numerics"], found["rule"]["delta"]) == ("fp8", 0.09)


def test_two_models(run_directory: Path, tmp_path: Path, embedded: Any, capsys: pytest.CaptureFixture[str]) -> None:
    old = copy.deepcopy(embedded)
    with torch.no_grad():
        for parameter in old.parameters():
            parameter.mul_(1.1)
    directory = save(old, tmp_path / "old")
    # The second one samples, the first one scores.
    got = sample(dataclasses.replace(config(), model="embedded"), other=directory)
    assert got.verdict is None
    engine = RecordingEngine(old)
    same = sample(config(), other=directory, engine=engine)
    assert same.tokens.id.tolist() == got.tokens.id.tolist()
    dense = dense_rows(embedded, engine.rollout).gather(1, engine.rollout.tokens[:, None])[:, 0]
    torch.testing.assert_close(got.tokens.policy.logp[:, 0].double(), dense, rtol=0, atol=1e-4)
    torch.testing.assert_close(got.tokens.behaviour.logp[:, 0], engine.rollout.logp)
    file = tmp_path / "found.json"
    assert command("embedded", directory, "--json", str(file)) == 0
    out = capsys.readouterr().out
    assert f"with the weights of {directory}" in " ".join(out.split())
    assert "verdict   none: two models are meant to differ" in out
    found = json.loads(file.read_text())
    assert found["gap"]["mean"] > 0.01
    assert found["verdict"] is None
    # A run stands for its checkpoint; what was written is never replaced.
    assert command("embedded", str(run_directory), "--json", str(file)) == 2
    file = tmp_path / "again.json"
    assert command("embedded", str(run_directory), "--json", str(file)) == 0
    assert json.loads(file.read_text())["other"] == str(run_directory / "checkpoint")


@pytest.mark.parametrize(
    ("engine", "options"),
    [(ShiftedEngine, ["--rule", "ppo_clip", "--rollout.top_k", "0"]), (NoisyEngine, []), (BlindEngine, [])],
)
def test_a_fault_ends_with_code_1(
    engine: type[WrappedEngine],
    options: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(TransformersConfig, "start", lambda self, model: engine(model))
    assert command("embedded", *options) == 1
    captured = capsys.readouterr()
    assert "\nverdict   " in captured.out
    assert "Traceback" not in captured.err


def test_what_is_absent_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert command("embedded", "--rule", "none", "--rollout.top_k", "0", "--worst", "1") == 0
    out = capsys.readouterr().out
    assert "the engine recorded no top-K (rollout.top_k is 0)" in out
    assert "rule none has no trust region" in out
    assert "The token that differs most" in out


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "MODEL comes first"),
        (["--engine", "transformers", "embedded"], "MODEL comes first"),
        (["nowhere/at/all"], "model 'nowhere/at/all' does not exist"),
        (["embedded", "nowhere/at/all"], "model 'nowhere/at/all' does not exist"),
        (["embedded", "one", "two"], "there are 3 names"),
        (["embedded", "--engine.numeric", "fp8"], "did you mean 'engine.numerics'?"),
        (["embedded", "--worst", "0"], "'0' is not a whole number of 1 or more"),
        (["embedded", "--model", "embedded"], "MODEL, which comes first"),
        (["embedded", "--rollout.top_k", "0"], "rule 'predictive' needs top-K"),
        (["embedded", "--rollout.top_k", "100"], "vocabulary has 64 tokens"),
        (["embedded", "--rollout.temperature", "0"], "rollout.temperature is 0.0"),
        (["embedded", "--figure", "found.pdf"], "the figure is written as .svg or .png"),
        (["embedded", "--json", "nowhere/found.json"], "there is no directory nowhere"),
        (["embedded", "--config", "nowhere.toml"], "cannot read nowhere.toml"),
    ],
)
def test_mistakes_end_with_code_2(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(*argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err.splitlines()[-1]


def test_models_of_other_vocabularies_cannot_be_compared(tmp_path: Path) -> None:
    narrow = save(small_model("qwen3"), tmp_path / "narrow")
    with pytest.raises(ConfigError, match=r"'embedded' \(64 ids\) and model .* \(24 ids\)"):
        sample(config(), other=narrow)
    # As many ids, of other tokens.
    swapped = tmp_path / "swapped"
    save(small_model("embedded"), swapped)
    text = (swapped / "tokenizer.json").read_text()
    vocabulary = json.loads(text)
    words = vocabulary["model"]["vocab"]
    words["thus"], words["now"] = words["now"], words["thus"]
    (swapped / "tokenizer.json").write_text(json.dumps(vocabulary))
    with pytest.raises(ConfigError, match="have other vocabularies"):
        sample(config(), other=str(swapped))


def test_the_trainers_own_forward_pass_is_used(embedded: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, dense = (config(update={"head": head}) for head in ("fused", "dense"))
    one, other = (sample(settings).tokens.policy.logp[:, 0] for settings in (fused, dense))
    torch.testing.assert_close(one, other, rtol=0, atol=1e-4)

    def odd(model: object) -> None:
        raise HeadError("it is odd")

    monkeypatch.setattr("predmask.train.forward.ModelHead.of", odd)
    assert torch.equal(sample(config()).tokens.policy.logp[:, 0], other)
    with pytest.raises(ConfigError, match="cannot be taken apart: it is odd; use 'auto' or 'dense'"):
        sample(fused)


def test_the_support_is_the_engines(embedded: Any) -> None:
    """What is compared is what the engine returned, unchanged."""
    engine = RecordingEngine(embedded, "int4")
    got = sample(config(), engine=engine)
    expected: BehaviourSupport = engine.rollout.behaviour()
    assert torch.equal(got.tokens.behaviour.logp, expected.logp)
    assert torch.equal(got.tokens.behaviour.ids, expected.ids)
