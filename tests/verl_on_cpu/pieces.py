"""What a server of a test sampled, written by itself: which weights each token of a response really comes from."""

import json
import os
from collections import defaultdict
from pathlib import Path

import torch

from helpers_processes import MARK

FILE = "pieces.jsonl"
"""In the run's directory, a line for each answer that has tokens."""
UNSURE = -1


def write(prompt, tokens, version):
    """Add an answer; it is given the tokens that were there already as the end of its prompt."""
    with (Path(os.environ[MARK]) / FILE).open("a") as file:
        file.write(json.dumps([prompt, tokens, version]) + "\n")


def read(directory):
    """For each prompt with a response: the ways in which it was sampled, each as the versions of its tokens."""
    found = defaultdict(set)
    for line in (directory / FILE).read_text().splitlines():
        prompt, tokens, version = json.loads(line)
        for before in found.get(tuple(prompt), {()}):
            found[(*prompt, *tokens)].add((*before, *[version] * len(tokens)))
    return found


def versions(found, samples, tokens):
    """[N] each token's version, UNSURE where it was sampled in several ways; [N] the oldest of its response."""
    each, oldest = torch.full((2, len(tokens)), UNSURE)
    for sample in samples:
        places = tokens.sample == sample.sample
        ways = torch.tensor(sorted(found[*sample.prompt, *tokens.id[places].tolist()]))
        each[places] = ways[0].where((ways == ways[0]).all(0), UNSURE)
        [oldest[places]] = ways[:, 0].unique()
    return each, oldest
