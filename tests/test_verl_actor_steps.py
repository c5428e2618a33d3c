"""verl's actor with the mask over several optimiser steps: figures, numbers and traces, and what is refused."""

from __future__ import annotations

import importlib.util
import json
import logging
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from helpers_verl import (
    Case,
    Sample,
    assert_close,
    dense_logits,
    filled,
    make_samples,
    policy_model,
    run_processes,
    without_topk,
    write_policy,
)
from predmask.cli import main
from predmask.core import mask_metrics
from predmask.traces import TokenTrace, Trace

if importlib.util.find_spec("verl") is None:
    pytest.skip("needs verl", allow_module_level=True)

UIDS = ["a", "a", "b", "b"]
VERSIONS = [[0, 0, 0, 0], [1, 1, 0, 0]]
"""Steps after which the weights were sent that sampled the responses, in the first and the second step."""
ENDS = [1, 5]
"""Ids that end a response, by the model's generation settings."""
SEED = 48
"""Of the order in which responses are trained on where they are shuffled."""
Key = tuple[str, int]


def work(rank: int, folder: str) -> None:
    """Everything in one process, each result written down at once."""
    from verl_on_cpu.actor import join

    where = Path(folder)
    join(rank, 1, where / "store")
    for part in (train_steps, resume, shuffled, unfinished_batch, endings, full, stage, refusals):
        torch.save(part(where), where / f"{part.__name__}.pt")
    torch.distributed.destroy_process_group()


def make_worker(where: Path, model: str = "model", *, lr: float = 0.0, **policy_loss: Any) -> Any:
    """An actor whose settings are those of `Case`, and these."""
    from predmask.plugins.verl.settings import PolicyLossConfig
    from verl_on_cpu.actor import make_worker

    return make_worker(where / model, PolicyLossConfig(**{**Case().policy_loss, **policy_loss}), lr=lr)


def step_samples(step: int) -> list[Sample]:
    """Two responses to each of two prompts; the prompts of the second step are others."""
    samples = make_samples([(3, 4), (3, 6), (2, 5), (2, 3)], seed=step)
    for number, sample in enumerate(samples):
        of_prompt = number // 2 * 2
        sample["prompt"] = samples[of_prompt]["prompt"]
        version = VERSIONS[step - 1][number]
        sample |= {"uid": f"{step}{UIDS[number]}", "session": number % 2, "step": step}
        sample["extra"] = {"min_global_steps": version, "max_global_steps": version}
    return samples


def train_steps(where: Path) -> list[dict[str, Any]]:
    """Two steps of two epochs of two mini-batches, as verl's trainer asks for them; its metrics."""
    from verl_on_cpu.actor import make_batch, train_step

    worker = make_worker(where, lr=1e-2, traces={"directory": str(where / "steps"), "responses": 0})
    batches = [make_batch(step_samples(step), micro_batch=1, global_batch_size=2) for step in (1, 2)]
    return [train_step(worker, batch, epochs=2, mini_batch_size=2) for batch in batches]


def resume(where: Path) -> list[list[dict[str, Any]]]:
    """Two steps of a run that begins with step 7, of which a part is recorded; and the same run once more."""
    return [resume_once(where / "resumed", where), resume_once(where / "resumed", where)]


def resume_once(directory: Path, where: Path) -> list[dict[str, Any]]:
    from verl_on_cpu.actor import make_batch, train_step

    worker = make_worker(where, traces={"directory": str(directory), "responses": 1, "every": 2})
    found = []
    for step in (7, 8):
        samples = step_samples(1)
        wanted = [first_by_hash([(prompt, 0), (prompt, 1)]) for prompt in ("1a", "1b")]
        for sample in samples:
            sample |= {"step": step, "extra": {"min_global_steps": step - 2, "max_global_steps": step - 1}}
            if (sample["uid"], sample["session"]) not in wanted:
                sample["reward_model"] = "which nobody should read"
        batch = make_batch(samples, micro_batch=2, global_batch_size=2)
        found.append(train_step(worker, batch, epochs=1, mini_batch_size=2))
    return found


def shuffled(where: Path) -> list[list[Key]]:
    """Two passes, each in an order of its own, of which one response an optimiser step is recorded; these orders."""
    from verl.utils import tensordict_utils as tu

    from predmask.plugins.verl.batch import listed
    from verl_on_cpu.actor import make_batch, train_step

    worker = make_worker(where, traces={"directory": str(where / "shuffled"), "responses": 1})
    batch = make_batch(step_samples(1), micro_batch=1, global_batch_size=2)
    order = tu.make_iterator(batch, mini_batch_size=2, epochs=2, seed=SEED, dataloader_kwargs={"shuffle": True})
    found = [list(zip(listed(part, "uid"), listed(part, "session_id"), strict=True)) for part in order]
    train_step(worker, batch, epochs=2, mini_batch_size=2, shuffle=True, seed=SEED)
    return found


def unfinished_batch(where: Path) -> list[dict[str, Any]]:
    """Two mini-batches one by one, of which only the second one is a batch's last."""
    from verl_on_cpu.actor import logged, make_batch, train

    worker, samples = make_worker(where), make_samples()
    parts = [make_batch(samples[:2], last=False), make_batch(samples[2:], last=True)]
    return [logged(train(worker, part)) for part in parts]


def endings(where: Path) -> None:
    """Responses that end with either end, and with neither, and one that verl filled up with."""
    from verl_on_cpu.actor import make_batch, train

    model = where / "ends"
    shutil.copytree(where / "model", model)
    path = model / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": ENDS}))
    samples = [*make_samples()[:3], filled()[-1]]
    for sample, last in zip(samples, [*ENDS, 9], strict=False):
        sample["response"][-1] = last
    train(make_worker(where, "ends", traces={"directory": str(where / "endings")}), make_batch(samples))


def full(where: Path) -> dict[str, Any]:
    """Two steps whose trace may take no room; what is warned of, and verl's metrics of the second."""
    from verl_on_cpu.actor import logged, make_batch, train

    worker = make_worker(where, traces={"directory": str(where / "full"), "max_mb": 1e-6})
    with warned() as texts:
        metrics = [train(worker, make_batch(make_samples())) for _ in range(2)]
    return {"texts": texts, "metrics": logged(metrics[1])}


@contextmanager
def warned() -> Iterator[list[str]]:
    """The warnings of this package."""
    texts: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())
    logging.getLogger("predmask").addHandler(handler)
    yield texts
    logging.getLogger("predmask").removeHandler(handler)


def stage(where: Path) -> list[Any]:
    """What comes of two mini-batches at a pipeline stage without outputs, whose host returns nothing."""
    from verl.workers.utils.losses import ppo_loss

    from predmask.plugins.verl.engine import MaskedEngine
    from predmask.plugins.verl.settings import PolicyLossConfig
    from verl_on_cpu.actor import make_batch

    class Host:
        model_config = SimpleNamespace(
            tokenizer=SimpleNamespace(eos_token_id=1),
            generation_config=None,
            hf_config=policy_model().config,
        )

        def get_data_parallel_group(self) -> Any:
            return torch.distributed.group.WORLD

        def is_mp_src_rank_with_outputs(self) -> bool:
            return False

        def forward_backward_batch(self, data: Any, loss_function: Any, forward_only: bool) -> dict[str, Any]:
            return {}

    class Engine(MaskedEngine, Host):
        pass

    settings = PolicyLossConfig(**Case().policy_loss, traces={"directory": str(where / "stage")})
    engine, loss = Engine(), partial(ppo_loss, config=SimpleNamespace(policy_loss=settings))
    return [engine.forward_backward_batch(make_batch(make_samples(), last=last), loss) for last in (False, True)]


def refusals(where: Path) -> dict[str, str]:
    """What is said of faulty batches and settings."""
    from verl.utils import tensordict_utils as tu

    from predmask.plugins.verl.loss import policy_loss
    from predmask.plugins.verl.settings import PolicyLossConfig
    from verl_on_cpu.actor import make_batch, train

    def trained(
        samples: list[Sample] | None = None,
        *,
        flags: Any = None,
        fields: Any = None,
        changed: Callable[[torch.Tensor], torch.Tensor] | None = None,
        **settings: Any,
    ) -> None:
        """`changed` is what becomes of the rows' marks after the host's cut."""
        worker = make_worker(where, **settings)
        if changed is not None:
            cut = worker.engine._predmask_cut
            worker.engine._predmask_cut = lambda *given: changed(cut(*given))
        batch = make_batch(samples or make_samples(), micro_batch=1)
        for key, change in (fields or {}).items():
            batch[key] = change(batch)
        tu.assign_non_tensor(batch, **(flags or {}))
        train(worker, batch)

    def configured(**settings: Any) -> None:
        PolicyLossConfig(**{"host": {"rollout_name": "vllm"}, **settings})

    faults: dict[str, Callable[[], Any]] = {
        "top-K missing": lambda: trained(without_topk()),
        "another K": lambda: trained(top_k=4),
        "a problem at the server": lambda: trained(with_problem()),
        "a second weight": lambda: trained(
            fields={
                "rollout_is_weights": lambda batch: torch.nested.nested_tensor_from_jagged(
                    torch.ones_like(batch["old_log_probs"].values()), batch["old_log_probs"].offsets()
                )
            }
        ),
        "fused kernels": lambda: trained(flags={"use_fused_kernels": True}),
        "padded": lambda: trained(fields={"response_mask": lambda batch: batch["response_mask"].to_padded_tensor(0)}),
        "rows lost": lambda: trained(changed=lambda marks: marks * (marks < 3)),
        "rows exchanged": lambda: trained(
            changed=lambda marks: marks.masked_scatter(marks > 0, marks[marks > 0].flip(0))
        ),
        "rows cut off": lambda: trained(changed=lambda marks: marks[:, 1:]),
        "no engine": lambda: policy_loss(*torch.zeros(4, 1, 2).unbind()),
        "rule": lambda: configured(rule={"name": "clip"}),
        "rule field": lambda: configured(rule={"name": "dppo", "epsilon": 0.2}),
        "rule value": lambda: configured(rule={"name": "dppo", "delta": -1.0}),
        "traces field": lambda: configured(traces={"dir": "x"}),
        "traces never": lambda: configured(traces={"every": 0}),
        "traces below 0": lambda: configured(traces={"responses": -8}),
        "traces without room": lambda: configured(traces={"max_mb": 0}),
        "top_k": lambda: configured(top_k=0),
        "top_k below 0": lambda: configured(rule={"name": "ppo_clip"}, top_k=-1),
        "ratio_cap": lambda: configured(ratio_cap=0.0),
        "loss_mode": lambda: configured(loss_mode="vanilla"),
        "host": lambda: PolicyLossConfig(),
    }
    return {name: said(fault) for name, fault in faults.items()}


def with_problem() -> list[Sample]:
    samples = make_samples()
    samples[4]["extra"] = {"min_global_steps": 0, "predmask_problem": "position 3 has 4 entries, and 5 were asked for"}
    return samples


def said(fault: Callable[[], Any]) -> str:
    try:
        fault()
    except Exception as error:  # noqa: BLE001  whatever it is, its text is what is tested
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the worker found."""
    found = tmp_path_factory.mktemp("found")
    write_policy(found / "model")
    run_processes(work, str(found), count=1)
    return found


def found_by(part: Callable[[Path], Any], folder: Path) -> Any:
    return torch.load(folder / f"{part.__name__}.pt", weights_only=False)


def test_steps_are_numbered_as_the_host_took_them(folder):
    """Two steps of two epochs of two mini-batches: versions count optimiser steps, prompts are groups."""
    trace = Trace(folder / "steps")
    assert trace.steps == [1, 2]
    for step in trace.steps:
        tokens, samples = TokenTrace.cat(list(trace.tokens([step]))), step_samples(step)
        for number, sample in enumerate(samples):
            mine = tokens[tokens.sample == number]
            length = len(sample["response"])
            assert mine.id.tolist() == sample["response"].tolist() * 2
            assert mine.position.tolist() == list(range(length)) * 2
            assert mine.epoch.tolist() == [0] * length + [1] * length
            assert set(mine.group.tolist()) == {number // 2}
            assert set(mine.minibatch.tolist()) == {number // 2}
            begun = 4 * (step - 1)
            assert mine.optimizer_step.tolist() == [begun + number // 2] * length + [begun + 2 + number // 2] * length
            assert set(mine.version.tolist()) == {4 if VERSIONS[step - 1][number] == 1 else 0}
            assert torch.equal(mine.advantage, sample["advantage"].expand(2 * length))
        assert [list(s.prompt) for s in trace.samples(step)] == [s["prompt"].tolist() for s in samples]
        assert [s.group for s in trace.samples(step)] == [0, 0, 1, 1]


def test_figures_are_of_all_tokens_of_a_batch(folder):
    """Of each token once in each epoch, whatever mini-batch it is in."""
    metrics = found_by(train_steps, folder)
    # Mini-batches of 10 and of 8 tokens, at the optimiser steps 0 to 3 and 4 to 7.
    assert [m["predmask/staleness_mean"] for m in metrics] == pytest.approx(
        [(10 * (0 + 2) + 8 * (1 + 3)) / 36, (10 * (0 + 2) + 8 * (5 + 7)) / 36]
    )
    assert [m["predmask/staleness_max"] for m in metrics] == [3, 7]
    for step, logged in enumerate(metrics, start=1):
        tokens = TokenTrace.cat(list(Trace(folder / "steps").tokens([step])))
        staleness = tokens.optimizer_step - tokens.version
        expected = mask_metrics(tokens.behaviour, tokens.policy, tokens.decision, staleness=staleness).compute()
        found = {name.removeprefix("predmask/"): v for name, v in logged.items() if name.startswith("predmask/")}
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-7)
        assert 0 < found["mask_frac"] < 1


def test_figures_come_with_a_batchs_last_mini_batch(folder):
    first, last = found_by(unfinished_batch, folder)
    assert not [name for name in first if "predmask" in name]
    # 11 tokens at one optimiser step, and 15 at the next, all sampled before the first.
    assert last["predmask/staleness_mean"] == pytest.approx(15 / 26)


def test_the_first_pass_is_by_the_weights_that_were_there(folder):
    tokens = TokenTrace.cat(list(Trace(folder / "steps").tokens([1])))
    sample = step_samples(1)[0]
    rows = dense_logits(policy_model(), sample["prompt"], sample["response"]).detach().double()
    expected = rows.log_softmax(-1).gather(1, sample["response"][:, None])[:, 0]
    first, second = (tokens[(tokens.sample == 0) & (tokens.epoch == epoch)].policy.logp[:, 0] for epoch in (0, 1))
    assert_close(first, expected, "logp")
    assert (second - expected).abs().max() > 0.1


def test_a_trace_of_the_actor_makes_a_report(folder, tmp_path):
    pytest.importorskip("matplotlib")
    page = tmp_path / "report.html"
    assert main(["report", str(folder / "steps"), "--output", str(page)]) == 0
    assert "<html" in page.read_text()


def first_by_hash(keys: list[Key]) -> Key:
    """Which of the responses is recorded where one may be."""
    return min(keys, key=lambda key: zlib.crc32(f"{key[0]}/{key[1]}".encode()))


def ids_of(key: Key) -> list[int]:
    (sample,) = [s for s in step_samples(1) if (s["uid"], s["session"]) == key]
    return sample["response"].tolist()


@pytest.mark.parametrize("directory", ["resumed", "resumed/from-000007"])
def test_a_run_is_resumed_and_recorded_in_part(folder, directory):
    """It begins with the host's step; one response of each optimiser step, of every second step."""
    trace = Trace(folder / directory)
    assert trace.steps == [7]
    tokens = TokenTrace.cat(list(trace.tokens()))
    for optimizer_step, prompt in enumerate(("1a", "1b")):
        mine = tokens[tokens.optimizer_step == optimizer_step]
        assert mine.id.tolist() == ids_of(first_by_hash([(prompt, 0), (prompt, 1)]))
    assert len(trace.samples(7)) == 2
    # What came before this worker counts as its beginning.
    assert set(tokens.version.tolist()) == {0}
    for first, second in found_by(resume, folder):
        # Mini-batches of 10 and of 8 tokens.
        assert first["predmask/staleness_mean"] == pytest.approx((0 * 10 + 1 * 8) / 18)
        assert second["predmask/staleness_mean"] == pytest.approx((2 * 10 + 3 * 8) / 18)


def test_passes_are_counted_whether_recorded_or_not(folder):
    """A response that is first recorded in the second pass is of epoch 1."""
    order, tokens = found_by(shuffled, folder), TokenTrace.cat(list(Trace(folder / "shuffled").tokens()))
    recorded = [first_by_hash(keys) for keys in order]
    for step, key in enumerate(recorded):
        mine = tokens[tokens.optimizer_step == step]
        assert mine.id.tolist() == ids_of(key)
        assert set(mine.epoch.tolist()) == {step // 2}
        assert set(mine.minibatch.tolist()) == {step % 2}
    assert set(recorded[2:]) - set(recorded[:2])  # or the order would not show it


def test_a_response_is_finished_by_any_of_the_models_ends(folder):
    """By its generation settings; what verl filled up with is not recorded."""
    samples = Trace(folder / "endings").samples(1)
    assert [sample.finished for sample in samples] == [True, True, False]
    assert [list(sample.prompt) for sample in samples] == [s["prompt"].tolist() for s in make_samples()[:3]]


def test_a_trace_without_room_ends_and_the_training_does_not(folder):
    found = found_by(full, folder)
    (text,) = found["texts"]
    assert text.startswith("predmask: the trace ended early: a step takes ")
    assert "traces.max_mb" in text
    assert found["metrics"]["predmask/staleness_mean"] == 1


def test_a_stage_without_outputs_has_no_figures(folder):
    assert found_by(stage, folder) == [{}, {}]
    assert not (folder / "stage").exists()


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("top-K missing", "ValueError", ["no teacher_ids and no teacher_logprobs", "default_agent_loop=predmask"]),
        ("another K", "ValueError", ["(7, 5)", "policy_loss.top_k is 4"]),
        ("a problem at the server", "RuntimeError", ["top-K of 1 responses", "position 3 has 4 entries, and 5 were"]),
        ("a second weight", "ValueError", ["set algorithm.rollout_correction.rollout_is=null"]),
        ("fused kernels", "ValueError", ["set actor_rollout_ref.model.use_fused_kernels=False"]),
        ("padded", "ValueError", ["set trainer.use_v1=True"]),
        ("rows lost", "RuntimeError", ["2 of 4 tokens were not measured"]),
        ("rows exchanged", "RuntimeError", ["nats from the host's own on average"]),
        ("rows cut off", "RuntimeError", ["rows of logits (1, 7) and of the batch (1, 6) do not fit"]),
        ("no engine", "RuntimeError", ["the actor's engine is not predmask's", "predmask verl doctor"]),
        ("rule", "SettingsError", ["policy_loss.rule.name is 'clip'", "choose one of none, ppo_clip, cispo"]),
        ("rule field", "SettingsError", ["'epsilon': 0.2", "(fields of dppo: divergence, support, delta)"]),
        ("rule value", "SettingsError", ["rule.delta is -1.0", "above 0"]),
        ("traces field", "SettingsError", ["{'dir': 'x'}", "directory, every, responses, max_mb"]),
        ("traces never", "SettingsError", ["traces.every is 0", "1 or more"]),
        ("traces below 0", "SettingsError", ["traces.responses is -8", "0 or more"]),
        ("traces without room", "SettingsError", ["traces.max_mb is 0", "above 0"]),
        ("top_k", "SettingsError", ["rule 'predictive' reads the top-K", "top_k is 0", "set 20"]),
        ("top_k below 0", "SettingsError", ["top_k is -1", "0 or more"]),
        ("ratio_cap", "SettingsError", ["ratio_cap is 0.0", "above 0 (null for no cap)"]),
        ("loss_mode", "SettingsError", ["'vanilla'", "set it to 'predmask'"]),
        ("host", "SettingsError", ["policy_loss.host is empty", "predmask verl args"]),
    ],
)
def test_a_fault_is_named_with_its_remedy(folder, fault, kind, words):
    text = found_by(refusals, folder)[fault]
    assert text.startswith(f"{kind}: "), text
    assert all(word in text for word in words), text
