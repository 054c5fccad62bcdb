"""The verdict, on logs made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from surefoot.scenario.events import Event, Kind, Strike
from surefoot.scenario.log import Line
from surefoot.scenario.verdict import Recovery, Verdict, judge

_STEPS = 12
_RANKS = 2
_STEP_S = 10.0
"""Ranks end a step one second apart, the first at the full ten."""


def _loss(rank: int, step: int) -> str:
    return f"{rank:02x}{step:06x}"


def _lines(run: str, attempt: int, steps: Sequence[int], start_s: float, ranks: Sequence[int] = (0, 1)) -> list[Line]:
    return [
        Line(run, attempt, rank, step, (rank, step), _loss(rank, step), start_s + (place + 1) * _STEP_S + rank)
        for place, step in enumerate(steps)
        for rank in ranks
    ]


_CALM = _lines("undisturbed", 1, range(_STEPS), 5000.0)


def _strike(kind: Kind, t: float, durable: int | None = None) -> Strike:
    return Strike(
        event=Event(kind=kind, phase="training"), t=t, at_step=0, struck_in="training", pids=(1,), durable=durable
    )


def _restarted(last: int, resumed_from: int, pause_s: float = 100.0) -> list[Line]:
    """One attempt up to step `last`, and one from `resumed_from` to the end."""
    first = _lines("disturbed", 1, range(last + 1), 0.0)
    return [*first, *_lines("disturbed", 2, range(resumed_from, _STEPS), first[-1].t + pause_s - 1)]


def _judge(lines: list[Line], *strikes: Strike) -> Verdict:
    return judge(lines, strikes, steps=_STEPS, num_ranks=_RANKS)


def _cost(lines: list[Line], *strikes: Strike) -> Recovery:
    return _judge([*lines, *_CALM], *strikes).recoveries[0]


def test_equal_runs_pass() -> None:
    """A log in which every line of the disturbed run equals the undisturbed one passes, redone steps included."""
    verdict = _judge([*_restarted(5, 5), *_CALM], _strike(Kind.KILL_TRAINER, 61.5))
    assert verdict.problems == ()
    assert verdict.bit_identical
    assert verdict.passed


@pytest.mark.parametrize("attempt", [1, 2])
@pytest.mark.parametrize("change", [{"loss_bits": "00000004"}, {"samples": (0, 6)}, {"samples": (5, 0)}])
def test_one_different_line_fails(attempt: int, change: dict[str, object]) -> None:
    """One bit of one loss, one sample or their order, in a step or in its repetition: not identical, named."""
    lines = [
        replace(line, **change) if (line.attempt, line.rank, line.step) == (attempt, 0, 5) else line  # type: ignore[arg-type]
        for line in _restarted(5, 5)
    ]
    verdict = _judge([*lines, *_CALM], _strike(Kind.KILL_TRAINER, 61.5))
    assert not verdict.bit_identical
    assert not verdict.passed
    assert verdict.problems[0].startswith(f"disturbed attempt {attempt}, rank 0, step 5: ")


@pytest.mark.parametrize("run", ["disturbed", "undisturbed"])
def test_an_absent_line_fails(run: str) -> None:
    """A step that one rank of either run never did is no success, though nothing differs."""
    lines = [
        line
        for line in [*_lines("disturbed", 1, range(_STEPS), 0.0), *_CALM]
        if (line.run, line.rank, line.step) != (run, 1, 11)
    ]
    verdict = _judge(lines)
    assert verdict.problems == (f"{run}: no line of rank 1, step 11",)


@pytest.mark.parametrize("lines", [[], _CALM, _lines("disturbed", 1, range(_STEPS), 0.0)])
def test_nothing_to_compare_is_not_identical(lines: list[Line]) -> None:
    """Empty runs are not equal runs."""
    verdict = _judge(lines)
    assert not verdict.bit_identical
    assert not verdict.passed


def test_lines_that_should_not_be_there_fail() -> None:
    """A step past the end, a rank too many, an unknown run or the same line twice is named."""
    good = [*_lines("disturbed", 1, range(_STEPS), 0.0), *_CALM]
    for odd in (
        _lines("disturbed", 1, [_STEPS], 900.0, ranks=[0]),
        _lines("disturbed", 1, [3], 900.0, ranks=[2]),
        _lines("other", 1, [3], 900.0, ranks=[0]),
        [good[0]],
    ):
        assert len(_judge([*good, *odd]).problems) == 1


def test_many_differences_are_counted_not_listed() -> None:
    """A run that went its own way is told in a few lines and a number."""
    other = [replace(line, loss_bits="ffffffff") for line in _lines("disturbed", 1, range(_STEPS), 0.0)]
    verdict = _judge([*other, *_CALM])
    assert len(verdict.problems) == 6
    assert verdict.problems[-1] == "… 24 differences in all"


def test_an_eviction_costs_no_step() -> None:
    """Steps finished between the notice and the stop are no redone steps, nor do they end the recovery."""
    # Noticed in step 4, which ends at 50 s; stopped after step 5; goes on at 6.
    lines = _restarted(5, 6, pause_s=100.0)
    assert _cost(lines, _strike(Kind.EVICT, 45.0)) == Recovery(Kind.EVICT, 6, 0, 61.0 + 99.0 + 10.0 - 45.0)


def test_an_eviction_that_loses_a_step_fails() -> None:
    """A step finished after the notice and trained again is a lost step."""
    verdict = _judge([*_restarted(5, 5), *_CALM], _strike(Kind.EVICT, 45.0))
    assert verdict.bit_identical
    assert verdict.problems == ("evict at step 0: 1 finished steps were trained again, at most 0 may be",)


@pytest.mark.holds("strict-fence")
@pytest.mark.parametrize("kind", [Kind.KILL_TRAINER, Kind.KILL_SUPERVISOR])
def test_a_killed_process_may_cost_one_step(kind: Kind) -> None:
    """One redone step is within the promise, two are not."""
    strike = _strike(kind, 61.5)
    assert _judge([*_restarted(5, 5), *_CALM], strike).passed
    verdict = _judge([*_restarted(5, 4), *_CALM], strike)
    assert verdict.recoveries[0].redone_steps == 2
    assert verdict.problems == (f"{kind} at step 0: 2 finished steps were trained again, at most 1 may be",)


def test_a_step_that_only_one_rank_finished_is_not_redone() -> None:
    """The step in flight does not count."""
    lines = [line for line in _restarted(5, 5) if (line.attempt, line.rank, line.step) != (1, 1, 5)]
    recovery = _cost(lines, _strike(Kind.KILL_TRAINER, 60.5))
    assert (recovery.resumed_from, recovery.redone_steps) == (5, 0)
    # The step that rank 0 had done is not new; the next is, done by rank 0 at 180 s.
    assert recovery.seconds_to_new_step == pytest.approx(180.0 - 60.5)


def test_a_killed_agent_costs_nothing() -> None:
    """Within one attempt, training went on where it was, and the next step is the new one."""
    lines = _lines("disturbed", 1, range(_STEPS), 0.0)
    assert _cost(lines, _strike(Kind.KILL_AGENT, 45.0)) == Recovery(Kind.KILL_AGENT, 4, 0, 5.0)


def test_a_killed_agent_that_ends_the_trainers_is_seen() -> None:
    """If a later attempt repeats steps after the agent's death, they count."""
    verdict = _judge([*_restarted(5, 5), *_CALM], _strike(Kind.KILL_AGENT, 61.5))
    assert verdict.recoveries[0].redone_steps == 1
    assert not verdict.passed


@pytest.mark.parametrize(("durable", "passes"), [(3, True), (2, True), (4, False)])
def test_after_the_loss_of_everything_it_resumes_from_the_newest_durable_step(durable: int, passes: bool) -> None:
    """Going back behind a step that was durable fails; a start may complete a newer commit itself."""
    verdict = _judge([*_restarted(5, 3), *_CALM], _strike(Kind.KILL_ALL, 61.5, durable))
    assert verdict.recoveries[0].redone_steps == 3
    assert verdict.passed is passes


def test_several_events_share_no_steps() -> None:
    """Each event is charged with what followed it, up to the next."""
    first = _lines("disturbed", 1, range(4), 0.0)
    second = _lines("disturbed", 2, range(3, 8), 100.0)
    third = _lines("disturbed", 3, range(8, _STEPS), 300.0)
    strikes = [_strike(Kind.KILL_TRAINER, 42.0), _strike(Kind.KILL_AGENT, 135.0), _strike(Kind.EVICT, 145.0)]
    verdict = _judge([*first, *second, *third, *_CALM], *strikes)
    assert verdict.passed
    assert verdict.recoveries == (
        Recovery(Kind.KILL_TRAINER, 3, 1, 120.0 - 42.0),
        Recovery(Kind.KILL_AGENT, 6, 0, 140.0 - 135.0),
        Recovery(Kind.EVICT, 8, 0, 310.0 - 145.0),
    )


def test_an_event_after_which_nothing_was_trained_fails() -> None:
    """A run that never came back is told as that."""
    lines = _lines("disturbed", 1, range(6), 0.0)
    verdict = _judge([*lines, *_CALM], _strike(Kind.EVICT, 62.0))
    assert verdict.recoveries == (Recovery(Kind.EVICT, None, 0, None),)
    assert "evict at step 0: training never went on" in verdict.problems


def test_a_start_that_died_before_its_first_step_is_passed_over() -> None:
    """Attempts without a line leave no trace, and do not hide what the next one redoes."""
    lines = [
        replace(line, attempt=4) if line.attempt == 2 else line for line in _restarted(5, 4) if line.run == "disturbed"
    ]
    assert _cost(lines, _strike(Kind.KILL_TRAINER, 61.5)).redone_steps == 2


@pytest.mark.parametrize("phase", ["training", "restoring"])
def test_an_event_inside_a_start_shows_what_made_the_start_necessary(phase: str) -> None:
    """A trainer's end may cost a step, also if the agent is killed while it comes back; an agent's own may not."""
    agent = _strike(Kind.KILL_AGENT, 62.0)
    agent = replace(agent, event=replace(agent.event, phase=phase), struck_in=phase)
    verdict = _judge([*_restarted(5, 5), *_CALM], _strike(Kind.KILL_TRAINER, 61.5), agent)
    redone = [problem for problem in verdict.problems if "trained again" in problem]
    assert len(redone) == (1 if phase == "training" else 0)


@pytest.mark.parametrize(("durable", "passes"), [(3, True), (4, False)])
def test_an_event_that_befell_a_recovery_answers_for_it(durable: int, passes: bool) -> None:
    """Training did not go on between the two; what the second start resumed from is held against what was durable at
    the first event."""
    lost, killed = _strike(Kind.KILL_JOB, 61.5, durable), _strike(Kind.KILL_TRAINER, 80.0)
    killed = replace(killed, event=replace(killed.event, phase="restoring"), struck_in="restoring")
    verdict = _judge([*_restarted(5, 3), *_CALM], lost, killed)
    assert [recovery.resumed_from for recovery in verdict.recoveries] == [None, 3]
    assert verdict.passed is passes
    assert _judge([*_restarted(5, 3), *_CALM], lost, replace(killed, struck_in="training")).problems
