from decimal import Decimal

import pytest
from carpool_core.values import parse_memory_mib, parse_quantity
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize(
    ("quantity", "mib"),
    [
        ("12Gi", 12288), ("500Mi", 500), ("1.5Gi", 1536), ("1Pi", 2**30), ("1024Ki", 1), (2**20, 1), ("1048576", 1),
        ("1e9", 953), ("1E9", 953), ("1P", 953674316), ("+2Mi", 2), (".5Gi", 512), ("5.Gi", 5120), ("1048576000m", 1),
        ("0", 0), ("1E", 953674316406),
    ],
)  # fmt: skip
def test_what_kubernetes_accepts(quantity: int | str, mib: int) -> None:
    assert parse_memory_mib(quantity) == mib


@pytest.mark.parametrize(
    "quantity", ["", "Gi", "-1Gi", "12GB", "12 Gi", "1Gi\n", "1e", "0x10", "NaN", "1.2.3", "\u0661Gi"]
)
def test_what_is_no_amount_of_memory(quantity: str) -> None:
    with pytest.raises(ValueError, match="expected an amount of memory such as 12Gi or 500Mi, found"):
        parse_memory_mib(quantity)


@given(
    st.integers(0, 2**60), st.sampled_from([("Ki", 2**10), ("Mi", 2**20), ("Gi", 2**30), ("k", 10**3), ("G", 10**9)])
)
def test_rounds_down_exactly(number: int, suffix: tuple[str, int]) -> None:
    assert parse_memory_mib(f"{number}{suffix[0]}") == number * suffix[1] // 2**20


@given(st.text(max_size=12))
def test_any_text_is_an_amount_or_refused(text: str) -> None:
    try:
        assert parse_memory_mib(text) >= 0
    except ValueError as error:
        assert repr(text) in str(error)  # noqa: PT017  # both outcomes are right


@given(st.decimals(0, 10**6, allow_nan=False, allow_infinity=False, places=3))
def test_fractions(number: Decimal) -> None:
    assert parse_memory_mib(f"{number:f}Gi") == int(number * 1024)


@pytest.mark.parametrize(("quantity", "value"), [("500m", "0.5"), (4, "4"), ("2Ki", "2048"), ("0", "0")])
def test_amounts_in_their_own_unit(quantity: int | str, value: str) -> None:
    assert parse_quantity(quantity) == Decimal(value)
    with pytest.raises(ValueError, match="expected an amount such as"):
        parse_quantity("four")
