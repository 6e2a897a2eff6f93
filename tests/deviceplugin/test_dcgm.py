"""Where counters come from: dcgm-exporter, DCGM's host engine, GPM, NVML, in this order."""

import http.server
import math
import shutil
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from carpool_core.values import GpuUuid
from carpool_deviceplugin.app import metrics_sources
from carpool_deviceplugin.dcgm import (
    FIELDS,
    GPU,
    INSTANCE,
    UUID_FIELD,
    CounterFeed,
    Counters,
    Dcgm,
    DcgmError,
    EngineInstance,
    Entity,
    Exporter,
    HostEngine,
    Place,
    SourceError,
    parse,
)
from carpool_deviceplugin.settings import AgentSettings
from carpool_deviceplugin.testing.mps import FakeMpsCommands
from carpool_deviceplugin.testing.node import Node
from carpool_deviceplugin.testing.nvml import FakeNvml

PAGE = """# HELP DCGM_FI_DEV_GPU_UTIL GPU utilization (in %).
# TYPE DCGM_FI_DEV_GPU_UTIL gauge
DCGM_FI_DEV_GPU_UTIL{gpu="0",UUID="GPU-0",pci_bus_id="00000000:07:00.0",device="nvidia0",modelName="x"} 71
DCGM_FI_PROF_SM_ACTIVE{gpu="0",UUID="GPU-0",device="nvidia0",pod="a",namespace="x",container="train"} 0.25
DCGM_FI_PROF_SM_ACTIVE{gpu="0",UUID="GPU-0",GPU_I_PROFILE="3g.20gb",GPU_I_ID="1"} 0.5
DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION{gpu="0",UUID="GPU-0"} NaN
# TYPE go_threads gauge
go_threads 9
"""


def test_the_exporters_page_is_read() -> None:
    assert parse(PAGE, "url") == {
        ("GPU-0", None): {"DCGM_FI_DEV_GPU_UTIL": 71.0, "DCGM_FI_PROF_SM_ACTIVE": 0.25},
        ("GPU-0", 1): {"DCGM_FI_PROF_SM_ACTIVE": 0.5},
    }


@pytest.mark.parametrize(
    "page", ["", "go_threads 9\n", "<html>", "DCGM_FI_DEV_GPU_UTIL{ 1\n", PAGE.replace("GPU-0", "")]
)
def test_what_is_no_exporter_is_said(page: str) -> None:
    with pytest.raises(SourceError, match="expected"):
        parse(page, "http://here/metrics")


@pytest.fixture
def server() -> Iterator[http.server.HTTPServer]:
    class Handler(http.server.BaseHTTPRequestHandler):
        page = PAGE

        def do_GET(self) -> None:  # the base class's name
            self.send_response(200)
            self.end_headers()
            self.wfile.write(type(self).page.encode())

        def log_message(self, *_: object) -> None:
            return

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_exporter_is_asked_over_http(server: http.server.HTTPServer) -> None:
    exporter = Exporter(f"http://127.0.0.1:{server.server_port}/metrics")
    assert exporter.values()[GpuUuid("GPU-0"), None]["DCGM_FI_DEV_GPU_UTIL"] == 71
    server.RequestHandlerClass.page = PAGE + "x" * (5 << 20)
    with pytest.raises(SourceError, match="expected at most"):
        exporter.values()


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "http://127.0.0.1:1/metrics", "nonsense", "http://[::1", "http://a b/"]
)
def test_urls_that_lead_nowhere(url: str) -> None:
    with pytest.raises(SourceError, match="expected"):
        Exporter(url).values()


class Engine:
    """A host engine in memory."""

    def __init__(self, uuids: Sequence[str]) -> None:
        self.uuids, self.mig_instances = list(uuids), list[EngineInstance]()
        self.activity: dict[Entity, float] = {}
        self.is_up = True
        self.connections = 0
        self.watched: set[int] = set()

    def _answer(self) -> None:
        if not self.is_up:
            raise DcgmError("the host engine is gone")

    def connect(self, address: str) -> None:
        self._answer()
        self.connections += 1

    def disconnect(self) -> None:
        self.watched.clear()

    def gpus(self) -> Sequence[Entity]:
        self._answer()
        return [Entity(GPU, i) for i in range(len(self.uuids))]

    def instances(self) -> Sequence[EngineInstance]:
        self._answer()
        return self.mig_instances

    def watch(self, fields: Sequence[int], every_s: float) -> None:
        self._answer()
        self.watched |= set(fields)

    def latest(self, entities: Sequence[Entity], fields: Sequence[int]) -> Mapping[tuple[Entity, int], float | str]:
        self._answer()
        found: dict[tuple[Entity, int], float | str] = {}
        for entity in entities:
            for field in set(fields) & self.watched:
                if field == UUID_FIELD:
                    found[entity, field] = self.uuids[entity.number]
                elif field == 1002 and entity in self.activity:
                    found[entity, field] = self.activity[entity]
        return found


def test_the_host_engine_is_opened_again_where_it_was_lost() -> None:
    engine = Engine(["GPU-0", "GPU-1"])
    engine.activity[Entity(GPU, 1)] = 0.5
    engine.activity[Entity(GPU, 0)] = math.nan  # it could not be computed
    source = HostEngine(engine, "localhost:5555")
    assert source.values() == {("GPU-1", None): {"DCGM_FI_PROF_SM_ACTIVE": 0.5}}
    engine.is_up = False
    with pytest.raises(DcgmError, match="is gone"):
        source.values()
    engine.is_up = True
    assert source.values()
    assert engine.connections == 2
    engine.uuids.clear()
    source = HostEngine(engine, "localhost:5555")
    with pytest.raises(DcgmError, match="expected a host engine with GPUs, found none"):
        source.values()


@pytest.fixture(scope="module")
def libdcgm(tmp_path_factory: pytest.TempPathFactory) -> str:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    made = tmp_path_factory.mktemp("dcgm") / "libdcgm.so.4"
    source = Path(__file__).parent / "dcgm" / "libdcgm.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(made), str(source)], check=True)
    return str(made)


@pytest.mark.parametrize("address", ["localhost:5555", "unix:///run/dcgm.sock"])
def test_the_librarys_calls_and_structures(libdcgm: str, address: str) -> None:
    """Against a C library that checks the sizes as the real one does."""
    engine = HostEngine(Dcgm(["libabsent.so", libdcgm]), address)
    activity, heat = "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_DEV_GPU_TEMP"
    for _ in range(2):
        assert engine.values() == {
            ("GPU-0", None): {activity: 0.5, heat: 41.0},
            ("GPU-1", None): {activity: 0.5, heat: 41.0},
            ("GPU-1", 3): {activity: 0.75, heat: 41.0},
        }


def test_the_librarys_errors_are_said(libdcgm: str) -> None:
    with pytest.raises(DcgmError, match=r"dcgmConnect_v2 failed: The connection is not valid \(-33\)"):
        HostEngine(Dcgm([libdcgm]), "elsewhere:5555").values()
    with pytest.raises(DcgmError, match=r"expected libabsent.so, found neither; install datacenter-gpu-manager"):
        HostEngine(Dcgm(["libabsent.so"]), "localhost:5555").values()
    with pytest.raises(DcgmError, match="expected a connection"):
        Dcgm([libdcgm]).gpus()


class Told:
    """A source that says what it is told to."""

    def __init__(self, name: str, *, is_scraped: bool = False) -> None:
        self.name, self.is_scraped = name, is_scraped
        self.said: dict[Place, Counters] | None = {}
        self.asked = 0

    def values(self) -> Mapping[Place, Counters]:
        self.asked += 1
        if self.said is None:
            raise SourceError(f"{self.name} is away")
        return self.said


A = GpuUuid("GPU-0")


def test_the_first_that_answers_counts_for_a_while() -> None:
    first, second, now = Told("first"), Told("second"), [0.0]
    feed = CounterFeed([first, second], lambda: now[0])
    assert feed.at(A) is None
    first.said, second.said = {(A, None): {"x": 1.0}}, {(A, None): {"x": 2.0}}
    feed.refresh()
    assert feed.at(A) == (first, {"x": 1.0})
    assert feed.at(A, 1) is None
    first.said = None
    feed.refresh()
    assert feed.at(A) == (second, {"x": 2.0})
    feed.refresh()
    assert first.asked == 2, "it is left alone for a minute"
    now[0] = 61.0
    assert feed.at(A) is None, "what was said too long ago says nothing of now"
    first.said = {(A, None): {"x": 3.0}}
    feed.refresh()
    assert feed.at(A) == (first, {"x": 3.0})
    first.said = second.said = None
    feed.refresh()
    assert feed.at(A) is None


@pytest.fixture
def told() -> Told:
    return Told("dcgm")


@pytest.fixture
def node(tmp_path: Path, told: Told) -> Node:
    return Node(FakeNvml(["A100-40"]), FakeMpsCommands(), tmp_path, sources=(told,))


def test_each_source_is_named_and_the_next_steps_in(node: Node, told: Told) -> None:
    devices = node.devices()
    gpu = devices.uuids[0]
    assert devices.read(gpu).source == "nvml"
    told.said = {(gpu, None): {"DCGM_FI_PROF_SM_ACTIVE": 0.4, "DCGM_FI_DEV_GPU_TEMP": 77.0, "DCGM_FI_OTHER": 1.0}}
    devices.refresh_counters()
    reading = devices.read(gpu)
    assert (reading.source, reading.is_exported_elsewhere) == ("dcgm", False)
    assert (reading.counters["DCGM_FI_DEV_GPU_TEMP"], reading.counters["DCGM_FI_PROF_SM_ACTIVE"]) == (77.0, 0.4)
    assert "DCGM_FI_OTHER" not in reading.counters
    assert "DCGM_FI_PROF_DRAM_ACTIVE" not in reading.counters, "what it does not say is absent"
    told.said = None
    devices.refresh_counters()
    assert devices.read(gpu).source == "nvml"
    assert Node(FakeNvml(["H100"]), FakeMpsCommands(), node.root).devices().uuids
    hopper = Node(FakeNvml(["H100"]), FakeMpsCommands(), node.root).devices()
    assert hopper.read(hopper.uuids[0]).source == "nvml-gpm"


def test_pods_on_an_a100_get_their_sm_activity_from_dcgm(node: Node, told: Told) -> None:
    devices = node.devices()
    gpu = devices.uuids[0]
    node.start(0, 42, "a", sm=0.6)
    node.start(0, 43, "b", sm=0.2)
    told.said = {(gpu, None): {"DCGM_FI_PROF_SM_ACTIVE": 0.4, "DCGM_FI_PROF_DRAM_ACTIVE": 0.1}}
    for _ in range(11):
        devices.refresh_counters()
        reading = devices.read(gpu)
        node.advance(1)
    a, b = reading.processes
    assert (a.sm_s, b.sm_s) == (pytest.approx(3.0, rel=0.02), pytest.approx(1.0, rel=0.02)), "by time of their kernels"


def test_settings_lead_to_sources() -> None:
    names = [s.name for s in metrics_sources(AgentSettings(dcgm_exporter="http://x/metrics"))]
    assert names == ["dcgm-exporter", "dcgm"]
    assert metrics_sources(AgentSettings(dcgm_address="")) == []
    assert set(FIELDS) >= {203, 1001, 1002, 1003, 1004, 1005}
    assert INSTANCE != GPU
