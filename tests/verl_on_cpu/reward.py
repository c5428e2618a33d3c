"""The embedded task as verl's custom reward function."""

from predmask.tasks import Problem
from predmask.tasks.arithmetic import Arithmetic


def compute_score(data_source, solution_str, ground_truth, **_):
    problem = Problem(id="", prompt="", reference=ground_truth)
    return Arithmetic().score(problem, solution_str)
