"""What a verl launch command needs for a mask, as Hydra overrides."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from predmask.core import Rule
from predmask.plugins.verl import RATIO_CAP, RULE, TOP_K
from predmask.plugins.verl.host import MAX_LOGPROBS, VLLM_LOGPROBS

GROUP = ("hydra.searchpath=[pkg://predmask.plugins.verl.config]", "+predmask=verl")
"""The configuration group with all that does not depend on the rule."""

_LOSS = "actor_rollout_ref.actor.policy_loss"
_AGENT_LOOPS = "actor_rollout_ref.rollout.agent.agent_loop_config_path"
_PLAIN = re.compile(r"[\w/.+@%-]+", re.ASCII)
"""Values that neither a shell nor Hydra reads as anything else."""


class LaunchError(ValueError):
    """Overrides that cannot be written; the text names the option and the remedy."""


def launch_args(
    rule: Rule,
    *,
    top_k: int | None = None,
    ratio_cap: float | None = RATIO_CAP,
    traces: Mapping[str, Any] | None = None,
) -> list[str]:
    """Overrides for `python -m verl.trainer.main_ppo`, each a word without blanks; defaults are left out.

    Args:
        rule: which tokens are dropped.
        top_k: K, which the rollout server reports; by default 20, or 0 for a rule of the sampled token alone.
        ratio_cap: C, the cap of the detached importance weight; None for no cap.
        traces: fields of `settings.TraceSettings`; `directory` names where tokens are recorded.

    Raises LaunchError for a K that the rule cannot do with, and for a directory that would not survive the shell.
    """
    if top_k is None:
        top_k = TOP_K if rule.needs_topk else 0
    if rule.needs_topk and top_k < 1:
        raise LaunchError(
            f"top-K missing: --top-k is {top_k}, and rule {rule.name!r} reads the top-K of the rollout server; give "
            f"--top-k {TOP_K}, for one"
        )
    if ratio_cap is not None and not ratio_cap > 0:
        raise LaunchError(f"--ratio-cap is {ratio_cap}; it must be above 0 (none for no cap)")
    return [*GROUP, *_of_rule(rule), *_of_numbers(top_k, ratio_cap), *_of_traces(traces or {}), *_of_install()]


def _of_rule(rule: Rule) -> Iterator[str]:
    if rule.name != RULE:
        yield f"{_LOSS}.rule.name={rule.name}"
    for field in dataclasses.fields(rule):
        value = getattr(rule, field.name)
        if value != field.default:
            yield f"++{_LOSS}.rule.{field.name}={_spelled(value, f'rule.{field.name}')}"


def _of_numbers(top_k: int, ratio_cap: float | None) -> Iterator[str]:
    if top_k != TOP_K:
        yield f"{_LOSS}.top_k={top_k}"
    if top_k > VLLM_LOGPROBS:
        yield f"++{MAX_LOGPROBS}={top_k}"
    if ratio_cap != RATIO_CAP:
        yield f"{_LOSS}.ratio_cap={_spelled(ratio_cap, '--ratio-cap')}"


def _of_traces(traces: Mapping[str, Any]) -> Iterator[str]:
    if not traces:
        return
    if not traces.get("directory"):
        raise LaunchError(f"traces are set ({', '.join(traces)}), but not where they go; give --traces DIR")
    for name, value in traces.items():
        # The worker that writes them may have another working directory.
        value = Path(value).absolute() if name == "directory" else value
        yield f"++{_LOSS}.traces.{name}={_spelled(value, '--traces')}"


def _of_install() -> Iterator[str]:
    """Where the agent loop's file is, if not beside verl's package, where verl would find it on every node."""
    verl = find_spec("verl")
    here = Path(__file__).parent / "config" / "agent_loops.yaml"
    if verl is None or verl.origin is None:
        return
    if not (Path(verl.origin).parent.parent / "predmask/plugins/verl/config/agent_loops.yaml").exists():
        yield f"{_AGENT_LOOPS}={_spelled(here, 'the directory of predmask')}"


def _spelled(value: Any, option: str) -> str:
    text = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    if not _PLAIN.fullmatch(text):
        raise LaunchError(
            f"{option} is {text!r}, which a shell or Hydra would take apart; use letters, digits and / . _ + @ % -"
        )
    return text
