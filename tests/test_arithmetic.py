"""The arithmetic task and the model that ships with it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from predmask.tasks.arithmetic import Arithmetic
from predmask.tasks.base import Problem, Task

MODEL = Path(str(files("predmask") / "data" / "arithmetic"))
PROBLEM = Problem(id="3141+2718", prompt="3 1 4 1 + 2 7 1 8 =", reference="05859")
WORKED = "so 1 8 9 0 now 4 1 5 0 then 1 7 8 0 so 3 2 5 0 ANS 0 5 8 5 9 <eos>"


def operands(problem: Problem) -> tuple[int, int]:
    left, right = problem.prompt.removesuffix(" =").split(" + ")
    return int(left.replace(" ", "")), int(right.replace(" ", ""))


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(MODEL)


def test_is_a_task():
    assert isinstance(Arithmetic(), Task)


@pytest.mark.parametrize(
    "task",
    [
        Arithmetic(),
        Arithmetic(digits=1, train_problems=75, heldout_problems=3),
        Arithmetic(digits=2, train_problems=7500, heldout_problems=312),
        Arithmetic(digits=9, train_problems=50, heldout_problems=50),
    ],
    ids=lambda task: f"{task.digits} digits",
)
def test_splits_are_distinct_and_disjoint(task: Arithmetic):
    train, heldout = task.problems("train"), task.problems("heldout")
    assert len({p.id for p in train}) == len({p.prompt for p in train}) == len(train) == task.train_problems
    assert len({p.id for p in heldout}) == len(heldout) == task.heldout_problems
    unordered = [{frozenset(operands(p)) for p in split} for split in (train, heldout)]
    assert not unordered[0] & unordered[1]


def test_references_are_the_sums():
    for problem in Arithmetic(train_problems=500).problems("train"):
        assert re.fullmatch(r"(\d ){4}\+( \d){4} =", problem.prompt)
        assert re.fullmatch(r"\d{5}", problem.reference)
        assert int(problem.reference) == sum(operands(problem))


def test_problems_are_the_same_in_another_process():
    """Python salts its own hash anew in each process; the splits must not depend on it."""
    code = (
        "from predmask.tasks.arithmetic import Arithmetic; t = Arithmetic(train_problems=40, heldout_problems=40);"
        "print(*(p.id for s in ('train', 'heldout') for p in t.problems(s)))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    here = Arithmetic()
    ids = [p.id for split in ("train", "heldout") for p in here.problems(split)[:40]]
    assert printed == {" ".join(ids) + "\n"}


def test_the_embedded_models_splits_stay_as_they_were():
    """The shipped model saw the train problems: other splits would let it be measured on what it has seen."""
    task = Arithmetic()
    assert [p.id for p in task.problems("train")[:3]] == ["9879+9142", "8806+4057", "2098+0796"]
    assert [p.id for p in task.problems("heldout")[:3]] == ["8529+6949", "7254+4877", "6778+2578"]


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"digits": 0}, "digits"),
        ({"train_problems": 0}, "train_problems"),
        ({"heldout_problems": -1}, "heldout_problems"),
        ({"digits": 1}, "train_problems"),
        ({"digits": 2, "train_problems": 7501}, "train_problems"),
        ({"digits": 2, "train_problems": 1, "heldout_problems": 313}, "heldout_problems"),
    ],
)
def test_settings_without_enough_problems_are_refused(settings: dict[str, int], field: str):
    with pytest.raises(ValueError, match=rf"^{field} is -?\d+; it must be 1 "):
        Arithmetic(**settings)


@pytest.mark.parametrize(
    "response",
    [
        WORKED,
        WORKED.removesuffix(" <eos>"),
        "ANS 0 5 8 5 9",
        "ANS 05859",
        "ANS 1 2 ANS 0 5 8 5 9 <eos>",
        "ANS 0 5 8 5 9 <eos> ANS 1 1 1 1 1 <eos>",
    ],
)
def test_right_answers_score(response: str):
    assert Arithmetic().score(PROBLEM, response) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "ANS",
        "<eos>",
        "0 5 8 5 9 <eos>",
        "ANS 0 5 8 5 8 <eos>",
        "ANS 5 8 5 9 <eos>",
        "ANS 0 5 8 5 9 0 <eos>",
        "ANS 0 5 8 5 9 so <eos>",
        "ANS so 0 5 8 5 9 <eos>",
        "ANS 0 5 8 5 9 ANS <eos>",
        "ANS 0 5 8 5 9 ANS 0 5 8 5 0 <eos>",
        "<eos> ANS 0 5 8 5 9",
        "ANS ٠ ٥ ٨ ٥ ٩ <eos>",
    ],
)
def test_wrong_answers_do_not_score(response: str):
    assert Arithmetic().score(PROBLEM, response) == 0.0


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        (WORKED, "05859"),
        ("ANS 05859", "05859"),
        ("ANS 1 2 ANS 0 5 8 5 9 <eos> ANS 1", "05859"),
        ("ANS 5 so 8", "5so8"),
        ("0 5 8 5 9", None),
        ("ANS <eos> 0 5 8 5 9", None),
        ("", None),
    ],
)
def test_answers_count_as_equal_by_what_is_scored(response: str, answer: str | None):
    assert Arithmetic().answer(response) == answer


@given(st.lists(st.one_of(st.sampled_from([*"0123456789", "ANS", "<eos>", "so"]), st.text())).map(" ".join))
def test_any_text_gets_a_score(response: str):
    """Only a text that holds the right digits in a row can score, and the score is never anything but 0 or 1."""
    score = Arithmetic().score(PROBLEM, response)
    assert score in (0.0, 1.0)
    assert score == 0.0 or "ANS05859" in "".join(response.split())


@given(st.text().filter(lambda text: "ANS" not in text and "<eos>" not in text), st.text())
def test_what_stands_before_the_answer_and_after_the_end_is_free(thoughts: str, rest: str):
    assert Arithmetic().score(PROBLEM, f"{thoughts} ANS 0 5 8 5 9 <eos>{rest}") == 1.0


def test_the_tokenizer_keeps_prompts_and_responses(tokenizer):
    assert len(tokenizer) == 64
    assert (tokenizer.pad_token, tokenizer.eos_token) == ("<pad>", "<eos>")
    for problem in Arithmetic(train_problems=100).problems("train"):
        ids = tokenizer.encode(problem.prompt)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == problem.prompt
    ids = tokenizer.encode(WORKED)
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids) == WORKED
    text = tokenizer.decode([*ids, tokenizer.pad_token_id], skip_special_tokens=True)
    assert text == WORKED.removesuffix(" <eos>")
    assert Arithmetic().score(PROBLEM, text) == 1.0


def test_the_tokenizer_pads_prompts_on_the_left(tokenizer):
    batch = tokenizer(["1 + 2 =", "1 0 + 2 0 ="], padding=True)
    assert batch["input_ids"][0][:2] == [tokenizer.pad_token_id] * 2
    assert batch["attention_mask"][0] == [0, 0, 1, 1, 1, 1]


def test_the_model_is_tiny_tied_and_fits_the_tokenizer(model, tokenizer):
    assert model.config.vocab_size == len(tokenizer)
    assert model.num_parameters() == 353_024
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert model.generation_config.pad_token_id == tokenizer.pad_token_id


def test_the_model_adds_sometimes_but_not_greedily(model, tokenizer):
    """The start that reinforcement learning needs: right responses are there, and are not the likeliest ones."""
    task = Arithmetic()
    problems = task.problems("heldout")
    prompts = tokenizer([problem.prompt for problem in problems], return_tensors="pt")

    def respond(**sampling) -> tuple[float, torch.Tensor]:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            output = model.generate(**prompts, max_new_tokens=48, **sampling)
        responses = output[:, prompts["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(responses, skip_special_tokens=True)
        scores = [task.score(problem, text) for problem, text in zip(problems, texts, strict=True)]
        return sum(scores) / len(scores), responses

    sampled, responses = respond(do_sample=True, temperature=1.0, top_k=0)
    assert 0.12 < sampled < 0.30
    ended = (responses == tokenizer.eos_token_id).any(-1)
    assert ended.float().mean() > 0.98
    greedy, _ = respond(do_sample=False)
    assert greedy <= 0.03


def test_the_model_gives_mass_to_words_beyond_the_top_20(model, tokenizer):
    """An engine shows 20 log-probs: where a worked solution starts a column, the rest is worth estimating."""
    ids = torch.tensor([tokenizer.encode(f"{PROBLEM.prompt} so 1 8 9 0")])
    with torch.inference_mode():
        probabilities = model(input_ids=ids).logits[0, -1].softmax(-1)
    tail = 1.0 - probabilities.topk(20).values.sum().item()
    assert 0.04 < tail < 0.10
