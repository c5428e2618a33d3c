"""The border between a rollout engine and the method: what is found by id, and what is refused."""

import math
from dataclasses import replace

import pytest
import torch

from predmask import DPPO, PolicySupport, Predictive, Reason, mask_metrics
from predmask.rollout.records import RolloutError, rollout_from_entries

NAN, INF = math.nan, math.inf


def two_responses(top_k=2, **options):
    """Responses [5, 6] and [7] with three entries a position, in no order."""
    entries = [
        [{4: -2.5, 5: -0.3, 6: -2.0}, {6: -3.0, 5: -0.2, 4: -2.2}],
        [{7: -0.1, 6: -4.0, 5: -3.0}],
    ]
    return rollout_from_entries([[1, 2], [3]], [[5, 6], [7]], entries, top_k=top_k, **options)


def test_flat_arrays():
    rollout = two_responses(version=3, finished=[True, False]).check(top_k=2, vocabulary_size=8)
    assert rollout.tokens.tolist() == [5, 6, 7]
    assert rollout.responses() == [[5, 6], [7]]
    assert rollout.logp.tolist() == pytest.approx([-0.3, -3.0, -0.1])
    assert rollout.topk_ids.tolist() == [[5, 6], [5, 4], [7, 5]]
    assert rollout.topk_logp.flatten().tolist() == pytest.approx([-0.3, -2.0, -0.2, -2.2, -0.1, -3.0])
    assert (rollout.sequence.tolist(), rollout.version.tolist()) == ([0, 0, 1], [3, 3, 3])
    assert (rollout.finished.tolist(), rollout.top_k) == ([True, False], 2)
    assert rollout.logp.dtype == rollout.topk_logp.dtype == torch.float32


def test_behaviour_support_is_the_union():
    """The second token is outside its top-2, and joins them."""
    behaviour = two_responses().behaviour()
    assert [sorted(ids[valid].tolist()) for ids, valid in zip(behaviour.ids, behaviour.valid, strict=True)] == [
        [5, 6],
        [4, 5, 6],
        [5, 7],
    ]
    expected = 1 - sum(math.exp(v) for v in (-3.0, -0.2, -2.2))
    assert behaviour.log_tail[1].exp().item() == pytest.approx(expected, abs=1e-6)


def test_selected_responses_are_a_rollout_of_their_own():
    rollout = replace(two_responses(finished=[True, False]), full_logp=torch.arange(24.0).view(3, 8))
    one = rollout.select(torch.tensor([1]))
    assert (one.prompts, one.responses(), one.finished.tolist()) == (((3,),), [[7]], [False])
    assert one.full_logp.tolist() == [rollout.full_logp[2].tolist()]
    swapped = rollout.select(torch.tensor([1, 0])).check(top_k=2, vocabulary_size=8)
    assert (swapped.responses(), swapped.sequence.tolist()) == ([[7], [5, 6]], [0, 1, 1])
    assert swapped.topk_ids.tolist() == [[7, 5], [5, 6], [5, 4]]
    assert rollout.token_index(torch.tensor([1, 0])).tolist() == [2, 0, 1]
    empty = rollout.select(torch.tensor([], dtype=torch.int64))
    assert (empty.responses(), empty.tokens.numel()) == ([], 0)


@pytest.mark.parametrize("entry", [{4: -0.2, 9: -2.5}, {9: -2.5, 4: -0.2}])
def test_sampled_token_is_found_by_its_id(entry):
    """NeMo-RL 3130, TRL 3867: in either order."""
    rollout = rollout_from_entries([[1]], [[9]], [[entry]], top_k=1)
    assert rollout.logp.item() == -2.5
    assert rollout.topk_ids.tolist() == [[4]]


def test_sampled_token_that_was_not_returned_is_an_error():
    """NeMo-RL 3130: {4: -.2} alone for a sampled 9."""
    with pytest.raises(RolloutError, match=r"response 0, token 0: the sampled id 9 .* \[4\]"):
        rollout_from_entries([[1]], [[9]], [[{4: -0.2}]], top_k=1)


@pytest.mark.parametrize("missing", [None, NAN])
@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("others", [{7: -2.0}, {7: -2.0, 4: -3.0, 3: -3.5}])
def test_missing_log_prob_is_unknown_not_certain(missing, top_k, others):
    """TRL 6166: mu = [-.2, None, -1.1]: the record is good, and the token is in no mean."""
    entries = [[{5: -0.2} | others, {6: missing} | others, {7: -1.1, 6: -2.0, 5: -2.1}]]
    rollout = rollout_from_entries([[1]], [[5, 6, 7]], entries, top_k=top_k).check(top_k=top_k, vocabulary_size=8)
    assert torch.isnan(rollout.logp).tolist() == [False, True, False]
    behaviour = rollout.behaviour()
    policy = PolicySupport.from_logits(torch.zeros(3, 8), behaviour)
    rule = DPPO(support="topk" if top_k else "binary")
    decision = rule(behaviour, policy, torch.ones(3))
    assert decision.reason[1] == Reason.UNKNOWN
    assert decision.trainable.tolist() == [True, False, True]
    metrics = mask_metrics(behaviour, policy, decision)
    assert metrics.means["mask_frac"][1] == 2
    assert metrics.compute()["unknown_logprob_count"] == 1


@pytest.mark.parametrize("order", [[1, 2, 3], [2, 3, 1], [2, 1, 3]])
def test_unknown_entries_do_not_disturb_the_order(order):
    values = {1: NAN, 2: -1.0, 3: -0.5}
    rollout = rollout_from_entries([[1]], [[2]], [[{i: values[i] for i in order}]], top_k=2)
    assert rollout.topk_ids.tolist() == [[3, 2]]


def test_position_with_too_few_known_entries_is_unknown():
    """Even where the sampled token is known: its top-K is not."""
    rollout = rollout_from_entries([[1]], [[5]], [[{5: -0.2, 6: None}]], top_k=2).check(top_k=2, vocabulary_size=8)
    assert torch.isnan(rollout.logp).all()
    assert rollout_from_entries([[1]], [[5]], [[{5: -0.2, 6: None}]], top_k=1).logp.item() == pytest.approx(-0.2)


def test_engine_that_caps_its_log_probs():
    """vLLM 16546: 50 asked for, 20 finite, 30 -inf: the error names the cap."""
    entry = {i: (-3.0 - 0.01 * i if i < 20 else -INF) for i in range(50)}
    rollout = rollout_from_entries([[1]], [[0]], [[entry]], top_k=50)
    with pytest.raises(RolloutError, match=r"20 of 50 .* cap its log-probs at 20 .*max_logprobs"):
        rollout.check(top_k=50, vocabulary_size=100)
    with pytest.raises(RolloutError, match="2 log-probs were returned, but top-3 was asked for"):
        rollout_from_entries([[1]], [[0]], [[{0: -1.0, 1: -2.0}]], top_k=3)
    with pytest.raises(RolloutError, match="top-2, but top-5"):
        two_responses().check(top_k=5, vocabulary_size=8)


def test_engine_without_topk():
    """SGLang 12418: 'top-K missing', at the border and in the rule."""
    rollout = rollout_from_entries([[1]], [[5]], [[{5: -0.2}]], top_k=0)
    with pytest.raises(RolloutError, match="top-K missing"):
        rollout.check(top_k=20, vocabulary_size=8)
    behaviour = rollout.check(top_k=0, vocabulary_size=8).behaviour()
    policy = PolicySupport.from_logits(torch.zeros(1, 8), behaviour)
    with pytest.raises(ValueError, match="top-K missing"):
        Predictive()(behaviour, policy, torch.ones(1))


def test_record_without_ids_is_refused():
    """rLLM 272, SkyRL 123: text does not turn back into the sampled ids."""
    with pytest.raises(RolloutError, match="token ids"):
        rollout_from_entries([[1]], [], [[{5: -0.2}]], top_k=0)
    with pytest.raises(RolloutError, match="sampled id"):
        rollout_from_entries([[1]], ["7"], [[{7: -0.2}]], top_k=0)
    with pytest.raises(RolloutError, match="2 tokens but 1 log-probs"):
        rollout_from_entries([[1]], [[5, 6]], [[{5: -0.2}]], top_k=0)


@pytest.mark.parametrize("rows", [6, 7])
def test_ids_of_another_vocabulary_are_refused(rows):
    """NeMo-RL 237: an id is valid iff 0 <= id < rows."""
    with pytest.raises(RolloutError, match=f"id 7, but the policy has ids 0 to {rows - 1}" if rows == 7 else "id 6"):
        two_responses().check(top_k=2, vocabulary_size=rows)
    rollout = two_responses()
    with pytest.raises(RolloutError, match="topk_ids holds id -1"):
        replace(rollout, topk_ids=torch.full_like(rollout.topk_ids, -1)).check(top_k=2, vocabulary_size=8)


def test_tokens_that_were_not_sampled_may_hold_placeholders():
    """SkyRL 758: an appended end with log-prob 0, and a top-K that nobody computed."""
    rollout = two_responses()
    appended = torch.tensor([True, False, True])
    for value in (0.0, NAN, -INF):
        changed = replace(
            rollout,
            sampled=appended,
            logp=torch.where(appended, rollout.logp, value),
            topk_logp=torch.where(appended[:, None], rollout.topk_logp, value),
            topk_ids=torch.where(appended[:, None], rollout.topk_ids, 0),
        )
        assert changed.check(top_k=2, vocabulary_size=8) is changed


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("logp", torch.tensor([-0.3, -3.0]), "logp has 2 entries where 3"),
        ("topk_ids", torch.zeros(2, 2, dtype=torch.int64), "topk_ids has 2"),
        ("topk_logp", torch.full((3, 1), -1.0), "differ"),
        ("sampled", torch.ones(4, dtype=torch.bool), "sampled has 4"),
        ("version", torch.zeros(1), "version has 1"),
        ("finished", torch.ones(3, dtype=torch.bool), "finished has 3"),
        ("lengths", torch.tensor([3]), "lengths has 1"),
        ("lengths", torch.tensor([2, 2]), "tokens has 3 entries where 4"),
        ("logp", torch.full((3,), -1.0, dtype=torch.bfloat16), "bfloat16"),
        ("topk_logp", torch.full((3, 2), -1.0, dtype=torch.float16), "float16"),
        ("tokens", torch.tensor([5, -1, 7]), "tokens holds id -1"),
        ("topk_ids", torch.tensor([[5, 6], [4, 4], [7, 5]]), "token 1: .* twice"),
        ("topk_logp", torch.full((3, 2), -0.1), "sum to 1.8097"),
        ("topk_logp", torch.tensor([[-1.0, -2.0], [-1.0, NAN], [-1.0, -2.0]]), "token 1: 1 of 2"),
        ("topk_logp", torch.tensor([[-1.0, -2.0], [-1.0, INF], [-1.0, -2.0]]), "token 1: 1 of 2"),
        ("logp", torch.tensor([-0.3, -INF, -0.1]), "finite log-prob"),
        ("logp", torch.tensor([-0.3, INF, -0.1]), "finite log-prob"),
        ("logp", torch.tensor([-0.3, 0.2, -0.1]), "at most 0"),
    ],
)
def test_faults_are_named(field, value, match):
    two_responses().check(top_k=2, vocabulary_size=8)
    with pytest.raises(RolloutError, match=match):
        replace(two_responses(), **{field: value}).check(top_k=2, vocabulary_size=8)


def test_rounding_above_one_passes():
    rollout = two_responses()
    topk = torch.tensor([[1e-6, -9.0], [-0.2, -2.2], [-0.1, -3.0]])
    changed = replace(rollout, logp=torch.tensor([1e-6, -3.0, -0.1]), topk_logp=topk)
    assert changed.check(top_k=2, vocabulary_size=8) is changed


def test_sampled_and_topk_log_probs_belong_together():
    rollout = two_responses()
    elsewhere = replace(rollout, logp=torch.tensor([-0.5, -3.0, -0.1]))
    with pytest.raises(RolloutError, match=r"token 0: the sampled id 5 has log-prob -0.5, but its entry .* is -0.3"):
        elsewhere.check(top_k=2, vocabulary_size=8)
    likelier = replace(rollout, logp=torch.tensor([-0.3, -1.0, -0.1]))
    with pytest.raises(RolloutError, match=r"token 1: the sampled id 6 .* is missing"):
        likelier.check(top_k=2, vocabulary_size=8)
    rolled = replace(rollout, topk_ids=rollout.topk_ids.roll(1, 0), topk_logp=rollout.topk_logp.roll(1, 0))
    with pytest.raises(RolloutError, match="one position and one temperature"):
        rolled.check(top_k=2, vocabulary_size=8)


def test_forced_tokens_need_no_topk():
    rollout = two_responses()
    ids, logp = rollout.topk_ids.clone(), rollout.topk_logp.clone()
    ids[1], logp[1] = -1, -INF
    forced = replace(rollout, topk_ids=ids, topk_logp=logp, sampled=torch.tensor([True, False, True]))
    assert forced.check(top_k=2, vocabulary_size=8) is forced
    with pytest.raises(RolloutError, match="id -1"):
        replace(forced, sampled=rollout.sampled).check(top_k=2, vocabulary_size=8)
    with pytest.raises(RolloutError, match="id 9"):
        replace(forced, topk_ids=ids.masked_fill(ids == -1, 9)).check(top_k=2, vocabulary_size=8)


def test_no_response_token_at_all():
    rollout = rollout_from_entries([[1], [2]], [[], []], [[], []], top_k=2).check(top_k=2, vocabulary_size=8)
    assert (rollout.responses(), rollout.topk_ids.shape) == ([[], []], (0, 2))
    assert rollout.behaviour().logp.shape == (0, 3)
