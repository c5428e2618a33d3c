"""The direction study on the embedded task: many seeds, each a short run whose tokens are followed over their steps."""

from __future__ import annotations

import json
import os
import threading
import tomllib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from functools import cache
from multiprocessing import get_context, parent_process
from pathlib import Path
from signal import SIG_DFL, SIGINT, signal
from typing import Any

import numpy as np

from predmask.analysis import AnalysisError
from predmask.analysis.direction.logit_steps import single_steps
from predmask.analysis.direction.outcomes import Counts, Outside, add, outside_region, tally
from predmask.traces import SampleTrace, TokenTrace
from predmask.train import PRESETS, Config, Trainer, TrainingError
from predmask.train.options import resolve, to_toml

PRESET = "arithmetic-stress"
STEPS = 3
DELTA: float = PRESETS[PRESET].values["rule"]["delta"]
"""Threshold of the top-K KL: the preset's."""
BETAS = (0.9, 0.0)
"""AdamW's momentum, and none: momentum moves a token whatever its own gradient says."""
FILE = "direction.json"
_KINDS = ("counts", "steps")

_OWN: dict[str, Any] = {
    "seed": 0,
    "output": "none",
    "tensorboard": False,
    "device": "cpu",
    "threads": 1,
    "traces": {"enabled": True, "after": True, "full": True},
    # Held-out accuracy is no part of this.
    "eval": {"every": 0, "prompts": 1, "samples": 1},
}
"""What the study sets itself; the seed changes from run to run."""


def variants(layer: Mapping[str, Any]) -> dict[str, Config]:
    """The configurations of the study by name, with the user's options over its own.

    Without a rule of the user's nothing is dropped, so that every token's own gradient is in the step, and no criterion
    chooses the tokens. Raises AnalysisError for options that the study sets itself.
    """
    for key in _OWN:
        if key in layer:
            raise AnalysisError(f"{key} is set by the study itself; give other options, or --seeds and --output")
    rule = {} if "rule" in layer else {"rule": {"name": "none"}}
    betas = BETAS if "beta1" not in layer.get("optimizer", {}) else (None,)
    configs = [
        resolve(
            PRESETS[PRESET].values,
            {"steps": STEPS, **rule},
            layer,
            {} if beta1 is None else {"optimizer": {"beta1": beta1}},
            _OWN,
        )
        for beta1 in betas
    ]
    if configs[0].rollout.top_k == 0:
        raise AnalysisError("rollout.top_k is 0, and without top-K the ratio's direction is exact already; use 20")
    return {f"beta1 = {config.optimizer.beta1:g}": config for config in configs}


def run_seed(config: Config, delta: float = DELTA) -> dict[str, Any]:
    """A short run with the seed of the configuration: its counts (see `tally`, `single_steps`), ready for JSON."""
    recorder = _Counting(delta)
    trainer = Trainer(config)
    trainer.recorder = recorder
    try:
        accuracy = [result.metrics.get("accuracy") for result in trainer.steps()]
    finally:
        trainer.close()
    # The seed is one cluster.
    counts = {key: value.sum(0) for key, value in tally(Outside.cat(recorder.outside)).items()}
    return {
        "accuracy": [None if value is None else round(value, 4) for value in accuracy],
        "trainable": recorder.trainable,
        "counts": {key: value.tolist() for key, value in counts.items()},
        "steps": {key: value[0].tolist() for key, value in add(recorder.steps).items()},
    }


def run_study(
    layer: Mapping[str, Any],
    seeds: int,
    directory: Path,
    *,
    delta: float = DELTA,
    workers: int = 1,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Run every variant with seeds 0 to `seeds` - 1 in `workers` processes of one thread each; returns what FILE holds.

    FILE in `directory` is written anew as each seed finishes, and seeds that it has are not run again. Raises
    AnalysisError where it holds a study of another protocol. `progress` is told how many runs are done, of how many.
    """
    configs = variants(layer)
    protocol = {"delta": delta, "variants": {name: _described(config) for name, config in configs.items()}}
    path = directory / FILE
    study = load(path) if path.is_file() else {"protocol": protocol, "seeds": {name: {} for name in configs}}
    if study["protocol"] != protocol:
        raise AnalysisError(f"{path} holds a study with other options; choose another --output, or delete it")
    directory.mkdir(parents=True, exist_ok=True)
    wanted = [(name, seed) for seed in range(seeds) for name in configs]
    missing = [(name, seed) for name, seed in wanted if str(seed) not in study["seeds"][name]]
    done = len(wanted) - len(missing)
    progress(done, len(wanted))
    # Ctrl-C reaches the workers too; they end at once and in silence.
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=signal, initargs=(SIGINT, SIG_DFL)) as pool:
        runs = {(name, seed): replace(configs[name], seed=seed) for name, seed in missing}
        running = {pool.submit(_work, config, delta): run for run, config in runs.items()}
        try:
            for future in as_completed(running):
                name, seed = running[future]
                try:
                    study["seeds"][name][str(seed)] = future.result()
                except TrainingError as error:
                    raise TrainingError(f"{name}, seed {seed}: {error}") from error
                _write(path, study)
                done += 1
                progress(done, len(wanted))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    wanted_seeds = [str(seed) for seed in range(seeds)]
    return study | {"seeds": {name: {seed: study["seeds"][name][seed] for seed in wanted_seeds} for name in configs}}


def _work(config: Config, delta: float) -> dict[str, Any]:
    """A seed in a process of the pool."""
    _end_with_parent()
    return run_seed(config, delta)


@cache
def _end_with_parent() -> None:
    """A study that was killed leaves no process behind: a pool's own ones would wait for work for ever."""

    def wait() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def load(path: Path) -> dict[str, Any]:
    """What FILE holds: `protocol`, and `seeds` by variant and seed, each as `run_seed` gives it."""
    try:
        study = json.loads(path.read_text(encoding="utf-8"))
        keys = study.pop("keys")
        for seeds in study["seeds"].values():
            for seed in seeds.values():
                seed.update({kind: dict(zip(keys[kind], seed[kind], strict=True)) for kind in _KINDS})
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise AnalysisError(f"{path} cannot be read as a direction study: {error!r}") from error
    return study


def pooled(study: Mapping[str, Any], variant: str) -> tuple[Counts, Counts]:
    """The counts of a variant's seeds, each seed a cluster: those of tokens outside, and of single logit steps."""
    seeds = [study["seeds"][variant][seed] for seed in sorted(study["seeds"][variant], key=int)]
    counts, steps = ({key: np.array([seed[kind][key] for seed in seeds]) for key in seeds[0][kind]} for kind in _KINDS)
    return counts, steps


class _Counting:
    """A recorder that keeps what became of the tokens outside, and no token longer than that."""

    def __init__(self, delta: float) -> None:
        self.delta = delta
        self.trainable = 0
        self.outside: list[Outside] = []
        self.steps: list[Counts] = []

    def wants(self, step: int) -> bool:
        return True

    def add(self, records: TokenTrace | Sequence[SampleTrace]) -> None:
        if isinstance(records, TokenTrace):
            self.trainable += int(records.decision.trainable.sum())
            self.outside.append(outside_region(records, self.delta))
            self.steps.append(single_steps(records))

    def commit(self, step: int) -> None:
        pass


def _described(config: Config) -> dict[str, Any]:
    """A configuration as JSON has it, without what the study sets for every run."""
    return {key: value for key, value in tomllib.loads(to_toml(config, comments=False)).items() if key not in _OWN}


def _write(path: Path, study: Mapping[str, Any]) -> None:
    """A seed a line, the keys of its counts but once; renamed to its place, so that no reader meets half a file."""
    keys: dict[str, list[str]] = {}
    variants = []
    for name, seeds in study["seeds"].items():
        rows = []
        for seed in sorted(seeds, key=int):
            keys = {kind: list(seeds[seed][kind]) for kind in _KINDS}
            packed = seeds[seed] | {kind: list(seeds[seed][kind].values()) for kind in _KINDS}
            rows.append(f'"{seed}": {json.dumps(packed, separators=(",", ":"))}')
        variants.append(f"{json.dumps(name)}: {{\n" + ",\n".join(rows) + "\n}")
    head = f'{{"protocol": {json.dumps(study["protocol"])},\n"keys": {json.dumps(keys)},\n"seeds": {{'
    partial = path.with_suffix(".partial")
    partial.write_text(head + ",\n".join(variants) + "}}\n", encoding="utf-8")
    partial.rename(path)
