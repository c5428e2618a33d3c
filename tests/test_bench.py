"""The benchmark: that all variants compute the same thing, and that what it writes can be read."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from predmask.bench import VARIANTS, BenchError, Case, Result, Row, Variant, measure, read_json, table, write_json
from predmask.bench.cases import Inputs
from predmask.bench.memory import available, peak_in_new_process
from predmask.bench.peers import Outcome
from predmask.bench.variants import BOUND, FULL, PLAIN, run, why_not
from predmask.cli import main
from predmask.core import NoMask, Predictive
from predmask.ops import masked_policy_loss

TINY = Case(tokens=40, hidden_size=16, vocabulary=300)
WITH_LOSS = [name for name in VARIANTS if name not in (BOUND, "statistics")]
ARGUMENTS = ["bench", "ops", "--tokens", "40", "--hidden-size", "16", "--vocabulary", "300", "--rounds", "2"]


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return TINY.inputs()


def exact(inputs: Inputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Loss and gradients in float64, by autograd."""
    hidden, weight = (values.detach().double().requires_grad_() for values in (inputs.hidden, inputs.weight))
    logp = torch.log_softmax(hidden @ weight.T, dim=-1).gather(-1, inputs.sampled[:, None])[:, 0]
    loss = -(inputs.advantage.double() * (logp - inputs.logp.double()).exp()).mean()
    return (loss.detach(), *torch.autograd.grad(loss, (hidden, weight)))


@pytest.mark.parametrize("name", WITH_LOSS)
def test_all_variants_compute_the_same_loss_and_gradients(name: str, inputs: Inputs) -> None:
    if reason := why_not(name):
        pytest.skip(reason)
    inputs.release()
    outcome = run(VARIANTS[name], inputs)
    loss, by_hidden, by_weight = exact(inputs)
    assert outcome.loss is not None
    torch.testing.assert_close(outcome.loss.double(), loss, rtol=1e-5, atol=1e-6)
    assert inputs.hidden.grad is not None
    torch.testing.assert_close(inputs.hidden.grad.double(), by_hidden, rtol=1e-4, atol=1e-6)
    found = inputs.weight_grad() if inputs.weight.grad is None else inputs.weight.grad
    torch.testing.assert_close(found.double(), by_weight, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != BOUND])
def test_log_probs_are_those_of_the_sampled_tokens(name: str, inputs: Inputs) -> None:
    if reason := why_not(name):
        pytest.skip(reason)
    logp = run(VARIANTS[name], inputs).logp
    if logp is None:
        assert VARIANTS[name].logp is not None
        logp = VARIANTS[name].logp(inputs)
    logits = inputs.hidden.detach().double() @ inputs.weight.detach().double().T
    expected = torch.log_softmax(logits, dim=-1).gather(-1, inputs.sampled[:, None])[:, 0]
    torch.testing.assert_close(inputs.exact_logp(), expected)
    torch.testing.assert_close(logp.double(), expected, rtol=0, atol=1e-5)


def test_the_bound_does_the_three_products(inputs: Inputs) -> None:
    inputs.release()
    run(VARIANTS[BOUND], inputs)
    hidden, weight = inputs.hidden.detach(), inputs.weight.detach()
    logits = hidden @ weight.T
    torch.testing.assert_close(inputs.buffer("hidden_grad", torch.float32, *hidden.shape), logits @ weight)
    torch.testing.assert_close(inputs.weight_grad(), logits.T @ hidden)


def test_the_plain_pass_is_the_full_one_without_a_mask(inputs: Inputs) -> None:
    plain = run(VARIANTS[PLAIN], inputs)
    gradients = [inputs.hidden.grad, inputs.weight.grad]
    inputs.clear()
    full = masked_policy_loss(
        inputs.hidden, inputs.weight, inputs.behaviour, inputs.advantage, rule=NoMask(), denominator=TINY.tokens
    )
    full.loss.backward()
    torch.testing.assert_close(plain.loss, full.loss.detach())
    torch.testing.assert_close(plain.logp, full.policy.logp[:, 0])
    torch.testing.assert_close(gradients, [inputs.hidden.grad, inputs.weight.grad])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_nothing_is_masked_so_that_all_do_the_same_work(dtype: str) -> None:
    inputs = Case(tokens=64, hidden_size=64, vocabulary=5000, dtype=dtype).inputs()
    found = masked_policy_loss(
        inputs.hidden, inputs.weight, inputs.behaviour, inputs.advantage, rule=Predictive(), denominator=64
    )
    assert found.decision.keep.all()
    assert found.decision.divergence.mean() > 1e-4  # and yet the policies differ


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_inputs_are_read_back_as_they_were_written(dtype: str, tmp_path: Path) -> None:
    inputs = Case(tokens=8, hidden_size=4, vocabulary=50, dtype=dtype).inputs()
    inputs.save(tmp_path)
    read = Inputs.load(tmp_path)
    for name in ("hidden", "weight", "sampled", "logp", "topk_ids", "topk_logp", "advantage"):
        assert torch.equal(getattr(read, name), getattr(inputs, name))
    assert read.hidden.requires_grad
    assert read.weight.requires_grad


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux counts the peak")
def test_peak_memory_is_that_of_the_logits(tmp_path: Path) -> None:
    Case(tokens=256, hidden_size=8, vocabulary=40_000).inputs().save(tmp_path)
    logits = 4 * 256 * 40_000
    peaks = {name: peak_in_new_process(name, tmp_path) for name in (BOUND, FULL, "dense")}
    for name, least, most in ((BOUND, 0.9, 2.0), (FULL, 0.9, 2.0), ("dense", 1.9, 4.5)):
        found = peaks[name]
        assert found is not None
        assert least * logits < found < most * logits, name
    with pytest.raises(BenchError, match=r"no such variant.*KeyError"):
        peak_in_new_process("no such variant", tmp_path)


def row(name: str, *wall: float) -> Row:
    times = list(wall)
    return Row(name=name, label=name, returns="", wall=times, cpu=times, peak_bytes=None, logp_error=None)


def test_ratios_are_of_the_same_round_and_the_first_one_does_not_count() -> None:
    bound, other, slow = row("a", 9.0, 1.0, 2.0, 4.0), row("b", 9.0, 2.0, 6.0), row("c", 36.0)
    assert other.over(bound, "wall") == (2.5, 2.0, 3.0)
    assert str(other.over(bound, "wall")) == "2.50 (2.00 to 3.00)"
    assert bound.seconds("wall") == 2.0
    assert other.rounds == 2
    assert slow.over(bound, "wall") == (4.0, 4.0, 4.0)  # it ran in the warm-up alone
    assert slow.seconds("wall") == 36.0


def test_a_slow_variant_is_left_out_of_further_rounds_and_the_bound_is_not() -> None:
    names = [BOUND, FULL]
    result = measure(TINY, names, rounds=2, limit=1e-9, memory=False)
    assert [len(entry.wall) for entry in result.rows] == [1, 1]
    assert "warm-up" in table(result)
    result = measure(TINY, names, rounds=2, limit=1e9, memory=False)
    assert [len(entry.wall) for entry in result.rows] == [3, 3]


@pytest.fixture(scope="module")
def result() -> Result:
    return measure(TINY, [FULL, PLAIN, "dense"], rounds=2, memory=False)


def test_the_table_has_a_row_for_each_variant_and_says_what_statistics_cost(result: Result) -> None:
    lines = table(result).splitlines()
    rows = [line for line in lines if line.startswith("|")]
    assert len({line.count("|") for line in rows}) == 1
    assert [line.split("|")[1].strip() for line in rows[2:]] == [
        VARIANTS[name].label for name in (BOUND, FULL, PLAIN, "dense")
    ]
    assert any(line.startswith("Statistics and mask over the same pass") for line in lines)
    assert "1.00" in rows[2]


def test_json_holds_everything(result: Result, tmp_path: Path) -> None:
    write_json(tmp_path / "x.json", [result])
    assert read_json(tmp_path / "x.json") == [result]
    found = json.loads((tmp_path / "x.json").read_text())["results"][0]["rows"][1]
    assert found["name"] == FULL
    assert len(found["wall"]) == len(found["cpu"]) == 3
    assert found["ratio"]["wall"]["least"] <= found["ratio"]["wall"]["median"]
    assert found["logp_error"] < 1e-5


def test_it_is_an_error_if_nothing_asked_for_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(inputs: Inputs) -> Outcome:
        raise ModuleNotFoundError("No module named 'no_such_package'")

    monkeypatch.setitem(VARIANTS, "absent", Variant("absent", "", absent, "no-such-package"))
    with pytest.raises(BenchError, match=r"absent cannot be measured: .*pip install 'no-such-package'"):
        measure(TINY, ["absent"], rounds=1, memory=False)


def test_a_peer_that_is_not_installed_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(inputs: Inputs) -> Outcome:
        importlib.import_module("no_such_package")
        raise AssertionError

    monkeypatch.setitem(VARIANTS, "absent", Variant("absent", "", absent, "no-such-package>=2"))
    result = measure(TINY, [FULL, "absent"], rounds=1, memory=False)
    assert result.row("absent") is None
    expected = "absent (No module named 'no_such_package'; pip install 'no-such-package>=2')"
    assert f"Not measured: {expected}." in table(result)
    monkeypatch.setitem(VARIANTS, "absent", Variant("absent", "", absent))
    with pytest.raises(ModuleNotFoundError):  # a fault of our own is not hidden
        measure(TINY, ["absent"], rounds=1, memory=False)


def test_what_does_not_fit_into_memory_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("predmask.bench.ops.available", lambda device: 1000)
    result = measure(TINY, [FULL, "dense"], rounds=1, memory=False)
    assert "GB are free" in result.left_out["dense"]
    assert result.row(FULL) is not None
    assert (available("cpu") or 1) > 0


def test_the_command_prints_tables_and_writes_the_figure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    figure, data = tmp_path / "ops.svg", tmp_path / "ops.json"
    arguments = ["--dtype", "float32", "bfloat16", "--only", FULL, "dense", "--no-memory", "--cpu-time"]
    assert main([*ARGUMENTS, *arguments, "--figure", str(figure), "--json", str(data)]) == 0
    printed = capsys.readouterr()
    assert printed.out.count("### ") == 2
    assert "CPU time, s" in printed.out
    assert "warming up" in printed.err
    assert [result.case.dtype for result in read_json(data)] == ["float32", "bfloat16"]
    assert figure.read_text().startswith("<?xml")
    assert "/tmp" not in data.read_text() + printed.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "cutlass"], "unknown variant 'cutlass'; choose from gemm, predmask,"),
        (["--tokens", "41"], "tokens is 41; it must be a multiple of 4"),
        (["--tokens", "0"], "'0' is not a whole number of 1 or more"),
        (["--limit", "soon"], "'soon' is not a finite number above 0"),
        (["--top-k", "300"], "top-k is 300; it must be from 1 to 299"),
        (["--figure", "ops.pdf"], "the figure is written as .svg or .png"),
        (["--json", "nowhere/ops.json"], "there is no directory nowhere"),
        (["--dtype", "int4"], "invalid choice: 'int4'"),
    ],
)
def test_a_users_mistake_is_a_message(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("predmask.bench.measure", lambda *_, **__: pytest.fail("measured before checking"))
    if "--only" in arguments:
        monkeypatch.undo()
    try:
        code: Any = main([*ARGUMENTS, *arguments])
    except SystemExit as error:
        code = error.code
    assert code == 2
    assert message in capsys.readouterr().err


def test_help_names_every_variant(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "ops", "--help"])
    assert ended.value.code == 0
    words = capsys.readouterr().out.replace(",", " ").split()
    assert [name for name in VARIANTS if name not in words] == []


def test_a_figure_without_matplotlib_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main([*ARGUMENTS, "--figure", "ops.svg"]) == 2
    assert "install predmask[instruments]" in capsys.readouterr().err


def test_the_published_benchmark_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(__file__).parent.parent / "benchmarks" / "ops.py"
    spec = importlib.util.spec_from_file_location("published", path)
    assert spec is not None
    assert spec.loader is not None
    published: Any = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "published", published)
    spec.loader.exec_module(published)
    plans = tuple(published.Plan(dtype="float32", tokens=tokens, names=(FULL,), limit=10) for tokens in (4, 8))
    shape = {"hidden_size": 16, "vocabulary": 300}
    published.run(plans[:1], shape, 1, tmp_path / "x.json")
    results = published.run(plans, shape, 1, tmp_path / "x.json")
    assert [result.case.tokens for result in results] == [4, 8]
    assert "measured already" in capsys.readouterr().err
    assert results[0].left_out["dense"] == "for want of time"
