"""Write DAPO-Math-17k, AIME24 and AIME25 as verl reads them: `python recipes/verl/make_data.py DIR`.

It needs predmask[math], which wants another transformers than verl: run it in an environment of its own. Each question
of the training data is written once, and none that is in AIME24 or AIME25.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from predmask.tasks import Problem
from predmask.tasks.math import Math

# DAPO-Math-17k has these words around each question; verl's scoring of it looks for them in the answer.
BEFORE = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
AFTER = '\n\nRemember to put your answer on its own line after "Answer:".'
TRAIN = ("BytedTsinghua-SIA/DAPO-Math-17k@train",)
HELD_OUT = {"aime24": "HuggingFaceH4/aime_2024@train", "aime25": "math-ai/aime25@test"}


def write(path: Path, problems: Iterable[Problem], data_source: str) -> int:
    """Write the problems, and return how many; verl chooses how to score them by `data_source`."""
    rows = [
        {
            "data_source": data_source,
            "prompt": [{"role": "user", "content": _asked(problem.prompt)}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(problem.reference)},
            "extra_info": {"index": number, "id": problem.id},
        }
        for number, problem in enumerate(problems)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return len(rows)


def _asked(question: str) -> str:
    return question if "Answer:" in question else f"{BEFORE}{question}{AFTER}"


def main(directory: Path, train: tuple[str, ...] = TRAIN, held_out: dict[str, str] = HELD_OUT) -> None:
    """Write all three files into the directory."""
    trained = Math(data=train, heldout_data=tuple(held_out.values())).problems("train")
    files = {"dapo-math-17k": ("math_dapo", trained)}
    for name, source in held_out.items():
        files[name] = (name, Math(heldout_data=(source,)).problems("heldout"))
    for name, (data_source, problems) in files.items():
        path = directory / f"{name}.parquet"
        print(f"{write(path, problems, data_source):>7,} problems in {path}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(f"usage: {sys.argv[0]} DIR")
    main(Path(sys.argv[1]))
