"""The pages of docs/reference/ by file name, with the functions that make them."""

from collections.abc import Callable, Mapping
from pathlib import Path

from carpool_docs import commands, metrics, resources, settings

FOLDER = Path(__file__).parents[1] / "reference"

PAGES: Mapping[str, Callable[[], str]] = {
    "settings.md": settings.page,
    "metrics.md": metrics.page,
    "commands.md": commands.page,
    "resources.md": resources.page,
}


def write(folder: Path = FOLDER) -> list[Path]:
    """Write every page into a folder, and return the files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = [folder / name for name in PAGES]
    for file in files:
        file.write_text(PAGES[file.name](), encoding="utf-8")
    return files
