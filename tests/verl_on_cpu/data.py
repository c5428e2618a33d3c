"""What a run reads: the embedded model with a tokenizer that verl takes, and the embedded task in verl's format."""

import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from transformers import AutoTokenizer

from predmask.tasks.arithmetic import Arithmetic

MODEL = Path(__file__).parents[2] / "src" / "predmask" / "data" / "arithmetic"


def write_model(directory):
    """The embedded model; a chat with its tokenizer is the question and nothing else."""
    shutil.copytree(MODEL, directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    # verl looks for these two in every Qwen, and uses them where a chat has several turns.
    tokenizer.add_tokens(["<|im_end|>", "\n"])
    tokenizer.chat_template = "{{ messages[0]['content'] }}"
    tokenizer.save_pretrained(directory)


def write_questions(path, split, count):
    problems = Arithmetic().problems(split)[:count]
    rows = [
        {
            "data_source": "arithmetic",
            "prompt": [{"role": "user", "content": problem.prompt}],
            "reward_model": {"style": "rule", "ground_truth": problem.reference},
            "extra_info": {"index": index},
        }
        for index, problem in enumerate(problems)
    ]
    pq.write_table(pa.Table.from_pylist(rows), path)
