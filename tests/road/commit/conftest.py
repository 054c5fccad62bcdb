"""Tests of the promise that a checkpoint is whole and verified, or does not exist."""

import pytest

pytest.register_assert_rewrite("one_save")
