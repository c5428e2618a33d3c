"""Is the operator's Triton backend right on this GPU, and how fast is it?

    python benchmarks/gpu_check.py

First parity: statistics and gradients of a small batch against the dense backend in float64, in three dtypes. Then
time and peak memory of one training step's loss at the head, forward and backward, at two sizes, next to the three
matrix products alone (logits, gradient of the hidden states, gradient of the weight), which no implementation can do
without. Everything is printed as Markdown. The exit status is 0, or 1 if parity fails, or 2 where it cannot run.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from statistics import median
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from predmask.core import BehaviourSupport, Predictive
from predmask.ops import masked_policy_loss, support_statistics

VALUE_LIMIT = 3e-5
"""Largest error of log-probs, log tail and entropy in nats, and of Q_T as a share."""
GRADIENT_LIMITS = {torch.float32: 1e-4, torch.bfloat16: 2**-6, torch.float16: 2**-9}
"""Largest error of gradients, as a share of the largest number: slopes and results are rounded to 16 bits."""
RULE = Predictive()
TOP_K = 20
SPREAD = 4.0
"""Standard deviation of the logits: an entropy of about 4 nats at V = 152k."""
DRIFT = 0.3
"""Largest relative perturbation of the behaviour policy's hidden states: about a quarter of the tokens are dropped."""
WORKSPACES = (1, 2, 4)
"""GiB that a chunk may take."""
GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class Shape:
    """One size."""

    tokens: int
    hidden: int
    vocabulary: int

    def __str__(self) -> str:
        return f"N = {self.tokens:,}, D = {self.hidden:,}, V = {self.vocabulary:,}"

    @property
    def product_flop(self) -> float:
        """Of the three products."""
        return 6.0 * self.tokens * self.hidden * self.vocabulary


PARITY = Shape(tokens=512, hidden=320, vocabulary=8_191)
TIMED = (Shape(tokens=8_192, hidden=4_096, vocabulary=151_936), Shape(tokens=2_048, hidden=1_024, vocabulary=151_936))
TINY_PARITY = Shape(tokens=40, hidden=24, vocabulary=301)
TINY_TIMED = (Shape(tokens=24, hidden=32, vocabulary=300),)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens that a slightly different policy sampled, and a head."""

    hidden: Tensor
    weight: Tensor
    behaviour: BehaviourSupport
    advantage: Tensor

    @classmethod
    def of(cls, shape: Shape, dtype: torch.dtype, device: torch.device) -> Batch:
        """A seeded batch, made a few tokens at a time."""
        generator = torch.Generator(device).manual_seed(0)
        normal = partial(torch.randn, generator=generator, device=device)
        weight = (normal(shape.vocabulary, shape.hidden) * SPREAD / math.sqrt(shape.hidden)).to(dtype)
        hidden = normal(shape.tokens, shape.hidden).to(dtype)
        records: list[tuple[Tensor, ...]] = []
        for rows in hidden.split(256):
            # Each token drifts by another amount.
            drift = DRIFT * torch.rand(len(rows), 1, generator=generator, device=device)
            logits = ((rows + drift * normal(rows.shape)).to(dtype) @ weight.T).float()
            log_mu = logits - logits.logsumexp(-1, keepdim=True)
            sampled = torch.multinomial(log_mu.exp(), 1, generator=generator)
            top = log_mu.topk(TOP_K, dim=-1)
            records.append((sampled[:, 0], log_mu.gather(-1, sampled)[:, 0], top.indices, top.values))
        sampled, logp, ids, top_logp = (torch.cat(parts) for parts in zip(*records, strict=True))
        return cls(
            hidden=hidden.requires_grad_(),
            weight=weight.requires_grad_(),
            behaviour=BehaviourSupport.from_topk(sampled, logp, ids, top_logp),
            advantage=normal(shape.tokens),
        )

    def double(self) -> Batch:
        """The same numbers in float64."""
        hidden, weight = (values.detach().double().requires_grad_() for values in (self.hidden, self.weight))
        return Batch(hidden=hidden, weight=weight, behaviour=self.behaviour, advantage=self.advantage)

    def loss(self, backend: Any, **options: Any) -> Any:
        """Forward and backward pass."""
        self.hidden.grad = self.weight.grad = None
        found = masked_policy_loss(
            self.hidden,
            self.weight,
            self.behaviour,
            self.advantage,
            rule=RULE,
            denominator=len(self.hidden),
            backend=backend,
            **options,
        )
        found.loss.backward()
        return found


@contextmanager
def settings(*, product: bool = False, workspace: int | None = None) -> Iterator[None]:
    """The Triton backend with the product in its kernel, or with a workspace of so many GiB."""
    from predmask.ops import triton_sweep

    class ProductInKernel(triton_sweep.TritonSweep):
        """Forms the product in the kernel that measures it."""

        def __init__(self, head: Any, hidden: Tensor, rows: int) -> None:
            super().__init__(head, hidden, rows, form_product=True)

    chosen = ProductInKernel if product else triton_sweep.TritonSweep
    space = triton_sweep.WORKSPACE_BYTES if workspace is None else workspace * GIB
    with mock.patch.multiple(triton_sweep, TritonSweep=chosen, WORKSPACE_BYTES=space):
        yield


def parity(shape: Shape, device: torch.device) -> bool:
    """Print errors against float64; whether all are small."""
    print(f"## Parity, {shape}\n")
    print("| dtype | backend | log-prob | log tail | Q_T, share | entropy | by hidden, share | by weight, share | |")
    print("|---|---|---|---|---|---|---|---|---|")
    passed = True
    for dtype, limit in GRADIENT_LIMITS.items():
        batch = Batch.of(shape, dtype, device)
        exact = batch.double()
        right = exact.loss("dense")
        for label, backend, product in (
            ("triton", "triton", False),
            ("triton, product in the kernel", "triton", True),
            ("chunked", "chunked", False),
        ):
            with settings(product=product):
                found = batch.loss(backend)
            mine, its = found.policy, right.policy
            values = [
                _largest(torch.where(batch.behaviour.valid, mine.logp - its.logp, 0.0)),
                _largest(mine.log_tail - its.log_tail),
                _largest(mine.tail_sum_squares / its.tail_sum_squares - 1),
                _largest(mine.entropy - its.entropy),
            ]
            shares: list[float] = []
            for gradient, expected in ((batch.hidden.grad, exact.hidden.grad), (batch.weight.grad, exact.weight.grad)):
                assert gradient is not None
                assert expected is not None
                shares.append(_largest(gradient - expected) / _largest(expected))
            same = torch.equal(found.decision.keep, right.decision.keep)
            # NaN is not below a limit.
            fine = same and all(v < VALUE_LIMIT for v in values) and all(v < limit for v in shares)
            passed &= fine
            cells = " | ".join(f"{value:.1e}" for value in (*values, *shares))
            verdict = "ok" if fine else "FAILED" if same else "FAILED: other tokens are kept"
            print(f"| {_name(dtype)} | {label} | {cells} | {verdict} |", flush=True)
    limits = ", ".join(f"{_name(dtype)} {limit:.1e}" for dtype, limit in GRADIENT_LIMITS.items())
    print(f"\nLargest errors against float64; allowed are {VALUE_LIMIT:.0e}, and for gradients {limits}.\n")
    return passed


def _largest(values: Tensor) -> float:
    return float(values.detach().abs().max())


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class Clock:
    """Times runs, and knows when the budget is used."""

    def __init__(self, seconds: float, repeats: int, device: torch.device) -> None:
        self._end = time.monotonic() + seconds
        self._repeats = repeats
        self._device = device

    @property
    def left(self) -> float:
        """Seconds."""
        return self._end - time.monotonic()

    def run(self, function: Callable[[], Any]) -> tuple[list[float], float]:
        """Seconds of each run after two for warming up, and the peak of memory in GiB beyond what was there.

        Runs that the budget has no time for are left out.
        """
        function()
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        before = self._allocated()
        began = time.monotonic()
        function()
        peak = (torch.cuda.max_memory_allocated() - before) / GIB if self._device.type == "cuda" else math.nan
        each = time.monotonic() - began
        times: list[float] = []
        while len(times) < self._repeats and (not times or self.left > 2 * each):
            times.append(self._time(function))
        return times, peak

    def _allocated(self) -> int:
        return torch.cuda.memory_allocated() if self._device.type == "cuda" else 0

    def _time(self, function: Callable[[], Any]) -> float:
        if self._device.type != "cuda":
            began = time.perf_counter()
            function()
            return time.perf_counter() - began
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1000


def variants(batch: Batch) -> dict[str, Callable[[], Any]]:
    """What is timed; the first is the bound."""
    hidden, weight = batch.hidden.detach(), batch.weight.detach()

    @torch.no_grad()
    def products() -> None:
        """In chunks, since no one holds all logits; in the dtype of the inputs."""
        for rows in hidden.split(2048):
            logits = rows @ weight.T
            _ = logits @ weight
            del _
            _ = logits.T @ rows

    def usual() -> None:
        """What most trainers do: 16-bit logits, log-softmax in float32, nothing but the log-prob."""
        batch.hidden.grad = batch.weight.grad = None
        logits = (batch.hidden @ batch.weight.T).float()
        logp = torch.log_softmax(logits, -1).gather(-1, batch.behaviour.ids[:, :1])[:, 0]
        ratio = (logp - batch.behaviour.logp[:, 0]).exp()
        (-(ratio * batch.advantage).mean()).backward()

    @torch.no_grad()
    def statistics() -> None:
        support_statistics(batch.hidden, batch.weight, batch.behaviour, backend="triton")

    def triton(**options: Any) -> None:
        with settings(**options):
            batch.loss("triton")

    buffer: list[Tensor] = []

    def into_buffer() -> None:
        if not buffer:
            buffer.append(torch.zeros_like(weight, dtype=torch.float32))
        batch.weight.requires_grad_(False)
        try:
            batch.loss("triton", weight_grad=buffer[0])
        finally:
            batch.weight.requires_grad_(True)

    return {
        "the three products alone": products,
        **{f"triton, workspace {size} GiB": partial(triton, workspace=size) for size in WORKSPACES},
        "triton, product in the kernel": partial(triton, product=True),
        "triton, into a float32 buffer": into_buffer,
        "triton, statistics without gradient": statistics,
        "chunked": lambda: batch.loss("chunked"),
        "all logits, log-prob alone": usual,
        "all logits, statistics (dense)": lambda: batch.loss("dense"),
    }


def timings(shape: Shape, device: torch.device, clock: Clock) -> None:
    """Print time and memory of every variant."""
    batch = Batch.of(shape, torch.bfloat16, device)
    dropped = float(batch.loss("triton").decision.dropped.float().mean())
    print(f"## bfloat16, {shape}, K = {TOP_K}; {dropped:.0%} of the tokens are dropped\n")
    print("| | ms | over the products | peak GiB | TFLOP/s of products | runs |")
    print("|---|---|---|---|---|---|")
    bound: float | None = None
    for label, function in variants(batch).items():
        if clock.left <= 0:
            print(f"| {label} | skipped: the time budget is used | | | | |", flush=True)
            continue
        try:
            times, peak = clock.run(function)
        except torch.OutOfMemoryError:
            print(f"| {label} | out of memory | | | | |", flush=True)
            torch.cuda.empty_cache()
            continue
        finally:
            batch.hidden.grad = batch.weight.grad = None
        seconds = median(times)
        bound = seconds if bound is None else bound
        rate = shape.product_flop / seconds / 1e12
        print(
            f"| {label} | {1000 * seconds:.2f} | {seconds / bound:.2f} | {peak:.2f} | {rate:.1f} | {len(times)} |",
            flush=True,
        )
    print("\nMedians; peak: beyond inputs. Rows without gradient form one of the three products.\n")


def profile(shape: Shape, device: torch.device) -> None:
    """Print which kernels take the time."""
    batch = Batch.of(shape, torch.bfloat16, device)
    batch.loss("triton")
    with torch.profiler.profile() as found:
        batch.loss("triton")
    sort = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    print(f"## Kernels, {shape}\n\n```\n{found.key_averages().table(sort_by=sort, row_limit=15)}\n```\n")


def arguments() -> argparse.Namespace:
    """What the command line asks for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog=EPILOG
    )
    parser.add_argument(
        "--seconds", type=float, default=240, help="time budget; what does not fit is skipped (default: 240)"
    )
    parser.add_argument("--repeats", type=int, default=9, help="timed runs of each variant (default: 9)")
    parser.add_argument("--profile", action="store_true", help="also list the kernels that take the time")
    parser.add_argument(
        "--tiny",
        action="store_true",
        help="tiny sizes: without a GPU the kernels are interpreted on the CPU, which tries this script and nothing "
        "else; its times mean nothing",
    )
    return parser.parse_args()


EPILOG = """\
reading the table:
  over the products   time over that of the three products alone; 1 is the bound, and a token that is dropped or has no
                      advantage takes only a third of its share, so that less than 1 is possible
  peak GiB            beyond inputs: gradients (the weight's in float32, then in bfloat16) and the workspace
  workspace           larger chunks add to the weight's float32 gradient fewer times: each time it is read and written
                      (2.5 GB each way at D = 4,096)

A GPU with 80 GiB fits everything; what does not fit is reported as out of memory and skipped.
"""


def main() -> int:
    """The exit status."""
    asked = arguments()
    if find_spec("triton") is None:
        print("gpu_check needs triton: pip install triton (torch's wheels for GPUs bring it)", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        if not asked.tiny:
            print("gpu_check needs a CUDA GPU, and torch sees none; --tiny tries it out on the CPU", file=sys.stderr)
            return 2
        os.environ["TRITON_INTERPRET"] = "1"
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    clock = Clock(asked.seconds, asked.repeats, device)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU, kernels interpreted"
    import triton  # pyright: ignore[reportMissingImports]

    print(f"# GPU check: {name}, torch {torch.__version__}, triton {triton.__version__}\n")
    passed = parity(TINY_PARITY if asked.tiny else PARITY, device)
    for shape in TINY_TIMED if asked.tiny else TIMED:
        timings(shape, device, clock)
        if asked.profile:
            profile(shape, device)
    if not passed:
        print("PARITY FAILED: errors above the limits, see the first table", file=sys.stderr)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
