"""The policy-loss section of verl's actor configuration, as this plug-in reads it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from verl.workers.config import PolicyLossConfig as HostPolicyLossConfig  # pyright: ignore[reportMissingImports]

from predmask.core import RULES, Rule
from predmask.plugins.recording import TraceSettings
from predmask.plugins.verl import LOSS_MODE, RATIO_CAP, RULE, TOP_K
from predmask.plugins.verl.host import hindrances


class SettingsError(ValueError):
    """A configuration that this plug-in refuses; the text names the values and the remedies."""


@dataclass
class PolicyLossConfig(HostPolicyLossConfig):
    """`actor_rollout_ref.actor.policy_loss`, made by Hydra in the driver and in each worker.

    Raises SettingsError for a rule that cannot be made, and for host settings under which another objective than the
    rule's would be trained.
    """

    loss_mode: str = LOSS_MODE
    rule: dict[str, Any] = field(default_factory=lambda: {"name": RULE})
    """The rule's name and its fields."""
    top_k: int = TOP_K
    """K, the likeliest ids that the rollout server reports; 0 for rules of the sampled token alone."""
    ratio_cap: float | None = RATIO_CAP
    """C, the cap of the detached importance weight; None for no cap."""
    traces: dict[str, Any] = field(default_factory=dict)
    """Fields of `TraceSettings`."""
    host: dict[str, Any] = field(default_factory=dict)
    """What the rest of verl's configuration says (see `host.hindrances`)."""

    def __post_init__(self) -> None:
        # Where the entry point was not loaded, as with VERL_USE_EXTERNAL_PLUGINS=none.
        from predmask.plugins.verl import register as register

        rule = self.make_rule()
        self.trace_settings()
        found = list(hindrances(self.host))
        if self.loss_mode != LOSS_MODE:
            found.append(f"policy_loss.loss_mode is {self.loss_mode!r}: set it to {LOSS_MODE!r}, or leave it out")
        if type(self.top_k) is not int or self.top_k < 0:
            found.append(f"policy_loss.top_k is {self.top_k!r}: it must be a whole number, 0 or more")
        elif rule.needs_topk and self.top_k < 1:
            text = f"rule {rule.name!r} reads the top-K, and policy_loss.top_k is {self.top_k}"
            found.append(f"{text}: set {TOP_K}, for one")
        if not _is_cap(self.ratio_cap):
            found.append(f"policy_loss.ratio_cap is {self.ratio_cap!r}: it must be a number above 0 (null for no cap)")
        if found:
            raise SettingsError("predmask cannot train under this configuration:\n- " + "\n- ".join(found))

    def make_rule(self) -> Rule:
        """The rule that decides."""
        return make_rule(self.rule)

    def trace_settings(self) -> TraceSettings:
        """What is recorded."""
        _check_mapping(self.traces, "traces", "directory=DIR")
        try:
            return TraceSettings(**self.traces)
        except (TypeError, ValueError) as error:
            known = ", ".join(one.name for one in fields(TraceSettings))
            raise SettingsError(f"policy_loss.traces is {dict(self.traces)}: {error} (its fields: {known})") from error


def make_rule(settings: Mapping[str, Any]) -> Rule:
    """The rule of these settings: `name`, and fields of the rule."""
    _check_mapping(settings, "rule", f"name={RULE}")
    given = dict(settings)
    name = given.pop("name", None)
    if name not in RULES:
        raise SettingsError(f"policy_loss.rule.name is {name!r}: choose one of {', '.join(RULES)}")
    try:
        return RULES[name](**given)
    except (TypeError, ValueError) as error:
        known = ", ".join(one.name for one in fields(RULES[name])) or "none"
        raise SettingsError(f"policy_loss.rule is {dict(settings)}: {error} (fields of {name}: {known})") from error


def _check_mapping(value: Any, name: str, example: str) -> None:
    if not isinstance(value, Mapping):
        raise SettingsError(f"policy_loss.{name} is {value!r}: set its fields, as policy_loss.{name}.{example}")


def _is_cap(value: Any) -> bool:
    return value is None or (type(value) in (int, float) and value > 0)
