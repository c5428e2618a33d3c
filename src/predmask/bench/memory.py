"""Peak memory of a variant, beyond its inputs and the gradients that it leaves.

On a CPU each variant runs in a process of its own, in which nothing has run before; Linux counts the peak.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import torch

from predmask.bench.cases import BenchError, Inputs
from predmask.bench.variants import VARIANTS, Variant, run, why_not

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")


def peak_in_new_process(name: str, folder: Path) -> int | None:
    """Bytes, for the inputs that were saved to `folder`; None where the system does not count them.

    Raises BenchError where the process fails, as for want of memory.
    """
    command = [sys.executable, "-m", "predmask.bench.memory", name, str(folder), str(torch.get_num_threads())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise BenchError(f"{name} failed in a process of its own: {reason}")
    return json.loads(done.stdout.splitlines()[-1])


def peak(variant: Variant, inputs: Inputs) -> int | None:
    """Bytes, in this process. Run the variant on something small before."""
    inputs.release()
    variant.prepare(inputs)
    if inputs.hidden.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run(variant, inputs)
        found = torch.cuda.max_memory_allocated()
    else:
        try:
            _CLEAR.write_text("5")  # from now on the peak counts from here
            before = _status("VmRSS")
            run(variant, inputs)
            found = _status("VmHWM")
        except OSError:
            return None
    gradients = [values.grad for values in (inputs.hidden, inputs.weight) if values.grad is not None]
    return max(0, found - before - sum(gradient.numel() * gradient.element_size() for gradient in gradients))


def _status(name: str) -> int:
    """Bytes."""
    (line,) = (line for line in _STATUS.read_text().splitlines() if line.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


def available(device: str) -> int | None:
    """Bytes that are free; None where that is not known."""
    if device == "cuda":
        return torch.cuda.mem_get_info()[0]
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None)


def main() -> None:
    """The new process: print the bytes."""
    name, folder, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    why_not(name)  # loads what it needs
    print(json.dumps(peak(VARIANTS[name], Inputs.load(Path(folder)))))


if __name__ == "__main__":
    main()
