"""Times, amounts and prices as a user writes them, and files of prices."""

import pytest

from batchscope.choice import money
from batchscope.choice.money import Amount, Prices
from batchscope.errors import UserError


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("90s", 90), ("30min", 1800), ("30 m", 1800), ("2h", 7200), ("1h30m", 5400), ("1.5d", 129600), (".5h", 1800)],
)
def test_a_time_has_a_unit(text, seconds):
    assert money.seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "2", "-2h", "0h", "2 hours", "h", "nan h", "1e9d", "2h!", "2h -30m"])
def test_a_time_without_a_unit_or_above_all_bounds_is_refused(text):
    with pytest.raises(ValueError, match="takes a time above 0 with its unit, such as 30min or 2h, got"):
        money.seconds(text)


def test_a_start_up_may_be_0():
    assert money.seconds_or_0("0") == money.seconds_or_0("0min") == 0
    assert money.seconds_or_0("2min") == 120


@pytest.mark.parametrize(
    ("text", "amount"), [("5", Amount(5.0)), ("$2.50", Amount(2.5, "$")), ("12 EUR", Amount(12.0, "EUR"))]
)
def test_an_amount_may_name_its_currency(text, amount):
    assert money.amount(text) == amount


@pytest.mark.parametrize("text", ["0", "-5", "five", "", "$5€", "inf", "1e5"])
def test_an_amount_is_above_0(text):
    with pytest.raises(ValueError, match="takes an amount of money above 0"):
        money.amount(text)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("h100=2.5/h", ("h100", Amount(2.5))),
        ("T4=$0.01/min", ("t4", Amount(0.6, "$"))),
        ("l4 = 24 EUR/day", ("l4", Amount(1.0, "EUR"))),
    ],
)
def test_a_price_is_that_of_an_hour(text, found):
    name, amount = money.price(text)
    assert (name, amount.currency) == (found[0], found[1].currency)
    assert amount.value == pytest.approx(found[1].value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("h100=2.5", r"such as h100=2.5/h, and 'h100=2.5' has no unit"),
        ("h100=2.5/week", r"has the unit 'week'"),
        ("h100", "takes a device and its price, such as h100=2.5/h, got 'h100'"),
        ("=2/h", "takes a device and its price"),
        ("h100=-2/h", "takes an amount of money above 0"),
    ],
)
def test_a_price_without_its_parts_is_refused(text, said):
    with pytest.raises(ValueError, match=said):
        money.price(text)


def known(name):
    if name not in ("t4", "h100"):
        raise UserError(f"{name}: no such device")
    return name


GOOD = "source: list prices of a provider\ndate: 2025-06-01\ncurrency: $\nper_hour: {T4: 0.5, h100: 2.5}\n"


def test_a_file_says_whose_prices_they_are(tmp_path):
    path = tmp_path / "prices.yaml"
    path.write_text(GOOD)
    prices = money.collect([("h100", Amount(2.0, "$"))], money.read_prices(path), Amount(5.0), known)
    assert prices == Prices({"t4": 0.5, "h100": 2.0}, "$", "list prices of a provider, 2025-06-01")
    assert prices.text(0.0526) == "$0.053"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("per_hour: {t4: 0.5}", "whose prices these are, and of which day"),
        ("source: a provider\nper_hour: {t4: 0.5}", "whose prices these are, and of which day"),
        ("source: a\ndate: 2025", "has no table `per_hour`"),
        ("[1, 2]", "has no table `per_hour`"),
        ("", "has no table `per_hour`"),
        (GOOD.replace("0.5", "-1"), "T4: takes an amount above 0 for an hour, got -1"),
        (GOOD.replace("0.5", "cheap"), "T4: takes an amount above 0 for an hour, got 'cheap'"),
        (GOOD.replace("0.5", ".nan"), "T4: takes an amount above 0"),
        (GOOD.replace("0.5", "true"), "T4: takes an amount above 0"),
        ("{: [", "is not a YAML file"),
        ("!!python/object:os.system {}", "is not a YAML file"),
    ],
)
def test_a_file_that_holds_no_prices_is_one_line(tmp_path, text, said):
    path = tmp_path / "prices.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=said) as refused:
        money.read_prices(path)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_none_is_one_line(tmp_path):
    with pytest.raises(UserError, match="cannot be read: No such file"):
        money.read_prices(tmp_path / "none.yaml")
    with pytest.raises(UserError, match="cannot be read: Is a directory"):
        money.read_prices(tmp_path)
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="is not a YAML file"):
        money.read_prices(tmp_path / "bytes")


def test_two_currencies_cannot_be_compared():
    with pytest.raises(UserError, match=r"amounts in \$ and in EUR cannot be compared"):
        money.collect([("t4", Amount(1.0, "$"))], None, Amount(5.0, "EUR"), known)


def test_a_price_of_an_unknown_device_is_refused():
    with pytest.raises(UserError, match="t5: no such device"):
        money.collect([("t5", Amount(1.0))], None, None, known)


@pytest.mark.parametrize(
    ("value", "text"),
    [(5, "5"), (0.0712, "0.071"), (1234.6, "1,235"), (0.07, "0.070"), (2.5, "2.5"), (12.34, "12"), (2e-5, "0.000020")],
)
def test_an_amount_has_two_digits_that_count(value, text):
    assert Prices({}).text(value) == text
    assert Prices({}, "EUR").text(value) == f"{text} EUR"
