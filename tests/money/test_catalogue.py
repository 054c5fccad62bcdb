"""Prices: shipped with source, date and licence; implausible ones flagged and never used."""

from __future__ import annotations

import json
from datetime import date
from importlib import resources
from pathlib import Path

import pytest

from surefoot.errors import ConfigError
from surefoot.money import catalogue
from surefoot.money.catalogue import COLUMNS, check, discounts, find, parse, shipped

_HEAD = ",".join(COLUMNS) + "\n"


def _row(zone: str, market: str, amount: str) -> str:
    return f"gcp,us-x,{zone},a3-highgpu-8g,H100-80GB,8,{market},{amount},2026-01-01,zone list,\n"


def test_every_shipped_price_has_source_date_and_licence() -> None:
    """And none is flagged; the big three H100 nodes are there."""
    prices = shipped()
    for price in prices:
        assert price.source
        assert price.licence in ("MIT", "Apache-2.0")
        assert price.age_days(date(2026, 12, 1)) is not None
        assert price.usable, price
    on_demand = {name: find(prices, name, "on-demand") for name in ("p5.48xlarge", "a3-highgpu-8g", "ND96isr H100 v5")}
    amounts = {name: price.usd_per_instance_hour if price else None for name, price in on_demand.items()}
    assert amounts == {"p5.48xlarge": 55.04, "a3-highgpu-8g": 84.40, "ND96isr H100 v5": 98.32}


def test_the_licences_of_shipped_data_are_shipped() -> None:
    """A licence file for each source of the data files."""
    data = resources.files("surefoot.money") / "data"
    for name, words in (
        ("bamboo", "UCLASystem"),
        ("parcae", "Microsoft Corporation"),
        ("cloudprice", "MIT License"),
        ("spot-advisor", "Apache License"),
    ):
        assert words in (data / f"{name}.LICENSE").read_text()


def test_a_missing_spot_price_is_missing() -> None:
    """No spot price of a3-highgpu-8g may be shipped: none is invented."""
    assert find(shipped(), "a3-highgpu-8g", "spot") is None


def test_spot_above_on_demand_is_flagged_and_unused() -> None:
    """A real catalogue row: 88.72 spot where on-demand was said to be 45.75."""
    prices = check(parse(_HEAD + _row("b", "on-demand", "45.7547") + _row("b", "spot", "88.7186"), "f"))
    assert [price.usable for price in prices] == [True, False]
    assert "above on-demand" in prices[1].flag
    assert find(prices, "a3-highgpu-8g", "spot") is None


def test_one_implausible_price_among_many_is_flagged() -> None:
    """Real rows: two zones at 43 to 45 where the others are at 88 to 112."""
    amounts = (101.7, 91.3, 96.7, 96.7, 103.6, 111.8, 87.8, 98.9, 43.07, 45.28)
    rows = "".join(_row(f"z{i}", "on-demand", str(amount)) for i, amount in enumerate(amounts))
    flagged = [price.usd_per_instance_hour for price in check(parse(_HEAD + rows, "f")) if price.flag]
    assert flagged == [43.07, 45.28]


def test_a_blank_price_is_no_offer() -> None:
    """Kept, shown, not used, and no zero."""
    (price,) = check(parse(_HEAD + _row("a", "spot", ""), "f"))
    assert price.usd_per_instance_hour is None
    assert not price.usable
    assert not price.flag


@pytest.mark.parametrize("amount", ["-3", "0", "9999"])
def test_negative_zero_and_absurd_prices_are_flagged(amount: str) -> None:
    """Below a cent or above 60 USD a GPU-hour."""
    (price,) = check(parse(_HEAD + _row("a", "on-demand", amount), "f"))
    assert "not plausible" in price.flag


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("provider,price\naws,3\n", "f:1: wrong columns: 'region' is missing"),
        (_HEAD + _row("a", "on-demand", "cheap"), "f:2: price 'cheap' is no number"),
        (_HEAD + _row("a", "weekly", "3"), "f:2: market 'weekly'"),
        (_HEAD + "aws,r,,t,g,0,spot,1,2026-01-01,s,\n", "f:2: gpu_count '0'"),
        (_HEAD + "aws,r,,t,g,8,spot,1,2026-01-01,,\n", "f:2: a price needs an instance_type and a source"),
        (_HEAD + "aws,r,,t,g,8,spot,1,2026-01-01,s,MIT,x,y\n", "f:2: wrong columns"),
    ],
)
def test_bad_price_files_get_one_clear_line(text: str, words: str) -> None:
    """File, line and what is wrong."""
    with pytest.raises(ConfigError, match=words) as caught:
        parse(text, "f")
    assert "\n" not in str(caught.value)


def test_discounts_come_from_the_data() -> None:
    """ND96isr 81.5 %, p5 52 %: of the shipped pairs some lie in 60 to 74 %, not all."""
    shares = {price.instance_type: share for price, share in discounts(shipped())}
    assert shares["ND96isr_H100_v5"] == pytest.approx(1 - 18.169536 / 98.32)
    assert shares["p5.48xlarge"] == pytest.approx(0.52, abs=1e-3)
    assert 0 < sum(0.60 <= share <= 0.74 for share in shares.values()) < len(shares)


def test_user_prices_take_precedence(tmp_path: Path) -> None:
    """An override of one price leaves the others; what is written is read back."""
    own = tmp_path / "prices.csv"
    row = parse(_HEAD + "aws,us-east-1,,p5.48xlarge,H100-80GB,8,spot,16.5,2026-11-01,my quote,\n", "f")
    catalogue.write(row, own)
    assert parse(own.read_text(), "own") == row
    merged = catalogue.load(own)
    found = find(merged, "p5.48xlarge", "spot")
    assert found is not None
    assert (found.usd_per_instance_hour, found.source) == (16.5, "my quote")
    assert len(merged) == len(shipped())


def test_the_file_of_the_catalogue_package_is_understood() -> None:
    """GPU rows of its layout, on-demand and spot; another layout is refused."""
    document = {
        "as_of": "2026-09-06",
        "currency": "USD",
        "azure": {
            "region": "eastus",
            "instances": [
                {"sku": "B1s", "hourly_usd": 0.0104},
                {"sku": "N", "hourly_usd": 98.32, "spot_hourly_usd": 18.2, "gpu_type": "H100", "gpu_count": 8},
            ],
        },
    }
    rows = catalogue.parse_cloudprice(json.dumps(document), "package 1.0")
    assert [(r.market, r.usd_per_instance_hour, r.as_of) for r in rows] == [
        ("on-demand", 98.32, "2026-09-06"),
        ("spot", 18.2, "2026-09-06"),
    ]
    for bad in ("{}", "[]", '{"as_of": 1, "aws": {"instances": [{"gpu_count": 1}]}}', "x"):
        with pytest.raises(ConfigError, match=r"package 1\.0"):
            catalogue.parse_cloudprice(bad, "package 1.0")


def test_a_package_that_is_not_there_is_named() -> None:
    """With how to get it; one that is there and has no prices says so."""
    with pytest.raises(ConfigError, match="pip install no-such-catalogue"):
        catalogue.from_package("no-such-catalogue")
    with pytest.raises(ConfigError, match="neither"):
        catalogue.from_package("numpy")
