"""What the plug-in relies on in TRL, and what it refuses."""

from __future__ import annotations

import ast
import inspect
import textwrap
from dataclasses import fields
from importlib import metadata
from typing import Any

import pytest

pytest.importorskip("trl")

import torch
from trl import GRPOConfig, GRPOTrainer

from helpers_trl import HOST_WARNINGS, ROWS, TOP_K, make_trainer, options, policy_model, reward, train
from predmask.core import CISPO, BehaviourSupport, PolicySupport, PPOClip, Predictive, Reason
from predmask.plugins.trl import PredmaskGRPOConfig, PredmaskGRPOTrainer, host
from predmask.plugins.trl.host import HostError, check_version

pytestmark = [pytest.mark.filterwarnings(text) for text in HOST_WARNINGS]

SIGNATURES = {
    "_generate_single_turn": [
        "self",
        "prompt_ids",
        "images",
        "multimodal_fields",
        "num_generations",
        "has_tool_images=False",
    ],
    "_calculate_rewards": ["self", "inputs", "prompts", "completions", "completion_ids_list"],
    "_generate_and_score_completions": ["self", "inputs"],
    "_compute_loss": ["self", "model", "inputs"],
}
"""Of the methods that are overridden."""
UNPACKED = {
    ("_generate", "self._generate_single_turn"): 2,
    ("_generate_single_turn", "self.vllm_generation.generate"): 4,
    ("_generate_and_score_completions", "self._generate"): 8,
}
"""How many values TRL's own code takes from a call, by the method that calls."""
DEFAULTS = {
    "loss_type": "dapo",
    "importance_sampling_level": "token",
    "epsilon": 0.2,
    "epsilon_high": None,
    "delta": None,
    "beta": 0.0,
    "use_liger_kernel": False,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": None,
    "repetition_penalty": 1.0,
    "generation_kwargs": None,
    "vllm_structured_outputs_regex": None,
    "vllm_importance_sampling_correction": True,
    "off_policy_mask_threshold": None,
    "top_entropy_quantile": 1.0,
    "entropy_coef": 0.0,
    "use_adaptive_entropy": False,
    "use_transformers_continuous_batching": False,
    "use_transformers_paged": False,
    "temperature": 1.0,
    "vllm_mode": "colocate",
}
"""Of TRL's options that are read."""
KNOWN = {
    # Which are judged
    *DEFAULTS,
    # Of objectives that are refused
    "sapo_temperature_neg",
    "sapo_temperature_pos",
    "vespo_k_pos",
    "vespo_lambda_pos",
    "vespo_k_neg",
    "vespo_lambda_neg",
    "vllm_importance_sampling_mode",
    "vllm_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min",
    "vllm_importance_sampling_cap",
    "use_bias_correction_kl",
    "sync_ref_model",
    "ref_model_mixup_alpha",
    "ref_model_sync_steps",
    "entropy_coef_min",
    "entropy_coef_max",
    "entropy_coef_delta",
    "entropy_target",
    "transformers_continuous_batching_config",
    "max_tool_calling_iterations",
    "router_aux_loss_coef",
    # Of rewards and advantages, which are TRL's
    "reward_weights",
    "multi_objective_aggregation",
    "scale_rewards",
    "mask_truncated_completions",
    # Of the model, the data, the course and the log
    "model_init_kwargs",
    "trust_remote_code",
    "disable_dropout",
    "cast_lm_head_to_fp32",
    "num_generations",
    "num_generations_eval",
    "max_completion_length",
    "ds3_gather_for_generation",
    "shuffle_dataset",
    "pad_to_multiple_of",
    "generation_batch_size",
    "steps_per_generation",
    "num_iterations",
    "chat_template_kwargs",
    "cache_implementation",
    "use_vllm",
    "vllm_model_impl",
    "vllm_enable_sleep_mode",
    "vllm_server_base_url",
    "vllm_server_host",
    "vllm_server_port",
    "vllm_server_timeout",
    "vllm_group_port",
    "vllm_gpu_memory_utilization",
    "vllm_max_model_length",
    "vllm_tensor_parallel_size",
    "log_completions",
    "log_multimodal",
    "num_completions_to_print",
    "log_unique_prompts",
    "log_completions_hub_repo",
}
"""All options that TRL's GRPOConfig adds to transformers' ones."""


def source_of(method: str) -> ast.AST:
    return ast.parse(textwrap.dedent(inspect.getsource(getattr(GRPOTrainer, method))))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures_are_those_that_are_overridden(name):
    found = []
    for kind in (GRPOTrainer, PredmaskGRPOTrainer):
        parameters = inspect.signature(getattr(kind, name)).parameters.values()
        found.append([p.name if p.default is p.empty else f"{p.name}={p.default}" for p in parameters])
    assert found[0] == SIGNATURES[name], f"TRL {metadata.version('trl')} has changed the parameters of {name}"
    assert found[1] == SIGNATURES[name]


def test_at_most_four_methods_are_overridden():
    """Field case 36. The rest of the class is the plug-in's own: none of its names is TRL's or transformers'."""
    own = {name for name, value in vars(PredmaskGRPOTrainer).items() if callable(value) or name == "_tag_names"}
    assert {name for name in own if hasattr(GRPOTrainer, name)} == {*SIGNATURES, "__init__", "_tag_names"}


@pytest.mark.parametrize(("method", "call"), UNPACKED)
def test_results_have_as_many_parts(method, call):
    parts = [
        len(node.targets[0].elts)
        for node in ast.walk(source_of(method))
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func) == call
        and isinstance(node.targets[0], ast.Tuple)
    ]
    assert parts == [UNPACKED[method, call]], (
        f"TRL {metadata.version('trl')}: {method} takes {parts} values from {call}; not {UNPACKED[method, call]}"
    )


def test_the_host_is_as_it_is_relied_on(tmp_path):
    """Fields of the batch, types of results, and attributes, of a run of TRL's own trainer."""
    version = f"TRL {metadata.version('trl')} has changed"
    seen: dict[str, Any] = {}

    class Watched(GRPOTrainer):
        def _generate_single_turn(self, *arguments: Any, **more: Any) -> Any:
            seen["turn"] = super()._generate_single_turn(*arguments, **more)
            return seen["turn"]

        def _calculate_rewards(self, *arguments: Any, **more: Any) -> Any:
            seen["rewards"] = super()._calculate_rewards(*arguments, **more)
            return seen["rewards"]

        def _compute_loss(self, model: Any, inputs: Any) -> Any:
            seen["inputs"] = inputs
            seen["mode"] = (self.model.training, self.current_gradient_accumulation_steps, self._step)
            return super()._compute_loss(model, inputs)

    plain = make_trainer(tmp_path, stock=True, gradient_accumulation_steps=2)
    trainer = Watched(
        model=policy_model(),
        reward_funcs=reward,
        args=plain.args,
        train_dataset=plain.train_dataset,
        processing_class=plain.processing_class,
    )
    trainer.train()
    completions, logprobs = seen["turn"]
    assert logprobs is None, f"{version} what _generate_single_turn returns beside the completions"
    assert len(completions) == 8, f"{version} how many completions a generation has"
    assert all(isinstance(token, int) for completion in completions for token in completion)
    assert tuple(seen["rewards"].shape) == (8, 1), f"{version} the shape of _calculate_rewards' result"
    shapes = {name: tuple(value.shape) for name, value in seen["inputs"].items()}
    width = max(map(len, completions))
    assert shapes.pop("prompt_ids") == shapes.pop("prompt_mask"), f"{version} the batch"
    expected = {
        "completion_ids": (4, width),
        "completion_mask": (4, width),
        "advantages": (4,),
        "num_items_in_batch": (),
    }
    assert shapes == expected, f"{version} the fields of the batch"
    assert seen["mode"] == (True, 2, 1), f"{version} when and how often the loss is computed"
    read = (
        *("accelerator", "args", "aux_loss_enabled", "eos_token_ids", "loss_type", "max_completion_length", "model"),
        *("num_generations", "num_iterations", "reward_weights", "state", "temperature", "use_vllm", "vllm_mode"),
        *("_is_vlm", "_metrics", "_step", "_tokenizer", "_tag_names"),
    )
    assert [name for name in read if not hasattr(trainer, name)] == [], f"{version} its attributes"
    assert set(trainer._metrics) == {"train", "eval"}, f"{version} where figures are collected"


def test_tags_are_added_to_the_hosts():
    assert PredmaskGRPOTrainer._tag_names == ["trl", "grpo", "predmask"]
    assert GRPOTrainer._tag_names == ["trl", "grpo"]


def test_options_have_the_defaults_that_are_relied_on():
    """An option that TRL adds may change the objective: look at it, refuse it or not, and name it here."""
    found = {field.name: field.default for field in fields(GRPOConfig)}
    version = f"TRL {metadata.version('trl')}"
    assert {name: found.get(name, "gone") for name in DEFAULTS} == DEFAULTS, f"{version} has other defaults"
    added = {name for name in GRPOConfig.__annotations__ if name not in ("_VALID_DICT_FIELDS", *OVERRIDDEN)}
    known = KNOWN - {"use_liger_kernel"}  # transformers' own
    assert added == known, f"{version} has other options: {sorted(added ^ known)}"
    assert {option.name for option in host._OPTIONS} <= set(DEFAULTS)


OVERRIDDEN = ("learning_rate", "remove_unused_columns")
"""Options of transformers' that TRL gives other defaults."""


@pytest.mark.parametrize(
    ("version", "is_fit"), [("1.15.3", False), ("1.16.0", True), ("1.16.4", True), ("1.17.0", False)]
)
def test_other_versions_are_refused(tmp_path, monkeypatch, version, is_fit):
    monkeypatch.setattr(metadata, "version", lambda name: {"trl": version}[name])
    if is_fit:
        check_version()
        return
    with pytest.raises(HostError, match=rf"TRL {version} .* pip install 'trl>=1\.16,<1\.17'"):
        PredmaskGRPOTrainer(model=policy_model(), args=None)


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    **{
        name: ({"loss_type": name}, [f"loss_type is '{name}'", "one of grpo, bnpo"])
        for name in ("sapo", "luspo", "vespo")
    },
    "cispo": ({"loss_type": "cispo"}, ["for CISPO use rule=CISPO()"]),
    "sequence ratios": (
        {"importance_sampling_level": "sequence"},
        ["importance_sampling_level is 'sequence'", "set importance_sampling_level=token"],
    ),
    "beta": ({"beta": 0.04}, ["beta is 0.04", "set beta=0.0"]),
    "epsilon": ({"epsilon": 0.1}, ["epsilon is 0.1", "rule=PPOClip(eps_low=...)"]),
    "epsilon_high": ({"epsilon_high": 0.28}, ["epsilon_high is 0.28", "rule=PPOClip(eps_high=...)"]),
    "delta": ({"delta": 0.15}, ["delta is 0.15", "rule=Predictive(delta=...)"]),
    "liger": ({"use_liger_kernel": True}, ["use_liger_kernel is True", "its fused loss would replace the rule's"]),
    "top_p": ({"top_p": 0.9}, ["top_p is 0.9", "another distribution", "set top_p=1.0"]),
    "top_k": ({"top_k": 20}, ["top_k is 20", "behaviour_top_k"]),
    "min_p": ({"min_p": 0.05}, ["min_p is 0.05", "set min_p=None"]),
    "repetition": ({"repetition_penalty": 1.1}, ["repetition_penalty is 1.1"]),
    "generation_kwargs": ({"generation_kwargs": {"top_h": 0.3}}, ["generation_kwargs is {'top_h': 0.3}"]),
    "regex": ({"vllm_structured_outputs_regex": "a"}, ["vllm_structured_outputs_regex is 'a'", "forbids tokens"]),
    "correction": (
        {"vllm_importance_sampling_correction": True},
        ["vllm_importance_sampling_correction is True", "second importance weight"],
    ),
    "second mask": ({"off_policy_mask_threshold": 0.5}, ["off_policy_mask_threshold is 0.5", "second mask"]),
    "entropy quantile": ({"top_entropy_quantile": 0.2}, ["top_entropy_quantile is 0.2", "second mask"]),
    "entropy": ({"entropy_coef": 0.01}, ["entropy_coef is 0.01", "entropy bonus"]),
    "adaptive entropy": ({"use_adaptive_entropy": True}, ["use_adaptive_entropy is True", "entropy bonus"]),
    "continuous batching": (
        {"use_transformers_continuous_batching": True},
        ["use_transformers_continuous_batching is True", "reports no log-probs"],
    ),
    "temperature": ({"temperature": 0.0}, ["temperature is 0.0", "set temperature=1.0"]),
    "no rule": ({"rule": "predictive"}, ["rule is 'predictive'", "Predictive(delta=0.15)"]),
    "a rule's class": ({"rule": Predictive}, ["give an instance"]),
    "no top-K": ({"behaviour_top_k": 0}, ["rule 'predictive' reads the top-K", "set behaviour_top_k=20"]),
    "K below 0": ({"behaviour_top_k": -1, "rule": PPOClip()}, ["behaviour_top_k is -1"]),
    "cap": ({"ratio_cap": 0.0}, ["ratio_cap is 0.0", "None for no cap"]),
    "vllm's cap": (
        {"use_vllm": True, "behaviour_top_k": 21},
        ["behaviour_top_k is 21", "max_logprobs at 20 in colocate mode"],
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_other_objectives_are_refused(tmp_path, name):
    """With the option's value and the remedy; when the options are made, and when they were changed since."""
    settings, said = REFUSED[name]
    with pytest.raises(HostError) as caught:
        PredmaskGRPOConfig(**options(tmp_path, **settings))
    for part in said:
        assert part in str(caught.value)
    args = PredmaskGRPOConfig(**options(tmp_path))
    for key, value in settings.items():
        setattr(args, key, value)
    with pytest.raises(HostError) as caught:
        PredmaskGRPOTrainer(policy_model(), reward, args)
    for part in said:
        assert part in str(caught.value)


def test_each_option_of_the_table_has_a_case():
    tested = {key for settings, _ in REFUSED.values() for key in settings}
    assert {option.name for option in host._OPTIONS} - tested == {"use_transformers_paged"}  # TRL's old name


@pytest.mark.filterwarnings("ignore:`use_transformers_paged` is deprecated:FutureWarning")
def test_the_old_name_is_refused_too(tmp_path):
    with pytest.raises(HostError, match="use_transformers_paged is True"):
        PredmaskGRPOConfig(**options(tmp_path, use_transformers_paged=True))


def test_all_is_said_at_once(tmp_path):
    with pytest.raises(HostError) as caught:
        PredmaskGRPOConfig(**options(tmp_path, beta=0.1, top_p=0.5, rule=CISPO()))
    assert str(caught.value).count("\n- ") == 2


@pytest.mark.parametrize("neutral", [{"top_p": None}, {"top_k": -1}, {"top_k": None}, {"repetition_penalty": None}])
def test_neutral_values_are_taken(tmp_path, neutral):
    PredmaskGRPOConfig(**options(tmp_path, **neutral))


def test_a_plain_config_is_refused(tmp_path):
    for args in (None, GRPOConfig(**options(tmp_path))):
        with pytest.raises(HostError, match=r"args is (NoneType|GRPOConfig); give a PredmaskGRPOConfig\(rule="):
            PredmaskGRPOTrainer(policy_model(), reward, args)


@pytest.mark.parametrize("name", ["tools", "rollout_func", "environment_factory"])
def test_other_completions_are_refused(tmp_path, name):
    """Before TRL asks for a chat template that has tools."""
    args = PredmaskGRPOConfig(**options(tmp_path))
    value: Any = [len] if name == "tools" else dict
    with pytest.raises(HostError, match=f"{name} is given: only completions that this trainer samples"):
        PredmaskGRPOTrainer(policy_model(), reward, args, **{name: value})


def test_images_are_refused(tmp_path, monkeypatch):
    original = GRPOTrainer.__init__

    def with_images(self: Any, *arguments: Any, **more: Any) -> None:
        original(self, *arguments, **more)
        self._is_vlm = True

    monkeypatch.setattr(GRPOTrainer, "__init__", with_images)
    # The signature is TRL's.
    with_images.__signature__ = inspect.signature(original)  # pyright: ignore[reportFunctionMemberAccess]
    with pytest.raises(HostError, match="reads images"):
        make_trainer(tmp_path)


def test_an_auxiliary_loss_is_refused(tmp_path):
    model = policy_model("qwen3_moe")
    with pytest.raises(HostError, match=r"set router_aux_loss_coef=0\.0"):
        make_trainer(tmp_path, model=model, router_aux_loss_coef=0.01)
    make_trainer(tmp_path, model=policy_model("qwen3_moe"), router_aux_loss_coef=0.0)


def test_learned_prompts_are_refused(tmp_path):
    peft = pytest.importorskip("peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(HostError, match=r"learn a prompt.*use LoRA"):
        make_trainer(tmp_path, peft_config=config)


def test_more_than_the_vocabulary_is_refused(tmp_path):
    with pytest.raises(HostError, match=f"behaviour_top_k is {ROWS + 1}, but the model has {ROWS} ids"):
        make_trainer(tmp_path, behaviour_top_k=ROWS + 1)
    assert len(train(tmp_path, behaviour_top_k=ROWS).steps) == 1


@pytest.mark.parametrize(
    ("name", "value"), [("typical_p", 0.3), ("suppress_tokens", [5]), ("min_new_tokens", 2), ("forced_eos_token_id", 1)]
)
def test_a_models_own_truncation_is_refused(tmp_path, name, value):
    """TRL overrides temperature, top_p and the like in the model's generation_config, and leaves these."""
    with pytest.raises(HostError, match=f"generation_config has {name}=.*set model.generation_config.{name} = "):
        make_trainer(tmp_path, model=policy_model(**{name: value}))


def test_what_the_host_overrides_is_no_hindrance(tmp_path):
    """As in Qwen3's generation_config.json; and values that change nothing."""
    shipped = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "typical_p": 1.0, "num_beams": 1}
    plain, other = (train(tmp_path, model=policy_model(**settings)) for settings in ({}, shipped))
    assert plain.completions() == other.completions()


def test_truncated_sampling_is_refused_for_a_reason(tmp_path):
    """Field case 9: logits [3, 2, 1, 0] under top_k = 2 give a ratio of .881 although nothing changed."""
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]])
    mu = logits[:, :2].log_softmax(-1)
    assert mu[0].tolist() == pytest.approx([-0.313, -1.313], abs=1e-3)
    behaviour = BehaviourSupport.from_topk(torch.tensor([0]), mu[:, 0], torch.tensor([[0, 1]]), mu)
    policy = PolicySupport.from_logits(logits, behaviour)
    assert policy.logp[0, [0, 2]].tolist() == pytest.approx([-0.440, -1.440], abs=1e-3)
    decision = Predictive()(behaviour, policy, torch.ones(1), torch.ones(1, dtype=torch.bool))
    assert float(decision.weight) == pytest.approx(0.881, abs=1e-3)
    assert int(decision.reason) != Reason.UNKNOWN
    with pytest.raises(HostError, match="top_k is 2: completions would be sampled from another distribution"):
        PredmaskGRPOConfig(**options(tmp_path, top_k=2))


def test_a_second_loss_is_refused(tmp_path):
    """Field case 36: a host's fused loss, switched on together with the mask."""
    with pytest.raises(HostError, match="use_liger_kernel is True: its fused loss would replace the rule's"):
        PredmaskGRPOConfig(**options(tmp_path, use_liger_kernel=True))


def test_the_defaults_are_taken(tmp_path):
    """All that TRL sets by itself, except the correction, which is off."""
    args = PredmaskGRPOConfig(output_dir=str(tmp_path), use_cpu=True)
    assert (args.rule, args.behaviour_top_k, args.ratio_cap) == (Predictive(), 20, 5.0)
    assert not args.vllm_importance_sampling_correction
    assert make_trainer(tmp_path).args.behaviour_top_k == TOP_K
