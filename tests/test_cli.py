"""The command line through `main`: what it prints, and its exit codes."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

import predmask
from predmask.cli import VERBS, main
from predmask.core import DIVERGENCES, RULES, TAILS
from predmask.rollout import ENGINES
from predmask.tasks import TASKS
from predmask.train.config import Config
from predmask.train.options import describe, resolve
from predmask.train.presets import PRESETS


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "300")


def exits(argv: list[str]) -> int:
    """The exit code, whether `main` returns it or argparse ends the process."""
    try:
        return main(argv)
    except SystemExit as error:
        return int(error.code or 0)


def config(capsys: pytest.CaptureFixture[str], *argv: str) -> Config:
    """What `predmask config` prints, read back."""
    assert main(["config", *argv]) == 0
    return resolve(tomllib.loads(capsys.readouterr().out))


def test_config_prints_a_configuration_that_can_be_run_again(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert config(capsys) == Config()
    main(["config", "arithmetic", "--rule", "ppo_clip", "--seed=3"])
    file = tmp_path / "run.toml"
    file.write_text(capsys.readouterr().out, encoding="utf-8")
    first = config(capsys, "arithmetic", "--rule", "ppo_clip", "--seed=3")
    assert config(capsys, "--config", str(file)) == first
    assert config(capsys, f"--config={file}", "--seed", "4") == dataclasses.replace(first, seed=4)


@pytest.mark.parametrize(
    "argv",
    [
        ["arithmetic", "--config", "run.toml", "--threads", "3"],
        ["--config", "run.toml", "arithmetic", "--threads", "3"],
        ["arithmetic", "--threads", "3", "--config", "run.toml"],
    ],
)
def test_preset_file_and_options_in_any_order(
    argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("threads = 2\nsteps = 7")
    found = config(capsys, *argv)
    assert (found.threads, found.steps) == (3, 7)
    assert found.loss.ratio_cap == PRESETS["arithmetic"].values["loss"]["ratio_cap"]


def test_a_users_task_is_found_in_the_current_directory(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "my_puzzles.py").write_text(
        "from dataclasses import dataclass\n"
        "@dataclass(frozen=True, kw_only=True)\n"
        "class Riddle:\n"
        "    level: int = 1\n"
        "    def problems(self, split): return ()\n"
        "    def score(self, problem, response): return 0.0\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    task: Any = config(capsys, "--task", "my_puzzles:Riddle", "--task.level", "2").task
    assert (type(task).__name__, task.level) == ("Riddle", 2)


# Help


def test_help_of_the_program_names_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n    {verb}" in out for verb in VERBS)


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits(["--version"]) == 0
    assert capsys.readouterr().out == f"predmask {predmask.__version__}\n"


def test_help_lists_every_option_and_preset(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits(["config", "--help"]) == 0
    out = capsys.readouterr().out
    for option in describe():
        assert option.meaning in out
        if option.type:
            assert f"--{option.path} {option.type}" in out
            assert f"(default: {option.default})" in out
    assert all(name in out and preset.summary in out for name, preset in PRESETS.items())
    assert "--config FILE" in out


@pytest.mark.parametrize("argv", [["--rule", "ppo_clip", "--help"], ["-h", "--rule", "ppo_clip"]])
def test_help_follows_the_choices(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert exits(["config", *argv]) == 0
    out = capsys.readouterr().out
    assert "--rule.dual_clip float|none" in out
    assert "--rule.delta" not in out


def test_help_shows_the_presets_values_and_what_must_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert exits(["config", "arithmetic", "--task", "reasoning_gym", "--help"]) == 0
    out = capsys.readouterr().out
    assert "no cap (default: 10.0)" in out
    assert "leg_counting (must be set)" in out


# Lists


def test_list_shows_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    words = [line.split() for line in lines if line.startswith("  ") and line[2] != " "]
    names = [word[0] for word in words]
    assert names == [*RULES, *DIVERGENCES, *TAILS, *ENGINES, *TASKS, *PRESETS]
    text = "\n".join(lines)
    for entry in (*RULES.values(), *ENGINES.values(), *PRESETS.values()):
        assert entry.summary in text
    for entry in (*DIVERGENCES.values(), *TAILS.values()):
        assert entry.formula in text
        assert entry.source in text
    for cls in RULES.values():
        assert cls.source in text
        assert ", ".join(field.name for field in dataclasses.fields(cls)) in text


def test_list_of_one_section_says_what_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list", "rules"]) == 0
    out = capsys.readouterr().out
    assert "predictive" in out
    assert "arithmetic" not in out
    assert out.count("needs: top-K log-probs") == sum(rule().needs_topk for rule in RULES.values())
    main(["list", "tasks"])
    assert "needs: --task.dataset" in capsys.readouterr().out


def test_list_wraps_to_the_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    main(["list"])
    assert max(map(len, capsys.readouterr().out.splitlines())) <= 70


# Mistakes


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "VERB"),
        (["traen"], "traen"),
        (["list", "rule"], "rules"),
        (["list", "--sec"], "--sec"),
        (["config", "nowhere"], "unknown preset 'nowhere'; choose one of arithmetic"),
        (["config", "run.toml"], "a file is given by --config FILE"),
        (["config", "--seed", "1", "arithmetic"], "'arithmetic' belongs to no option"),
        (["config", "--rule.dleta", "1"], "did you mean 'rule.delta'?"),
        (["config", "--conf", "x"], "unknown option 'conf'"),
        (["config", "--config"], "--config"),
        (["config", "--config", "nowhere.toml"], "cannot read nowhere.toml: No such file or directory"),
        (["config", "--task", "nowhere:Task"], "'nowhere:Task'"),
        (["config", "--rule.delta", "-1"], "rule.delta is -1.0"),
        (["config", "--rule", "dpo", "--help"], "did you mean 'dppo'?"),
    ],
)
def test_mistakes_end_with_code_2_and_one_message(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    last = captured.err.splitlines()[-1]
    assert last.startswith("predmask")
    assert "error: " in last
    assert message in last


def test_a_missing_package_is_named_with_its_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tomlkit", None)
    assert main(["config"]) == 2
    assert capsys.readouterr().err == (
        "predmask: error: the package tomlkit is missing: install predmask[train] "
        "(in a clone: pip install -e '.[train]')\n"
    )


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), 130),
        (FileNotFoundError(2, "No such file or directory", "x"), 2),
        (ModuleNotFoundError("no", name="transformers.models"), 2),
    ],
)
def test_exit_codes(error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: object) -> int:
        raise error

    monkeypatch.setattr("predmask.cli.list.run", run)
    assert main(["list"]) == code


@pytest.mark.parametrize("error", [ZeroDivisionError(), ValueError(), ModuleNotFoundError(name="predmask.core")])
def test_faults_of_the_program_keep_their_traceback(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: object) -> int:
        raise error

    monkeypatch.setattr("predmask.cli.list.run", run)
    with pytest.raises(type(error)):
        main(["list"])


def test_a_reader_that_leaves_is_no_error() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "predmask", "list"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    assert process.stderr.read() == b""
    process.stderr.close()
    assert process.wait() == 141


def test_a_terminal_without_the_symbols_is_no_error() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-m", "predmask", "list", "rules"]
    assert b"predictive" in subprocess.run(command, env=environment, capture_output=True, check=True).stdout


def test_an_option_with_a_slip_is_guessed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["show", "runs/x", "--smaple", "3"])
    assert "did you mean --sample?" in capsys.readouterr().err


def test_an_error_does_not_obey_what_it_quotes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path / "a\x1b[2Jb")]) == 2
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert "x1b[2Jb" in shown
