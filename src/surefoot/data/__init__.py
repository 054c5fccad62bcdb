"""Data that depend on seed, epoch and step alone: samplers for any number of ranks, and randomness seeded by sample.

For a training script's own use; nothing else of Surefoot needs it.
"""

from __future__ import annotations

from surefoot.data.order import order
from surefoot.data.samplers import GlobalBatchSampler, GlobalSampler, Last
from surefoot.data.seeded import Seeded, seeded

__all__ = ["GlobalBatchSampler", "GlobalSampler", "Last", "Seeded", "order", "seeded"]
