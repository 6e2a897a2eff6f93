"""Names of GPU products: NVML's, or a part of one."""

import pytest
from carpool_core.products import PRODUCTS, UnknownProductError, find_product, product_matches


@pytest.mark.parametrize(
    ("wanted", "name"),
    [
        pytest.param("NVIDIA A100-SXM4-40GB", "NVIDIA A100-SXM4-40GB", id="as NVML has it"),
        pytest.param("Simulated NVIDIA A30", "NVIDIA A30", id="simulated"),
        pytest.param("a100-sxm4-80gb", "NVIDIA A100-SXM4-80GB", id="case"),
        pytest.param("A100 80GB PCIe", "NVIDIA A100 80GB PCIe", id="words"),
        pytest.param("L4", "NVIDIA L4", id="a word that another product's begins with"),
        pytest.param("A10", "NVIDIA A10", id="a word that several begin with"),
        pytest.param("A100SXM440GB", "NVIDIA A100-SXM4-40GB", id="neither dashes nor spaces"),
        pytest.param("RTX2080", "NVIDIA GeForce RTX 2080", id="two words as one"),
        pytest.param(" L4 ", "NVIDIA L4", id="blanks around it"),
        pytest.param("3090", "NVIDIA GeForce RTX 3090", id="the last word"),
        pytest.param("GeForce_RTX_2080".replace("_", "-"), "NVIDIA GeForce RTX 2080", id="dashes for spaces"),
    ],
)
def test_a_product_goes_by_its_name_or_an_unambiguous_part(wanted: str, name: str) -> None:
    assert find_product(wanted).name == name


def test_every_product_goes_by_its_own_name() -> None:
    assert [find_product(product.name) for product in PRODUCTS] == list(PRODUCTS)


def test_what_several_products_go_by_is_refused_with_their_names() -> None:
    with pytest.raises(UnknownProductError) as told:
        find_product("A100")
    assert "'A100' is ambiguous" in str(told.value)
    assert "NVIDIA A100-SXM4-40GB, NVIDIA A100-SXM4-80GB, NVIDIA A100 80GB PCIe; write more" in str(told.value)
    assert "A10," not in str(told.value)
    with pytest.raises(UnknownProductError, match="matches NVIDIA A100-SXM4-40GB, NVIDIA A100-SXM4-80GB;"):
        find_product("A100SXM4")


@pytest.mark.parametrize("wanted", ["MI300", "A1000", "nvidia-x", "L40", "H20", "A3", "A100SXM", "", " "])
def test_what_no_product_goes_by_is_refused_with_those_there_are(wanted: str) -> None:
    """Regression: H20 and L40, which are products of their own, were taken for H200 and L40S."""
    with pytest.raises(UnknownProductError, match=r"is unknown; known products: .*Tesla T4"):
        find_product(wanted)


@pytest.mark.parametrize(
    ("product", "wanted", "does"),
    [
        pytest.param("NVIDIA A100-SXM4-80GB", "A100", True, id="every product of that word"),
        pytest.param("NVIDIA L40S", "L4", False, id="letters of another word"),
        pytest.param("NVIDIA A100-SXM4-40GB", "A10", False, id="letters of another word, which several begin with"),
        pytest.param("Simulated NVIDIA L4", "L4", True, id="simulated"),
        pytest.param("NVIDIA RTX 5000 Ada Generation", "RTX 5000", True, id="a product that the table lacks"),
        pytest.param("NVIDIA L40S", "L40", False, id="letters of another product that the table lacks"),
        pytest.param("NVIDIA L40", "L40", True, id="a product that the table lacks by its word"),
        pytest.param("NVIDIA A40-48Q", "A40-48", False, id="a word cut short"),
        pytest.param("NVIDIA L4", " ", False, id="no word at all"),
    ],
)
def test_a_job_that_wants_a_product_gets_no_other(product: str, wanted: str, does: bool) -> None:
    """Regression: a job that asked for an L4 was placed on an L40S."""
    assert product_matches(product, wanted) is does
