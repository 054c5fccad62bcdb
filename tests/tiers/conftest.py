"""The contract lives in a module of its own, whose assertions shall explain themselves too."""

import pytest

pytest.register_assert_rewrite("contract")
