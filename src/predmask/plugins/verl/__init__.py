"""Predictive divergence masks inside verl, by its public registries.

Rollout servers report their top-K (`vllm`, `sglang`), the agent loop puts it into the batch (`agent_loop`), the engine
takes the policy's statistics from its logits (`engine`, `hook`, `packed`), the rule is asked once, and the registered
loss hands its decision to verl's own averages (`loss`). `settings` is what the configuration says, `host` what it must
not say.
"""

LOSS_MODE = "predmask"
"""Under this name verl knows the policy loss, and the agent loop."""
RULE, TOP_K, RATIO_CAP = "predictive", 20, 5.0
"""What the mask is by default; Hydra reads the same in `config/predmask/verl.yaml`."""
