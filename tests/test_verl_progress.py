"""The plug-in for verl: how its worker numbers steps and versions, in verl's three trainer modes."""

import warnings
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("verl", reason="make test-verl runs these")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # verl's own
    from predmask.plugins.verl.progress import Progress
    from predmask.plugins.verl.settings import PolicyLossConfig


@pytest.fixture
def progress(tmp_path):
    """Makes the progress of a single worker under this configuration of verl."""
    torch.distributed.init_process_group("gloo", f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    engine = SimpleNamespace(
        get_data_parallel_group=lambda: torch.distributed.group.WORLD,
        model_config=SimpleNamespace(tokenizer=SimpleNamespace(eos_token_id=1), generation_config=None),
        is_mp_src_rank_with_outputs=lambda: True,
    )
    yield lambda **host: Progress(PolicyLossConfig(host={"rollout_name": "vllm", **host}), engine)
    torch.distributed.destroy_process_group()


def batch(sent=1, versions=((0, 0),), *, last=True):
    """A mini-batch of prompts sent out at this step, and the oldest and newest versions of its responses."""
    extra = [{"min_global_steps": oldest, "max_global_steps": newest} for oldest, newest in versions]
    return {"global_steps": [sent] * len(versions), "extra_fields": extra, "update_lr_scheduler": last}


def took(progress, *batches):
    """Step and versions of each of these mini-batches, and the progress's own count of optimiser steps."""
    found = []
    for one in batches:
        with progress.minibatch(one):
            found.append((progress.step, progress.optimizer_step, progress.versions(one).tolist()))
    return found


def test_a_version_is_what_its_step_left(progress):
    steps = took(
        progress(),
        batch(last=False),
        batch(),
        batch(2, [(1, 1), (0, 1)], last=False),
        batch(2, [(0, 0)]),
        batch(3, [(2, 2), (1, 2)]),
    )
    assert steps == [(1, 0, [0]), (1, 1, [0]), (2, 2, [2, 0]), (2, 3, [0]), (3, 4, [4, 2])]


def test_prompts_sent_out_ahead_do_not_hold_the_count(progress):
    """In the asynchronous modes, all prompts of a step may have been sent out before it."""
    steps = took(progress(trainer_v1_trainer_mode="colocate_async"), batch(1), batch(1), batch(2, [(1, 1)]))
    assert steps == [(1, 0, [0]), (2, 1, [0]), (3, 2, [1])]


def test_a_step_of_several_batches_sends_one_version(progress):
    mode = {"trainer_v1_trainer_mode": "separate_async", "trainer_v1_separate_async_parameter_sync_step": 2}
    steps = took(progress(**mode), batch(), batch(), batch(2, [(1, 1), (0, 1)]), batch(2, [(0, 0)]), batch(3, [(2, 2)]))
    assert steps == [(1, 0, [0]), (1, 1, [0]), (2, 2, [2, 0]), (2, 3, [0]), (3, 4, [4])]


def test_only_the_separate_mode_has_such_steps(progress):
    mode = {"trainer_v1_trainer_mode": "colocate_async", "trainer_v1_separate_async_parameter_sync_step": 4}
    assert [step for step, *_ in took(progress(**mode), batch(), batch(2))] == [1, 2]


def test_a_resumed_run_goes_on_with_the_hosts_number(progress):
    """What is older than the worker counts as its beginning."""
    assert took(progress(), batch(7, [(6, 6), (4, 5)]), batch(8, [(7, 7), (5, 7)])) == [(7, 0, [0, 0]), (8, 1, [1, 0])]


def test_what_is_newer_than_thought_corrects_the_number(progress):
    """A run resumed before step 8, whose first batch was sampled before that; its second step tells."""
    steps = took(progress(), batch(7, [(6, 6)]), batch(8, [(6, 8), (7, 8), (8, 8)]), batch(9, [(9, 9)]))
    assert steps == [(7, 0, [0]), (9, 1, [0, 0, 1]), (10, 2, [2])]


def test_without_a_servers_version_there_is_none(progress):
    one = batch()
    one["extra_fields"] = [{}]
    with (tracked := progress()).minibatch(one):
        assert (tracked.step, tracked.versions(one)) == (1, None)
