"""Phases: exactly one for each billed GPU-second.

The names follow the badput types of Google's ``ml-goodput-measurement`` where one fits, so that a forecast and a
measurement can be laid side by side. Invariant: the phases of a run add up to its billed time.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Phase(StrEnum):
    """What a billed GPU-second was spent on."""

    USEFUL = "useful"
    """Compute whose effect is in the final history."""
    CHECKPOINT_SAVE = "checkpoint_save"
    """Training stands still for a save; the wait for the last save at the end."""
    WASTED_PROGRESS = "wasted_progress_from_disruption"
    """Compute that was lost and done again."""
    RESTORE = "checkpoint_restore"
    """Loading from a durable tier."""
    INFRASTRUCTURE_RECOVERY = "infrastructure_recovery"
    """Nodes that stand idle until a lost one is replaced."""
    PROGRAM_STARTUP = "program_startup"
    """From the loss to the first new step, without waiting and loading: detection, rendezvous, processes, memory."""
    ELASTIC_RESIZE = "elastic_re_init"
    """Growing back when a replacement arrives."""
    ELASTIC_SLICE_DOWN = "elastic_slice_down"
    """What a smaller world computes less than its share, and nodes that fit no allowed world size."""
    STANDBY = "standby"
    """Warm nodes that wait for a loss."""


PHASES = tuple(Phase)


def total(phases: Mapping[Phase, float]) -> float:
    """Sum of all phases, in the unit of the values."""
    return sum(phases.values())
