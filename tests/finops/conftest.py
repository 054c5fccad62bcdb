"""One plan of the brief's example, made once: it takes seconds."""

from __future__ import annotations

import pytest

from surefoot.finops.example import brief_request
from surefoot.finops.planner import Plan, make_plan
from surefoot.finops.request import Request


@pytest.fixture(scope="session")
def brief() -> Request:
    return brief_request()


@pytest.fixture(scope="session")
def brief_plan(brief: Request) -> Plan:
    return make_plan(brief)
