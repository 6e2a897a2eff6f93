"""The board's certificate on a real TLS server, on a clock that tests advance."""

import asyncio
import ssl
from contextlib import asynccontextmanager

import pytest
import uvicorn
from carpool_board.commands import board, keep_current, load
from carpool_core.testing.clock import FakeClock
from carpool_e2e.controlplane import make
from carpool_extender.testing import until
from click.testing import CliRunner
from structlog.testing import capture_logs


def renew(folder):
    """Make a certificate and its key."""
    make(folder, "tls", "/CN=board", ["IP:127.0.0.1"])


@asynccontextmanager
async def keeping(folder, kind=uvicorn.Config):
    """A server that keeps its certificate current; yields what it shows after a next look at the files."""
    renew(folder)
    config = kind(object, ssl_certfile=folder / "tls.crt", ssl_keyfile=folder / "tls.key", log_config=None)
    loaded, clock = load(config), FakeClock()
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=config.ssl)
    keeper = asyncio.create_task(keep_current(config, loaded, clock.sleep))

    async def shown():
        await until(lambda: clock.sleeping)
        clock.advance(clock.sleeping[0])
        await until(lambda: clock.sleeping)
        return await asyncio.to_thread(ssl.get_server_certificate, server.sockets[0].getsockname())

    try:
        yield shown
    finally:
        keeper.cancel()
        server.close()
        await asyncio.gather(keeper, return_exceptions=True)


@pytest.mark.parametrize("broken", ["tls.crt", "tls.key"])
async def test_broken_certificate_is_tried_again_with_the_old_one_in_use(tmp_path, broken):
    """One file alone, and beside a new other one."""
    async with keeping(tmp_path) as shown:
        first = await shown()
        assert first == (tmp_path / "tls.crt").read_text()
        for change in (lambda _: None, renew):
            change(tmp_path)
            (tmp_path / broken).write_text("neither")
            with capture_logs() as logs:
                assert [await shown() for _ in range(3)] == [first] * 3
            assert [log["event"] for log in logs] == ["certificate not loaded"] * 3
        renew(tmp_path)
        assert await shown() == (tmp_path / "tls.crt").read_text() != first


async def test_certificate_that_was_renewed_while_it_was_loaded_is_taken_up(tmp_path):
    class Renewed(uvicorn.Config):
        def load(self):
            super().load()
            renew(tmp_path)

    async with keeping(tmp_path, Renewed) as shown:
        assert await shown() == (tmp_path / "tls.crt").read_text()


def test_key_without_a_certificate_is_a_sentence(tmp_path):
    """Regression: it ended with a traceback."""
    done = CliRunner().invoke(board, ["--tls-key", "k.pem", "--port", "0"])
    assert (done.exit_code, "expected the certificate of k.pem, found none" in done.output) == (2, True)
