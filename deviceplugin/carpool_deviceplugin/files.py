"""Files that readers never see half-written."""

import os
from pathlib import Path


def write_file(path: Path, content: bytes) -> None:
    """Write a file atomically, and create its directory; raises OSError and then leaves no temporary file."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")  # no program reads files with this suffix
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
