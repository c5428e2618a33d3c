"""Settings that all tests share."""

import os
from typing import Any

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("local", deadline=None, max_examples=40)
settings.register_profile("ci", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")


@pytest.fixture
def small_sweeps(request: pytest.FixtureRequest) -> Any:
    """Several chunks, measured in several parts, with weights in several blocks, wherever there is enough of them."""
    if request.node.get_closest_marker("slow"):
        yield
        return
    from helpers_ops import small_chunks

    with small_chunks(tokens=None):
        yield
