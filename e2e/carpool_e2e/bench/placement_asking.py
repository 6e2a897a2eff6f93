"""An extender of its own, and a client that asks it as kube-scheduler does."""

import http.client
import os
import random
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
from carpool_core.resources.node import GpuNode

from carpool_e2e import certificates
from carpool_e2e.errors import HarnessError
from carpool_e2e.ports import choose

PATIENCE_S = 180.0


@dataclass(frozen=True, slots=True)
class Decision:
    """What one pod's decision took, in seconds."""

    filter_s: float
    prioritize_s: float
    processor_s: float
    """Processor time of the extender until the next pod was asked about: with the changes that it heard of meanwhile,
    but without time that it had to wait for a processor, on this machine or because others had it."""
    is_new: bool
    """Whether nobody had asked for a place for such a job before."""

    @property
    def total_s(self) -> float:
        """How long kube-scheduler waited."""
        return self.filter_s + self.prioritize_s


def processor_s(pid: int) -> float:
    """Return the processor time that a process has used, in seconds; as exact as the scheduler's own books."""
    # As clock_getcpuclockid(3) makes it: Python offers only that of its own threads.
    return time.clock_gettime((~pid << 3) | 2)


def asked_for(pod: bytes, names: list[str]) -> bytes:
    """Return the body of a request of kube-scheduler about a pod and some nodes."""
    return b'{"Pod":' + pod + b',"Nodes":null,"NodeNames":' + msgspec.json.encode(names) + b"}"


class Client:
    """Asks one pod after the other over a connection that is kept.

    Args:
        port: Of the extender.
        ready: URL that says whether it has listed everything.
        tls: Whom it trusts, and as whom it comes.
    """

    def __init__(self, port: int, ready: str, tls: ssl.SSLContext) -> None:
        self._port, self._ready, self._tls = port, ready, tls
        self._connection: http.client.HTTPSConnection | None = None
        self._draw = random.Random(3)  # noqa: S311  # a benchmark, no secret

    def wait(self) -> None:
        """Wait until the extender has listed everything.

        Raises:
            HarnessError: It has not in time.
        """
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            try:
                with urlopen(self._ready) as answer:  # noqa: S310  # our own URL
                    if answer.status == 200:
                        self._connection = http.client.HTTPSConnection("127.0.0.1", self._port, context=self._tls)
                        return
            except OSError:
                time.sleep(0.2)
        raise HarnessError(f"expected the extender to be ready within {PATIENCE_S:.0f} s, it was not")

    def decide(self, pod: bytes, nodes: Sequence[GpuNode]) -> tuple[float, float]:
        """Filter, then prioritize what fits; return how long each took, in seconds.

        Raises:
            HarnessError: No node fits, or none is the best.
        """
        filter_s, found = self._filter(pod, nodes)
        fits = found["NodeNames"] or []
        prioritize_s, scored = self._post("/prioritize", pod, fits)
        if not fits or len(scored) != len(fits) or max(one["Score"] for one in scored) != 10:
            raise HarnessError(
                f"expected scores of some nodes with a 10 among them, found {len(scored)}: {found}"[:500]
            )
        return filter_s, prioritize_s

    def refused(self, pod: bytes, nodes: Sequence[GpuNode]) -> float:
        """Filter a job that fits nowhere; return how long that took, in seconds.

        Raises:
            HarnessError: It fits.
        """
        took, found = self._filter(pod, nodes)
        if found["NodeNames"]:
            raise HarnessError("expected that no node fits, found some that do")
        return took

    def _filter(self, pod: bytes, nodes: Sequence[GpuNode]) -> tuple[float, Any]:
        names = [node.metadata.name for node in nodes]
        self._draw.shuffle(names)  # kube-scheduler offers them as its own filters came to an end
        return self._post("/filter", pod, names)

    def _post(self, path: str, pod: bytes, names: list[str]) -> tuple[float, Any]:
        if self._connection is None:
            raise HarnessError("expected wait() before a request")
        body = asked_for(pod, names)
        began = time.perf_counter()
        self._connection.request("POST", path, body, {"Content-Type": "application/json"})
        answer = self._connection.getresponse()
        text = answer.read()
        took = time.perf_counter() - began
        if answer.status != 200:
            raise HarnessError(f"expected an answer to {path}, found {answer.status}: {text[:200]!r}")
        return took, msgspec.json.decode(text)


@contextmanager
def extender(folder: Path, api_port: int, slot: int) -> Iterator[tuple["subprocess.Popen[bytes]", Client]]:
    """Run `carpool extender` beside the API server of that port.

    Args:
        folder: Empty; certificates and the log go there.
        api_port: Of an API server without TLS.
        slot: Of the ports.
    """
    certificates.make(folder, "ca", "/CN=ca")
    certificates.make(folder, "server", "/CN=extender", ["IP:127.0.0.1"], "ca")
    certificates.make(folder, "client", "/CN=scheduler", ["DNS:scheduler"], "ca")
    ports = choose(slot)
    environment = {
        "KUBECONFIG": str(paper_kubeconfig(folder, api_port)),
        "CARPOOL_EXTENDER_PORT": str(ports.extender),
        "CARPOOL_METRICS_PORT": str(ports.extender_metrics),
        "CARPOOL_EXTENDER_TLS_CERT": str(folder / "server.crt"),
        "CARPOOL_EXTENDER_TLS_KEY": str(folder / "server.key"),
        "CARPOOL_EXTENDER_CLIENT_CA": str(folder / "ca.crt"),
    }
    tls = ssl.create_default_context(cafile=str(folder / "ca.crt"))
    tls.load_cert_chain(folder / "client.crt", folder / "client.key")
    with (folder / "log").open("wb") as log:
        command = [sys.executable, "-m", "carpool_extender"]
        process = subprocess.Popen(command, env={**os.environ, **environment}, stdout=log, stderr=log)
        try:
            yield process, Client(ports.extender, f"http://127.0.0.1:{ports.extender_metrics}/readyz", tls)
        finally:
            process.terminate()
            process.wait()


def paper_kubeconfig(folder: Path, port: int) -> Path:
    """Write a kubeconfig of an API server on paper; return where it is."""
    context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
    content = {
        "current-context": "c",
        "contexts": [context],
        "clusters": [{"name": "c", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "u", "user": {"token": "paper"}}],
    }
    path = folder / "kubeconfig"
    path.write_bytes(msgspec.json.encode(content))
    return path
