"""Certificates of the extender on a real server and with the real openssl, on a clock that tests advance."""

import asyncio
import re
import ssl
import time
from contextlib import asynccontextmanager

import pytest
from carpool_core.settings import SettingsError
from carpool_core.testing.clock import FakeClock
from carpool_e2e.controlplane import make
from carpool_extender.certificates import CHECK_S, LIFETIME_DAYS, Certificates, expiry_of
from carpool_extender.settings import TlsSettings
from carpool_extender.testing import until
from http_world import ARGS, make_certificates, running, tls_of
from structlog.testing import capture_logs

DAY_S = 86400.0


@pytest.fixture
def made(tmp_path):
    """A directory in which the extender has made certificates."""
    Certificates(TlsSettings(tmp_path), FakeClock()).files()
    return tmp_path


@pytest.fixture
def given(tmp_path):
    """Certificates of another program, which the test may replace."""
    return make_certificates(tmp_path)


@asynccontextmanager
async def reloading(kube, folder):
    """A server with the certificates of another program; yields its URL, its parts, and a wait for a next check."""
    clock = FakeClock()
    settings = TlsSettings(None, folder / "server.crt", folder / "server.key", folder / "ca.crt")
    async with running(kube, settings, clock=clock) as (url, parts):
        keeping = asyncio.create_task(parts.certificates.run())

        async def check():
            for _ in range(9):
                await asyncio.sleep(0)
            clock.advance(CHECK_S)
            for _ in range(9):
                await asyncio.sleep(0)

        try:
            yield url, parts, check
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)


async def shown_by(url, context):
    """Let both sides shake hands; return the number of the server's certificate."""
    async with connected(url, context) as (reader, writer):
        await ask(reader, writer)  # a refused client certificate shows only here
        return writer.get_extra_info("peercert")["serialNumber"]


@asynccontextmanager
async def connected(url, context):
    host, port = url.removeprefix("https://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        yield reader, writer
    finally:
        writer.close()


async def ask(reader, writer):
    writer.write(f"POST /filter HTTP/1.1\r\nhost: x\r\ncontent-length: {len(ARGS)}\r\n\r\n{ARGS}".encode())
    head = await reader.readuntil(b"\r\n\r\n")
    assert b" 200 OK" in head
    await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))


def test_each_key_is_readable_by_its_owner_only_and_that_of_the_authority_is_deleted(made):
    """A pod never needs another certificate: they last longer than it runs."""
    files = {str(file.relative_to(made)): file for file in made.rglob("*") if file.is_file()}
    assert sorted(files) == ["client/ca.crt", "client/client.pem", "server.pem"]
    assert "PRIVATE KEY" not in files.pop("client/ca.crt").read_text()
    for file in files.values():
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.read_text().count("PRIVATE KEY-----") == 2  # its begin and its end
        assert expiry_of(file) - time.time() > (LIFETIME_DAYS - 1) * DAY_S


async def test_the_scheduler_trusts_the_extender_after_a_restart(kube, made):
    """The files are those of the pod, not of the process."""
    context = ssl.create_default_context(cafile=made / "client" / "ca.crt")
    context.load_cert_chain(made / "client" / "client.pem")
    shown = set()
    for _ in range(2):
        async with running(kube, TlsSettings(made)) as (url, _):
            shown.add(await shown_by(url, context))
    assert len(shown) == 1


def test_a_start_that_was_interrupted_begins_again(made):
    before = {file: file.read_text() for file in made.rglob("*.*") if file.is_file()}
    (made / "server.pem").unlink()  # the last that is made
    Certificates(TlsSettings(made), FakeClock()).files()
    assert not [file for file, content in before.items() if file.read_text() == content]


async def test_a_renewed_certificate_is_shown_without_a_restart(kube, given):
    """The same process, server and port; a connection that is open stays open."""
    context = tls_of(given, "client")
    async with reloading(kube, given) as (url, parts, check), connected(url, context) as (reader, writer):
        first = await shown_by(url, context)
        make(given, "server", "/CN=extender", ["IP:127.0.0.1"], "ca")
        await check()
        assert parts.not_ready() is None
        assert await shown_by(url, context) != first
        await ask(reader, writer)


async def test_a_certificate_without_its_key_is_reported_and_the_old_one_is_shown_until_it_has_one(kube, given):
    context = tls_of(given, "client")
    async with reloading(kube, given) as (url, parts, check):
        first, key = await shown_by(url, context), (given / "server.key").read_text()
        make(given, "server", "/CN=extender", ["IP:127.0.0.1"], "ca")
        new = (given / "server.key").read_text()
        (given / "server.key").write_text(key)
        await check()
        assert await shown_by(url, context) == first
        assert "expected a certificate and its key in" in str(parts.not_ready())
        (given / "server.key").write_text(new)
        await check()
        assert parts.not_ready() is None
        assert await shown_by(url, context) != first


async def test_another_ca_is_reported_and_the_old_certificate_is_shown(kube, given):
    """kube-scheduler has read the old one, and would trust no certificate of the new."""
    context = tls_of(given, "client")
    async with reloading(kube, given) as (url, parts, check):
        first, same = await shown_by(url, context), (given / "ca.crt").read_bytes()
        (given / "ca.crt").unlink()
        (given / "ca.crt").write_bytes(same)
        await check()
        assert parts.not_ready() is None
        make_certificates(given)
        await check()
        assert await shown_by(url, context) == first
        assert "restart the pod" in str(parts.not_ready())


async def test_an_expired_certificate_is_answered_with_a_sentence(kube, certificates):
    clock = FakeClock()
    settings = TlsSettings(None, certificates / "server.crt", certificates / "server.key", certificates / "ca.crt")
    expired = expiry_of(certificates / "server.crt")
    async with running(kube, settings, clock=clock) as (url, parts):
        assert parts.not_ready() is None
        clock.advance(expired - clock.now().timestamp())
        assert "server.crt, found one that expired at 20" in str(parts.not_ready())
        with capture_logs() as logs:
            keeping = asyncio.create_task(parts.certificates.run())
            for _ in range(3):
                await until(lambda: clock.sleeping and clock.sleeping[0] <= CHECK_S)
                clock.advance(CHECK_S)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        assert [log["log_level"] for log in logs if "problem" in log] == ["error"], "said once"
        assert await shown_by(url, tls_of(certificates, "client")), "kube-scheduler decides whether it goes on"


def test_a_directory_that_cannot_be_used_is_an_error_with_the_setting(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SettingsError, match="CARPOOL_EXTENDER_TLS_DIR: expected a directory to write certificates to"):
        Certificates(TlsSettings(tmp_path), FakeClock()).files()
    assert not (tmp_path / "server.pem").exists()
