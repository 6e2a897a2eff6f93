"""Files that readers never see half-written, and directories that containers may use."""

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


_LABEL, _FOR_CONTAINERS = "security.selinux", b"system_u:object_r:container_file_t:s0\0"


def make_for_containers(directory: Path) -> None:
    """Create a directory that containers may use, also where SELinux is enforced; raises OSError.

    SELinux gives every file a label. What is created in the directory later gets its type.
    """
    directory.mkdir(parents=True, exist_ok=True)
    try:
        label = os.getxattr(directory, _LABEL)
    except OSError:
        return  # SELinux is off
    if label != _FOR_CONTAINERS:
        os.setxattr(directory, _LABEL, _FOR_CONTAINERS)
