"""Beam search as pure functions: what is offered, who lives on and where, what an answer is worth."""

import pytest

from minivllm.request import BeamParams, FinishReason, Hypothesis, Request, RequestError
from minivllm.sample.beam import (
    Beam,
    answers,
    assign_slots,
    best,
    choose_beams,
    complete,
    cut_off,
    expand,
    finished_answers,
    is_done,
    num_candidates,
    score,
    select,
)

EOS = 9


def hypothesis(score, *tokens):
    return Hypothesis(tokens, score, score, FinishReason.STOP)


def pairs(candidates):
    return [(c.parent, c.token_id) for c in candidates]


# candidates


def test_a_beam_offers_twice_the_width_or_more_if_more_tokens_end():
    assert num_candidates(4, 1) == 8
    assert num_candidates(1, 1) == 2
    assert num_candidates(1, 3) == 4, "three ends and one that goes on"


def test_candidates_rank_by_the_sum_of_log_probabilities():
    beams = [Beam((1,), (-1.0,)), Beam((2,), (-0.5,))]
    assert pairs(expand(beams, [[(5, -0.1), (6, -2.0)], [(5, -0.75), (6, -1.0)]])) == [(0, 5), (1, 5), (1, 6), (0, 6)]


def test_equal_candidates_rank_by_their_tokens_however_the_beams_are_numbered():
    low, high = Beam((1,), (-1.0,)), Beam((2,), (-1.0,))
    offered = [(7, -1.0), (8, -1.0)]
    assert pairs(expand([low, high], [offered] * 2)) == [(0, 7), (0, 8), (1, 7), (1, 8)]
    assert pairs(expand([high, low], [offered] * 2)) == [(1, 7), (1, 8), (0, 7), (0, 8)]


def test_candidates_know_their_rank_after_their_parent():
    assert [c.rank for c in expand([Beam()], [[(5, -0.1), (6, -0.2)]])] == [1, 2]


def test_ends_leave_the_race_and_the_best_of_the_others_live_on():
    candidates = expand([Beam()], [[(EOS, -0.1), (1, -0.2), (2, -0.3), (3, -0.4)]])
    going_on, ended = select(candidates, 2, {EOS})
    assert (pairs(going_on), pairs(ended)) == ([(0, 1), (0, 2)], [(0, EOS)])


# slots


def test_a_beam_with_one_child_stays_in_its_slot():
    assert assign_slots([2, 0, 1], [0, 1, 2]) == [2, 0, 1]


def test_further_children_take_the_slots_of_beams_that_nobody_continues():
    assert assign_slots([1, 1, 3, 1], [0, 1, 2, 3]) == [1, 0, 3, 2]


# answers


def test_a_score_divides_by_the_length_to_the_power_of_the_penalty():
    assert score(-8.0, 4, 1.0) == -2.0
    assert score(-8.0, 4, 0.0) == -8.0
    assert score(-8.0, 4, 2.0) == -0.5


def test_length_counts_the_prompt_but_not_the_token_that_ended_the_answer():
    beam, params = Beam((1, 2), (-1.0, -1.0)), BeamParams()
    (candidate,) = expand([beam], [[(EOS, -1.0)]])
    assert complete(beam, candidate, 4, params) == Hypothesis((1, 2, EOS), -3.0, -0.5, FinishReason.STOP)
    assert cut_off(beam, 4, params) == Hypothesis((1, 2), -2.0, -2 / 6, FinishReason.LENGTH)


def test_a_larger_penalty_favours_longer_answers():
    short, long = Beam((1,), (-1.0,)), Beam((1, 2, 3), (-0.5,) * 3)
    winners = [answers([], [short, long], 1, BeamParams(2, length_penalty=p))[0].token_ids for p in (0, 1)]
    assert winners == [(1,), (1, 2, 3)]


def test_the_best_answers_come_first_and_equal_ones_by_their_tokens():
    assert best([hypothesis(-2, 1), hypothesis(-1, 3), hypothesis(-1, 2)], 2) == [hypothesis(-1, 2), hypothesis(-1, 3)]


def test_only_early_stopping_ends_a_search_before_its_beams_are_full():
    complete_ones = [hypothesis(-1, 1), hypothesis(-1, 2)]
    assert is_done(complete_ones, BeamParams(2, early_stopping=True))
    assert not is_done(complete_ones[:1], BeamParams(2, early_stopping=True))
    assert not is_done(complete_ones, BeamParams(2))


def test_live_beams_are_answers_too_unless_the_search_ended_early():
    live = Beam((5,), (-0.1,))
    found = [hypothesis(-1, 1), hypothesis(-2, 2)]
    assert answers(found, [live], 1, BeamParams(2))[0].token_ids == (5,)
    assert answers(found, [live], 1, BeamParams(2, early_stopping=True)) == found


# a request's sequences


def searching(width=2, **params):
    beams = BeamParams(width, **params)
    return Request("r", [1, 2, 3], beams.sampling, max_tokens=8, beams=beams)


def test_after_the_prompt_all_beams_come_from_the_trunk():
    request = searching()
    trunk = request.sequences[0]
    chosen = choose_beams([trunk], request.sequences, [[(5, -0.1), (6, -0.2), (7, -0.3), (8, -0.4)]], ())
    assert [(t.token_id, t.parent) for t in chosen] == [(5, None), (6, None)]


def test_a_beam_whose_candidates_all_lose_continues_another():
    request = searching()
    one, two = request.sequences
    for sequence, token in zip(
        request.sequences, choose_beams([one], [one, two], [[(5, -0.1), (6, -3.0)]], ()), strict=True
    ):
        sequence.output_token_ids.append(token.token_id)
        sequence.logprobs.append(token.logprob)
    chosen = choose_beams([one, two], [one, two], [[(7, -0.1), (8, -0.2)], [(7, -0.1), (8, -0.2)]], ())
    assert [(t.token_id, t.parent) for t in chosen] == [(7, None), (8, 0)]
    assert [t.logprob.rank for t in chosen] == [1, 2]


def test_answers_that_end_are_noted_with_the_request_and_only_the_best_are_kept():
    request = searching()
    offered = [[(EOS, -0.1), (8, -0.2), (1, -0.3), (2, -0.4), (3, -0.5)]]
    choose_beams(request.sequences[:1], request.sequences, offered, {EOS, 8, 1})
    assert [h.token_ids for h in request.hypotheses] == [(EOS,), (8,)]


def test_beams_that_reached_the_length_are_answers_when_the_search_has_ended():
    request = searching()
    for sequence, token in zip(request.sequences, (5, 6), strict=True):
        sequence.output_token_ids.append(token)
        sequence.finish_reason = FinishReason.LENGTH
    assert [h.token_ids for h in finished_answers(request)] == [(5,), (6,)]


@pytest.mark.parametrize(
    ("field", "value"), [("width", 0), ("max_tokens", 0), ("length_penalty", float("nan")), ("width", True)]
)
def test_parameters_that_make_no_sense_are_refused_by_name(field, value):
    with pytest.raises(RequestError, match=field):
        BeamParams(**{field: value})
