"""Says what failed in a model's own code, which may raise anything: what was tried, where it arose, the exception."""

import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedOperatorException,
)

from carpool_predictor.features.abstention import TraceError

T = TypeVar("T")


def explained(what: str, run: Callable[[], T], file: Path | None = None) -> T:
    """Run something of a model's own.

    Args:
        what: What is said to have failed, such as "its constructor failed".
        run: What is run.
        file: The user's own file that it comes from, lines of which are named; None for a catalog's models.

    Raises:
        TraceError: It failed.
    """
    try:
        return run()
    except TraceError:
        raise
    except (DataDependentOutputException, DynamicOutputShapeException) as e:
        cause = f"the model's graph depends on the data ({_first_line(e)}), so that it has no fixed cost"
        raise TraceError("DataDependentGraph", f"{what}{_place(e, file)}: {cause}") from e
    except UnsupportedOperatorException as e:
        cause = f"no fake kernel for {_first_line(e)}"
        raise TraceError("OperatorUnsupported", f"{what}{_place(e, file)}: {cause}") from e
    except SystemExit as e:
        advice = "put what is not needed to build the model under `if __name__ == '__main__':`"
        raise TraceError("TraceFailed", f"{what}{_place(e, file)}: it ended the process ({e.code}); {advice}") from e
    except Exception as e:
        advice = _advice(e) if file is not None and isinstance(e, ImportError) else ""
        cause = f"{type(e).__name__}: {_first_line(e)}"
        raise TraceError("TraceFailed", f"{what}{_place(e, file)}: {cause}{advice}") from e


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0][:500]


def _place(error: BaseException, file: Path | None) -> str:
    """Name the innermost line of the user's own that an error came through: of their file, or of one beside it."""
    if file is None:
        return ""
    folder = file.parent.resolve()
    # The folder may be a home with an environment and all its libraries inside.
    libraries = {Path(__file__).resolve().parent, Path(sysconfig.get_path("stdlib")).resolve()}
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        found = Path(frame.filename).resolve()
        if not found.is_file():
            continue  # code without a file, such as `<frozen importlib._bootstrap>`, would lie in the current folder
        if folder in found.parents and "site-packages" not in found.parts and libraries.isdisjoint(found.parents):
            return f" at {found.relative_to(folder)}, line {frame.lineno}, in {frame.name}"
    return ""


def _advice(error: ImportError) -> str:
    if error.name is None:
        return "; import modules beside the file by their names, without a leading dot"
    return (
        f"; install what provides {error.name} where carpool runs, set PYTHONPATH to where it lies if it is your own, "
        "or name a file that builds the model without it"
    )
