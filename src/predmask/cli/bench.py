"""`predmask bench`: speed and memory, side by side with what others offer."""

from __future__ import annotations

import argparse
import shutil
import sys
from typing import Any

from predmask.cli.numbers import above_zero, positive
from predmask.cli.outputs import add_output_arguments, check_outputs, say_written

_WAYS = """\
ops measures one policy-gradient loss, from hidden states [N, D] and a head's weight [V, D] to both gradients. A round
runs each variant once, in an order of its own. The time is the median over rounds, and "× bound" the median of the
ratios to the three matrix products of the same round (with the least and the largest). Peak memory is that of a process
of its own for each variant (on Linux), beyond inputs and gradients. The last column is the largest distance of the
sampled tokens' log-probs to float64: it shows who rounds logits to 16 bits.

Nothing is masked in this batch: tokens that are dropped or have no advantage would only make predmask faster.
Peers are measured where they are installed (pip install liger-kernel trl verl; torch 2.13 or newer).

variants:
  gemm                  the three matrix products alone, into memory that is there already: the bound, always measured
  predmask              masked_policy_loss with the predictive rule and its exact tail
  predmask-buffer       the same, the weight's gradient added to a buffer
  predmask-logp         the same pass with nothing but the sampled tokens' log-probs, to see what statistics cost
  statistics            support_statistics, without gradients
  dense                 all logits at once, log-probs by autograd
  dense-statistics      all logits at once, the same statistics and mask
  checkpoint            the same a chunk of tokens at a time, with torch.utils.checkpoint
  liger, trl, verl      LigerFusedLinearGRPOLoss, TRL's fused head of its GRPO trainer, verl's FusedLinearForPPO
  torch, torch-256      linear_cross_entropy with chunks of its own choice (very slow: only when named), or of 256

examples:
  predmask bench ops                                         two to three minutes on two CPU cores
  predmask bench ops --tokens 512 2048 --dtype float32 bfloat16 --rounds 7 --limit 30 --figure ops.svg
  predmask bench ops --only predmask predmask-logp dense     what statistics cost, and what dense logits cost
  predmask bench ops --vocabulary 20000 --no-memory          a first look, in half a minute
"""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = subparsers.add_parser(
        "bench",
        help="speed and memory of the operator, side by side with peers",
        description="Measure on this machine.",
        epilog="`predmask bench ops --help` explains what is measured.",
    )
    which = parser.add_subparsers(metavar="WHAT", required=True)
    ops = which.add_parser(
        "ops",
        help="the fused operator: from hidden states to loss, statistics and gradients",
        description="Time and peak memory of the fused operator, side by side with peers.",
        epilog=_WAYS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    ops.add_argument(
        "--tokens", type=positive, nargs="+", default=[256], metavar="N", help="tokens of the batch (default: 256)"
    )
    ops.add_argument("--hidden-size", type=positive, default=1024, metavar="D", help="default: 1024")
    ops.add_argument("--vocabulary", type=positive, default=151_936, metavar="V", help="default: 151936 (Qwen3)")
    ops.add_argument(
        "--top-k",
        type=positive,
        default=20,
        metavar="K",
        help="likeliest tokens that the engine recorded (default: 20)",
    )
    ops.add_argument(
        "--dtype",
        nargs="+",
        default=["float32"],
        choices=("float32", "bfloat16"),
        help="of hidden states and weight (default: float32)",
    )
    ops.add_argument(
        "--rounds", type=positive, default=3, help="rounds that count, after one that does not (default: 3)"
    )
    ops.add_argument(
        "--limit",
        type=above_zero,
        metavar="SECONDS",
        help="leave a variant out of further rounds once it has taken this long (the bound stays)",
    )
    ops.add_argument("--threads", type=positive, help="CPU threads (default: all cores)")
    ops.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    ops.add_argument("--only", nargs="+", metavar="NAME", help="only these variants, and the bound")
    ops.add_argument("--cpu-time", action="store_true", help="CPU time instead of wall time, on a busy machine")
    ops.add_argument("--no-memory", action="store_true", help="do not measure peak memory")
    add_output_arguments(ops)
    return parser


def run(args: argparse.Namespace) -> int:
    """Measure, and print a table for each configuration."""
    import torch

    from predmask.bench import BenchError, Case, figure, heading, measure, table, write_json

    check_outputs(args)
    device = args.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise BenchError("device cuda: PyTorch finds no CUDA device here")
    if args.threads:
        torch.set_num_threads(args.threads)
    cases = [
        Case(
            tokens=tokens,
            hidden_size=args.hidden_size,
            vocabulary=args.vocabulary,
            top_k=args.top_k,
            dtype=dtype,
            device=device,
        )
        for dtype in args.dtype
        for tokens in args.tokens
    ]
    clock = "cpu" if args.cpu_time else "wall"
    results = []
    for case in cases:
        progress = Progress()
        result = measure(
            case, args.only, rounds=args.rounds, limit=args.limit, memory=not args.no_memory, progress=progress
        )
        progress.close()
        results.append(result)
        if len(results) == 1:
            print(heading(results))
        print("\n" + table(result, clock), flush=True)
        if args.json:
            write_json(args.json, results)
    if args.figure:
        figure.draw(results, args.figure, clock)
    say_written(args)
    return 0


class Progress:
    """What is being measured: one line that changes on a terminal, else a line for each step."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()

    def __call__(self, text: str, keep: bool) -> None:
        """Show it."""
        if self._terminal:
            text = text[: shutil.get_terminal_size().columns - 1]
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
        elif keep:
            print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Leave an empty line to what follows."""
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
