"""`python -m carpool_docs`: write docs/reference/, and the dashboards of the chart."""

from collections.abc import Callable, Mapping
from pathlib import Path

from carpool_docs import commands, dashboards, metrics, resources, settings

FOLDER = Path(__file__).parents[1] / "reference"

PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings.page,
    "metrics.md": metrics.page,
    "commands.md": commands.page,
    "resources.md": resources.page,
    "output.md": commands.output_page,
    "optimizers.md": resources.optimizers_page,
}
"""The pages by file name, with the functions that make them."""


def write(folder: Path = FOLDER) -> list[Path]:
    """Write every page into a folder, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in PAGES]
    for file in files:
        file.write_text(PAGES[file.name](), encoding="utf-8")
    return files


if __name__ == "__main__":
    for path, text in dashboards.documents():
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    for file in [*write(), dashboards.FOLDER]:
        print(f"wrote {file}")  # a command's answer
