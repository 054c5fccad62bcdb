"""Quantities read from text, with their dimension.

A bare number is refused, so that a duration can never be taken for a size or a price for an hour for one for a month.
Inside the package every name carries its unit (``_s``, ``_bytes``, ``_usd``, ``_per_hour``); this module is the one
door through which text becomes such a number.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import isfinite

from surefoot.errors import ConfigError

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
MONTH_H = 720.0
"""Hours of a month where nothing else is said: 30 days. Kubecost uses 730; it is a setting of every report."""
GB = 1e9

_DURATIONS_S: Mapping[str, float] = {
    "ms": 1e-3,
    "s": 1.0,
    "min": 60.0,
    "h": HOUR_S,
    "d": DAY_S,
}
_SIZES_BYTES: Mapping[str, float] = {
    "B": 1.0,
    "kB": 1e3,
    "MB": 1e6,
    "GB": 1e9,
    "TB": 1e12,
    "KiB": 2.0**10,
    "MiB": 2.0**20,
    "GiB": 2.0**30,
    "TiB": 2.0**40,
}
_COUNTS: Mapping[str, float] = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}
_QUANTITY = re.compile(r"^\s*([-+]?[0-9][0-9_,]*\.?[0-9]*(?:[eE][-+]?[0-9]+)?)\s*(\S.*?)?\s*$")


def parse_duration_s(text: str) -> float:
    """Seconds from "18 s", "0.85s", "5 min", "72 h", "30 d". `ConfigError` for anything else."""
    return _parse(text, _DURATIONS_S, "a duration", "18 s, 5 min or 72 h")


def parse_size_bytes(text: str) -> float:
    """Bytes from "840 GB", "105 GiB". Decimal and binary prefixes are told apart. `ConfigError` for anything else."""
    return _parse(text, _SIZES_BYTES, "a size", "840 GB or 512 GiB")


def parse_rate_bytes_per_s(text: str) -> float:
    """Bytes per second from "3.1 GB/s" or "400 Gb/s" (bits). `ConfigError` for anything else."""
    rates = {f"{unit}/s": factor for unit, factor in _SIZES_BYTES.items()}
    rates |= {"Mb/s": 1e6 / 8, "Gb/s": 1e9 / 8, "Mbps": 1e6 / 8, "Gbps": 1e9 / 8}
    return _parse(text, rates, "a bandwidth", "3.1 GB/s or 400 Gb/s")


def parse_usd(text: str) -> float:
    """Dollars from "25000 USD" or "$25,000". `ConfigError` for anything else."""
    return _parse(_dollars(text), {"USD": 1.0}, "an amount", "25000 USD or $25,000")


def parse_usd_per_hour(text: str) -> tuple[float, str]:
    """Dollars an hour and what they are for ("gpu" or "node"), from "9.80 USD/gpu-h" or "$78.40/node-h"."""
    value = _dollars(text)
    for holder in ("gpu", "node"):
        suffix = f"USD/{holder}-h"
        if value.replace(" ", "").endswith(suffix):
            return _parse(value, {suffix: 1.0}, "a price", "9.80 USD/gpu-h"), holder
    raise ConfigError(f"{text!r} is no price of compute: write it like 9.80 USD/gpu-h or 78.40 USD/node-h")


def parse_usd_per_h(text: str) -> float:
    """Dollars for an hour of time (of delay, of an engineer), from "150 USD/h". `ConfigError` for anything else."""
    return _parse(_dollars(text), {"USD/h": 1.0}, "a price of an hour", "150 USD/h")


def parse_parameters(text: str) -> float:
    """Number of parameters from "70B" or "7e9". `ConfigError` for anything else."""
    return _parse(text, {**_COUNTS, "": 1.0}, "a number of parameters", "70B")


def parse_share(text: str) -> float:
    """A share between 0 and 1, from "80 %" or "0.8"."""
    share = _parse(text, {"%": 0.01, "": 1.0}, "a share", "80 % or 0.8")
    if not 0.0 <= share <= 1.0:
        raise ConfigError(f"{text!r} is no share: give 0 to 100 %")
    return share


def show_duration(seconds: float) -> str:
    """A duration as a person writes it: 0.85 s, 271 s, 46.4 min, 72.5 h."""
    if not isfinite(seconds):
        return "never"
    if abs(seconds) < 60:
        return f"{seconds:.3g} s"
    if abs(seconds) < 2 * HOUR_S:
        return f"{seconds / 60:.3g} min" if abs(seconds) >= 300 else f"{seconds:.3g} s"
    return f"{seconds / HOUR_S:.1f} h"


def show_usd(amount: float) -> str:
    """Dollars: whole above 100, with cents below."""
    if not isfinite(amount):
        return "—"
    return f"{amount:,.0f}" if abs(amount) >= 100 else f"{amount:,.2f}"


def show_share(share: float, digits: int = 1) -> str:
    return f"{100 * share:.{digits}f} %" if isfinite(share) else "—"


def _dollars(text: str) -> str:
    """ "$9.80/gpu-h" as "9.80 USD/gpu-h"."""
    stripped = text.strip()
    if not stripped.startswith("$"):
        return stripped
    number, slash, per = stripped[1:].partition("/")
    return f"{number} USD{slash}{per}"


def _parse(text: str, factors: Mapping[str, float], what: str, example: str) -> float:
    match = _QUANTITY.match(text)
    unit = str(match[2] or "").replace(" ", "") if match else ""
    if match is None or unit not in factors:
        known = ", ".join(unit for unit in factors if unit)
        raise ConfigError(f"{text!r} is not {what}: write it like {example} (units: {known})")
    value = float(match[1].replace(",", "").replace("_", "")) * factors[unit]
    if value < 0 or not isfinite(value):
        raise ConfigError(f"{text!r} is not {what}: it must be 0 or more and finite")
    return value
