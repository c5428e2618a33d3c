"""Evaluation: what engines are asked, and what their answers come to."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from helpers_math import laid_out, write_rows
from helpers_training import ShuffledEngine
from predmask.rollout import Rollout, RolloutError, Sampling, TransformersConfig
from predmask.tasks import Arithmetic, Problem
from predmask.tasks.math import Math
from predmask.tasks.verifier import Verifier, VerifierError
from predmask.train import Config
from predmask.train.config import ConfigError, PromptConfig, RolloutConfig
from predmask.train.evaluate import Answer, Evaluation, evaluate, ks, within_context
from predmask.train.evaluate_model import evaluate_model
from predmask.train.evaluation_files import AnswersFile, answer_row, problem_row, write_table
from predmask.train.models import load_policy
from predmask.train.prompts import Prompts

CUT = "…"


@dataclass(frozen=True, kw_only=True)
class Mute:
    """A question mark cannot be scored, and a part of the answer earns half; answers cannot be compared."""

    inline_verifier: ClassVar[bool] = True

    def problems(self, split: str) -> Sequence[Problem]:
        return ()

    def score(self, problem: Problem, response: str) -> float | None:
        if "?" in response:
            return None
        return 1.0 if response == problem.reference else 0.5 * float(response != "" and response in problem.reference)


@dataclass(frozen=True, kw_only=True)
class Quoted(Mute):
    """The same, where a response is its own answer."""

    def answer(self, response: str) -> str | None:
        return response or None


class Letters:
    """A prompt is the place of its problem, a response its letters."""

    def encode(self, problems: Sequence[Problem]) -> list[list[int]]:
        return [[place + 1] for place, _ in enumerate(problems)]

    def decode(self, responses: Sequence[Sequence[int]]) -> list[str]:
        return ["".join(map(chr, response)) for response in responses]


class ScriptedEngine:
    """Answers from lists, one for each problem: the greedy response first. `…` at the end says that it was cut."""

    def __init__(self, script: Sequence[Sequence[str]]) -> None:
        self.script = script
        self.given = [0] * len(script)
        self.asked: list[tuple[int, Sampling, int]] = []

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling, generator: torch.Generator) -> Rollout:
        self.asked.append((len(prompts), sampling, generator.initial_seed()))
        texts = []
        for (token,) in prompts:
            place = token - 1
            number = 0 if sampling.temperature == 0 else 1 + self.given[place]
            self.given[place] += sampling.temperature > 0
            texts.append(self.script[place][number])
        tokens = torch.tensor([ord(letter) for text in texts for letter in text])
        return Rollout(
            prompts=tuple(tuple(prompt) for prompt in prompts),
            lengths=torch.tensor([len(text) for text in texts]),
            tokens=tokens,
            logp=torch.zeros(len(tokens)),
            topk_ids=torch.zeros(len(tokens), 0, dtype=torch.int64),
            topk_logp=torch.zeros(len(tokens), 0),
            sampled=torch.ones_like(tokens, dtype=torch.bool),
            version=torch.zeros_like(tokens),
            finished=torch.tensor([not text.endswith(CUT) for text in texts]),
        )

    def update_weights(self, model: torch.nn.Module, version: int) -> None: ...

    def close(self) -> None: ...


def scripted(script: Sequence[Sequence[str]], task: Any = None, *, gold: str = "yes", **settings: Any) -> Evaluation:
    """An evaluation of problems that all have the same right answer."""
    task = task or Quoted()
    problems = [Problem(id=f"p{place}", prompt=f"question {place}", reference=gold) for place in range(len(script))]
    engine: Any = settings.pop("engine", None) or ScriptedEngine(script)
    prompts: Any = Letters()
    asked = {"samples": len(script[0]) - 1, "temperature": 0.7, "max_new_tokens": 9, "seed": 0, **settings}
    with Verifier(task) as verifier:
        return evaluate(engine, prompts, problems, verifier, **asked)


#                greedy  samples
BY_HAND = [
    ["yes", "yes", "yes", "no", "yes"],
    ["no", "no…", "yes", "no", "es"],
    ["no…", "a?", "yes", "yes", "b?"],
]


def test_figures_by_hand() -> None:
    found = scripted(BY_HAND).accuracy
    assert found.greedy == pytest.approx(1 / 3)
    assert found.sampled == pytest.approx((3 / 4 + 1 / 4 + 2 / 4) / 3)
    assert found.sampled_error == pytest.approx(np.std([0.75, 0.25, 0.5], ddof=1) / math.sqrt(3))
    assert found.pass_at_k == pytest.approx({1: 0.5, 2: (1 + 1 / 2 + 5 / 6) / 3, 4: 1.0})
    assert found.pass_at_n == found.pass_at_k[4]
    # yes; a tie of four; yes, since each unscored answer is another one.
    assert found.majority == pytest.approx((1 + 1 / 4 + 1) / 3)
    assert (found.prompts, found.samples, found.unscored) == (3, 4, 2)
    assert found.truncated == pytest.approx(1 / 12)
    assert found.length == pytest.approx(np.mean([3, 3, 2, 3, 3, 3, 2, 2, 2, 3, 3, 2]))
    assert found.intervals == {}


@given(
    st.integers(1, 6).flatmap(
        lambda n: st.lists(
            st.lists(st.sampled_from(["yes", "no", "maybe", "y", "?", "…"]), min_size=n + 1, max_size=n + 1),
            min_size=1,
            max_size=5,
        )
    )
)
def test_figures_are_those_of_every_draw(script: list[list[str]]) -> None:
    if all("?" in response for row in script for response in row[:1]):
        script = [["no", *row[1:]] for row in script]
    if all("?" in response for row in script for response in row[1:]):
        script = [[row[0], "no", *row[2:]] for row in script]
    found = scripted(script)
    rows = [row[1:] for row in script]
    n = len(rows[0])
    for k, value in found.accuracy.pass_at_k.items():
        draws = [["yes" in draw for draw in itertools.combinations(row, k)] for row in rows]
        assert value == pytest.approx(np.mean([np.mean(each) for each in draws]))
    assert found.accuracy.sampled == pytest.approx(np.mean([row.count("yes") / n for row in rows]))
    shares = []
    for row in rows:
        winners = [answer for answer in {*row} if row.count(answer) == max(map(row.count, row))]
        shares.append(("yes" in winners) / len(winners))
    assert found.accuracy.majority == pytest.approx(np.mean(shares))
    assert found.accuracy.truncated == pytest.approx(np.mean([[text == CUT for text in row] for row in rows]))
    assert found.accuracy.unscored == sum(text == "?" for row in script for text in row)
    assert found.unscored() == ({"declined": found.accuracy.unscored} if found.accuracy.unscored else {})


def test_partial_credit_is_not_right() -> None:
    assert scripted([["ye", "ye", "yes"]]).accuracy.sampled == 0.5


def test_one_problem_and_one_sample() -> None:
    found = scripted([["no", "yes"]]).accuracy
    assert (found.greedy, found.sampled, found.pass_at_n, found.majority) == (0, 1, 1, 1)
    assert found.sampled_error is None
    assert found.pass_at_k == {1: 1.0}
    assert found.intervals == {}
    assert found.figures()["avg@1"] == (1.0, None, None)


@pytest.mark.parametrize(("samples", "expected"), [(1, [1]), (2, [1, 2]), (6, [1, 2, 4, 6]), (16, [1, 2, 4, 8, 16])])
def test_pass_at_k_is_shown_by_powers_of_two_and_at_the_end(samples: int, expected: list[int]) -> None:
    assert ks(samples) == expected


def test_a_majority_needs_answers_that_can_be_compared() -> None:
    assert scripted([["yes", "yes", "yes"]], Mute()).accuracy.majority is None
    silent = scripted([["yes", "", ""]]).accuracy
    assert silent.majority is None
    assert "maj@2" not in silent.figures()
    assert scripted([["yes", "", ""], ["yes", "no", ""]]).accuracy.majority == 0.0


def test_intervals_are_those_of_a_bootstrap_over_problems() -> None:
    generator = np.random.RandomState(5)
    script = [
        ["yes" if generator.rand() < rate else "no" for _ in range(5)] for rate in generator.uniform(0, 1, size=40)
    ]
    found = scripted(script).accuracy
    averages = np.array([row[1:].count("yes") / 4 for row in script])
    resampler = np.random.RandomState(0)
    means = [averages[resampler.randint(40, size=40)].mean() for _ in range(4000)]
    assert found.intervals["avg@4"] == pytest.approx(np.percentile(means, [2.5, 97.5]))
    assert set(found.intervals) == {"greedy", "avg@4", "pass@1", "pass@2", "pass@4", "maj@4"}
    for name, (value, low, high) in found.figures().items():
        assert value is not None
        assert low is not None
        assert high is not None
        assert low <= value <= high, name
    assert found.intervals["avg@4"] == found.intervals["pass@1"]


def test_no_intervals_of_few_problems_nor_of_problems_that_are_alike() -> None:
    assert scripted([["yes", "no", "yes"], ["no", "no", "no"]] * 4).accuracy.intervals == {}
    alike = scripted([["no", "no", "yes"]] * 12).accuracy
    assert alike.intervals == {}
    assert alike.figures()["pass@2"] == (1.0, None, None)


def test_problems_of_the_same_id_stay_apart() -> None:
    prompts: Any = Letters()
    problems = [Problem(id="twice", prompt="?", reference=gold) for gold in ("yes", "no")]
    with Verifier(Quoted()) as verifier:
        engine: Any = ScriptedEngine([["yes", "yes"], ["yes", "no"]])
        found = evaluate(
            engine,
            prompts,
            problems,
            verifier,
            samples=1,
            temperature=1.0,
            max_new_tokens=4,
            seed=0,
        )
    assert [result.hits for result in found.results] == [[1], [1]]
    assert [result.greedy.right for result in found.results] == [True, False]
    assert [answer.place for answer in found.answers] == [0, 0, 1, 1]


@pytest.mark.slow
def test_mathematics_by_hand(tmp_path: Path) -> None:
    """Fractions vote together however they are written, and a response without an answer does not vote."""
    pytest.importorskip("math_verify")
    questions = [("What is a half of 1?", "1/2"), ("What is 10 times 100?", "1000")]
    task = Math(heldout_data=(str(write_rows(tmp_path / "aime.jsonl", laid_out("aime", questions))),))
    half = [r"\boxed{\frac12}", r"so \boxed{0.5}", r"\boxed{\frac{2}{4}}", r"\boxed{2}", r"\boxed{2"]
    thousand = [r"\boxed{1…", r"\boxed{999}", r"\boxed{1,000}", r"\boxed{1", r"\boxed{999"]
    engine: Any = ScriptedEngine([half, thousand])
    prompts: Any = Letters()
    with Verifier(task) as verifier:
        found = evaluate(
            engine, prompts, task.problems("heldout"), verifier, samples=4, temperature=1.0, max_new_tokens=99, seed=0
        )
    assert [result.hits for result in found.results] == [[1, 1, 0, 0], [0, 1, 0, 0]]
    assert [result.greedy.right for result in found.results] == [True, False]
    assert [result.majority for result in found.results] == [1.0, 0.5]
    assert found.accuracy.pass_at_k == pytest.approx({1: 3 / 8, 2: (5 / 6 + 1 / 2) / 2, 4: 1.0})
    assert found.accuracy.unscored == 0


# --- asking --------------------------------------------------------------------------------------------------


def test_the_engine_is_asked_in_batches_and_what_came_is_told_at_once() -> None:
    script = [[f"{place}{number}" for number in range(6)] for place in range(7)]
    engine = ScriptedEngine(script)
    told: list[tuple[list[Answer], int, int]] = []
    found = scripted(
        script,
        engine=engine,
        batch_size=8,
        progress=lambda answers, total: told.append((list(answers), total, len(engine.asked))),
    )
    assert [size for size, _, _ in engine.asked] == [7, 7, 7, 7, 7, 7]  # 7 greedy, 35 sampled in even parts
    assert [sampling.temperature for _, sampling, _ in engine.asked] == [0, 0.7, 0.7, 0.7, 0.7, 0.7]
    assert {(sampling.max_new_tokens, sampling.top_k) for _, sampling, _ in engine.asked} == {(9, 0)}
    assert [(len(answers), total, asked) for answers, total, asked in told] == [(7, 42, n) for n in range(1, 7)]
    # Whatever the batches: each response is with its problem, in the order of sampling.
    assert [[answer.response for answer in (row.greedy, *row.samples)] for row in found.results] == script
    assert [answer.sample for answer in found.results[3].samples] == [1, 2, 3, 4, 5]
    assert found.results[3].greedy.sample is None
    together = [answer for answers, _, _ in told for answer in answers]
    assert sorted(together, key=lambda answer: (answer.place, answer.sample or 0)) == found.answers


def test_a_batch_without_a_score_is_an_error_until_something_was_scored() -> None:
    """What was answered is told before: with an engine, it may have taken hours."""
    told: list[str] = []
    settings: dict[str, Any] = {"progress": lambda answers, total: told.extend(answer.response for answer in answers)}
    with pytest.raises(VerifierError, match=r"none of the 2 answers .* by the task Quoted.* returned None"):
        scripted([["a?", "yes"], ["b?", "yes"]], **settings)
    assert told == ["a?", "b?"]
    assert scripted([["yes", "a?"], ["no", "b?"]], **settings).accuracy.unscored == 2


@pytest.mark.parametrize(("count", "raises"), [(7, False), (8, True)])
def test_few_problems_may_all_be_faulty(count: int, raises: bool) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Failing(Mute):
        def score(self, problem: Problem, response: str) -> float | None:
            return 1.0 / len(response.removeprefix("?"))

    script = [["x", "?"]] * count
    if raises:
        with pytest.raises(VerifierError, match=r"none of the 8 answers .*'p0': ZeroDivisionError"):
            scripted(script, Failing())
    else:
        assert scripted(script, Failing()).unscored() == {"raised": 7}


def test_random_numbers_are_the_seeds() -> None:
    seeds = []
    for seed in (3, 3, 4):
        engine = ScriptedEngine(BY_HAND)
        scripted(BY_HAND, engine=engine, seed=seed)
        seeds.append({initial for _, _, initial in engine.asked})
    assert seeds[0] == seeds[1]
    assert len(seeds[0]) == 1
    assert seeds[0] != seeds[2]


def test_answers_to_other_prompts_are_refused() -> None:
    model, tokenizer = load_policy("embedded", torch.device("cpu"))
    problems = Arithmetic().problems("heldout")[:3]
    with Verifier(Arithmetic()) as verifier, pytest.raises(RolloutError, match="other prompts"):
        evaluate(
            ShuffledEngine(model),
            Prompts(tokenizer, PromptConfig()),
            problems,
            verifier,
            samples=1,
            temperature=1.0,
            max_new_tokens=4,
            seed=0,
        )


def test_responses_are_cut_to_the_context() -> None:
    model, _ = load_policy("embedded", torch.device("cpu"))
    context = model.config.max_position_embeddings
    config = Config(rollout=RolloutConfig(max_new_tokens=10_000))
    assert within_context(config, [model], [[1], [1, 2, 3]]).rollout.max_new_tokens == context - 3
    fits = Config(rollout=RolloutConfig(max_new_tokens=context - 3))
    assert within_context(fits, [model], [[1, 2, 3]]) is fits
    with pytest.raises(ConfigError, match=rf"{context} tokens.*prompt.max_tokens"):
        within_context(config, [model], [[1], [1] * context])


# --- a model by itself ---------------------------------------------------------------------------------------


def embedded(**sections: dict[str, Any]) -> Config:
    config = Config(device="cpu", rollout=RolloutConfig(max_new_tokens=28))
    changed = {name: dataclasses.replace(getattr(config, name), **values) for name, values in sections.items()}
    return dataclasses.replace(config, **changed)


def test_a_model_answers_by_itself_or_through_its_engine() -> None:
    small = {"prompts": 12, "samples": 2}
    policy = evaluate_model(embedded(eval=small, engine={"numerics": "int4"}))
    assert policy.config.engine == TransformersConfig(batch_size=256)
    through = evaluate_model(embedded(eval={**small, "engine": "rollout"}, engine={"numerics": "int4"}))
    assert through.config.engine == TransformersConfig(numerics="int4")
    texts = [[answer.response for answer in found.evaluation.answers] for found in (policy, through)]
    assert texts[0] != texts[1]
    assert policy.available == 256
    assert policy.seconds > 0


def test_a_model_is_sampled_at_the_temperature_of_evaluations() -> None:
    cold = evaluate_model(embedded(eval={"prompts": 12, "samples": 3, "temperature": 1e-5}))
    assert cold.temperature == 1e-5
    for result in cold.evaluation.results:
        assert {answer.response for answer in result.samples} == {result.greedy.response}
    assert evaluate_model(embedded(eval={"prompts": 1, "samples": 1})).temperature == 1.0


def test_what_is_left_out_is_said() -> None:
    task = {"digits": 4}
    length = len(load_policy("embedded", torch.device("cpu"))[1].encode("1 2 3 4 + 1 2 3 4 ="))
    found = evaluate_model(embedded(task=task, prompt={"max_tokens": length}, eval={"prompts": 3, "samples": 1}))
    assert found.notes == []
    with pytest.raises(ConfigError, match=r"every prompt has more than prompt.max_tokens = 3 tokens; raise it"):
        evaluate_model(embedded(prompt={"max_tokens": 3}))
    found = evaluate_model(embedded(rollout={"max_new_tokens": 500}, eval={"prompts": 2, "samples": 1}))
    (note,) = found.notes
    assert note.startswith(f"answers end after {found.config.rollout.max_new_tokens} tokens, not 500")


# --- what is written -----------------------------------------------------------------------------------------


def test_the_rows_of_the_table(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    found = scripted(BY_HAND)
    write_table(found, tmp_path / "table.parquet")
    table = pq.read_table(tmp_path / "table.parquet")
    rows = table.to_pylist()
    assert rows == [problem_row(result) for result in found.results]
    assert rows[2] == {
        "id": "p2",
        "question": "question 2",
        "gold": "yes",
        "n": 4,
        "right": 2,
        "avg": 0.5,
        "pass": True,
        "majority_answer": "yes",
        "majority_tied": 1,
        "majority_right": 1.0,
        "greedy_answer": "no…",
        "greedy_right": False,
        "greedy_truncated": True,
        "greedy_unscored": False,
        "truncated": 0,
        "unscored": 2,
        "mean_length": 2.5,
    }
    assert (rows[1]["majority_answer"], rows[1]["majority_tied"], rows[1]["majority_right"]) == ("no…", 4, 0.25)
    assert np.mean([row["avg"] for row in rows]) == pytest.approx(found.accuracy.sampled)
    assert np.mean([row["majority_right"] for row in rows]) == pytest.approx(found.accuracy.majority)


def test_a_table_without_answers_to_compare_has_the_same_columns(tmp_path: Path) -> None:
    import pyarrow.parquet as pq

    for name, task in (("with", Quoted()), ("without", Mute())):
        write_table(scripted([["no", "yes"]], task), tmp_path / f"{name}.parquet")
    tables = [pq.read_table(tmp_path / f"{name}.parquet") for name in ("with", "without")]
    assert tables[0].schema.equals(tables[1].schema)
    (row,) = tables[1].to_pylist()
    assert (row["majority_answer"], row["majority_tied"], row["majority_right"]) == (None, 0, None)
    assert row["greedy_answer"] is None


def test_the_lines_of_the_answers_file(tmp_path: Path) -> None:
    found = scripted(BY_HAND, gold="yes")
    with AnswersFile(tmp_path / "answers.jsonl") as file:
        for number, answer in enumerate(found.answers, 1):
            file.add(answer)
            assert len((tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()) == number
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text(encoding="utf-8").splitlines()]
    assert rows == [answer_row(answer) for answer in found.answers]
    assert [(row["problem"], row["sample"], row["response"]) for row in rows] == [
        (f"p{place}", number or None, text) for place, row in enumerate(BY_HAND) for number, text in enumerate(row)
    ]
    assert {row["gold"] for row in rows} == {"yes"}
    unscored = [row for row in rows if row["score"] is None]
    assert [row["response"] for row in unscored] == ["a?", "b?"]
    assert all(row["why"].startswith("declined") for row in unscored)
    assert all(row["why"] is None for row in rows if row["score"] is not None)
    assert [row["tokens"] for row in rows[5:7]] == [2, 3]
    assert [row["truncated"] for row in rows[5:7]] == [False, True]


def test_an_answers_file_stays_until_there_are_answers(tmp_path: Path) -> None:
    file = tmp_path / "answers.jsonl"
    file.write_text("of an earlier evaluation")
    with AnswersFile(file):
        pass
    assert file.read_text() == "of an earlier evaluation"
    with AnswersFile(file) as opened:
        opened.add(scripted([["no", "yes"]]).answers[0])
    assert json.loads(file.read_text())["response"] == "no"


def test_text_that_is_no_unicode_is_written(tmp_path: Path) -> None:
    """JSON may hold half of a surrogate pair, as data sets have shown."""
    import pyarrow.parquet as pq

    found = scripted([["no", "ja\n\x00é"]], gold="\ud83d")
    write_table(found, tmp_path / "table.parquet")
    assert pq.read_table(tmp_path / "table.parquet").column("gold").to_pylist() == ["?"]
    with AnswersFile(tmp_path / "answers.jsonl") as file:
        for answer in found.answers:
            file.add(answer)
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text(encoding="utf-8").split("\n") if line]
    assert rows[1]["gold"] == "\ud83d"
    assert rows[1]["response"] == "ja\n\x00é"
