"""`surefoot plan` and `surefoot prices` as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from surefoot.cli import plan, prices
from surefoot.errors import ConfigError
from surefoot.money import catalogue

_SCHEME_KEYS = {
    "scheme",
    "goodput",
    "net_saving",
    "price_saving",
    "scheme_saving",
    "lost_steps",
    "cost_usd",
    "p95_cost_usd",
}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's own catalogue, empty, in a private place."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "config" / "surefoot" / "prices.csv"


def _call(*words: str) -> str:
    app = typer.Typer()
    plan.register(app)
    prices.register(app)
    result = CliRunner().invoke(app, list(words), catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


_JOB = (
    "plan", "--params", "7B", "--work", "20 h", "--gpus", "32", "--evictions", "6 h",
    "--on-demand-price", "9.80 USD/gpu-h", "--spot-price", "3.10 USD/gpu-h",
    "--only", "two-tier-shrink", "--runs", "100",
)  # fmt: skip


def test_the_brief_as_json(own: Path) -> None:
    """Assumptions and, for each scheme, at least the eight promised keys; nothing else on standard output."""
    document = json.loads(_call("plan", "--example", "brief", "--runs", "200", "--json"))
    assert {"assumptions", "schemes"} <= set(document)
    assert document["assumptions"]["state"]["value"] == 840
    assert len(document["schemes"]) >= 10
    for entry in document["schemes"]:
        assert set(entry) >= _SCHEME_KEYS
        assert entry["net_saving"] == pytest.approx(entry["price_saving"] + entry["scheme_saving"])
        assert entry["net_saving"] <= 1
        assert sum(part["cost_usd"] for part in entry["cost_components"]) == pytest.approx(entry["cost_usd"])
        assert entry["p95_cost_usd"] >= entry["cost_distribution_usd"]["p50"]


def test_a_table_for_people(own: Path) -> None:
    """Headline, the schemes, capacity, what matters, assumptions with their sources."""
    text = _call(*_JOB)
    for words in ("Net saving", "schemes on spot", "capacity", "what matters most", "assumptions", "Poisson", "given"):
        assert words in text, words


def test_a_page_is_written(own: Path, tmp_path: Path) -> None:
    """To the named file; the table is still printed."""
    file = tmp_path / "plan.html"
    assert "written" in _call(*_JOB, "--html", str(file))
    assert file.read_text().startswith("<!DOCTYPE html>")


def test_the_answer_has_a_deadline_and_policies(own: Path) -> None:
    """With a deadline and a trace the policies are compared, at two restarts each."""
    words = (*_JOB, "--deadline", "30 h", "--availability", "bamboo-p3", "--json")
    policies = json.loads(_call(*words))["deadline_policies"]
    assert [entry["policy"] for entry in policies] == ["spot only", "greedy", "uniform progress", "surefoot"] * 2


def test_unknown_examples_are_named(own: Path) -> None:
    """With those there are."""
    with pytest.raises(ConfigError, match="there is: brief"):
        _call("plan", "--example", "other")


def test_prices_are_shown_with_source_and_date(own: Path) -> None:
    """A table and JSON; a filter; an unknown type is named."""
    text = _call("prices", "p5.48xlarge")
    assert "55.04" in text
    assert "2026-09-06" in text
    document = json.loads(_call("prices", "--json"))
    assert all(row["source"] and row["as_of"] for row in document["prices"])
    with pytest.raises(ConfigError, match="no price of"):
        _call("prices", "abacus")


def test_discounts_are_shown_from_the_data(own: Path) -> None:
    """How many offers lie in 60 to 74 %, the median, the extremes."""
    assert "311 of 577 GPU offers save 60 to 74 %, the median 66 %; from -62 % to" in _call("prices", "--discounts")


def test_a_price_is_overridden(own: Path) -> None:
    """By hand, with unit and source; the plan takes it at once."""
    _call("prices", "--set", "a3-highgpu-8g:spot=1.98 USD/gpu-h", "--source", "my quote")
    found = catalogue.find(catalogue.load(own), "a3-highgpu-8g", "spot")
    assert found is not None
    assert (found.usd_per_instance_hour, found.source) == (pytest.approx(15.84), "my quote")
    with pytest.raises(ConfigError, match="write it like"):
        _call("prices", "--set", "a3-highgpu-8g=1.98")


def test_prices_are_updated_from_a_file(own: Path, tmp_path: Path) -> None:
    """Good rows are taken over; a row that is implausible is kept, flagged and not used."""
    news = tmp_path / "news.csv"
    news.write_text(
        ",".join(catalogue.COLUMNS)
        + "\naws,us-east-1,,p5.48xlarge,H100-80GB,8,spot,17.2,2026-11-28,zone list,\n"
        + "azure,eastus,,ND96isr_H100_v5,H100-80GB,8,spot,120,2026-11-28,zone list,\n"
    )
    assert "1 of them will not be used" in _call("prices", "--update", str(news))
    rows = catalogue.load(own)
    found = catalogue.find(rows, "p5.48xlarge", "spot")
    assert found is not None
    assert found.usd_per_instance_hour == 17.2
    assert catalogue.find(rows, "ND96isr_H100_v5", "spot") is None


def test_a_file_is_checked(own: Path, tmp_path: Path) -> None:
    """Exit 1 and one line for each row that would not be used."""
    bad = tmp_path / "bad.csv"
    bad.write_text(
        ",".join(catalogue.COLUMNS)
        + "\ngcp,asia-northeast1,b,a3-highgpu-8g,H100-80GB,8,on-demand,45.7547,unknown,zone list,\n"
        + "gcp,asia-northeast1,b,a3-highgpu-8g,H100-80GB,8,spot,88.7186,unknown,zone list,\n"
    )
    app = typer.Typer()
    prices.register(app)
    plan.register(app)
    result = CliRunner().invoke(app, ["prices", "--check", str(bad)])
    assert result.exit_code == 1
    assert "spot 88.72 above on-demand 45.75; not used" in result.stdout
