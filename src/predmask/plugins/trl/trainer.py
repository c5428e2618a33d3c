"""TRL's GRPOTrainer with a rule between rollouts and loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from accelerate.utils import gather_object
from torch import Tensor
from trl.trainer.grpo_trainer import GRPOTrainer

from predmask.core import BehaviourSupport, Metrics, mask_metrics
from predmask.ops import MaskedPolicyLoss
from predmask.plugins.trl.capture import LOGP, TOPK_IDS, TOPK_LOGP, Recorder, padded, recorded, rollout_from_vllm_lists
from predmask.plugins.trl.config import PredmaskGRPOConfig
from predmask.plugins.trl.head import Question, add_masked_loss
from predmask.plugins.trl.host import HostError, check_version, refuse, refuse_functions, refuse_model
from predmask.plugins.trl.tracing import Tracer
from predmask.rollout import Rollout

SAMPLE, VERSION = "predmask_sample", "predmask_version"
"""Fields of TRL's batch: the number of a completion within its generation, and the optimiser steps before that."""


class PredmaskGRPOTrainer(GRPOTrainer):
    """TRL's trainer, whose loss is -keep · min(r, C) · A · log pi_k, with r and `keep` against the policy that sampled.

    Takes what TRL's GRPOTrainer takes, with a `PredmaskGRPOConfig`. Averages are those of `loss_type`; figures are
    logged as `predmask/...`. Raises HostError for what cannot be honoured, and HeadError for a model whose head cannot
    be taken apart.
    """

    _tag_names = [*GRPOTrainer._tag_names, "predmask"]  # noqa: RUF012  as TRL has it
    args: PredmaskGRPOConfig
    model: Any

    def __init__(self, *arguments: Any, **more: Any) -> None:
        check_version()
        given = signature(GRPOTrainer).bind(*arguments, **more).arguments
        args = given.get("args")
        if not isinstance(args, PredmaskGRPOConfig):
            raise HostError(
                f"args is {type(args).__name__}; give a PredmaskGRPOConfig(rule=Predictive(delta=0.15), ...)"
            )
        refuse(args)  # its fields may have been set since
        refuse_functions(given)
        super().__init__(*arguments, **more)
        refuse_model(self)
        add_masked_loss(self.model)
        self._vocabulary_size: int = self.model.get_output_embeddings().weight.shape[0]
        if self.use_vllm:
            self.vllm_generation.logprobs = args.behaviour_top_k
        self._rollout: Rollout | None = None
        self._rewards = torch.empty(0)
        self._mask_metrics = Metrics()
        self._tracer = Tracer(args, self)

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, has_tool_images: bool = False
    ) -> Any:
        """As TRL's, with what the completions were sampled from recorded beside."""
        top_k, version = self.args.behaviour_top_k, self.state.global_step
        if self.use_vllm:
            with _heard(self.vllm_generation) as answers:
                super()._generate_single_turn(prompt_ids, images, multimodal_fields, num_generations, has_tool_images)
            _, completions, logprobs, ids = answers[-1]
            self._rollout = rollout_from_vllm_lists(
                prompt_ids, completions, logprobs, ids, top_k=top_k, version=version
            )
            # Of K + 1 log-probs, TRL takes the first for the sampled token's.
            return completions, [part.tolist() for part in self._rollout.logp.split(self._rollout.lengths.tolist())]
        recorder = Recorder(top_k, self.temperature)
        with recorded(self.model, recorder):
            found = super()._generate_single_turn(
                prompt_ids, images, multimodal_fields, num_generations, has_tool_images
            )
        self._rollout = recorder.rollout(prompt_ids, found[0], version)
        return found

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        """As TRL's, kept for the traces."""
        found = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        weighted = (found * self.reward_weights.to(found.device)).nansum(1)
        self._rewards = weighted.masked_fill(found.isnan().all(1), torch.nan)
        return found

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """As TRL's, with the record of the completions in the batch."""
        batch = super()._generate_and_score_completions(inputs)
        rollout, self._rollout = self._rollout, None
        if rollout is None:
            raise RuntimeError("TRL generated no completions by _generate_single_turn, so that nothing was recorded")
        rollout.check(top_k=self.args.behaviour_top_k, vocabulary_size=self._vocabulary_size)
        tokens, device = batch["completion_ids"], batch["completion_ids"].device
        count = len(tokens)
        batch |= padded(rollout, tokens.shape[1], device)
        batch[SAMPLE] = torch.arange(count, device=device) + count * self.accelerator.process_index
        batch[VERSION] = torch.full((count,), self.state.global_step, device=device)
        if self.model.training:
            self._tracer.generated(batch[SAMPLE], self._rewards)
        return batch

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        """The masked loss, in the place of TRL's."""
        mask = inputs["completion_mask"].bool()
        ids = inputs["completion_ids"]
        behaviour = BehaviourSupport.from_topk(ids, inputs[LOGP], inputs[TOPK_IDS], inputs[TOPK_LOGP])
        advantage = inputs["advantages"][:, None].float()
        question = Question(
            behaviour=behaviour,
            advantage=advantage,
            weights=self._weights(mask, inputs["num_items_in_batch"]),
            response_mask=mask,
            rule=self.args.rule,
            ratio_cap=self.args.ratio_cap,
            temperature=self.temperature,
        )
        with self.accelerator.autocast():
            result = model(
                input_ids=torch.cat([inputs["prompt_ids"], ids], dim=1),
                attention_mask=torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
                masked_loss=question,
            )
        self._note(inputs, result)
        return result.loss

    @property
    def _steps_per_generation(self) -> int:
        """Micro-batches of a generation; TRL has filled it in."""
        return self.args.steps_per_generation or 1

    def _weights(self, mask: Tensor, num_items_in_batch: Tensor) -> Tensor:
        """[B, T] what a token weighs in TRL's average of this `loss_type`."""
        training = self.model.training
        steps = self.current_gradient_accumulation_steps if training else 1
        tokens = mask.float()
        if self.loss_type == "grpo":
            return tokens / tokens.sum(1, keepdim=True).clamp(min=1) / len(mask) / steps
        if self.loss_type == "bnpo":
            return tokens / tokens.sum().clamp(min=1) / steps
        if self.loss_type == "dr_grpo":
            horizon = self.max_completion_length or mask.shape[1]
            return tokens / (len(mask) * horizon) / steps
        # dapo: the tokens of the whole generation, as many of them as one optimiser step has.
        share = steps / self._steps_per_generation if training else 1.0
        return tokens / (num_items_in_batch.clamp(min=1) / self.accelerator.num_processes * share)

    def _note(self, inputs: dict[str, Any], result: MaskedPolicyLoss) -> None:
        """Figures and traces of this micro-batch; with the last of an optimiser step they are logged."""
        versions = inputs[VERSION]
        age = (self.state.global_step - versions)[:, None].expand(inputs["completion_ids"].shape)
        metrics = mask_metrics(result.behaviour, result.policy, result.decision, staleness=age)
        self._mask_metrics = self._mask_metrics.merge(metrics)
        if not self.model.training:
            self._log_figures("eval")
            return
        self._tracer.record(inputs, result, numbers=inputs[SAMPLE], versions=versions)
        generate_every = self._steps_per_generation * self.num_iterations
        ends = self.accelerator.sync_gradients
        over = (self._step + 1) % generate_every == 0 or (ends and self.state.global_step + 1 >= self.state.max_steps)
        if ends:
            self._log_figures("train")
        if ends or over:
            self._tracer.end(last=over)

    def _log_figures(self, mode: str) -> None:
        """Those since the last time, over all processes."""
        whole = Metrics()
        for part in gather_object([self._mask_metrics]):
            whole = whole.merge(part)
        self._mask_metrics = Metrics()
        for name, value in whole.compute().items():
            self._metrics[mode][f"predmask/{name}"].append(value)


@contextmanager
def _heard(generation: Any) -> Iterator[list[Any]]:
    """In here, what `generation.generate` answers is also put into a list."""
    answers: list[Any] = []
    generate = generation.generate

    def heard(*arguments: Any, **more: Any) -> Any:
        answers.append(generate(*arguments, **more))
        return answers[-1]

    generation.generate = heard
    try:
        yield answers
    finally:
        del generation.generate
