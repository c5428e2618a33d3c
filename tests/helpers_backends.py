"""Backends of an engine's process: one that answers with transformers, and others that go wrong."""

import os
import signal
import subprocess
import time
from pathlib import Path

import torch

from predmask.rollout import Rollout, RolloutError, TransformersEngine
from predmask.rollout.serve import model_directory
from predmask.rollout.vllm import VLLMBackend


def _fail():
    raise RuntimeError("no such kernel")


def _refuse():
    raise RolloutError("not at this temperature")


DEEDS = {
    "answer": lambda: None,
    "fail": _fail,
    "refuse": _refuse,
    "exit": lambda: os._exit(3),
    "be killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "hang": lambda: time.sleep(600),
    "talk": lambda: print("a line of the engine's own", flush=True),
    "have a child": lambda: subprocess.Popen(["sleep", "600"], close_fds=False),
}


class FakeBackend:
    """Does what it is told at its start and at each request, then answers every prompt with one random token."""

    def __init__(self, *, at_start=(), at_request=()):
        self.at_request = at_request
        for deed in at_start:
            DEEDS[deed]()

    def generate(self, prompts, seeds, sampling, end_ids):
        for deed in self.at_request:
            DEEDS[deed]()
        count = len(prompts)
        return Rollout(
            prompts=tuple(map(tuple, prompts)),
            lengths=torch.ones(count, dtype=torch.int64),
            tokens=torch.tensor(seeds) % 7,
            logp=torch.full((count,), -sampling.temperature),
            topk_ids=torch.tensor(end_ids).expand(count, -1),
            topk_logp=torch.zeros(count, len(end_ids)),
            sampled=torch.ones(count, dtype=torch.bool),
            version=torch.zeros(count, dtype=torch.int64),
            finished=torch.zeros(count, dtype=torch.bool),
        )

    def load(self, weights):
        self.names = [name for name, _ in weights]


class ModelBackend:
    """transformers: random weights at first, then those of the file that it was sent."""

    def __init__(self, *, config):
        self.directory = model_directory(config)
        self.engine = None

    def generate(self, prompts, seeds, sampling, end_ids):
        return self.engine.generate(prompts, sampling, torch.Generator().manual_seed(seeds[0]))

    def load(self, weights):
        import transformers
        from safetensors.torch import save_file

        save_file(dict(weights), Path(self.directory) / "model.safetensors", metadata={"format": "pt"})
        (architecture,) = transformers.AutoConfig.from_pretrained(self.directory).architectures
        cls = getattr(transformers, architecture)
        model, report = cls.from_pretrained(self.directory, dtype=torch.float32, output_loading_info=True)
        if any(report.values()):
            raise RolloutError(f"weights are missing or unknown: {report}")
        self.engine = TransformersEngine(model.eval())


FAULT = "PREDMASK_TEST_FAULT"
"""The variable that names a file, which says what `FaultyBackend` leaves out: cache, all, a weight, or nothing."""


class FaultyBackend(VLLMBackend):
    """vLLM, but for what it leaves out of each update."""

    def load(self, weights):
        fault = Path(os.environ[FAULT]).read_text()
        if fault == "all":
            return
        if fault == "cache":
            self._llm.reset_prefix_cache = lambda: True
        super().load((name, weight) for name, weight in weights if name != fault)
        vars(self._llm).pop("reset_prefix_cache", None)
