"""The report: what the page says, that hostile text stays text, and how it looks in a browser."""

import itertools
import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers_browser import look, print_pdf
from helpers_traces import make_samples, make_tokens, make_trace
from predmask.analysis import AnalysisError
from predmask.analysis.report import report, write_report
from predmask.analysis.report.curves import thinned
from predmask.analysis.report.digest import UNREAD, StepDigest, digest
from predmask.analysis.report.markup import render
from predmask.analysis.report.tokens import mask_section
from predmask.analysis.runs import read_run
from predmask.cli import main
from predmask.core import DPPO, IcePop, PPOClip, Predictive, Reason
from predmask.traces import TokenTrace, TraceInfo, TraceWriter, rule_settings

HOSTILE = (
    "<script>alert(1)</script>",
    "</svg><b>",
    '" onload="alert(1)',
    "'><img src=x onerror=alert(1)>",
    "</style></title></code>",
    "&lt;i&gt; &amp;",
    "\u202emirrored\u0000\x1b[31m",
    "a\nb",
    "",
)
CONFIG = """\
model = "embedded"
steps = 3
seed = 7

[task]
name = "arithmetic"

[rule]
name = "predictive"
delta = 0.05

[engine]
name = "transformers"
numerics = "fp8"
"""


def metrics(step, **changes):
    """A line of metrics.jsonl."""
    figures = {
        "reward": 0.2 + 0.01 * step,
        "accuracy": 0.2 + 0.01 * step,
        "mask_frac": 0.02,
        "mask_frac_pos": 0.015,
        "mask_frac_neg": 0.005,
        "divergence_kept_mean": 1e-3,
        "divergence_masked_mean": 0.2,
        "behaviour_kl": 2e-3,
        "mismatch_kl": 1e-4,
        "entropy": 0.5,
        "staleness_mean": 7.5,
        "staleness_max": 15.0,
        "response_length": 26.5,
        "unknown_logprob_count": 2.0,
        "overflow_count": 1.0,
    }
    return {"step": step, **figures, **changes}


def make_run(directory, lines=None, *, trace=True, config=CONFIG, **settings):
    """A run directory, with a trace of three steps."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.toml").write_text(config)
    before = {"step": 0, "heldout": {"sampled": 0.25, "greedy": 0.1}}
    if lines is None:
        lines = [before, metrics(1), metrics(2), metrics(3, heldout={"sampled": 0.75, "greedy": 0.8})]
    (directory / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (directory / "summary.json").write_text('{"status": "finished", "seconds": 12.0}')
    (directory / "versions.json").write_text('{"torch": "2.13.0"}')
    if trace:
        make_trace(directory, steps=3, tokens=200, noise=1.0, **settings)
    return read_run(directory)


class Page(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, page):
        super().__init__()
        self.elements = []
        self.texts = []
        self.feed(page)

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)

    @property
    def text(self):
        return re.sub(r"\s+", " ", "".join(self.texts))

    @property
    def tags(self):
        return {tag for tag, _ in self.elements}

    def values(self, *names):
        """Values of these attributes, of any element."""
        return [attributes[name] for _, attributes in self.elements for name in names if name in attributes]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("runs") / "my-run")


@pytest.fixture(scope="module")
def page(run):
    return report(run)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """A run whose every text is hostile."""
    directory = tmp_path_factory.mktemp("runs") / "<img src=x>&\"'\x1b]0;title\x07"
    bad = json.dumps(HOSTILE[0] + HOSTILE[2] + HOSTILE[4] + HOSTILE[6])
    config = CONFIG.replace('"embedded"', bad).replace('"fp8"', bad) + f"{bad} = {bad}\n"
    texts = {i: HOSTILE[i % len(HOSTILE)] for i in range(12)}
    run = make_run(directory, config=config, texts=texts)
    (directory / "versions.json").write_text(json.dumps({HOSTILE[0] + "\x07": HOSTILE[1] + "\x07\ud800"}))
    (directory / "summary.json").write_text(json.dumps({"status": "failed: " + HOSTILE[3] + "\x1b", "seconds": 1.0}))
    return report(read_run(run.path))


def test_hostile_text_stays_text(page, hostile):
    parsed = Page(hostile)
    assert parsed.tags <= Page(page).tags | {"br"}
    assert not [name for _, attributes in parsed.elements for name in attributes if name.startswith("on")]
    for text in HOSTILE[:6]:
        assert re.sub(r"\s+", " ", text) in parsed.text
    assert "<img src=x>&\"'" in parsed.text
    # Characters that act on the page are spelled out.
    assert all(sign == "\n" or sign.isprintable() for sign in hostile)
    assert "\\u202emirrored\\x00\\x1b[31m" in parsed.text
    assert parsed.text.count("<img src=x>&\"'\\x1b]0;title\\x07") == 3  # title, heading, command
    # A token without a text is shown as its id.
    assert "⟨8⟩" in parsed.text
    assert not re.search(r"<(code|span)[^>]*></", hostile)


def test_nothing_comes_from_elsewhere(page, hostile):
    for text in (page, hostile):
        parsed = Page(text)
        assert not {"script", "iframe", "object", "embed", "base", "form"} & parsed.tags
        links = parsed.values("href", "src", "xlink:href", "srcset", "action")
        assert links
        assert all(link.startswith(("#", "data:")) for link in links)
        assert not re.search(r"@import|url\((?!#)", text)
        policy = next(each["content"] for tag, each in parsed.elements if each.get("http-equiv"))
        assert "default-src 'none'" in policy
        assert "script-src" not in policy


def test_structure(page):
    parsed = Page(page)
    assert page.startswith("<!DOCTYPE html>")
    assert ("html", {"lang": "en"}) in parsed.elements
    assert ("meta", {"charset": "utf-8"}) in parsed.elements
    assert any(each.get("name") == "viewport" for _, each in parsed.elements)
    headings = [int(tag[1]) for tag, _ in parsed.elements if re.fullmatch("h[1-6]", tag)]
    assert headings[0] == 1
    assert headings.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(headings))
    ids = parsed.values("id")
    assert ids
    assert len(ids) == len(set(ids))
    used = {value[1:] for value in parsed.values("href") if value.startswith("#")}
    assert used | set(re.findall(r"url\(#([^)]+)\)", page)) == set(ids)


def test_figures_have_text_alternatives(page):
    figures = re.findall(r"<figure>.*?</figure>", page, re.DOTALL)
    assert len(figures) == 7 + 2 + 3
    for each in figures:
        drawing = next(attributes for tag, attributes in Page(each).elements if tag == "svg")
        assert drawing["role"] == "img"
        assert len(drawing["aria-label"]) > 30
        assert "<figcaption>" in each
        assert re.search(r"<text|<figcaption>[^<]*\d", each)
    labels = [re.search('aria-label="(.*?)"', each)[1] for each in figures]
    assert "reward from 0.21 to 0.23" in labels[0]
    assert "held-out, sampled from 0.25 to 0.75" in labels[0]


def test_headline_of_a_run(page):
    text = Page(page).text
    assert "25.0% → 75.0%" in text
    assert "greedy 10.0% → 80.0%" in text
    assert "Masked tokens2.00%of known response tokens, mean over steps; A > 0: 1.50%, A < 0: 0.50%" in text
    assert "KL(mu‖pi)0.002" in text
    assert "Mismatch of engine and trainer0.0001" in text
    assert "Unknown log-probs6tokens; 3 overflows" in text
    assert "taskarithmeticmodelembeddedenginetransformers, fp8rulepredictive (delta 0.05)seed7steps3 of 3" in text
    assert "statusfinished, 12 stoken trace3 steps, 600 tokens" in text
    assert "torch2.13.0" in text


def test_headline_of_a_trace_alone_equals_numpy(tmp_path):
    trace = make_trace(tmp_path / "theirs", steps=2, tokens=300, noise=1.0)
    text = Page(report(read_run(tmp_path / "theirs"))).text
    tokens = TokenTrace.cat(list(trace.tokens(without=UNREAD)))
    reason = tokens.decision.reason.numpy()
    positive, negative = ((reason == each).mean() for each in (Reason.DROPPED_POSITIVE, Reason.DROPPED_NEGATIVE))
    assert (
        f"Masked tokens{positive + negative:.2%}of known response tokens, all recorded tokens; "
        f"A > 0: {positive:.2%}, A < 0: {negative:.2%}" in text
    )
    for each in Reason:
        assert f"{(reason == each).sum():,}{(reason == each).mean():.2%}" in text
    ids, counts = np.unique(tokens.id.numpy()[tokens.decision.dropped.numpy()], return_counts=True)
    most = ids[np.argmax(counts)]
    assert (
        f"Dropped most often: t{most} (id {most}), {counts.max()} of {counts.sum()} ({counts.max() / counts.sum():.0%})"
        in text
    )
    assert "Share: of all 600 known response tokens of the trace together." in text
    assert "Configuration" not in text


def test_a_mask_that_hits_one_id(tmp_path):
    """Of 100 tokens 2 are masked, both the same id with A > 0: it is named first, with its share and its split."""
    rule = Predictive(delta=1e9)
    tokens = make_tokens(rule, tokens=100)
    chosen = (tokens.id == tokens.id[10]).nonzero()[:2, 0]
    decision = replace(
        tokens.decision,
        reason=tokens.decision.reason.index_fill(0, chosen, Reason.DROPPED_POSITIVE),
        keep=tokens.decision.keep.index_fill(0, chosen, False),
    )
    with TraceWriter(
        tmp_path / "t", TraceInfo(run="r", rule=rule_settings(rule), vocabulary_size=12, top_k=4)
    ) as writer:
        writer.add(replace(tokens, decision=decision))
        writer.commit(1)
    text = Page(report(read_run(tmp_path / "t"))).text
    found, occurs = int(tokens.id[10]), int((tokens.id == tokens.id[10]).sum())
    assert "Masked tokens2.00%of known response tokens, all recorded tokens; A > 0: 2.00%, A < 0: 0.00%" in text
    # This mask drops inside the region of the rule that measured.
    assert "Dropped tokens, and those kept outside" in text
    assert "In all, kept outside: 0; dropped, A > 0: 2; dropped, A < 0: 0." in text
    assert f"Dropped most often: ⟨{found}⟩ (id {found}), 2 of 2 (100%), 2 of them with A > 0 and 0 with A < 0" in text
    assert f"⟨{found}⟩{found}2100.0%20{2 / occurs:.2%}" in text


def test_a_response_is_marked_by_reason(run, page):
    marked = re.search('<div class="tokens">(.*?)</div>', page, re.DOTALL)[1]
    where = re.search(r"--step (\d+) --sample (\d+)", page)
    tokens = TokenTrace.cat(list(run.need_trace().tokens([int(where[1])])))
    tokens = tokens[tokens.sample == int(where[2])]
    spans = [each for tag, each in Page(marked).elements if tag == "span" and each["class"] != "prompt"]
    assert [each["class"] for each in spans] == [
        Reason(reason).name.lower().replace("_", "-") for reason in tokens.decision.reason.tolist()
    ]
    assert (
        f"mu {float(tokens.behaviour.logp[0, 0].exp()):.3g}, pi {float(tokens.policy.logp[0, 0].exp()):.3g}"
        in spans[0]["title"]
    )
    every = TokenTrace.cat(list(run.need_trace().tokens([int(where[1])])))
    assert tokens.decision.dropped.sum() == torch.bincount(every.sample[every.decision.dropped]).max()


def test_a_long_response_is_shown_where_it_is_dropped(tmp_path):
    make_trace(tmp_path / "t", Predictive(delta=0.5), steps=1, tokens=2000, length=2000, noise=0.1)
    make_trace(tmp_path / "u", Predictive(delta=0.1), steps=1, tokens=500, length=500, noise=1.0)
    calm, wild = (TokenTrace.cat(list(read_run(tmp_path / name).need_trace().tokens())) for name in "tu")
    wild = replace(wild, sample=calm.sample[:500], position=torch.arange(1500, 2000), advantage=wild.advantage)
    info = read_run(tmp_path / "t").need_trace().info
    with TraceWriter(tmp_path / "both", info) as writer:
        writer.add(TokenTrace.cat([calm[:1500], wild]))
        writer.commit(1)
    page = report(read_run(tmp_path / "both"))
    shown = re.search(r"Shown are positions ([\d,]+) to ([\d,]+)", page)
    first, last = (int(each.replace(",", "")) for each in shown.groups())
    assert last - first == 599
    assert 1200 < first <= 1500
    assert len(re.findall("title=", page)) == 600
    dropped = len(re.findall('class="dropped-[a-z]*" title=', page))
    assert dropped > 60
    assert f"Dropped tokens above: the first 60 of {dropped}" in page


def test_without_a_trace(tmp_path):
    text = report(make_run(tmp_path / "run", trace=False))
    assert text.count("<svg") == 7
    assert "predmask train PRESET --traces" in text
    assert "Configuration" in text


@pytest.mark.parametrize("rule", [Predictive(delta=0.05), PPOClip(), IcePop()])
def test_a_trace_of_another_trainer(tmp_path, rule):
    """Without configuration, texts, responses, entropy and squares; with K = 0 where the rule allows it."""
    top_k = 4 if rule.needs_topk else 0
    tokens = make_tokens(rule, tokens=100, top_k=top_k, noise=1.0, step=5)
    tokens = replace(tokens, policy=replace(tokens.policy, tail_sum_squares=None, entropy=None))
    info = TraceInfo(run="<theirs>", rule=rule_settings(rule), vocabulary_size=12, top_k=top_k)
    with TraceWriter(tmp_path / "t", info) as writer:
        writer.add(tokens)
        writer.commit(5)
    text = Page(report(read_run(tmp_path / "t"))).text
    assert "<theirs>" in text
    assert "Staleness" in text
    assert "Entropy" not in text
    assert ("predictive" in text.split("The same tokens under each rule")[1].split("A response")[0]) == bool(top_k)
    assert ("cannot be asked" in text) == (top_k == 0)
    assert re.search(r"⟨\d+⟩", text)


def test_a_rule_of_another_version(tmp_path):
    with TraceWriter(
        tmp_path / "t", TraceInfo(run="r", rule={"name": "<new>", "x": "<y>"}, vocabulary_size=12, top_k=4)
    ) as writer:
        writer.add(make_tokens())
        writer.commit(1)
    text = Page(report(read_run(tmp_path / "t"))).text
    assert "<new> (x <y>)" in text
    assert "this run" not in text
    assert "this version of predmask does not know it" in text
    assert "has no threshold" not in text


def test_a_run_that_was_killed(tmp_path):
    run = make_run(tmp_path / "run", trace=False)
    (run.path / "summary.json").unlink()
    (run.path / "metrics.jsonl").write_text('{"step": 0, "heldout": {"sampled": 0.5, "greedy": 0.5}}\n{"step": 1, "rew')
    text = Page(report(read_run(run.path))).text
    assert "unfinished" in text
    assert "0 of 3" in text
    (run.path / "metrics.jsonl").write_text("")
    assert "none was completed yet" in report(read_run(run.path))


def test_a_run_whose_metrics_are_lost(tmp_path):
    run = make_run(tmp_path / "run", trace=False)
    (run.path / "metrics.jsonl").unlink()
    text = Page(report(read_run(run.path))).text
    assert "stepsunknown of 3statusfinished" in text
    assert "or the file is lost" in text
    (run.path / "summary.json").write_text('{"status": "finished", "steps": 3}')
    assert "steps3 of 3statusfinished" in Page(report(read_run(run.path))).text


def test_figures_that_are_not_finite_are_counted(tmp_path):
    lines = [metrics(1), metrics(2, entropy=float("nan"), behaviour_kl=float("inf")), metrics(3, behaviour_kl=0.0)]
    lines += [metrics(4, reward=float("nan"), entropy=1e308, accuracy="none", mask_frac=None, heldout={"sampled": "x"})]
    text = Page(report(make_run(tmp_path / "run", lines, trace=False))).text
    assert text.count("1 value is not finite and not drawn") == 3
    assert f"KL(mu‖pi){(0.002 + 0.002 + 0) / 3:.3g}" in text


def test_one_step(tmp_path):
    assert "one step" in report(make_run(tmp_path / "run", [metrics(1)], trace=False))


def rows(page, title):
    """The numbers of the figure with that title."""
    each = next(each for each in re.findall(r"<figure>.*?</figure>", page, re.DOTALL) if f"<h3>{title}</h3>" in each)
    found = re.findall(r"<tr>(.*?)</tr>", each, re.DOTALL)
    return Page(each).text, [re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row) for row in found]


def test_a_long_run_stays_small(tmp_path):
    generator = np.random.default_rng(0)
    lines = [metrics(step, entropy=generator.random(), mask_frac_pos=generator.random()) for step in range(1, 5001)]
    text = report(make_run(tmp_path / "run", lines, trace=False))
    assert len(text) < 1e6
    caption, table = rows(text, "Entropy")
    assert "A point is the mean of 17 neighbouring steps." in caption
    assert table[1] == ["1 to 17", f"{np.mean([line['entropy'] for line in lines[:17]]):.3g}"]


def test_the_numbers_of_a_figure_are_those_that_are_drawn(tmp_path):
    """As many rows as points: steps of their own, or what neighbouring steps come to."""
    lines = [metrics(step, reward=step % 2, staleness_max=step % 5) for step in range(1, 101)]
    caption, table = rows(report(make_run(tmp_path / "a", lines, trace=False)), "Reward and accuracy")
    assert "A point is" not in caption
    assert table[1:3] == [["1", "1", "0.21"], ["2", "0", "0.22"]]
    assert len(table) == 101
    lines = [metrics(step, reward=step % 2, staleness_max=step % 5) for step in range(1, 601)]
    lines[9]["heldout"] = {"sampled": 0.5}
    page = report(make_run(tmp_path / "b", lines, trace=False))
    caption, table = rows(page, "Reward and accuracy")
    assert "A point is the mean of 2 neighbouring steps." in caption
    assert len(table) == 301
    assert table[5] == ["9 to 10", "0.5", f"{0.2 + 0.095:.3g}", "0.5"]
    caption, table = rows(page, "Staleness")
    assert "A point is the mean of 2 neighbouring steps, of 'largest' their largest value." in caption
    assert [row[2] for row in table[1:4]] == ["2", "4", "1"]
    assert rows(page, "Masked tokens by sign")[1][1] == ["1 to 2", "1.50%", "0.50%"]


def test_bars_of_many_steps_say_what_they_stand_for(tmp_path):
    trace = make_trace(tmp_path, steps=1)
    found = digest(trace)
    for step in range(1, 602):
        reasons = torch.zeros(len(Reason), dtype=torch.int64)
        reasons[Reason.DROPPED_POSITIVE], reasons[Reason.KEPT_INSIDE] = step % 3, 10 - step % 3
        found.steps[step] = StepDigest(reasons=reasons, known=10)
    caption, table = rows(render(mask_section(trace, found)), "Dropped tokens, and those kept outside")
    assert "A point is the mean of 3 neighbouring steps." in caption
    assert table[1] == ["1 to 3", "0.00%", "10.00%", "0.00%"]
    assert table[-1] == ["601", "0.00%", "10.00%", "0.00%"]


def test_lines_that_hide_each_other_are_one(tmp_path):
    text = report(make_run(tmp_path / "a", [metrics(step) for step in range(1, 4)], trace=False))
    assert "reward and accuracy, training (equal)" in text
    assert "mean and largest" not in text
    other = report(make_run(tmp_path / "b", [metrics(step, reward=0.1) for step in range(1, 4)], trace=False))
    assert "equal)" not in other


def test_thinning():
    curve = [(step, float(step)) for step in range(1, 11)]

    def means(most):
        return [(row.name, row.values["a"]) for row in thinned({"a": curve}, most)]

    assert means(10) == [(str(step), value) for step, value in curve]
    assert means(5) == [("1 to 2", 1.5), ("3 to 4", 3.5), ("5 to 6", 5.5), ("7 to 8", 7.5), ("9 to 10", 9.5)]
    assert means(4) == [("1 to 3", 2.0), ("4 to 6", 5.0), ("7 to 9", 8.0), ("10", 10.0)]
    assert thinned({}) == []
    # Figures of few steps, maxima, and values that are not finite.
    curves = {"a": curve, "b": [(4, 7.0)], "c_max": curve, "d": [(1, 1.0), (2, math.nan), (7, math.inf)]}
    assert [dict(row.values) for row in thinned(curves, 3)] == [
        {"a": 2.5, "b": 7.0, "c_max": 4.0, "d": 1.0},
        {"a": 6.5, "c_max": 8.0, "d": math.inf},
        {"a": 9.5, "c_max": 10.0},
    ]


@pytest.mark.parametrize(
    ("rule", "exact", "bound"),
    [
        (DPPO(support="binary", delta=0.05), {"ppo_clip", "dppo"}, {"predictive"}),
        (DPPO(delta=0.05), {"ppo_clip"}, {"dppo", "predictive"}),
        (IcePop(), {"ppo_clip", "icepop"}, {"dppo", "predictive"}),
    ],
)
def test_what_a_border_means_is_said_of_each_rule(tmp_path, rule, exact, bound):
    make_trace(tmp_path, rule, tokens=100)
    page = report(read_run(tmp_path))
    figures = re.findall(r"<figure>\s*<h3>([^<]*)</h3>.*?<figcaption>(.*?)</figcaption>", page, re.DOTALL)
    captions = {title.removesuffix(" (this run)"): caption for title, caption in figures}
    assert {name for name, caption in captions.items() if "The border is exact" in caption} == exact
    assert {name for name, caption in captions.items() if "top-K divergence is at least that" in caption} == bound
    assert [name for name, caption in captions.items() if "either sign may be dropped" in caption] == ["predictive"]
    assert page.count("top-K divergence") == len(bound)


def test_a_response_of_several_epochs(tmp_path):
    first, second = make_tokens(), make_tokens(Predictive(delta=1e9))
    tokens = TokenTrace.cat([first, replace(second, epoch=torch.ones_like(second.epoch))])
    info = TraceInfo(run="r", rule=rule_settings(Predictive(delta=0.05)), vocabulary_size=12, top_k=4)
    with TraceWriter(tmp_path / "t", info) as writer:
        writer.add([replace(sample, reward=math.nan) for sample in make_samples(first)])
        writer.add(tokens)
        writer.commit(1)
    text = Page(report(read_run(tmp_path / "t"))).text
    counts = [int(first.decision.dropped[first.sample == sample].sum()) for sample in range(6)]
    place = counts.index(max(counts))
    assert f"Step 1, sample {place}, epoch 0: {max(counts)} of 10 tokens dropped, and no response of this step" in text
    assert f"--step 1 --sample {place} --epoch 0" in text
    assert f"Not scored, right answer {place}." in text


def test_a_directory_whose_name_is_no_text(tmp_path):
    run = replace(make_run(tmp_path / "run", trace=False), path=Path("run\udcff"))
    page = report(run)
    assert page.encode()
    assert "run\\udcff" in page


def test_the_same_run_makes_the_same_page(run, page):
    assert report(read_run(run.path)) == page


def test_command(tmp_path, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: bool(opened.append(address)))
    run = make_run(tmp_path / "run", trace=False)
    assert main(["report", str(run.path)]) == 0
    page = run.path / "report.html"
    assert capsys.readouterr().out.strip() == str(page)
    assert main(["report", str(run.path), "--open", "--output", str(tmp_path / "other page.html")]) == 0
    assert (tmp_path / "other page.html").read_text() == page.read_text()
    assert "no web browser could be started" in capsys.readouterr().err
    assert opened == [(tmp_path / "other page.html").as_uri()]


def test_a_long_trace_says_that_it_is_read(tmp_path, capsys, monkeypatch):
    make_run(tmp_path / "run")
    assert main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().err == ""
    monkeypatch.setattr("predmask.cli.report._MANY", 500)
    assert main(["report", str(tmp_path / "run")]) == 0
    assert capsys.readouterr().err == "reading 600 tokens\n"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(["report", str(tmp_path / "run")]) == 0
    assert "/600 [" in capsys.readouterr().err


def test_mistakes(tmp_path, capsys, monkeypatch):
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "is no directory" in capsys.readouterr().err
    run = make_run(tmp_path / "run", trace=False)
    assert main(["report", str(run.path), "--output", str(tmp_path / "nowhere" / "page.html")]) == 2
    assert "there is no directory" in capsys.readouterr().err
    with pytest.raises(AnalysisError, match="cannot be written"):
        write_report(run, tmp_path)
    make_trace(tmp_path / "cut")
    (tmp_path / "cut" / "traces" / "tokens-000002.parquet").write_bytes(b"PAR1")
    assert main(["report", str(tmp_path / "cut")]) == 2
    assert "tokens-000002.parquet cannot be read" in capsys.readouterr().err
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["report", str(run.path)]) == 2
    assert "package matplotlib is missing" in capsys.readouterr().err


QUESTION = """
for (const each of document.querySelectorAll("details")) each.open = true;
const figures = [...document.querySelectorAll("figure")];
const texts = [...document.querySelectorAll("svg text")];
const root = document.documentElement;
return {
  h1: document.querySelector("h1").textContent,
  headings: figures.map((each) => each.querySelector("h3").textContent),
  sizes: figures.map((each) => each.querySelector("svg").getBoundingClientRect()).map((box) => [box.width, box.height]),
  letters: Math.min(...texts.map((each) => each.getBoundingClientRect().height)),
  outside: figures.flatMap((each) => {
    const frame = each.querySelector("svg").getBoundingClientRect();
    const left = (box) => box.right > frame.right + 4 || box.left < frame.left - 4;
    return [...each.querySelectorAll("svg text")].filter((text) => left(text.getBoundingClientRect()));
  }).map((text) => text.textContent),
  width: root.scrollWidth,
  room: root.clientWidth,
  scripts: document.scripts.length,
  cut: [...document.querySelectorAll(".scroll")].filter((each) => each.scrollWidth > each.clientWidth)
    .map((each) => each.textContent),
};
"""
FIGURES = [
    "Reward and accuracy",
    "Masked tokens by sign",
    "Divergence of kept and of masked tokens",
    "Mismatch",
    "Entropy",
    "Staleness",
    "Response length",
    "Dropped tokens, and those kept outside",
    "How far tokens are",
    "ppo_clip",
    "dppo",
    "predictive (this run)",
]


@pytest.mark.slow
@pytest.mark.parametrize("width", [360, 390, 1280])
def test_in_a_browser(page, width):
    found = look(page, QUESTION, width=width)
    assert found.console == []
    assert found.requests == ["/page.html"]
    assert found.answer["h1"] == "predmask: my-run"
    assert found.answer["headings"] == FIGURES
    assert all(300 < wide <= width and tall > 150 for wide, tall in found.answer["sizes"])
    assert found.answer["letters"] > 9
    assert found.answer["outside"] == []
    assert found.answer["width"] == found.answer["room"] <= width
    assert found.answer["cut"] == []


CODE = ("def", " f", "(", "x", "):\n", "    ", "return", " x", "\n", "\n\n", " internationalisation" * 3, "x" * 300)
TOKENS = """
for (const each of document.querySelectorAll("details")) each.open = true;
const box = document.querySelector(".tokens").getBoundingClientRect();
const cut = (each) => each.scrollWidth > each.clientWidth;
return {
  cut: [...document.querySelectorAll(".scroll, .tokens")].filter(cut).map((each) => each.textContent),
  spans: [...document.querySelectorAll(".tokens span")].map((each) => {
    const seen = each.getBoundingClientRect();
    return [each.textContent, seen.left - box.left, seen.top - box.top, seen.width, seen.height];
  }),
  width: document.documentElement.scrollWidth,
  line: parseFloat(getComputedStyle(document.querySelector(".tokens span")).lineHeight),
};
"""


@pytest.fixture(scope="module")
def coder(tmp_path_factory):
    """A page on tokens of code in a large vocabulary, many of which are dropped."""
    tokens = make_tokens(tokens=40_000, length=400, noise=1.0)
    ids = torch.where(tokens.behaviour.ids < 0, -1, tokens.behaviour.ids + 151_000)
    tokens = replace(
        tokens,
        behaviour=replace(tokens.behaviour, ids=ids),
        policy=replace(tokens.policy, vocabulary_size=151_936),
    )
    directory = tmp_path_factory.mktemp("coder")
    info = TraceInfo(run="r", rule=rule_settings(Predictive(delta=0.05)), vocabulary_size=151_936, top_k=4)
    with TraceWriter(directory, info) as writer:
        writer.write_vocabulary({151_000 + place: text for place, text in enumerate(CODE)})
        writer.add(tokens)
        writer.commit(1)
    return report(read_run(directory))


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 1280])
def test_tables_and_tokens_fit(coder, width):
    """Large numbers and long tokens are not cut off; only a token that is longer than a line is broken over lines."""
    found = look(coder, TOKENS, width=width).answer
    assert found["width"] <= width
    assert found["cut"] == []
    assert len(found["spans"]) == 400
    for (text, _, top, wide, tall), (_, left, below, _, _) in itertools.pairwise(found["spans"]):
        assert wide < width
        assert (tall > 1.9 * found["line"]) == (len(text) > (50 if width == 390 else 150))
        if "⏎" in text:
            assert below > top
            assert left < 20


@pytest.mark.slow
def test_hostile_text_in_a_browser(hostile):
    found = look(hostile, QUESTION)
    assert found.console == []
    assert found.requests == ["/page.html"]
    assert found.answer["scripts"] == 0
    assert found.answer["headings"] == FIGURES
    assert found.answer["width"] == found.answer["room"]


@pytest.mark.slow
def test_the_browser_sees_what_is_wrong(page):
    """The checks above can fail."""
    bad = page.replace("<main>", '<main><div style="width: 900px">wide</div><img src="/pixel.png"><script>1</script>')
    found = look(bad, QUESTION)
    assert found.answer["width"] > found.answer["room"]
    assert any("Content Security Policy" in line and "pixel.png" in line for line in found.console)
    assert found.requests == ["/page.html"]
    open_policy = re.sub('<meta http-equiv="Content-Security-Policy"[^>]*>', "", bad)
    assert "/pixel.png" in look(open_policy, QUESTION).requests


@pytest.mark.slow
def test_it_prints(page, tmp_path):
    (tmp_path / "page.html").write_text(page)
    print_pdf(tmp_path / "page.html", tmp_path / "page.pdf")
    pages = re.findall(rb"/Type\s*/Page\b", (tmp_path / "page.pdf").read_bytes())
    assert 4 <= len(pages) <= 12


@pytest.mark.slow
def test_time_and_memory(tmp_path):
    """A tenth of the two million tokens that must take less than 60 s and 2 GB; the latter does not grow with them."""
    sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
    try:
        from report import make_trace as make_long_trace
        from report import measure
    finally:
        sys.path.pop(0)
    make_long_trace(tmp_path, 200_000)
    cost = measure(tmp_path)
    assert cost.cpu_seconds < 8
    assert cost.peak_bytes < 1e9
    assert cost.page_bytes < 3e6
