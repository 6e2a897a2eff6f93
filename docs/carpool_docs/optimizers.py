"""Page of the optimizers, read from the predictor's table."""

from carpool_predictor.optimizers import TABLE

from carpool_docs.markdown import code, table
from carpool_docs.markdown import page as page_of

_INTRODUCTION = """Values of `spec.training.optimizer` and of `--optimizer`. The state is alive between steps, and
temporaries during the update. Bytes are those of a parameter of a 4,096 × 4,096 matrix in FP32 and in BF16; small
tensors differ where the source has blocks or thresholds. Updates that handle all tensors at once hold the temporaries
of all parameters. Others hold those of one tensor, or of two while the loop keeps the previous one."""

_MATRIX = (4096, 4096)


def _bytes(numbers: tuple[int, int]) -> str:
    return " / ".join(f"{number / (_MATRIX[0] * _MATRIX[1]):.3g}" for number in numbers)


def page() -> str:
    """Return the page."""
    rows = [
        (
            code(kind),
            _bytes((row.state_bytes([_MATRIX], 4), row.state_bytes([_MATRIX], 2))),
            _bytes((row.temporary_bytes([_MATRIX], 4), row.temporary_bytes([_MATRIX], 2))),
            "all tensors" if row.at_once else "one tensor",
            row.source,
        )
        for kind, row in TABLE.items()
    ]
    header = ("optimizer", "state, bytes", "temporaries, bytes", "of", "source")
    return page_of("Optimizers", _INTRODUCTION, table(header, rows))
