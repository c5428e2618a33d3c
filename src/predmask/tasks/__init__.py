"""Tasks: problems in two splits and a verifier; the visible table `TASKS` and how a task is named."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable
from typing import Any

from predmask.tasks.arithmetic import Arithmetic
from predmask.tasks.base import Problem, Split, Task
from predmask.tasks.imports import imported
from predmask.tasks.math import Math
from predmask.tasks.reasoning_gym import ReasoningGym

__all__ = ["TASKS", "Problem", "Split", "Task", "parse_task", "task_class"]

# A new task is one file and one line here; the property tests run over this table.
TASKS: dict[str, type] = {
    "arithmetic": Arithmetic,
    "math": Math,
    "reasoning_gym": ReasoningGym,
}


# What stands after the colon in `math:FILE,FILE` and `reasoning_gym:NAME`.
_AFTER_COLON: dict[str, Callable[[str], dict[str, Any]]] = {
    "math": lambda sources: {"data": tuple(sources.split(","))},
    "reasoning_gym": lambda name: {"dataset": name},
}


def parse_task(spec: str) -> tuple[type[Task], dict[str, Any]]:
    """The class and the fields that a task's spelling on the command line means.

    `math:DATA` is the task math with that data, `reasoning_gym:NAME` the data set NAME of reasoning-gym; any other
    spelling is that of `task_class`, whose `ValueError` it shares.
    """
    name, colon, rest = spec.partition(":")
    if colon and name in _AFTER_COLON:
        return TASKS[name], _AFTER_COLON[name](rest)
    return task_class(spec), {}


def task_class(name: str) -> type[Task]:
    """The task of a name in `TASKS`, or a class of your own by its import path `package.module:Class`.

    The module is looked for in the current directory first. Raises `ValueError`, with the remedy, for a name
    or path that leads to no class, and for a class that is no task: a frozen dataclass with `problems` and
    `score`.
    """
    if name in TASKS:
        return TASKS[name]
    module_name, colon, class_name = name.partition(":")
    if not colon:
        close = difflib.get_close_matches(name, TASKS, n=1)
        raise ValueError(
            f"unknown task {name!r}{f', did you mean {close[0]!r}?' if close else ''}: the tasks are "
            f"{', '.join(TASKS)}; a class of your own is named package.module:Class"
        )
    cls = imported(name, "task")
    if not isinstance(cls, type):
        raise ValueError(f"task {name!r}: the module {module_name} has no class {class_name!r}")
    _check(cls, name)
    return cls


def _check(cls: type, name: str) -> None:
    if not (dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen):  # pyright: ignore
        raise ValueError(
            f"task {name!r} is not a frozen dataclass: put @dataclass(frozen=True, kw_only=True) above it, "
            "its fields are the configuration that a run records"
        )
    if not callable(getattr(cls, "problems", None)):
        raise ValueError(f"task {name!r} has no problems: give it a method problems(split)")
    if not callable(getattr(cls, "score", None)):
        raise ValueError(
            f"task {name!r} is a task without a verifier, there is nothing to learn from: "
            "give it a method score(problem, response)"
        )
