"""Quantities as text: exact, with their unit, and nothing that could be read in two ways."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slurm_pfi.flex import FlexError, parse_flex
from slurm_pfi.units import (
    MAX_POWER_MW,
    UnitError,
    format_duration,
    format_power,
    parse_duration_s,
    parse_power_mw,
    watts_to_mw,
)

UNITS = {"W": 10**3, "kW": 10**6, "MW": 10**9}


@pytest.mark.parametrize(
    ("text", "power_mw"),
    [
        ("750W", 750_000),
        ("750 W", 750_000),
        (" 18.5kW ", 18_500_000),
        ("1.2MW", 1_200_000_000),
        ("0W", 0),
        ("-0W", 0),
        ("+5W", 5_000),
        ("0.0019W", 1),
        ("10000MW", MAX_POWER_MW),
    ],
)
def test_powers_are_read_exactly(text: str, power_mw: int) -> None:
    assert parse_power_mw(text) == power_mw


@pytest.mark.parametrize(
    "text",
    [
        *[
            "",
            "W",
            "18.5",
            "1e3W",
            "\N{ARABIC-INDIC DIGIT ONE}W",
            "\N{FULLWIDTH DIGIT ONE}W",
            "10 k W",
            "10  kW",
        ],
        *[
            "nanW",
            "infW",
            "0x10W",
            "1,5kW",
            "1.5.5kW",
            ".5kW",
            "5.W",
            "5kw",
            "5mW",
            "5KW",
            "5GW",
            "5Wh",
            "5W5",
        ],
        *["5%", "-5kW", "-0.001W", "--5W", "10000.000001MW", "99999999999999999999W", "999999999999999MW"],
        *["5\nW\n5", "5\x00W", "5\N{KELVIN SIGN}W"],
    ],
)
def test_other_texts_are_no_power(text: str) -> None:
    with pytest.raises(UnitError, match="write a power with its unit"):
        parse_power_mw(text)


@given(
    number=st.decimals(min_value=0, max_value=9999, places=6, allow_nan=False, allow_infinity=False),
    unit=st.sampled_from(sorted(UNITS)),
    space=st.sampled_from(["", " "]),
)
def test_a_power_is_never_rounded_up(number: object, unit: str, space: str) -> None:
    power_mw = parse_power_mw(f"{number}{space}{unit}")
    exact = Fraction(str(number)) * UNITS[unit]
    assert power_mw <= exact < power_mw + 1


@given(st.integers(0, MAX_POWER_MW))
def test_a_power_written_in_watts_comes_back(power_mw: int) -> None:
    text = f"{power_mw // 1000}.{power_mw % 1000:03d}W"
    assert parse_power_mw(text) == power_mw


@given(st.text(max_size=20))
def test_any_text_is_a_power_within_bounds_or_refused(text: str) -> None:
    try:
        power_mw = parse_power_mw(text)
    except UnitError:
        return
    assert 0 <= power_mw <= MAX_POWER_MW
    assert text.strip().isascii()


@pytest.mark.parametrize(
    ("text", "duration_s"),
    [("45s", 45), ("90m", 5400), ("2h", 7200), ("1h30m", 5400), ("1d", 86_400), ("5min", 300), ("0h5s", 5)],
)
def test_durations_are_read(text: str, duration_s: float) -> None:
    assert parse_duration_s(text) == duration_s


@pytest.mark.parametrize(
    "text",
    [
        "",
        "0s",
        "0h0m",
        "5",
        "-2h",
        "2 h",
        "1.5h",
        "30m1h",
        "2hours",
        "\N{ARABIC-INDIC DIGIT TWO}h",
        "1e2s",
        "1000000d",
        "P1D",
    ],
)
def test_other_texts_are_no_duration(text: str) -> None:
    with pytest.raises(UnitError, match="write a duration with its unit"):
        parse_duration_s(text)


@given(st.integers(0, 999), st.integers(0, 999), st.integers(0, 999), st.integers(1, 999))
def test_a_duration_is_the_sum_of_its_parts(days: int, hours: int, minutes: int, seconds: int) -> None:
    wanted = days * 86_400 + hours * 3600 + minutes * 60 + seconds
    assert parse_duration_s(f"{days}d{hours}h{minutes}m{seconds}s") == wanted


@given(st.floats(0, 1e10, allow_nan=False))
def test_watts_of_the_config_are_off_by_half_a_milliwatt_at_most(watts: float) -> None:
    assert abs(watts_to_mw(watts) - Fraction(watts) * 1000) <= Fraction(1, 2) + Fraction(watts) / 10**12


@pytest.mark.parametrize(
    ("power_mw", "text"),
    [
        (None, "?"),
        (0, "0 W"),
        (699_600, "700 W"),
        (9_999_400, "9999 W"),
        (18_500_000, "18.50 kW"),
        (-30_000, "-30 W"),
    ],
)
def test_power_for_people(power_mw: int | None, text: str) -> None:
    assert format_power(power_mw) == text


@pytest.mark.parametrize(
    ("duration_s", "text"),
    [
        (0, "0 s"),
        (119.4, "119 s"),
        (120, "2 min"),
        (7199, "119 min"),
        (7200, "2 h 00 min"),
        (11_130, "3 h 05 min"),
        (172_799, "47 h 59 min"),
        (187_200, "2 d 04 h"),
    ],
)
def test_durations_for_people(duration_s: float, text: str) -> None:
    assert format_duration(duration_s) == text


# ------------------------------------------------------------------------------------------------ flex


@given(st.integers(1, 100))
def test_every_whole_percentage_is_a_flex(number: int) -> None:
    flex = parse_flex(f"{number}%")
    assert flex.max_loss == number / 100
    assert flex.text == f"{number}%"
    assert not flex.is_none


@given(st.sampled_from(["low", "medium", "high", "5%", "100%"]))
def test_auto_is_what_the_site_says(default: str) -> None:
    flex = parse_flex("auto", site_default=default)
    assert flex.max_loss == parse_flex(default).max_loss
    assert flex.text == "auto"


def test_a_site_default_of_auto_would_mean_nothing() -> None:
    with pytest.raises(FlexError):
        parse_flex("auto", site_default="auto")


@given(st.text(max_size=12))
def test_any_text_is_a_known_flex_or_refused(text: str) -> None:
    try:
        flex = parse_flex(text)
    except FlexError as error:
        assert "none, low, medium, high, auto or a whole percentage" in str(error)
        return
    assert text in {"none", "low", "medium", "high", "auto"} or text.endswith("%")
    assert 0 <= flex.max_loss <= 1


@pytest.mark.parametrize(
    "text",
    [
        "0%",
        "101%",
        "05%",
        "5 %",
        "5.5%",
        "-5%",
        "\N{ARABIC-INDIC DIGIT FIVE}%",
        "None",
        "HIGH",
        " low",
        "low\n",
        "5",
    ],
)
def test_near_misses_are_no_flex(text: str) -> None:
    with pytest.raises(FlexError):
        parse_flex(text)
