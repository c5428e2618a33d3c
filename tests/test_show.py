"""The text of a rollout: which one is shown, that its marks are the recorded decisions, and that no token acts."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import unicodedata
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers_traces import make_samples, make_tokens, make_trace
from predmask.analysis import AnalysisError
from predmask.analysis.show import MARKS, find_response, table, text
from predmask.analysis.text import columns, visible
from predmask.cli import main
from predmask.core import PPOClip, Predictive, Reason
from predmask.traces import TokenTrace, Trace, TraceError, TraceInfo, TraceWriter, rule_settings

SGR = re.compile(r"\x1b\[[0-9;]*m")
HOSTILE = {
    0: "\x1b[2J",
    1: "\x1b]0;title\x07",
    2: "\u202eevil",
    3: "\x9b31m",
    4: "\r",
    5: "\x08\x08",
    6: "\u2028",
    7: "\x00",
    8: "end\n",
    9: "\u2066x\u2069",
    10: "\x7f",
    11: "<b>&amp;",
}


def write(directory: Path, tokens: TokenTrace, *, samples: bool = True, texts: dict[int, str] | None = None) -> Trace:
    """A trace of one step."""
    info = TraceInfo(
        run="made",
        rule=rule_settings(Predictive(delta=0.05)),
        vocabulary_size=tokens.policy.vocabulary_size,
        top_k=tokens.behaviour.top_k,
    )
    with TraceWriter(directory / "traces", info) as writer:
        if texts:
            writer.write_vocabulary(texts)
        if samples:
            writer.add(make_samples(tokens))
        writer.add(tokens)
        writer.commit(int(tokens.step[0]))
    assert writer.problem is None
    return Trace(directory)


def with_reasons(reasons: list[Reason], **settings: Any) -> TokenTrace:
    """One response whose tokens have these reasons."""
    tokens = make_tokens(tokens=len(reasons), length=len(reasons), **settings)
    reason = torch.tensor(reasons, dtype=torch.uint8)
    keep = (reason == Reason.KEPT_INSIDE) | (reason == Reason.KEPT_RETURNING)
    return replace(tokens, decision=replace(tokens.decision, reason=reason, keep=keep))


def last_part(shown: str) -> str:
    return shown.partition("\nresponse\n")[2]


def test_each_reason_has_its_mark_and_its_count(tmp_path: Path) -> None:
    reasons = [*Reason, Reason.DROPPED_POSITIVE]
    tokens = with_reasons(reasons)
    ids = tokens.id.tolist()
    trace = write(tmp_path, tokens, texts={i: f" t{i}" for i in range(12)})
    shown = text(find_response(trace), colour=False)
    a, b, c, d, e, f, g = (f" t{i}" for i in ids)
    assert last_part(shown) == f"{{{a}}}{b}({c})[+{d}+][-{e}-]?{f}?[+{g}+]"
    for legend in (
        "[+token+] dropped, A > 0: 2",
        "[-token-] dropped, A < 0: 1",
        "(token) kept outside: 1",
        "token kept inside: 1",
        "?token? unknown: 1",
        "{token} not trained on: 1",
    ):
        assert legend in shown
    assert "\nprompt\n t1 t2 t3\n" in shown


def test_colours_differ_in_more_than_colour_and_hold_the_same_text(tmp_path: Path) -> None:
    tokens = with_reasons(list(Reason))
    trace = write(tmp_path, tokens, texts={i: f" t{i}" for i in range(12)})
    response = find_response(trace)
    shown = text(response, colour=True)
    assert SGR.sub("", last_part(shown)) == "".join(f" t{i}" for i in tokens.id.tolist())
    without_colour = {re.sub(r"[34]8;5;\d+", "", mark.style) for mark in MARKS.values()}
    assert len(without_colour) == len(MARKS)
    for reason, mark in MARKS.items():
        start = f"\x1b[{mark.style}m" if mark.style else ""
        assert f"{start} t{tokens.id.tolist()[reason]}" in shown


def test_the_default_is_the_last_step_and_the_sample_with_most_dropped_tokens(tmp_path: Path) -> None:
    trace = make_trace(tmp_path, steps=3, tokens=80)
    tokens = TokenTrace.cat(list(trace.tokens([3])))
    dropped = [int(tokens.decision.dropped[tokens.sample == sample].sum()) for sample in range(8)]
    response = find_response(trace)
    assert response.step == 3
    assert response.sample == dropped.index(max(dropped))
    assert response.tokens.decision.dropped.sum() == max(dropped) > 0
    assert response.tokens.position.tolist() == list(range(10))
    shown = text(response, colour=False)
    assert (
        f"step 3 (recorded: 1 to 3), sample {response.sample} (recorded: 0 to 7), group {response.sample // 2}" in shown
    )
    assert f"10 tokens, finished; {max(dropped)} dropped" in shown or "cut at the length limit" in shown
    assert f"reference answer {response.sample}" in shown


def test_tokens_are_shown_in_the_order_of_their_positions(tmp_path: Path) -> None:
    tokens = make_tokens(tokens=30)
    trace = write(tmp_path, tokens[torch.randperm(30, generator=torch.Generator().manual_seed(0))])
    response = find_response(trace, sample=1)
    assert response.tokens.position.tolist() == list(range(10))
    assert torch.equal(response.tokens.id, tokens.id[10:20])


def test_the_epoch_with_most_dropped_tokens_is_shown_unless_another_is_asked_for(tmp_path: Path) -> None:
    first, second = make_tokens(seed=1), make_tokens(seed=2)
    second = replace(second, epoch=torch.ones_like(second.epoch))
    # The second pass has not reached sample 5.
    trace = write(tmp_path, TokenTrace.cat([first, second[second.sample < 5]]))
    dropped = {
        (sample, epoch): int(tokens.decision.dropped[tokens.sample == sample].sum())
        for epoch, tokens in enumerate((first, second))
        for sample in range(6 - epoch)
    }
    for epoch, tokens in enumerate((first, second)):
        response = find_response(trace, sample=2, epoch=epoch)
        assert torch.equal(response.tokens.id, tokens.id[20:30])
        assert f"epoch {epoch} (recorded: 0 to 1)" in text(response, colour=False)
        best = find_response(trace, epoch=epoch)
        assert best.epoch == epoch
        assert dropped[best.sample, epoch] == max(count for place, count in dropped.items() if place[1] == epoch)
    for sample in range(5):
        one, other = dropped[sample, 0], dropped[sample, 1]
        assert find_response(trace, sample=sample).epoch == int(other > one)
    assert {find_response(trace, sample=sample).epoch for sample in range(5)} == {0, 1}
    assert find_response(trace, sample=5).epoch == 0
    response = find_response(trace)
    assert dropped[response.sample, response.epoch] == max(dropped.values())
    with pytest.raises(AnalysisError, match="epoch 1 was not recorded; sample 5 of step 1 has epochs 0"):
        find_response(trace, sample=5, epoch=1)
    with pytest.raises(AnalysisError, match="epoch 7 was not recorded"):
        find_response(trace, epoch=7)


def test_what_is_said_of_a_step_holds_for_all_of_its_epochs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tokens are dropped in the first pass, and none in the second."""
    first, second = make_tokens(), make_tokens(Predictive(delta=1e9))
    assert first.decision.dropped.any()
    write(tmp_path, TokenTrace.cat([first, replace(second, epoch=torch.ones_like(second.epoch))]))

    def shown(*arguments: str) -> str:
        assert main(["show", str(tmp_path), *arguments]) == 0
        return capsys.readouterr().out

    counts = [int(first.decision.dropped[first.sample == sample].sum()) for sample in range(6)]
    whole = shown()
    assert f"Of step 1, sample {counts.index(max(counts))} has the most dropped tokens." in whole
    assert f"{max(counts)} dropped" in whole
    assert "epoch 0 (recorded: 0 to 1)" in whole
    assert "Of step 1, epoch 0, sample" in shown("--epoch", "0")
    assert "No token of step 1, epoch 1 was dropped; this is its first response." in shown("--epoch", "1")


def test_what_was_not_recorded_is_said(tmp_path: Path) -> None:
    trace = make_trace(tmp_path)
    with pytest.raises(TraceError, match="step 9 was not recorded; the trace has steps 1 to 2"):
        find_response(trace, step=9)
    with pytest.raises(AnalysisError, match="sample 6 was not recorded; step 2 has samples 0 to 5"):
        find_response(trace, sample=6)


def test_a_trace_of_another_trainer_shows_ids_and_no_prompt(tmp_path: Path) -> None:
    tokens = make_tokens(PPOClip(), top_k=0)
    trace = write(tmp_path, tokens, samples=False)
    response = find_response(trace, sample=0)
    shown = text(response, colour=False)
    assert "".join(f"⟨{i}⟩" for i in tokens.id[:10].tolist()) == re.sub(r"[][(){}?+-]", "", last_part(shown))
    assert "shown as their ids" in shown
    assert "prompt, reward and reference answer were not recorded" in shown
    assert "\nprompt\n" not in shown


def test_responses_that_are_not_scored_or_not_whole(tmp_path: Path) -> None:
    tokens = make_tokens(tokens=10)
    [facts] = make_samples(tokens)
    info = TraceInfo(run="made", rule={"name": "mine", "x": "\x1b[2J"}, vocabulary_size=12, top_k=4)
    with TraceWriter(tmp_path / "traces", info) as writer:
        writer.add([replace(facts, reward=float("nan"), reference="a\x1b[31m\nb", problem="")])
        writer.add(tokens[:7])
        writer.commit(1)
    shown = text(find_response(Trace(tmp_path)), colour=False)
    assert "reward not scored" in shown
    assert "10 tokens, of which 7 were recorded, cut at the length limit" in shown
    assert r"problem -, reference answer a\x1b[31m⏎b" in shown
    assert r"rule mine (x \x1b[2J" in shown


def test_hostile_tokens_are_shown_and_never_act(tmp_path: Path) -> None:
    tokens = make_tokens(tokens=120, noise=1.5)
    assert set(tokens.id.tolist()) == set(HOSTILE)
    trace = write(tmp_path, tokens, texts=HOSTILE)
    for colour in (False, True):
        for sample in range(12):
            response = find_response(trace, sample=sample)
            shown = text(response, colour=colour) + "\n" + table(response)
            left = SGR.sub("", shown) if colour else shown
            assert all(sign == "\n" or sign.isprintable() for sign in left)
    assert r"\x1b[2J" in visible(HOSTILE[0])
    assert visible(HOSTILE[2]) == r"\u202eevil"
    assert visible("a\nb\tc") == r"a⏎b\tc"
    assert visible("π 漢字 é 🙂") == "π 漢字 é 🙂"


def test_a_newline_is_shown_and_breaks_the_line(tmp_path: Path) -> None:
    tokens = with_reasons([Reason.KEPT_INSIDE, Reason.DROPPED_POSITIVE] * 3)
    trace = write(tmp_path, tokens, texts=dict.fromkeys(range(12), "a\n"))
    response = find_response(trace)
    assert last_part(text(response, colour=False)) == "\n".join(["a⏎", "[+a⏎+]"] * 3)
    assert SGR.sub("", last_part(text(response, colour=True))) == "\n".join(["a⏎"] * 6)


@given(
    words=st.lists(st.text(st.characters(exclude_categories=["Cs"])), min_size=12, max_size=12), colour=st.booleans()
)
def test_any_text_of_tokens_is_safe(words: list[str], colour: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    trace = write(tmp_path_factory.mktemp("any"), make_tokens(tokens=40), texts=dict(enumerate(words)))
    response = find_response(trace)
    own = {f"\x1b[{style}m" for style in ("0", "2", *(mark.style for mark in MARKS.values()))}
    shown = text(response, colour=colour, width=40) + table(response)
    if colour:
        assert set(SGR.findall(shown)) <= own
        shown = SGR.sub("", shown)
    for sign in shown.replace("\n", ""):
        assert unicodedata.category(sign) not in ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


@pytest.mark.parametrize("width", [20, 33, 80])
def test_lines_break_between_tokens_at_the_width(tmp_path: Path, width: int) -> None:
    words = {i: ("漢字", " word", "é", "🙂🙂")[i % 4] for i in range(12)}
    tokens = make_tokens(tokens=60, length=60)
    response = find_response(write(tmp_path, tokens, texts=words))
    for colour in (False, True):
        lines = last_part(text(response, colour=colour, width=width)).split("\n")
        sizes = [columns(SGR.sub("", line)) for line in lines]
        assert max(sizes) <= width
        assert min(sizes[:-1]) > width - 9  # the widest cell, a marked word, did not fit
    assert columns("漢字") == 4
    assert columns("e\u0301") == 1


def test_the_table_has_what_the_rule_read(tmp_path: Path) -> None:
    trace = make_trace(tmp_path, texts={i: "漢" * 30 if i % 2 else f" t{i}" for i in range(12)})
    response = find_response(trace, step=1, sample=3)
    head, *lines = table(response).splitlines()
    assert head.split() == ["position", "id", "token", "mu", "pi", "ratio", "D", "rate", "decision"]
    tokens = response.tokens
    assert len(lines) == len(tokens) == 10
    for row, line in enumerate(lines):
        position, token, *_ = line.split()
        assert (int(position), int(token)) == (row, tokens.id[row])
        mu, pi = tokens.behaviour.logp[row, 0].exp().item(), tokens.policy.logp[row, 0].exp().item()
        decision = MARKS[Reason(int(tokens.decision.reason[row]))].meaning
        assert line.endswith(decision)
        numbers = [float(word) for word in line.removesuffix(decision).split()[-5:]]
        expected = [mu, pi, pi / mu, tokens.decision.divergence[row].item(), tokens.decision.rate[row].item()]
        assert numbers == pytest.approx(expected, rel=6e-4)
        assert columns(line[: line.index("  ", 19)]) <= 40


@pytest.mark.skipif(os.name != "posix", reason="pseudo-terminals are POSIX")
def test_a_terminal_gets_colours(tmp_path: Path) -> None:
    make_trace(tmp_path)
    ours, theirs = os.openpty()
    env = {**os.environ, "TERM": "xterm-256color", "NO_COLOR": ""}
    with subprocess.Popen([sys.executable, "-m", "predmask", "show", str(tmp_path)], stdout=theirs, env=env) as process:
        os.close(theirs)
        shown = b""
        with contextlib.suppress(OSError):  # as Linux says that the other side was closed
            while part := os.read(ours, 65536):
                shown += part
    os.close(ours)
    assert process.returncode == 0
    assert SGR.search(shown.decode())


def test_colours_can_be_chosen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_trace(tmp_path)

    def shown(*arguments: str) -> str:
        assert main(["show", str(tmp_path), *arguments]) == 0
        return capsys.readouterr().out

    assert not SGR.search(shown())  # no terminal
    assert SGR.search(shown("--color", "always"))
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    assert SGR.search(shown())
    assert not SGR.search(shown("--color", "never"))
    monkeypatch.setenv("NO_COLOR", "1")
    assert not SGR.search(shown())
    assert SGR.search(shown("--color", "always"))
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not SGR.search(shown())
    assert "position" in shown("--table", "--step", "1", "--sample", "2")
    assert "Of step 2, sample" in shown()


def test_mistakes_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", str(tmp_path / "nowhere")]) == 2
    assert "no directory" in capsys.readouterr().err
    (tmp_path / "config.toml").write_text("")
    assert main(["show", str(tmp_path)]) == 2
    assert "--traces" in capsys.readouterr().err
