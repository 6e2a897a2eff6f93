"""Whom MPS servers serve: one user at a time."""

from carpool_extender.state.view import NOBODY, Bools, Columns


def serves_another(columns: Columns, user: int | None) -> Bools | None:
    """Where an MPS server serves another user: the newcomer would wait in CUDA until all its clients have ended.

    Args:
        columns: Some GPUs.
        user: As whom the newcomer runs; None where nobody knows. Its node's agent keeps it waiting then, if it must.

    Returns:
        A mask, shape (gpus,); None where the newcomer is in nobody's way.
    """
    if user is None:
        return None
    others: Bools = (columns.user != NOBODY) & (columns.user != user)
    return others
