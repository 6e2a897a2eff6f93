"""Model cards of the suites."""

from pathlib import Path
from string import Template

import carpool_research
import pytest
from carpool_research.report import write_card

CARDS = sorted(Path(str(carpool_research.__file__)).parent.glob("*/card.md.template"))


@pytest.mark.parametrize("template", CARDS, ids=lambda path: path.parent.name)
def test_a_report_fills_every_field_of_its_card(template: Path) -> None:
    """The suites that fit for an hour are not run here; a field without a value would end them with an error."""
    report = template.with_name("report.py").read_text()
    fields = Template(template.read_text()).get_identifiers()
    assert [field for field in fields if f'"{field}"' not in report] == []
    assert len(template.read_text().split()) < 800


def test_cards_are_written_from_their_template(tmp_path: Path) -> None:
    fields = Template(CARDS[0].read_text()).get_identifiers()
    card = write_card(
        f"carpool_research.{CARDS[0].parent.name}", tmp_path / "x" / "card.md", dict.fromkeys(fields, "7")
    )
    assert "$" not in card.read_text()
