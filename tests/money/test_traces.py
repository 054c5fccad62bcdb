"""Trace files: the shipped ones are read, broken ones are named in one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from surefoot.errors import ConfigError
from surefoot.money.traces import SHIPPED, load_trace, parse_trace


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_traces_are_sane(name: str) -> None:
    """Times grow from 0, counts are nodes, every loss is a fall of the count or more."""
    trace = load_trace(name)
    assert trace.times_s[0] == 0
    assert all(later > earlier for earlier, later in zip(trace.times_s, trace.times_s[1:], strict=False))
    assert min(trace.counts) >= 0
    assert all(0 < loss.lost <= loss.running_before for loss in trace.losses)


def test_two_records_of_one_run_agree() -> None:
    """The p3 run was written down twice, by node and by count: the same losses at the same times."""
    by_node, by_count = load_trace("bamboo-p3"), load_trace("parcae-p3")
    assert [(loss.time_s, loss.lost) for loss in by_node.losses] == [
        (loss.time_s, loss.lost) for loss in by_count.losses
    ]


def test_losses_are_counted_where_nodes_come_back_at_once() -> None:
    """Two go and two come in the same second: the count stays, the loss is there."""
    text = "0,add,a\n0,add,b\n1000,remove,a\n1000,remove,b\n1000,add,c\n1000,add,d\n2000,remove,c\n"
    trace = parse_trace(text, "t")
    assert trace.counts == (2, 2, 1)
    assert [(loss.time_s, loss.lost) for loss in trace.losses] == [(1.0, 2), (2.0, 1)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2021-12-11, 11:00:00, 5\n2021-12-11, 18:00:01, 5\n", r"f:2: gap of 7\.0 h"),
        ("-1000,5\n0,5\n", "f:1: negative time"),
        ("2021-12-11, 11:10:00, 5\n2021-12-11, 11:00:00, 5\n", "f:2: time goes back by 600 s"),
        ("0,5\n1000,-1\n", "f:2: -1 running nodes"),
        ("0,add,a\n1000,remove,b\n", "f:2: b is removed but was never added"),
        ("time;count\n0;5\n", "f:1: wrong columns"),
        ("0,5\n1000,5,7\n", "f:2: wrong columns"),
        ("2021-12-11, 11:00:00, 5\n2021-13-11, 11:00:00, 5\n", "f:2: .* is no date"),
        ('[0, "add", {"nodes": ["a"]}]\n[60000, "remove"]\n', "f:2: wrong columns"),
        ('[0, "add", {"nodes": ["a"]}]\n[60000, "remove", {}]\n', "f:2: wrong columns"),
        ("0,5\n", "1 rows are no trace"),
        ("0,5\n0,6\n", "all rows have the same time"),
        ("", "0 rows"),
    ],
)
def test_bad_files_get_one_clear_line(text: str, words: str) -> None:
    """File, line and what is wrong, in one line."""
    with pytest.raises(ConfigError, match=words) as caught:
        parse_trace(text, "f")
    assert "\n" not in str(caught.value)


def test_probes_that_overlap_by_a_minute_are_taken_in_file_order() -> None:
    """A step back of a minute is the order of two probes, not a broken file."""
    text = "2021-12-10, 13:09:45, 80\n2021-12-10, 13:08:45, 70\n2021-12-10, 13:12:45, 70\n"
    trace = parse_trace(text, "f")
    assert trace.counts == (70, 70)
    assert [loss.lost for loss in trace.losses] == [10]


def test_a_file_can_be_given(tmp_path: Path) -> None:
    """A path in place of a name; a name that is neither says which there are."""
    path = tmp_path / "mine.csv"
    path.write_text("0,4\n60000,3\n120000,4\n")
    assert load_trace(str(path)).lost_nodes == 1
    with pytest.raises(ConfigError, match="bamboo-a100"):
        load_trace("bamboo-b200")
