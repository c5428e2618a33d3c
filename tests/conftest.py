"""Settings that all tests share."""

import os

import torch
from hypothesis import settings

torch.set_num_threads(1)
settings.register_profile("local", deadline=None, max_examples=40)
settings.register_profile("ci", deadline=None, max_examples=40, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "local")
