"""What `predmask report` costs: time, peak memory and the page's size, for a long trace.

    python benchmarks/report.py
    python benchmarks/report.py --tokens 200000 --directory /tmp/trace

The trace has K = 20 and a vocabulary of 64; it is made once (about a minute) and used again where it lies already.
The report runs in a process of its own, on one thread.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from predmask import BehaviourSupport, PolicySupport, Predictive
from predmask.traces import TokenTrace, TraceInfo, TraceWriter, rule_settings

VOCABULARY, TOP_K, STEPS, CHUNK, LENGTH = 64, 20, 20, 20_000, 100
RULE = Predictive(delta=0.05)


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one report."""

    seconds: float
    cpu_seconds: float
    """Of all its threads; unlike `seconds`, whatever else the machine does."""
    peak_bytes: int
    """Resident memory."""
    page_bytes: int


def make_trace(directory: Path, tokens: int) -> None:
    """A trace of about `tokens` made-up tokens over 20 steps."""
    info = TraceInfo(run="made up", rule=rule_settings(RULE), vocabulary_size=VOCABULARY, top_k=TOP_K)
    with TraceWriter(directory / "traces", info) as writer:
        for step in range(1, STEPS + 1):
            for chunk in _chunks(step, tokens // STEPS):
                writer.add(chunk)
            writer.commit(step)


def measure(directory: Path) -> Cost:
    """Report on the run in a directory, in a process of its own."""
    page = directory / "report.html"
    command = [sys.executable, "-m", "predmask", "report", str(directory), "--output", str(page)]
    start = time.perf_counter()
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stdout=subprocess.DEVNULL)
    peak = 0
    while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        peak = max(peak, _peak(process.pid))
        time.sleep(0.02)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return Cost(
        seconds=time.perf_counter() - start,
        cpu_seconds=usage.ru_utime + usage.ru_stime,
        peak_bytes=peak,
        page_bytes=page.stat().st_size,
    )


def _peak(process: int) -> int:
    """The most bytes that a process had so far, by Linux (its `ru_maxrss` begins with that of its parent)."""
    lines = Path(f"/proc/{process}/status").read_text().splitlines()
    return max((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), default=0)


def main() -> None:
    """Make the trace, measure, print a line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2_000_000)
    parser.add_argument("--directory", type=Path, help="where the trace is kept (default: a temporary one)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = args.directory or Path(temporary)
        if not (directory / "traces").exists():
            make_trace(directory, args.tokens)
        cost = measure(directory)
        print(
            f"{args.tokens:,} tokens: {cost.seconds:.1f} s, {cost.peak_bytes / 1e9:.2f} GB at most, "
            f"a page of {cost.page_bytes / 1e6:.2f} MB"
        )


def _chunks(step: int, tokens: int) -> Iterator[TokenTrace]:
    """The tokens of a step; each chunk has the probabilities of the first, of other responses."""
    first = _tokens(step, min(tokens, CHUNK))
    responses = int(first.sample.max()) + 1
    for number in range(0, tokens, CHUNK):
        place = number // CHUNK
        yield replace(first, sample=first.sample + place * responses, minibatch=torch.full_like(first.step, place))


def _tokens(step: int, tokens: int) -> TokenTrace:
    generator = torch.Generator().manual_seed(step)
    mu = (3 * torch.randn(tokens, VOCABULARY, generator=generator)).log_softmax(-1)
    pi = mu + 0.3 * torch.randn(mu.shape, generator=generator)
    sampled = mu.exp().multinomial(1, generator=generator)[:, 0]
    top = mu.topk(TOP_K)
    behaviour = BehaviourSupport.from_topk(sampled, mu.gather(1, sampled[:, None])[:, 0], top.indices, top.values)
    policy = PolicySupport.from_logits(pi, behaviour)
    sample = torch.arange(tokens) // LENGTH
    advantage = torch.randn(int(sample.max()) + 1, generator=generator)[sample]
    return TokenTrace(
        step=torch.full((tokens,), step),
        epoch=torch.zeros(tokens, dtype=torch.int64),
        minibatch=torch.zeros(tokens, dtype=torch.int64),
        optimizer_step=torch.full((tokens,), 16 * step),
        version=torch.full((tokens,), 16 * (step - 1)),
        sample=sample,
        group=sample // 8,
        position=torch.arange(tokens) % LENGTH,
        advantage=advantage,
        behaviour=behaviour,
        policy=policy,
        decision=RULE(behaviour, policy, advantage),
    )


if __name__ == "__main__":
    main()
