"""Certificates of the extender on a real server and with the real openssl, on a clock that tests advance."""

import asyncio
import os
import ssl

import pytest
from carpool_core.settings import SettingsError
from carpool_core.testing.clock import FakeClock
from carpool_e2e.controlplane import make
from carpool_extender.certificates import CHECK_S, LIFETIME_DAYS, Certificates, validity_of
from carpool_extender.settings import TlsSettings
from carpool_extender.testing import until
from http_world import ARGS, running, tls_of
from structlog.testing import capture_logs

DAY_S = 86400.0


class World:
    """A directory, in which the extender makes certificates, and a clock at the moment at which it made them."""

    def __init__(self, folder):
        self.folder, self.clock = folder, FakeClock()
        self.settings = TlsSettings(folder)
        self.certificates = Certificates(self.settings, self.clock, self.clock.sleep)
        self.server, self.client = folder / "server.pem", folder / "client" / "client.pem"
        self.certificates.files()
        self.advance_to(validity_of(self.server).not_before)

    def advance_to(self, moment):
        self.clock.advance(moment - self.clock.now().timestamp())

    def context(self):
        """The context of kube-scheduler, which has read the folder `client`."""
        context = ssl.create_default_context(cafile=self.folder / "client" / "ca.crt")
        context.load_cert_chain(self.client)
        return context


@pytest.fixture
def made(tmp_path):
    return World(tmp_path)


async def shown_by(url, context):
    """Let both sides shake hands; return the end of the server's certificate."""
    host, port = url.removeprefix("https://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), ssl=context)
    try:
        certificate = writer.get_extra_info("peercert")
        writer.write(f"POST /filter HTTP/1.1\r\nhost: x\r\ncontent-length: {len(ARGS)}\r\n\r\n{ARGS}".encode())
        assert b" 200 OK" in await reader.readline()  # a refused client certificate shows only here
        return ssl.cert_time_to_seconds(certificate["notAfter"])
    finally:
        writer.close()


def test_each_key_is_readable_by_its_owner_only_and_lasts_a_year(made):
    for file in (made.folder / "authority.pem", made.server, made.client):
        assert file.stat().st_mode & 0o777 == 0o600
        assert "PRIVATE KEY" in file.read_text()
    assert "PRIVATE KEY" not in (made.folder / "client" / "ca.crt").read_text()
    assert sorted(os.listdir(made.folder / "client")) == ["ca.crt", "client.pem"]
    for file in (made.server, made.client):
        assert validity_of(file).not_after - validity_of(file).not_before == LIFETIME_DAYS * DAY_S


@pytest.mark.parametrize(("days", "is_renewed"), [(243, False), (244, True)])
def test_certificates_are_renewed_at_two_thirds_and_the_authority_is_not(made, days, is_renewed):
    before = {file: file.read_bytes() for file in made.folder.rglob("*.*")}
    assert len(before) == 4
    made.clock.advance(days * DAY_S)
    made.certificates.files()
    changed = {file.name for file, content in before.items() if file.read_bytes() != content}
    assert changed == ({"server.pem", "client.pem"} if is_renewed else set())


async def test_a_running_server_shows_the_renewed_certificate_and_takes_the_renewed_client(kube, made):
    """Without a restart: the same process, server and port, and connections that are open stay open."""
    async with running(kube, made.settings, clock=made.clock) as (url, parts):
        keeping = asyncio.create_task(parts.certificates.run())
        first = await shown_by(url, made.context())
        assert first == validity_of(made.server).not_after
        made.server.unlink()
        made.client.unlink()
        make_short(made)
        await until(lambda: made.clock.sleeping and made.clock.sleeping[0] <= CHECK_S)
        made.clock.advance(CHECK_S)
        await until(lambda: parts.certificates.expires_at != first)
        assert await shown_by(url, made.context()) == validity_of(made.server).not_after != first
        keeping.cancel()
        await asyncio.gather(keeping, return_exceptions=True)


def make_short(made):
    """Replace the server's certificate by one of a month, of the same authority, as another program would."""
    folder = made.folder.parent / f"{made.folder.name}-short"
    folder.mkdir()
    for name, ending in (("authority.crt", "CERTIFICATE"), ("authority.key", "PRIVATE KEY")):
        (folder / name).write_text((made.folder / "authority.pem").read_text())
        assert ending in (folder / name).read_text()
    make(folder, "server", "/CN=extender", ["IP:127.0.0.1"], "authority")
    made.server.write_text((folder / "server.crt").read_text() + (folder / "server.key").read_text())


async def test_an_expired_certificate_is_answered_with_a_sentence(kube, certificates):
    clock = FakeClock()
    settings = TlsSettings(None, certificates / "server.crt", certificates / "server.key", certificates / "ca.crt")
    expired = validity_of(certificates / "server.crt").not_after
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
        assert await shown_by(url, tls_of(certificates, "client")) == expired, (
            "kube-scheduler decides whether it goes on"
        )


def test_a_renewal_that_fails_keeps_what_is_there(made, monkeypatch):
    content = made.server.read_bytes()
    made.clock.advance(300 * DAY_S)
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(SettingsError, match="CARPOOL_EXTENDER_TLS_DIR: expected a directory to write certificates to"):
        made.certificates.files()
    assert made.server.read_bytes() == content
