"""What the documentation says is what the code does."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

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
    for name in re.findall(r"^    ([\w/]+\.py)(?:, ([\w/]+\.py))?", text, flags=re.MULTILINE):
        for file in filter(None, name):
            assert list((ROOT / "src").rglob(file)), file


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
