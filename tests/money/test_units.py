"""Quantities keep their dimension: at the door by their text, inside by their names."""

from __future__ import annotations

import dataclasses
import importlib
import pkgutil
from collections.abc import Callable, Iterator

import pytest

import surefoot.money
from surefoot.errors import ConfigError
from surefoot.money import units

_PARSERS: dict[str, Callable[[str], object]] = {
    "5 min": units.parse_duration_s,
    "840 GB": units.parse_size_bytes,
    "3.1 GB/s": units.parse_rate_bytes_per_s,
    "25000 USD": units.parse_usd,
    "9.80 USD/gpu-h": units.parse_usd_per_hour,
    "150 USD/h": units.parse_usd_per_h,
}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("5 min", 300.0),
        ("0.85s", 0.85),
        ("72h", 259_200.0),
        ("30 d", 2_592_000.0),
        ("250 ms", 0.25),
    ],
)
def test_durations(text: str, value: float) -> None:
    """Seconds from every unit of time."""
    assert units.parse_duration_s(text) == pytest.approx(value)


def test_sizes_and_rates_tell_bits_from_bytes_and_decimal_from_binary() -> None:
    """400 Gb/s is 50 GB/s; 1 GiB is 1,073,741,824 bytes; 840 GB is 840 · 10⁹."""
    assert units.parse_rate_bytes_per_s("400 Gb/s") == units.parse_rate_bytes_per_s("50 GB/s") == 50e9
    assert units.parse_size_bytes("1 GiB") == 2**30
    assert units.parse_size_bytes("840GB") == 840e9


def test_prices_say_what_the_hour_is_of() -> None:
    """A dollar sign or USD; of a GPU or of a node, never of nothing."""
    assert units.parse_usd_per_hour("$9.80/gpu-h") == (9.80, "gpu")
    assert units.parse_usd_per_hour("78.40 USD/node-h") == (78.40, "node")
    with pytest.raises(ConfigError, match="no price of compute"):
        units.parse_usd_per_hour("9.80 USD/h")


@pytest.mark.parametrize("text", _PARSERS)
def test_units_cannot_be_mixed(text: str) -> None:
    """Each kind of text is read by its own parser only; a bare number by none."""
    for wanted, parser in _PARSERS.items():
        if wanted == text:
            parser(text)
            continue
        with pytest.raises(ConfigError):
            parser(text)
    with pytest.raises(ConfigError):
        _PARSERS[text](text.split()[0])


@pytest.mark.parametrize("text", ["", "min", "-5 min", "5 parsec", "nan s", "1e999 s", "5 min 3"])
def test_nonsense_is_refused_with_an_example(text: str) -> None:
    """The message shows how to write it."""
    with pytest.raises(ConfigError, match=r"write it like|must be 0 or more"):
        units.parse_duration_s(text)


_ENDINGS = (
    "_s", "_h", "_usd", "_bytes", "_bytes_per_s", "_per_h", "_per_hour", "_gb", "_nodes", "_months", "_per_month",
    "_per_gb", "_per_gb_month", "_per_1000_puts", "_per_save", "_per_load", "_per_wall_s", "_per_node_h", "_per_unit",
    "_per_gpu", "_per_gpu_month", "_per_engineer_h", "_per_gb_out", "_per_gb_back", "_per_gb_egress", "_px",
    "_per_up_s", "_per_instance_hour",
)  # fmt: skip
_NO_UNIT = {
    # shares, counts and weights
    "announced", "on_demand_goodput", "miss_share", "tail_weight", "tail_share", "utilisation", "saving", "shape",
    "gap",
    "spot_goodput", "stable_goodput", "on_time_share", "share_of_compute", "least_goodput", "cold", "events", "loads",
    "lost_steps", "saves", "hot_lost_steps", "cold_events", "chance", "break_even_utilisation", "bytes_per_param",
    "engineer_hours", "quantity", "value",
    # one distribution, in the unit of its own name (cost, wall_s); pixels and values of a picture
    "mean", "p05", "p25", "p50", "p75", "p95", "low", "high",
    # the walk's clocks: seconds, said in its docstrings
    "wall", "position", "clock", "since", "save_at", "stalled_until", "durable", "lost_work",
}  # fmt: skip


def _float_fields() -> Iterator[tuple[str, str]]:
    for module in pkgutil.iter_modules(surefoot.money.__path__):
        loaded = importlib.import_module(f"surefoot.money.{module.name}")
        for kind in vars(loaded).values():
            if isinstance(kind, type) and dataclasses.is_dataclass(kind) and kind.__module__ == loaded.__name__:
                for entry in dataclasses.fields(kind):
                    if str(entry.type).replace(" | None", "") == "float":
                        yield f"{loaded.__name__}.{kind.__name__}", entry.name


def test_every_number_inside_carries_its_unit_in_its_name() -> None:
    """Every float field of the package's values ends with its unit, or is a share, a count or a weight."""
    found = list(_float_fields())
    assert len(found) > 100
    nameless = [(kind, name) for kind, name in found if not name.endswith(_ENDINGS) and name not in _NO_UNIT]
    assert nameless == []
