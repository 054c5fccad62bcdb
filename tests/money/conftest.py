"""One plan of the brief's example, made once: it takes seconds. And the way to the script of the worked example."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from money_samples import brief_request

from surefoot.money.planner import Plan, make_plan
from surefoot.money.request import Request

sys.path.append(str(Path(__file__).parents[2] / "docs/builders/worked_example"))


@pytest.fixture(scope="session")
def brief() -> Request:
    return brief_request()


@pytest.fixture(scope="session")
def brief_plan(brief: Request) -> Plan:
    return make_plan(brief)
