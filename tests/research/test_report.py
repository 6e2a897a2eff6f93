"""Tables, figures and progress of the suites."""

from carpool_research.report import counted


def test_items_are_counted_and_named() -> None:
    heard: list[str] = []
    assert list(counted([7, 8], "families held out, fold", heard.append)) == [7, 8]
    assert list(counted(["XGBoost"], "split", heard.append)) == ["XGBoost"]
    assert heard == ["families held out, fold 1 of 2", "families held out, fold 2 of 2", "split: XGBoost (1 of 1)"]
