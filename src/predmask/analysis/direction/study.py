"""The direction study on the embedded task: many seeds, each a short run whose tokens are followed over their steps."""

from __future__ import annotations

import os
import threading
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from signal import SIG_BLOCK, SIG_SETMASK, SIGINT, pthread_sigmask
from typing import Any

from predmask.analysis import AnalysisError
from predmask.analysis.direction.logit_steps import single_steps
from predmask.analysis.direction.outcomes import Outside, Tallies, add, outside_region, tally
from predmask.analysis.direction.study_file import ENDS, FILE, load, write
from predmask.traces import SampleTrace, TokenTrace
from predmask.train import PRESETS, Config, Trainer, TrainingError
from predmask.train.options import resolve, to_toml

PRESET = "arithmetic-stress"
STEPS = 3
DELTA: float = PRESETS[PRESET].values["rule"]["delta"]
"""Threshold of the top-K KL: the preset's."""
BETAS = (0.9, 0.0)
"""AdamW's momentum, and none: momentum moves a token whatever its own gradient says."""

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

    FILE in `directory` is written anew as each seed finishes, and seeds that it has are not run again; nor are those
    whose training failed, which it has with the reason. `progress` is told how many runs are done, of how many. Raises
    AnalysisError where FILE holds a study of another protocol, where a worker was killed, and where training failed
    with every seed of a variant.
    """
    configs = variants(layer)
    protocol = {"delta": delta, "variants": {name: _described(config) for name, config in configs.items()}}
    path = directory / FILE
    fresh = {"protocol": protocol, **{end: {name: {} for name in configs} for end in ENDS}}
    study = load(path) if path.is_file() else fresh
    if study["protocol"] != protocol:
        raise AnalysisError(f"{path} holds a study with other options; choose another --output, or delete it")
    directory.mkdir(parents=True, exist_ok=True)
    wanted = [(name, seed) for seed in range(seeds) for name in configs]
    missing = [(name, seed) for name, seed in wanted if not any(str(seed) in study[end][name] for end in ENDS)]
    done = len(wanted) - len(missing)
    progress(done, len(wanted))
    running: dict[Future[dict[str, Any]], tuple[str, int]] = {}
    try:
        with _pool(workers) as pool:
            with _deaf_to_ctrl_c():
                for name, seed in missing:
                    running[pool.submit(run_seed, replace(configs[name], seed=seed), delta)] = name, seed
            for future in as_completed(running):
                _take(study, *running[future], future)
                write(path, study)
                del running[future]
                done += 1
                progress(done, len(wanted))
    except BrokenProcessPool as error:
        raise AnalysisError(
            f"one of {workers} processes was killed, as happens where memory runs out; what is done lies in "
            f"{directory}, and the same command goes on: give it fewer --workers, or more memory"
        ) from error
    finally:
        # Cut short, it keeps what had ended.
        for future, (name, seed) in running.items():
            if future.done() and not future.cancelled() and isinstance(future.exception(), TrainingError | None):
                _take(study, name, seed, future)
                write(path, study)
    return _of_seeds(study, seeds)


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Worker processes, which are ended at once where the block is left by an error."""
    others = set(active_children())
    with ProcessPoolExecutor(workers, get_context("spawn"), initializer=_end_with_parent) as pool:
        try:
            yield pool
        except BaseException:
            for process in set(active_children()) - others:
                process.terminate()
            pool.shutdown(cancel_futures=True)
            raise


@contextmanager
def _deaf_to_ctrl_c() -> Iterator[None]:
    """Processes that are started in the block never hear of Ctrl-C: the study alone does, and ends them."""
    before = pthread_sigmask(SIG_BLOCK, {SIGINT})
    try:
        yield
    finally:
        pthread_sigmask(SIG_SETMASK, before)


def _end_with_parent() -> None:
    """A worker ends with a study that was killed: a pool's own would wait for work for ever."""

    def wait() -> None:
        parent = parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _take(study: dict[str, Any], name: str, seed: int, future: Future[dict[str, Any]]) -> None:
    """Put what a run came to into the study."""
    try:
        study["seeds"][name][str(seed)] = future.result()
    except TrainingError as error:
        study["failed"][name][str(seed)] = str(error)


def _of_seeds(study: Mapping[str, Any], seeds: int) -> dict[str, Any]:
    """The study of seeds 0 to `seeds` - 1: FILE may hold more."""
    wanted = [str(seed) for seed in range(seeds)]
    ended = {
        end: {name: {seed: runs[seed] for seed in wanted if seed in runs} for name, runs in study[end].items()}
        for end in ENDS
    }
    for name, runs in ended["seeds"].items():
        if not runs:
            raise AnalysisError(f"{name}: training failed with every seed; with seed 0: {ended['failed'][name]['0']}")
    return {**study, **ended}


class _Counting:
    """A recorder that keeps what became of the tokens outside, and no token longer than that."""

    def __init__(self, delta: float) -> None:
        self.delta = delta
        self.trainable = 0
        self.outside: list[Outside] = []
        self.steps: list[Tallies] = []

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
