"""The Engine protocol over an inference engine in a process of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from predmask.rollout.engine import Sampling, check_request, end_token_ids
from predmask.rollout.messages import pack_request, unpack_rollout
from predmask.rollout.probe import Probe
from predmask.rollout.process import EngineProcess
from predmask.rollout.records import Rollout, RolloutError
from predmask.rollout.weights import base_model, weights_file


class RemoteEngine:
    """Samples in another process, whose weights are replaced in place by `update_weights`.

    The process starts from random weights and then receives those of `model` like any later ones; after each
    transfer it is asked for proof (see `Probe`).

    Args:
        model: a Hugging Face causal language model, which may have adapters of peft; the engine gets merged weights.
        name, backend, settings, environment: as `EngineProcess` takes them; the settings are handed on with
            `config`, the text of the model's config.json.
        dtype: in which weights travel.
        tolerance: mean |Δ log-prob| that the engine's numerics explain, in nats.
        context: prompt and response come to at most so many tokens.
        temperatures: lowest and highest that it samples at.

    Raises RolloutError when the process cannot start, or does not answer with the model's weights.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        name: str,
        backend: str,
        settings: Mapping[str, Any],
        environment: Mapping[str, str],
        dtype: torch.dtype,
        tolerance: float,
        context: int,
        temperatures: tuple[float, float],
    ) -> None:
        self._config: Any = model.config
        self._context, self._temperatures = context, temperatures
        self._dtype = dtype
        self._end_ids = self._possible_end_ids(model)
        self._version = 0
        self._probe = Probe(vocabulary_size=self._config.vocab_size, context=context, tolerance=tolerance)
        asked = {**settings, "config": _config_text(base_model(model))}
        self._process = EngineProcess(name=name, backend=backend, settings=asked, environment=environment)
        try:
            self.update_weights(model, 0)
        except BaseException:
            self.close()
            raise

    @property
    def pid(self) -> int:
        """The id of the engine's process."""
        return self._process.pid

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, generator: torch.Generator) -> Rollout:
        """Sample one response a prompt, each from a seed that the generator draws.

        Raises RolloutError for what `check_request` and the engine refuse, and when the engine fails.
        """
        if not self._proven:
            raise RolloutError("the engine's last update of weights failed; update them before it is asked again")
        check_request(
            prompts,
            sampling,
            vocabulary_size=self._config.vocab_size,
            context=self._context,
            temperatures=self._temperatures,
        )
        seeds = torch.randint(2**62, (len(prompts),), generator=generator, device=generator.device)
        return self._ask(prompts, seeds.cpu(), sampling)

    def update_weights(self, model: nn.Module, version: int) -> None:
        """Replace the engine's weights, and prove that it answers with them.

        Raises RolloutError when it does not; then it is asked nothing more until an update succeeds.
        """
        self._process.check_open()
        self._proven = False
        with weights_file(model, self._dtype, self._process.directories) as path:
            self._process.ask({"do": "load", "file": str(path)})
        self._end_ids = self._possible_end_ids(model)
        probe = self._probe
        probe.check(model, self._ask(probe.prompts, torch.arange(len(probe.prompts)), probe.sampling), version)
        self._version, self._proven = version, True

    def close(self) -> None:
        """End the process; calling it twice is allowed."""
        self._process.close()

    def _possible_end_ids(self, model: nn.Module) -> set[int]:
        """The ids that end a response, without those that the model cannot sample and an engine would refuse."""
        return {token for token in end_token_ids(model) if 0 <= token < self._config.vocab_size}

    def _ask(self, prompts: Sequence[Sequence[int]], seeds: torch.Tensor, sampling: Sampling) -> Rollout:
        _, tensors = self._process.ask(*pack_request(prompts, seeds, sampling, self._end_ids))
        return unpack_rollout(prompts, tensors, self._version)


def _config_text(model: Any) -> str:
    """Its config.json, with its architecture, which a model that was never saved lacks there."""
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    return type(model.config).from_dict(config).to_json_string(use_diff=False)
