"""`surefoot prices`: show, check, override and update the catalogue."""

from __future__ import annotations

from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from surefoot.cli.printing import print_json, print_table, say
from surefoot.errors import ConfigError
from surefoot.money import catalogue
from surefoot.money.catalogue import Price
from surefoot.money.units import parse_usd_per_hour, show_share


def register(app: typer.Typer) -> None:
    """Add the command to ``app``."""
    app.command("prices")(prices)


def prices(
    instance: Annotated[str, typer.Argument(help="only this instance type, e.g. p5.48xlarge")] = "",
    file: Annotated[Path | None, typer.Option("--file", help="your own catalogue; default: the user's")] = None,
    check: Annotated[Path | None, typer.Option(help="check a price file and report what is wrong with it")] = None,
    update: Annotated[Path | None, typer.Option(help="take the prices of this file over")] = None,
    from_package: Annotated[str, typer.Option(help="take them over from an installed catalogue package")] = "",
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="TYPE:MARKET[:REGION]=PRICE, as a3-highgpu-8g:spot=1.98USD/gpu-h"),
    ] = None,
    source: Annotated[str, typer.Option(help="where a price given with --set comes from")] = "given by the user",
    discounts: Annotated[bool, typer.Option("--discounts", help="what spot saves, from the data")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="JSON instead of a table")] = False,
) -> None:
    """Show the price catalogue; check, override or update it. Every price has its source and date."""
    own = file or catalogue.user_file()
    if check is not None:
        raise typer.Exit(_report_check(check))
    news = _news(update, from_package, set_ or [], source, own)
    if news:
        _take_over(news, own)
    rows = catalogue.load(own)
    if instance:
        rows = [row for row in rows if instance.lower() in row.instance_type.lower()]
        if not rows:
            raise ConfigError(f"no price of {instance!r}; `surefoot prices` lists what there is")
    if as_json:
        print_json(_document(rows))
    elif discounts:
        _print_discounts(rows)
    else:
        _print_rows(rows)


def _news(update: Path | None, package: str, given: list[str], source: str, own: Path) -> list[Price]:
    found: list[Price] = []
    if update is not None:
        if not update.is_file():
            raise ConfigError(f"no price file {update}")
        found += catalogue.check(catalogue.parse(update.read_text(errors="replace"), str(update)))
    if package:
        found += catalogue.from_package(package)
    found += [_given(words, source, own) for words in given]
    return found


def _given(words: str, source: str, own: Path) -> Price:
    """One price of --set, with the GPU and count of the known type."""
    key, equals, amount = words.partition("=")
    kind, _, rest = key.partition(":")
    market, _, region = rest.partition(":")
    known = [row for row in catalogue.load(own) if row.instance_type.lower() == kind.strip().lower()]
    if not equals or market not in catalogue.MARKETS or not known:
        raise ConfigError(f"{words!r}: write it like 'a3-highgpu-8g:spot=1.98 USD/gpu-h', with a type of the catalogue")
    row = known[0]
    value, holder = parse_usd_per_hour(amount)
    return Price(
        provider=row.provider,
        region=region or row.region,
        instance_type=row.instance_type,
        gpu=row.gpu,
        gpu_count=row.gpu_count,
        market=market,
        usd_per_instance_hour=value * row.gpu_count if holder == "gpu" else value,
        as_of=date.today().isoformat(),
        source=source,
    )


def _take_over(news: list[Price], own: Path) -> None:
    kept = catalogue.parse(own.read_text(errors="replace"), str(own)) if own.is_file() else []
    catalogue.write(catalogue.merge(kept, news), own)
    taken = {(price.instance_type, price.market, price.region, price.zone) for price in news}
    bad = [p for p in catalogue.load(own) if p.flag and (p.instance_type, p.market, p.region, p.zone) in taken]
    message = f"{len(news)} price(s) written to {own}"
    say(f"{message}; {len(bad)} of them will not be used" if bad else message)


def _report_check(path: Path) -> int:
    """Print what is wrong with a price file; 1 when something is."""
    if not path.is_file():
        raise ConfigError(f"no price file {path}")
    rows = catalogue.check(catalogue.parse(path.read_text(errors="replace"), str(path)))
    problems = 0
    for row in rows:
        where = f"{row.instance_type} {row.market} {row.region}{' ' + row.zone if row.zone else ''}"
        if row.flag:
            problems += 1
            say(f"{where}: {row.flag}; not used")
        elif row.usd_per_instance_hour is None:
            say(f"{where}: blank, no offer")
    say(f"{len(rows)} prices, {problems} not used")
    return 1 if problems else 0


def _document(rows: list[Price]) -> dict[str, object]:
    pairs = [
        {"instance_type": price.instance_type, "region": price.region, "discount": share, "source": price.source}
        for price, share in catalogue.discounts(rows)
    ]
    return {"currency": "USD", "prices": [asdict(row) for row in rows], "discounts": pairs}


def _print_rows(rows: list[Price]) -> None:
    head = ("type", "where", "GPUs", "market", "USD/node-h", "USD/gpu-h", "as of", "source")
    print_table(head, [_line(row) for row in rows], right=head[4:6])
    missing = _without_spot(rows)
    if missing:
        say(f"no spot price shipped for {', '.join(missing)}: give one with --set")


def _line(row: Price) -> tuple[str, ...]:
    node, gpu = row.usd_per_instance_hour, row.usd_per_gpu_hour
    amounts = ("no offer", "") if node is None or gpu is None else (f"{node:,.2f}", f"{gpu:.2f}")
    note = f"NOT USED: {row.flag}" if row.flag else row.source
    where = f"{row.provider} {row.zone or row.region}"
    return (row.instance_type, where, f"{row.gpu_count} {row.gpu}", row.market, *amounts, _dated(row), note)


def _dated(row: Price) -> str:
    age = row.age_days(date.today())
    return f"{row.as_of} (old)" if age is not None and age > catalogue.STALE_DAYS else row.as_of


def _without_spot(rows: list[Price]) -> list[str]:
    spot = {row.instance_type for row in rows if row.market == "spot" and row.usable}
    return sorted({row.instance_type for row in rows} - spot)


def _print_discounts(rows: list[Price]) -> None:
    from surefoot.money import advisor  # numpy: nothing that other commands should wait for

    lines = [
        (price.instance_type, f"{price.provider} {price.region}", show_share(share), price.source)
        for price, share in catalogue.discounts(rows)
    ]
    print_table(("type", "where", "discount", "source"), lines, right=("discount",))
    feed = sorted(row.saving for row in advisor.advices())
    inside = sum(0.60 <= saving <= 0.74 for saving in feed)
    say(
        f"AWS Spot Advisor of {advisor.AS_OF}: {inside} of {len(feed)} GPU offers save 60 to 74 %, the median "
        f"{show_share(feed[len(feed) // 2], 0)}; from {show_share(feed[0], 0)} to {show_share(feed[-1], 0)}"
    )
