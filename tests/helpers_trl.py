"""Small runs of TRL's trainer, with the mask and without, and what must come of them by a dense forward pass."""

from __future__ import annotations

import copy
import functools
import os
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp
from datasets import Dataset
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

from helpers_processes import wait_for
from predmask.core import BehaviourSupport, MaskDecision, NoMask, PolicySupport, Rule, mask_metrics
from predmask.plugins.trl import PredmaskGRPOConfig, PredmaskGRPOTrainer
from predmask.traces import TokenTrace, Trace

ARITHMETIC = Path(__file__).parents[1] / "src" / "predmask" / "data" / "arithmetic"
PROMPTS = ["1 2 + 7 =", "3 + 4 =", "8 0 5 + 2 =", "9 =", "7 0 + 3 =", "1 + 1 + 1 + 1 =", "6 + 7 7 =", "5 0 ="]
"""Of several lengths: shorter ones are padded on the left."""
EOS, ROWS, WIDTH, TOP_K = 1, 72, 7, 5
"""The end's id, the head's rows (more than the tokenizer's ids), the longest completion, and K."""
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "qwen3": {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": False},
    "qwen3_tied": {"num_key_value_heads": 1, "head_dim": 32, "tie_word_embeddings": True},
    # Positions of their own, which padding would move.
    "gpt2": {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0},
    "gemma2": {"num_key_value_heads": 1, "head_dim": 32, "sliding_window": 6, "final_logit_softcapping": 2.0},
    "qwen3_moe": {
        "num_key_value_heads": 1,
        "head_dim": 32,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
    },
}
HOST_WARNINGS = (
    # TRL still uses transformers' old names.
    r"ignore:`(is_)?gradient_checkpointing(_\w+)?` is deprecated:FutureWarning",
)
"""Not ours."""


@functools.cache
def _pristine(kind: str) -> Any:
    config = AutoConfig.for_model(
        kind.split("_tied")[0],
        vocab_size=ROWS,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=EOS,
        pad_token_id=0,
        # Large weights: answers depend on the positions before, some tokens are likely, and some answers end.
        initializer_range=0.3,
        **ARCHITECTURES[kind],
    )
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if kind == "gemma2" else "sdpa")
    # Many ends, so that completions have many lengths.
    model.generation_config.eos_token_id = list(range(EOS, ROWS, 4))
    return model.eval()


def policy_model(kind: str = "qwen3", **generation: Any) -> Any:
    """A small random model of one's own; with these generation settings."""
    model = copy.deepcopy(_pristine(kind))
    for name, value in generation.items():
        setattr(model.generation_config, name, value)
    return model


@functools.cache
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(ARITHMETIC, padding_side="left", truncation_side="left")


def reward(prompts: Any, completion_ids: Any, **_: Any) -> list[float]:
    """Some number that differs between completions."""
    return [sum(ids) % 7 / 7 for ids in completion_ids]


@dataclass
class Step:
    """What one optimiser step did."""

    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    """After the step."""


class Watch(TrainerCallback):
    """Keeps the gradients and the weights of each optimiser step."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        gradients = {name: p.grad.detach().clone() for name, p in trained.items()}
        self.steps.append(Step(gradients, {}))

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.steps[-1].weights = {name: p.detach().clone() for name, p in model.named_parameters()}


def options(directory: Path, **more: Any) -> dict[str, Any]:
    return {
        "output_dir": str(directory / "out"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 4,
        "num_generations": 4,
        "max_completion_length": WIDTH,
        "max_steps": 1,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "disable_tqdm": True,
        "max_grad_norm": 0.0,
        # So that equal gradients make equal weights.
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "learning_rate": 0.3,
        **more,
    }


@dataclass
class Run:
    """A finished run."""

    trainer: Any
    steps: list[Step]
    generations: list[dict[str, Any]]
    """The batch of each generation, as TRL built it."""
    batches: list[dict[str, Any]]
    """The micro-batches, in the order in which they were trained on."""
    states: list[dict[str, Tensor]]
    """The weights before each micro-batch."""
    traces: Path | None = None

    @property
    def logs(self) -> list[dict[str, float]]:
        """What was logged with each optimiser step."""
        return [entry for entry in self.trainer.state.log_history if "loss" in entry]

    def completions(self) -> list[list[int]]:
        """In the order in which they were generated."""
        return [
            row[mask.bool()].tolist()
            for batch in self.generations
            for row, mask in zip(batch["completion_ids"], batch["completion_mask"], strict=True)
        ]


def make_trainer(
    directory: Path,
    *,
    stock: bool = False,
    model: Any = None,
    rewards: Any = reward,
    eval_data: bool = False,
    **more: Any,
) -> Any:
    """TRL's trainer, or with the mask; `more` are its options and arguments."""
    arguments = {name: more.pop(name) for name in ("peft_config", "tools", "rollout_func") if name in more}
    if stock:
        args = GRPOConfig(**options(directory, **more))
    else:
        args = PredmaskGRPOConfig(**options(directory, **{"behaviour_top_k": TOP_K, **more}))
    data = Dataset.from_list([{"prompt": prompt} for prompt in PROMPTS])
    return (GRPOTrainer if stock else PredmaskGRPOTrainer)(
        model=policy_model() if model is None else model,
        reward_funcs=rewards,
        args=args,
        train_dataset=data,
        eval_dataset=data.select(range(4)) if eval_data else None,
        processing_class=tokenizer(),
        **arguments,
    )


def train(directory: Path, **more: Any) -> Run:
    """A run of `max_steps` optimiser steps, watched from outside."""
    trainer = make_trainer(directory, **more)
    run = watched(trainer)
    trainer.train()
    return run


def watched(trainer: Any) -> Run:
    """What the trainer does from now on."""
    watch = Watch()
    trainer.add_callback(watch)
    run = Run(trainer, watch.steps, [], [], [])
    compute, generate = trainer._compute_loss, trainer._generate_and_score_completions

    def compute_loss(model: Any, inputs: Any) -> Tensor:
        run.batches.append(dict(inputs))
        run.states.append({name: p.detach().clone() for name, p in trainer.model.named_parameters()})
        return compute(model, inputs)

    def generate_and_score(inputs: Any) -> Any:
        run.generations.append(generate(inputs))
        return run.generations[-1]

    trainer._compute_loss, trainer._generate_and_score_completions = compute_loss, generate_and_score
    if directory := getattr(trainer.args, "traces", None):
        run.traces = Path(directory)
    return run


def rows_of(batch: Mapping[str, Any]) -> list[tuple[list[int], list[int]]]:
    """Prompt and completion of each row, without padding."""
    cut = [
        [row[mask.bool()].tolist() for row, mask in zip(batch[f"{part}_ids"], batch[f"{part}_mask"], strict=True)]
        for part in ("prompt", "completion")
    ]
    return list(zip(*cut, strict=True))


def dense_logits(model: Any, prompt: Sequence[int], completion: Sequence[int]) -> Tensor:
    """[T, V] of one sequence, without padding and without a cache."""
    ids = torch.tensor([[*prompt, *completion]])
    return model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]


@dataclass
class Expected:
    """Of one micro-batch, in float64; tokens row after row, without padding."""

    behaviour: BehaviourSupport
    policy: PolicySupport
    decision: MaskDecision
    losses: Tensor
    """[N] -keep · min(r, C) · A."""
    lengths: list[int]
    logp: Tensor = field(repr=False)
    """[N] log pi of the sampled tokens, with a gradient."""


def expect(
    model: Any, batch: Mapping[str, Any], *, rule: Rule, cap: float | None, temperature: float = 1.0
) -> Expected:
    """What a model in float64 and the rule make of a micro-batch."""
    rows = rows_of(batch)
    there = batch["completion_mask"].bool()
    logits = torch.cat([dense_logits(model, *row) for row in rows if row[1]]) / temperature
    behaviour = BehaviourSupport.from_topk(
        batch["completion_ids"][there],
        batch["predmask_logp"][there].double(),
        batch["predmask_topk_ids"][there],
        batch["predmask_topk_logp"][there].double(),
    )
    policy = PolicySupport.from_logits(logits.detach(), behaviour)
    lengths = there.sum(1)
    advantage = batch["advantages"].double().repeat_interleave(lengths)
    decision = rule(behaviour, policy, advantage, torch.ones(len(advantage), dtype=torch.bool))
    weight = decision.weight.clamp(max=float("inf") if cap is None else cap)
    return Expected(
        behaviour=behaviour,
        policy=policy,
        decision=decision,
        losses=torch.where(decision.keep, -weight * advantage, 0.0),
        lengths=lengths.tolist(),
        logp=logits.log_softmax(-1).gather(1, behaviour.ids[:, :1])[:, 0],
    )


def shares(lengths: Sequence[int], loss_type: str, *, steps: int, window: float) -> Tensor:
    """[N] of each token in the average of an optimiser step of `steps` micro-batches, of which this is one.

    `window` is the number of tokens of the whole generation that fall upon one optimiser step.
    """
    found = []
    for length in lengths:
        share = {
            "grpo": 1 / max(length, 1) / len(lengths) / steps,
            "bnpo": 1 / max(sum(lengths), 1) / steps,
            "dr_grpo": 1 / (len(lengths) * WIDTH) / steps,
            "dapo": 1 / window,
        }[loss_type]
        found += [share] * length
    return torch.tensor(found, dtype=torch.float64)


def exact_model(model: Any, state: Mapping[str, Tensor]) -> Any:
    """A copy in float64, with these weights."""
    exact = copy.deepcopy(model)
    for made in ("forward", "generate"):
        getattr(exact, "get_base_model", lambda exact=exact: exact)().__dict__.pop(made, None)
    exact.load_state_dict(dict(state), strict=False)
    exact.zero_grad()
    return exact.double().eval()


def assert_trained(
    run: Run, *, rule: Rule, cap: float | None = 5.0, temperature: float = 1.0, model: Any = None
) -> None:
    """Each optimiser step's loss, gradients and figures are those of the whole batch, computed densely."""
    args = run.trainer.args
    steps = args.gradient_accumulation_steps
    blank = policy_model() if model is None else model
    for number, step in enumerate(run.steps):
        part = slice(number * steps, (number + 1) * steps)
        exact = exact_model(blank, run.states[part][0])
        loss, found = 0.0, []
        for batch in run.batches[part]:
            expected = expect(exact, batch, rule=rule, cap=cap, temperature=temperature)
            window = float(batch["num_items_in_batch"].clamp(min=1)) * steps / args.steps_per_generation
            share = shares(expected.lengths, args.loss_type, steps=steps, window=window)
            (share * expected.losses * expected.logp).sum().backward()
            loss += float((share * expected.losses).sum())
            found.append(expected)
        assert_gradients(step.gradients, {name: p.grad for name, p in exact.named_parameters() if p.requires_grad})
        assert run.logs[number]["loss"] == pytest.approx(loss, rel=1e-4, abs=1e-6)
        versions = [batch["predmask_version"] for batch in run.batches[part]]
        age = torch.cat(
            [
                (number - version).repeat_interleave(torch.tensor(expected.lengths))
                for version, expected in zip(versions, found, strict=True)
            ]
        )
        figures = mask_metrics(*joined(found), staleness=age).compute()
        logged = {k.removeprefix("predmask/"): v for k, v in run.logs[number].items() if k.startswith("predmask/")}
        assert logged == pytest.approx(figures, rel=1e-4, abs=2e-6)


def joined(parts: Sequence[Expected]) -> tuple[BehaviourSupport, PolicySupport, MaskDecision]:
    """The micro-batches as one."""
    return tuple(_cat([getattr(part, name) for part in parts]) for name in ("behaviour", "policy", "decision"))  # pyright: ignore[reportReturnType]


def _cat(records: Sequence[Any]) -> Any:
    fields = {
        name: torch.cat([getattr(record, name) for record in records]) if isinstance(value, Tensor) else value
        for name, value in vars(records[0]).items()
    }
    return type(records[0])(**fields)


def assert_gradients(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor | None], tolerance: float = 2e-5
) -> None:
    """Each parameter's, relative to the largest of them all."""
    assert found.keys() == expected.keys()
    scale = max(float(value.abs().max()) for value in expected.values() if value is not None)
    assert scale > 0
    for name, value in expected.items():
        wanted = torch.zeros_like(found[name]) if value is None else value.to(found[name].dtype)
        torch.testing.assert_close(
            found[name], wanted, rtol=1e-4, atol=tolerance * scale, msg=lambda text, name=name: f"{name}: {text}"
        )


def read_tokens(run: Run) -> TokenTrace:
    assert run.traces is not None
    return TokenTrace.cat(list(Trace(run.traces).tokens()))


def run_processes(work: Callable[..., None], *arguments: Any, count: int, seconds: float = 200) -> None:
    """Run `work(rank, *arguments)` in new processes, which make one gloo group; none is left behind."""
    with socket.socket() as free, pytest.MonkeyPatch.context() as patch:
        free.bind(("127.0.0.1", 0))
        # What a launcher sets.
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", str(free.getsockname()[1]))
        patch.setenv("WORLD_SIZE", str(count))
        free.close()
        running: Any = mp.spawn(work, arguments, nprocs=count, join=False)
    wait_for(running, seconds)


def join(rank: int) -> None:
    """What a launcher sets for one process; the host then joins the group."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}


NO_MASK = {"rule": NoMask(), "ratio_cap": None}


class StandIn:
    """In the place of TRL's `VLLMGeneration`: samples from the weights that were sent last, answers as vLLM does."""

    def __init__(self, model: Any, accelerator: Any, processing_class: Any, **settings: Any) -> None:
        self.model, self.settings = model, settings
        self.mode, self.temperature = settings["mode"], settings["temperature"]
        self.logprobs = settings["logprobs"]
        self.vllm_client = self
        self.server = {"logprobs_mode": "processed_logprobs", "max_logprobs": 20, **SERVER}
        self.syncs = 0
        self.weights: dict[str, Tensor] = {}
        self.change: Callable[..., Any] = lambda *answer: answer

    def get_server_info(self) -> Any:
        return {"model_config": self.server}

    def sync_weights(self) -> None:
        self.syncs += 1
        self.weights = {name: p.detach().clone() for name, p in self.model.named_parameters()}

    @torch.no_grad()
    def generate(self, prompts: Any, images: Any, num_generations: int, profiler: Any = None) -> Any:
        assert images is None
        model = exact_model(policy_model(), self.weights)
        completions, logprobs, ids = [], [], []
        for prompt in prompts:
            tokens: list[int] = []
            rows: list[list[float]] = []
            row_ids: list[list[int]] = []
            while not tokens or (len(tokens) < WIDTH and tokens[-1] not in model.generation_config.eos_token_id):
                logp = (dense_logits(model, prompt, [*tokens, 0])[-1] / self.temperature).log_softmax(-1)
                token = int(torch.multinomial(logp.exp(), 1))
                # By rank; the sampled one is among them, or behind.
                listed = logp.topk(self.logprobs).indices.tolist()
                listed += [token] if token not in listed else []
                tokens.append(token)
                rows.append(logp[listed].tolist())
                row_ids.append(listed)
            completions.append(tokens)
            logprobs.append(rows)
            ids.append(row_ids)
        return self.change(prompts, completions, logprobs, ids)


SERVER: dict[str, Any] = {}
"""Other settings of the stand-in's server."""
