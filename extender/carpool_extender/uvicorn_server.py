"""uvicorn's server with clean-up after signals, and with a sentence for an address that is not available."""

import asyncio
import signal
import socket
from collections.abc import Coroutine, Generator
from contextlib import contextmanager
from typing import Any

import uvicorn
from carpool_core.settings import SettingsError


class Server(uvicorn.Server):
    """uvicorn's server, but it returns after a signal: uvicorn raises the signal again, which would skip clean-up.

    Args:
        config: uvicorn's configuration.
        variables: Start of the names of the variables with host and port, such as CARPOOL_EXTENDER.
    """

    def __init__(self, config: uvicorn.Config, variables: str) -> None:
        super().__init__(config)
        self._variables = variables

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen.

        Raises:
            SettingsError: The address is not available; uvicorn itself would end the process.
        """
        try:
            await super().startup(sockets)
        except SystemExit as error:
            raise SettingsError(
                f"{self._variables}_HOST and {self._variables}_PORT: expected an address of this host and a free port, "
                f"found {self.config.host} and {self.config.port}: {error.__context__}; set others"
            ) from error

    async def serve_beside(self, *work: Coroutine[Any, Any, None]) -> None:
        """Serve until a signal, or until some other work ends; cancel the rest, and raise the error of what ended."""
        tasks = [asyncio.ensure_future(one) for one in (self.serve(), *work)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    @contextmanager
    def capture_signals(self) -> Generator[None]:
        """Stop serving on SIGTERM and SIGINT."""
        loop = asyncio.get_running_loop()
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            loop.add_signal_handler(number, self.handle_exit, number, None)
        try:
            yield
        finally:
            for number in signals:
                loop.remove_signal_handler(number)
