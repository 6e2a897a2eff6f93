"""An extender behind a real server with mutual TLS, and what kube-scheduler sends it, literally."""

import asyncio
import ssl
from contextlib import asynccontextmanager

import aiohttp
from carpool_core.testing.clock import FakeClock
from carpool_core.testing.kube import FakeKube
from carpool_e2e.controlplane import make
from carpool_extender.app import build
from carpool_extender.server import create_server
from carpool_extender.settings import ExtenderSettings, TlsSettings
from carpool_extender.testing import FakeAgent, gpu_node, seed_job, seed_node, seed_pod, until
from extender_world import LEASE

POD = """{"metadata":{"name":"x-worker-0-1","namespace":"default","uid":"pod-x","resourceVersion":"812","generation":1,
"creationTimestamp":"2026-01-31T12:00:00Z","labels":{"carpool.dev/job":"x"},"ownerReferences":[{"apiVersion":
"carpool.dev/v1alpha1","kind":"GpuTrainingJob","name":"x","uid":"job-x","controller":true,"blockOwnerDeletion":true}],
"managedFields":[{"manager":"carpool-operator","operation":"Update","apiVersion":"v1","time":"2026-01-31T12:00:00Z",
"fieldsType":"FieldsV1","fieldsV1":{"f:metadata":{}}}]},"spec":{"volumes":[],"containers":[{"name":"train","image":
"localhost/train:1","command":["python","train.py"],"resources":{"limits":{"carpool.dev/gpu":"1"},"requests":
{"carpool.dev/gpu":"1"}},"terminationMessagePath":"/dev/termination-log","terminationMessagePolicy":
"FallbackToLogsOnError","imagePullPolicy":"Never"}],"restartPolicy":"Never","terminationGracePeriodSeconds":30,
"dnsPolicy":"ClusterFirst","securityContext":{},"schedulerName":"carpool-scheduler","tolerations":[{"key":
"nvidia.com/gpu","operator":"Exists","effect":"NoSchedule"}],"priority":0,"enableServiceLinks":true,
"preemptionPolicy":"PreemptLowerPriority"},"status":{"phase":"Pending","qosClass":"BestEffort"}}"""
ARGS = f'{{"Pod":{POD},"Nodes":null,"NodeNames":["a","b"]}}'
BIND = '{"PodName":"x-worker-0-1","PodNamespace":"default","PodUID":"pod-x","Node":"a"}'


def make_certificates(folder):
    """Make those of an authority, a server and a client, and of a stranger."""
    make(folder, "ca", "/CN=ca")
    make(folder, "server", "/CN=extender", ["IP:127.0.0.1"], "ca")
    make(folder, "client", "/CN=scheduler", ["DNS:scheduler"], "ca")
    make(folder, "stranger", "/CN=stranger", ["DNS:stranger"])
    return folder


def a_server():
    """A server in memory with two nodes and the pod of a job."""
    kube = FakeKube(FakeClock())
    for name in ("a", "b"):
        seed_node(kube, gpu_node(name, 1))
    seed_job(kube, "x")
    seed_pod(kube, "x")
    return kube


@asynccontextmanager
async def serving(kube, certificates, *, watching=True):
    """A real server with mutual TLS; yields its URL."""
    async with running(kube, certificates, watching=watching) as (url, _):
        yield url


@asynccontextmanager
async def running(kube, certificates, *, watching=True, clock=None, **settings):
    """The same; yields the parts of the extender too. `certificates` is a folder, or the settings themselves."""
    tls = certificates
    if not isinstance(tls, TlsSettings):
        tls = TlsSettings(None, certificates / "server.crt", certificates / "server.key", certificates / "ca.crt")
    settings, clock = (
        ExtenderSettings(scheduler_lease=LEASE, scheduler_host="here", port=0, tls=tls, **settings),
        clock or FakeClock(),
    )
    parts = build(settings, kube, clock, clock.sleep)
    server = create_server(parts.app(), settings, parts.certificates)
    tasks = [asyncio.create_task(server.serve())]
    if watching:
        tasks.append(asyncio.create_task(parts.run()))
        tasks.append(asyncio.create_task(FakeAgent(kube).serve("a")))
        await parts.informers.wait_synced()
    await until(lambda: server.started)
    try:
        yield f"https://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}", parts
    finally:
        for task in tasks[1:]:
            task.cancel()
        server.should_exit = True
        await asyncio.gather(*tasks, return_exceptions=True)


def tls_of(certificates, name):
    context = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
    if name:
        context.load_cert_chain(certificates / f"{name}.crt", certificates / f"{name}.key")
    return context


def as_client(certificates, name="client"):
    return aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=tls_of(certificates, name)))
