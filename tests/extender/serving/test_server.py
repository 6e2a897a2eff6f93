"""The server: who may connect, what a connection costs, and what the process loads."""

import asyncio
import subprocess
import sys

import aiohttp
import pytest
from carpool_extender.server import Gathering
from http_world import ARGS, as_client, serving, tls_of


@pytest.mark.parametrize("name", ["", "stranger"])
async def test_whoever_shows_no_certificate_of_the_ca_is_refused(kube, certificates, name):
    async with serving(kube, certificates) as url, as_client(certificates, name) as session:
        with pytest.raises(aiohttp.ClientError):
            await session.post(f"{url}/filter", data=ARGS)


class Wire(asyncio.Transport):
    """Notes what is written to it."""

    def __init__(self):
        super().__init__()
        self.written, self.is_closed = [], False

    def write(self, data):
        self.written.append(data)

    def close(self):
        self.is_closed = True

    def is_closing(self):
        return self.is_closed


async def test_the_head_of_an_answer_and_its_body_are_written_at_once():
    wire = Wire()
    transport = Gathering(wire)
    transport.write(b"head ")
    transport.write(b"body")
    assert wire.written == []
    await asyncio.sleep(0)
    assert wire.written == [b"head body"]


async def test_what_was_written_before_a_connection_closes_is_sent_and_nothing_after():
    wire = Wire()
    transport = Gathering(wire)
    transport.write(b"goodbye")
    transport.close()
    transport.write(b"?")
    await asyncio.sleep(0)
    assert (wire.written, transport.is_closing()) == ([b"goodbye"], True)


def test_the_process_loads_no_framework_that_it_does_not_use():
    """What a request costs besides the decision, and what an image holds, is Starlette and no more."""
    loads = "import sys, carpool_extender.app, carpool_extender.server"
    told = f"{loads}; print({{'fastapi', 'pydantic'}} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


async def test_no_tickets_are_made_for_sessions_that_nobody_resumes(kube, certificates):
    """They took a third of each handshake, and kube-scheduler makes one for each bind of a burst."""
    async with serving(kube, certificates) as url:
        host, port = url.removeprefix("https://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), ssl=tls_of(certificates, "client"))
        writer.write(b"GET /filter HTTP/1.1\r\nHost: extender\r\nConnection: close\r\n\r\n")
        assert (await reader.read()).startswith(b"HTTP/1.1 405 ")
        assert not writer.get_extra_info("ssl_object").session.has_ticket
        writer.close()
