"""Logging: an event of a few words with key-values, on standard error, the same for our own and for libraries' logs."""

import logging
import os
import sys
from typing import TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from carpool_core.settings import LogFormat, LogSettings

_NOISY = ("asyncio", "aiohttp.access", "urllib3")
"""Libraries whose informational logs tell an operator nothing."""


def configure(settings: LogSettings, process: str, *, stream: TextIO | None = None) -> None:
    """Set up structlog and the standard library's logging for this process.

    Args:
        settings: Level and format.
        process: Bound to every event as `process`, such as `extender`.
        stream: Where to write; standard error when None.
    """
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _NamedProcess(process),
        structlog.processors.StackInfoRenderer(),
    ]
    out = stream or sys.stderr
    is_json = settings.format is LogFormat.JSON
    final: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_encode)]
        if is_json
        else [
            structlog.dev.ConsoleRenderer(colors=_shows_colours(out), exception_formatter=structlog.dev.plain_traceback)
        ]
    )
    handler = logging.StreamHandler(out)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *final]
        )
    )
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _shows_colours(stream: TextIO) -> bool:
    """Whether it is a terminal of somebody who has not said that they want none (https://no-color.org)."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


class _NamedProcess:
    def __init__(self, process: str) -> None:
        self._process = process

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("process", self._process)
        return event


def _encode(event: object, **_: object) -> str:
    return msgspec.json.encode(event, enc_hook=str).decode()
