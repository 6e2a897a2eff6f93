"""Logging to standard error: an event of a few words with key-values, in one format for our and for libraries' logs."""

import logging
import os
import sys
from typing import TextIO

import msgspec
import structlog
from structlog.typing import EventDict, Processor, WrappedLogger

from carpool_core.settings import LogFormat, LogSettings

_NOISY = ("asyncio", "aiohttp.access", "urllib3")
"""Libraries whose informational logs are left out."""


def configure(settings: LogSettings, process: str, *, stream: TextIO | None = None) -> None:
    """Set up structlog and the standard library's logging for this process.

    Every event carries the name `process`, such as `extender`. Events go to standard error if `stream` is None.
    """

    def add_process(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("process", process)
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        add_process,
        structlog.processors.StackInfoRenderer(),
    ]
    out = stream or sys.stderr
    has_colours = out.isatty() and not os.environ.get("NO_COLOR")  # https://no-color.org
    final: list[Processor] = (
        [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(serializer=_encode)]
        if settings.format is LogFormat.JSON
        else [structlog.dev.ConsoleRenderer(colors=has_colours, exception_formatter=structlog.dev.plain_traceback)]
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
        processors=[structlog.stdlib.filter_by_level, *shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def _encode(event: object, **_: object) -> str:
    return msgspec.json.encode(event, enc_hook=str).decode()
