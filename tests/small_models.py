"""Small causal language models for the tests of engines."""

import copy
import functools

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from predmask.rollout import Sampling, TransformersEngine
from predmask.train.batches import Batch
from predmask.train.models import EMBEDDED, load_policy

VOCABULARY = 24
SIZES = {
    "qwen3": {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True},
    "qwen3_untied": {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": False},
    "llama": {"num_key_value_heads": 2, "head_dim": 32},
    "gpt2": {},
    # Windows shorter than some prompts and longer than others.
    "gemma2": {
        "num_key_value_heads": 1,
        "head_dim": 32,
        "sliding_window": 6,
        "attn_logit_softcapping": 1.0,
        "final_logit_softcapping": 2.0,
    },
    "mistral": {"num_key_value_heads": 1, "head_dim": 32, "sliding_window": 6},
    "cohere": {"num_key_value_heads": 1, "logit_scale": 0.3},
    "granite": {"num_key_value_heads": 1, "logits_scaling": 2.0, "residual_multiplier": 0.5},
    "qwen3_moe": {
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}
"""Random models by name: a transformers model type, and settings besides the common ones."""


@functools.cache
def _pristine(kind):
    if kind == EMBEDDED:
        return load_policy(EMBEDDED, torch.device("cpu"))[0]
    config = AutoConfig.for_model(
        kind.removesuffix("_untied"),
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=3,
        pad_token_id=0,
        # Large weights: a likely token, an unlikely one, and answers that depend on the positions before.
        initializer_range=0.3,
        **SIZES[kind],
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config).eval()


def small_model(kind, **generation):
    """A model of one's own of that kind, with these generation settings."""
    model = copy.deepcopy(_pristine(kind))
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    return model


def with_logits(row, **generation):
    """A model that answers everything with this row of logits."""
    model = small_model("qwen3", **generation)
    values = torch.tensor(row)
    model.config.vocab_size = len(row)

    def replace_logits(_module, _inputs, output):
        output.logits = values.expand(*output.logits.shape[:-1], len(row))
        return output

    model.register_forward_hook(replace_logits)
    return model


@torch.no_grad()
def dense_logp(model, prompt, response, temperature=1.0):
    """[T, V] log-probs of a response: one sequence, no padding, no cache, normalised in float64."""
    device = next(model.parameters()).device
    ids = torch.tensor([[*prompt, *response]], device=device)
    logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
    return torch.log_softmax(logits.double().cpu() / temperature, dim=-1)


def dense_rows(model, rollout, temperature=1.0):
    """[N, V] log-probs of a whole rollout, sequence after sequence."""
    pairs = zip(rollout.prompts, rollout.responses(), strict=True)
    return torch.cat([dense_logp(model, prompt, response, temperature) for prompt, response in pairs])


def sampled_batch(model, prompts):
    """A response of the model to each prompt, with random advantages and equal weights: something to train on."""
    generator = torch.Generator().manual_seed(0)
    rollout = TransformersEngine(model).generate(
        prompts, Sampling(temperature=1.0, max_new_tokens=9, top_k=5), generator
    )
    advantage = torch.randn(len(rollout.tokens), generator=generator)
    return Batch(rollout, torch.arange(len(prompts)), advantage, torch.full((len(advantage),), 1 / len(advantage)))
