"""Property tests of the core: reproducible, and never judged by the clock."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("core", deadline=None, derandomize=True, database=None, max_examples=100)
settings.load_profile("core")
