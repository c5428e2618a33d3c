"""What the documentation says is what the code does."""

from __future__ import annotations

import doctest
import re
from pathlib import Path
from typing import Any

import pytest

from helpers_traces import make_tokens
from predmask.core import DIVERGENCES, RULES, TAILS
from predmask.train.options import resolve

ROOT = Path(__file__).parent.parent
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


@pytest.mark.parametrize(("page", "least"), [("method.md", 30), ("operator.md", 10)])
def test_the_examples_hold(page: str, least: int) -> None:
    failures, examples = doctest.testfile(str(ROOT / "docs" / page), module_relative=False)
    assert failures == 0
    assert examples > least


def test_the_readme_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 1
    exec(compile(blocks[0], "README.md", "exec"), {})
    assert "kept" in capsys.readouterr().out


@pytest.mark.parametrize("name", [*RULES, *DIVERGENCES, *TAILS])
def test_the_method_page_names_everything(name: str) -> None:
    assert f"`{name}`" in (ROOT / "docs" / "method.md").read_text()


def test_the_tree_in_the_architecture_page_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    (tree,) = re.findall(r"```\nsrc/predmask/\n(.*?)```", text, flags=re.DOTALL)
    package = ROOT / "src" / "predmask"
    listed, folder = set(), package
    for line in re.findall(r"^ {2,4}\S.*", tree, flags=re.MULTILINE):
        names = re.match(r" +(\S+?)(?:, (\S+))?\s", line)
        assert names is not None
        inside = line.startswith("    ")
        paths = [(folder if inside else package) / name for name in names.groups() if name]
        assert all(path.exists() for path in paths), line
        listed.update(paths)
        folder = folder if inside else paths[0]
    packages = {path.parent for path in package.glob("*/__init__.py")}
    assert packages <= listed
    for documented in packages - {package / "bench", package / "cli"}:
        missing = {path for path in documented.glob("*.py") if path.name != "__init__.py"} - listed
        assert {path.name for path in missing} <= {"compare_views.py"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_inside_the_repository_lead_somewhere(page: Path) -> None:
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text):
        assert (page.parent / target).exists(), target


def test_the_task_of_the_architecture_page_is_a_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (block,) = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "architecture.md").read_text(), flags=re.DOTALL)
    (tmp_path / "doubling.py").write_text(block)
    monkeypatch.chdir(tmp_path)
    task = resolve({"task": {"name": "doubling:Doubling", "largest": 99}}).task
    train, heldout = ({problem.id for problem in task.problems(split)} for split in ("train", "heldout"))
    assert len(train) == 90
    assert not train & heldout
    problem = task.problems("train")[3]
    assert task.score(problem, f"that is {problem.reference}") == 1.0
    assert task.score(problem, "") == 0.0


def test_the_examples_of_the_instruments_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing, hosts = re.findall(r"```py\n(.*?)```", (ROOT / "docs" / "instruments.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    made = make_tokens(tokens=40, top_k=20, vocabulary_size=30, full=True)
    assert made.full is not None
    top = made.full.behaviour.topk(20)
    names: dict[str, Any] = {
        "V": 30,
        "steps": 2,
        "batches": [0],
        "ids": made.id,
        "mu": made.full.behaviour.gather(1, made.id[:, None])[:, 0],
        "top_ids": top.indices,
        "top_mu": top.values,
        "logits": made.full.policy,
        "advantage": made.advantage,
        "mask": made.decision.response_mask,
        "sample": made.sample,
        "group": made.group,
    }
    exec(compile(writing.replace("token_texts(tokenizer, V)", "{0: 'a'}"), "instruments.md", "exec"), names)
    exec(compile(reading.replace("runs/...", "mine"), "instruments.md", "exec"), names)
    assert (names["decision"].reason == names["tokens"].decision.reason).all()
    assert "tokens_from_verl(info, batch, step=1)" in hosts  # which needs a host's batch: see its own tests
