"""The plug-in for verl: which configurations it refuses, and in which words."""

import re
from importlib import resources

import pytest
import yaml

from predmask.plugins.verl.host import OPTIONS, PATHS, check_version, hindrances, key_of, notes

ROLLOUT, ACTOR, MODEL = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", "actor_rollout_ref.model"
CORRECTION, ENGINE = "algorithm.rollout_correction", "actor_rollout_ref.rollout.engine_kwargs"

# A configuration of verl 0.9.1 with nothing but the plug-in's group added, FSDP and vLLM.
ACCEPTED = {
    "async_training": None,
    "rollout": None,
    "trainer.use_v1": True,
    "trainer.v1.trainer_mode": "sync",
    "trainer.v1.separate_async.parameter_sync_step": 4,
    "distillation.enabled": False,
    f"{CORRECTION}.bypass_mode": True,
    f"{CORRECTION}.rollout_is": None,
    f"{CORRECTION}.rollout_rs": None,
    "algorithm.use_pf_ppo": False,
    "algorithm.adv_estimator": "grpo",
    f"{ACTOR}.strategy": "fsdp",
    f"{ACTOR}.use_fused_kernels": False,
    f"{MODEL}.use_fused_kernels": False,
    f"{ACTOR}.use_prefix_grouper": False,
    f"{ACTOR}.fsdp_config.pad_to_length": False,
    f"{ACTOR}.megatron.pad_to_length": None,
    f"{ACTOR}.megatron.dynamic_context_parallel": None,
    f"{MODEL}.mtp.enable_train": False,
    f"{MODEL}.mtp.enable_rollout": False,
    f"{ROLLOUT}.name": "vllm",
    f"{ROLLOUT}.calculate_log_probs": True,
    f"{ROLLOUT}.logprobs_mode": "processed_logprobs",
    f"{ENGINE}.vllm": {},
    f"{ROLLOUT}.temperature": 1.0,
    f"{ROLLOUT}.top_p": 1,
    f"{ROLLOUT}.top_k": -1,
    f"{ROLLOUT}.repetition_penalty": None,
    f"{ENGINE}.sglang.speculative_algorithm": None,
    f"{ROLLOUT}.disaggregation.enabled": False,
    f"{ROLLOUT}.multi_turn.enable": False,
    f"{ROLLOUT}.agent.default_agent_loop": "predmask",
    f"{ROLLOUT}.agent.agent_loop_manager_class": None,
    f"{ACTOR}.policy_loss.top_k": 20,
    f"{ACTOR}.clip_ratio": 0.2,
    f"{ACTOR}.clip_ratio_low": 0.2,
    f"{ACTOR}.clip_ratio_high": 0.2,
    f"{ACTOR}.clip_ratio_c": 3.0,
    f"{MODEL}.lora.dropout": 0.0,
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.loss_scale_factor": None,
}


def host(**changes):
    """`policy_loss.host`, with these paths changed; those of vLLM's arguments are put into their mapping."""
    group = f"{ENGINE}.vllm."
    of_vllm = {path.removeprefix(group): value for path, value in changes.items() if path.startswith(group)}
    others = {path: value for path, value in changes.items() if not path.startswith(group)}
    values = ACCEPTED | ({f"{ENGINE}.vllm": of_vllm} if of_vllm else {}) | others
    return {key_of(path): value for path, value in values.items()}


def test_a_fit_configuration_has_no_hindrance_and_no_note():
    assert ACCEPTED.keys() == set(PATHS)
    assert hindrances(host()) == []
    assert notes(host()) == []


@pytest.mark.parametrize(
    "changes",
    [
        {"trainer.v1.trainer_mode": "colocate_async"},
        {"trainer.v1.trainer_mode": "separate_async"},
        {f"{ACTOR}.strategy": "fsdp2"},
        {f"{ACTOR}.strategy": "megatron", f"{ACTOR}.megatron.pad_to_length": False},
        {f"{ROLLOUT}.name": "sglang", f"{ACTOR}.policy_loss.top_k": 50},
        {f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.logprobs_mode": None},
        {f"{ROLLOUT}.temperature": 0.6},
        {f"{ROLLOUT}.repetition_penalty": 1.1},
        {f"{ROLLOUT}.top_k": 0, f"{ROLLOUT}.top_p": 1.0},
        {f"{ENGINE}.vllm": None},
        {f"{ENGINE}.vllm.max-num-seqs": 8, f"{ENGINE}.vllm.logprobs-mode": "processed_logprobs"},
        {f"{ACTOR}.policy_loss.top_k": 50, f"{ENGINE}.vllm.max_logprobs": 50},
        {f"{ACTOR}.policy_loss.top_k": 50, f"{ENGINE}.vllm.max-logprobs": -1},
        {f"{ACTOR}.policy_loss.top_k": 50, f"{ENGINE}.vllm.max-logprobs": 20, f"{ENGINE}.vllm.max_logprobs": 50},
        {f"{ACTOR}.policy_loss.top_k": 0},
    ],
)
def test_what_is_allowed(changes):
    assert hindrances(host(**changes)) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (f"{ROLLOUT}.multi_turn.enable", True),
        (f"{ROLLOUT}.agent.default_agent_loop", "tool_agent"),
        (f"{ROLLOUT}.agent.agent_loop_manager_class", "a.B"),
        (f"{ROLLOUT}.disaggregation.enabled", True),
    ],
)
def test_what_the_topk_alone_forbids(path, value):
    assert len(hindrances(host(**{path: value}))) == 1
    assert hindrances(host(**{path: value, f"{ACTOR}.policy_loss.top_k": 0})) == []


@pytest.mark.parametrize(
    ("path", "value", "said", "remedy"),
    [
        ("async_training", {"staleness_threshold": 0.1}, "batches of another kind", "start verl.trainer.main_ppo"),
        ("rollout", {"nnodes": 1, "n_gpus_per_node": 8}, "batches of another kind", "start verl.trainer.main_ppo"),
        ("trainer.use_v1", False, "replaces the policy loss", "trainer.use_v1=true"),
        ("trainer.v1.trainer_mode", "my_own", "count its steps", "trainer.v1.trainer_mode=sync"),
        ("distillation.enabled", True, "teacher", "distillation.enabled=false"),
        (f"{CORRECTION}.rollout_is", "token", "second importance weight", f"{CORRECTION}.rollout_is=null"),
        (f"{CORRECTION}.rollout_rs", "seq_mean_k3", "another rule", f"{CORRECTION}.rollout_rs=null"),
        ("algorithm.adv_estimator", "remax", "greedy responses", "algorithm.adv_estimator=grpo"),
        ("algorithm.use_pf_ppo", True, "resamples the advantages", "algorithm.use_pf_ppo=false"),
        (f"{ACTOR}.strategy", "veomni", "no token is decided on", f"{ACTOR}.strategy=fsdp2"),
        (f"{ACTOR}.strategy", "torchtitan", "no token is decided on", "model_engine=megatron"),
        (f"{ACTOR}.use_prefix_grouper", True, "prefixes", f"{ACTOR}.use_prefix_grouper=false"),
        (f"{ACTOR}.fsdp_config.pad_to_length", True, "padding", f"{ACTOR}.pad_to_length=false"),
        (f"{ACTOR}.megatron.pad_to_length", True, "padding", f"{ACTOR}.megatron.pad_to_length=false"),
        (f"{MODEL}.mtp.enable_train", True, "a loss of its own", f"{MODEL}.mtp.enable_train=false"),
        (f"{MODEL}.mtp.enable_rollout", True, "accepted the tokens", f"{MODEL}.mtp.enable_rollout=false"),
        (f"{ENGINE}.vllm.speculative_config", {"method": "ngram"}, "accepted the tokens", "leave it out"),
        (f"{ENGINE}.sglang.speculative_algorithm", "EAGLE", "accepted the tokens", "leave it out"),
        (f"{ROLLOUT}.name", "trtllm", "vllm and sglang only", f"{ROLLOUT}.name=vllm"),
        (f"{ROLLOUT}.calculate_log_probs", False, "no anchor", f"{ROLLOUT}.calculate_log_probs=true"),
        (f"{ROLLOUT}.logprobs_mode", "raw_logprobs", "sampled from", f"{ROLLOUT}.logprobs_mode=processed_logprobs"),
        (f"{ENGINE}.vllm.logprobs_mode", "raw_logprobs", "sampled from", "leave it out"),
        (f"{ROLLOUT}.temperature", 0, "nothing is sampled", f"{ROLLOUT}.temperature=1"),
        (f"{ROLLOUT}.top_p", 0.95, "truncated sampling", f"{ROLLOUT}.top_p=1"),
        (f"{ROLLOUT}.top_k", 50, "truncated sampling", f"{ROLLOUT}.top_k=-1"),
        (f"{ROLLOUT}.logprobs_mode", None, "sampled from", f"{ROLLOUT}.logprobs_mode=processed_logprobs"),
        (f"{ENGINE}.vllm.logprobs-mode", "raw_logprobs", "sampled from", "leave it out"),
        (f"{ENGINE}.vllm.logits-processors", ["a.B"], "another distribution", "leave it out"),
        (f"{ENGINE}.vllm.speculative-config", {"method": "ngram"}, "accepted the tokens", "leave it out"),
        (f"{ENGINE}.vllm.logits_processors", ["a.B"], "another distribution", "leave it out"),
        (f"{ROLLOUT}.disaggregation.enabled", True, "split servers", f"{ROLLOUT}.disaggregation.enabled=false"),
        (f"{ROLLOUT}.multi_turn.enable", True, "first only", f"{ROLLOUT}.multi_turn.enable=false"),
        (f"{ROLLOUT}.agent.default_agent_loop", "tool_agent", "top-K", "default_agent_loop=predmask"),
        (f"{ROLLOUT}.agent.agent_loop_manager_class", "a.B", "other agent loops", "agent_loop_manager_class=null"),
        (f"{ACTOR}.policy_loss.top_k", 50, "max_logprobs=20", f"++{ENGINE}.vllm.max_logprobs=50"),
    ],
)
def test_what_is_refused(path, value, said, remedy):
    [sentence] = hindrances(host(**{path: value}))
    shown = "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    assert sentence.startswith(f"{path} is {shown}")
    assert said in sentence
    assert sentence.rpartition(";")[2].find(remedy) >= 0


def test_the_anchor_is_the_policy_that_sampled():
    """Field case 6: recomputed log-probs are never the anchor, and nothing weighs the ratio a second time."""
    [sentence] = hindrances(host(**{f"{CORRECTION}.bypass_mode": False}))
    assert "log-probs that the actor recomputes" in sentence
    assert sentence.endswith(f"set {CORRECTION}.bypass_mode=true")
    both = hindrances(host(**{f"{CORRECTION}.bypass_mode": False, f"{CORRECTION}.rollout_is": "sequence"}))
    assert len(both) == 2


@pytest.mark.parametrize("part", [ACTOR, MODEL])
def test_a_fused_loss_beside_the_mask_is_refused(part):
    """Field case 36."""
    [sentence] = hindrances(host(**{f"{part}.use_fused_kernels": True}))
    assert "form no logits" in sentence
    assert sentence.endswith(f"set {part}.use_fused_kernels=false")


def test_each_spelling_of_an_argument_of_vllm_is_looked_at():
    given = {f"{ENGINE}.vllm.logprobs_mode": "processed_logprobs", f"{ENGINE}.vllm.logprobs-mode": "raw_logits"}
    [sentence] = hindrances(host(**given))
    assert sentence.startswith(f"{ENGINE}.vllm.logprobs-mode is raw_logits")
    caps = {f"{ENGINE}.vllm.max_logprobs": 50, f"{ENGINE}.vllm.max-logprobs": 30}
    [sentence] = hindrances(host(**caps, **{f"{ACTOR}.policy_loss.top_k": 40}))
    assert "max_logprobs=30" in sentence


def test_a_long_value_is_cut():
    [sentence] = hindrances(host(async_training={f"key{i}": i for i in range(99)}))
    assert len(sentence) < 350
    assert "...: " in sentence


def test_all_hindrances_are_named_at_once():
    changes = {f"{ROLLOUT}.top_p": 0.9, f"{ROLLOUT}.temperature": 0, "distillation.enabled": True}
    assert len(hindrances(host(**changes))) == 3


def test_nothing_known_is_a_hindrance():
    [sentence] = hindrances({})
    assert "predmask verl args" in sentence


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.path)
def test_each_remedy_helps(option):
    """An override that is named makes its own option fit."""
    override = re.fullmatch(r"set (\S+?)=(\S+?)(, or .*)?", option.remedy)
    if override is None:
        assert option.remedy == "leave it out" or option.remedy.startswith("start verl.trainer.main_ppo")
        assert option.fits(None)
    else:
        assert option.fits(yaml.safe_load(override[2]))


def test_the_group_reads_every_option_that_is_looked_at():
    text = resources.files("predmask.plugins.verl.config").joinpath("predmask/verl.yaml").read_text(encoding="utf-8")
    assert text.startswith("# @package _global_\n")
    group = yaml.safe_load(text)
    read = group["actor_rollout_ref"]["actor"]["policy_loss"]["host"]
    assert read == {key_of(path): f"${{oc.select:{path},null}}" for path in PATHS}


def test_the_group_itself_says_nothing_that_is_refused():
    text = resources.files("predmask.plugins.verl.config").joinpath("predmask/verl.yaml").read_text(encoding="utf-8")
    group = yaml.safe_load(text)

    def said(path):
        found = group
        for part in path.split("."):
            found = found.get(part, {}) if isinstance(found, dict) else {}
        return found

    values = {key_of(path): said(path) for path in PATHS if said(path) != {}}
    assert len(values) == 5
    assert hindrances(values) == []


def test_notes_name_what_has_no_effect():
    [first, second] = notes(host(**{f"{ACTOR}.clip_ratio_high": 0.28, f"{MODEL}.lora.dropout": 0.05}))
    assert first.startswith(f"{ACTOR}.clip_ratio_high=0.28 has no effect")
    assert "lora.dropout=0.05" in second


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({f"{ROLLOUT}.repetition_penalty": 1.1}, "repetition_penalty=1.1 has no effect"),
        ({f"{ROLLOUT}.name": "sglang", f"{ROLLOUT}.logprobs_mode": None}, "logprobs_mode=null has no effect"),
        ({f"{ROLLOUT}.temperature": 0.6}, "temperature=0.6: verl divides the actor's logits"),
    ],
)
def test_other_notes(changes, said):
    [note] = notes(host(**changes))
    assert said in note


def test_a_divisor_that_depends_on_the_split_is_noted():
    mode = f"{ACTOR}.loss_agg_mode"
    [note] = notes(host(**{mode: "seq-mean-token-sum-norm"}))
    assert f"without {ACTOR}.loss_scale_factor" in note
    assert notes(host(**{mode: "seq-mean-token-sum-norm", f"{ACTOR}.loss_scale_factor": 8192})) == []


@pytest.mark.parametrize("version", ["0.9.1", "0.9.2", "0.9.1.post1", "0.9.10", "0.9.2rc1"])
def test_versions_that_fit(version):
    assert check_version(version) is None


@pytest.mark.parametrize("version", ["0.9.0", "0.8.3", "0.10.0", "0.10.0.dev0", "1.0", ""])
def test_versions_that_do_not(version):
    assert "pip install 'verl>=0.9.1,<0.10'" in check_version(version)
