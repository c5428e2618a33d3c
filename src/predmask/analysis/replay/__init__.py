"""Replay: what other rules would have decided about recorded tokens."""

from predmask.analysis.replay.decisions import Decided, Replay, Reproduction, registered_rules, replay, rule_labels

__all__ = ["Decided", "Replay", "Reproduction", "registered_rules", "replay", "rule_labels"]
