"""Counters of dcgm-exporter, DCGM's host engine, GPM and NVML, merged per field."""

import ctypes
import http.server
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from agent_world import first_gpu
from carpool_core.values import GpuUuid
from carpool_deviceplugin.app import metrics_sources
from carpool_deviceplugin.dcgm import CounterFeed, Exporter, HostEngine, SourceError, Values, parse
from carpool_deviceplugin.gpu import Counters
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
    """The C library checks sizes as the real one does; NaN and blank values are absent."""
    engine = HostEngine(address, ["libabsent.so", libdcgm])
    activity, heat = "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_DEV_GPU_TEMP"
    for _ in range(2):
        assert engine.values() == {
            ("GPU-0", None): {activity: 0.5, heat: 41.0},
            ("GPU-1", None): {activity: 0.5, heat: 41.0},
            ("GPU-1", 3): {activity: 0.75, heat: 41.0},
        }


def test_a_lost_host_engine_is_an_error_and_the_next_read_connects_again(libdcgm: str) -> None:
    engine = HostEngine("localhost:5555", [libdcgm])
    assert engine.values()
    ctypes.CDLL(libdcgm).dcgmDisconnect(7)
    with pytest.raises(SourceError, match="The connection is not valid"):
        engine.values()
    assert engine.values()


@pytest.mark.parametrize(
    ("address", "library", "message"),
    [
        ("elsewhere:5555", "", r"dcgmConnect_v2 failed: The connection is not valid \(-33\)"),
        ("empty:5555", "", "empty:5555: expected a host engine with GPUs, found none"),
        ("localhost:5555", "libabsent.so", r"expected libabsent.so, found neither; install datacenter-gpu-manager"),
        ("localhost:5555", "libm.so.6", "dcgmInit: expected it in DCGM's library, found none; update DCGM"),
    ],
)
def test_a_host_engine_that_cannot_be_read_is_an_error(libdcgm: str, address: str, library: str, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        HostEngine(address, [library or libdcgm]).values()


class FakeSource:
    """A source with these values; None: it fails."""

    def __init__(self, name: str, *, is_scraped: bool = False) -> None:
        self.name, self.is_scraped = name, is_scraped
        self.answer: Values | None = {}
        self.asked = 0

    def values(self) -> Values:
        self.asked += 1
        if self.answer is None:
            raise SourceError(f"{self.name} is away")
        return self.answer


A = GpuUuid("GPU-0")
TEMPERATURE, SM, DRAM = "DCGM_FI_DEV_GPU_TEMP", "DCGM_FI_PROF_SM_ACTIVE", "DCGM_FI_PROF_DRAM_ACTIVE"


def test_each_field_comes_from_the_first_source_that_has_it() -> None:
    """dcgm-exporter's default fields contain no SM activity; the host engine was not asked for it."""
    exporter, engine, now = FakeSource("dcgm-exporter", is_scraped=True), FakeSource("dcgm"), [0.0]
    feed = CounterFeed([exporter, engine], lambda: now[0])
    assert feed.at(A) == Counters()
    exporter.answer = {(A, None): {TEMPERATURE: 41.0, "DCGM_FI_DEV_OTHER": 1.0}}
    engine.answer = {(A, None): {TEMPERATURE: 42.0, SM: 0.5}}
    feed.refresh()
    found = feed.at(A)
    assert found.values == {TEMPERATURE: 41.0, SM: 0.5}
    assert found.sources == {TEMPERATURE: "dcgm-exporter", SM: "dcgm"}
    assert found.exported == {TEMPERATURE, "DCGM_FI_DEV_OTHER"}
    assert feed.at(A, 1) == Counters()


def test_a_source_that_fails_is_skipped_for_a_minute_and_old_values_expire() -> None:
    source, now = FakeSource("dcgm"), [0.0]
    feed = CounterFeed([source], lambda: now[0])
    source.answer = {(A, None): {SM: 0.5}}
    feed.refresh()
    now[0] = 61.0
    assert feed.at(A) == Counters(), "the values are too old"
    source.answer = None
    feed.refresh()
    feed.refresh()
    assert source.asked == 2
    now[0] = 122.0
    source.answer = {(A, None): {SM: 0.6}}
    feed.refresh()
    assert feed.at(A).values == {SM: 0.6}


@pytest.fixture
def source() -> FakeSource:
    return FakeSource("dcgm")


@pytest.fixture
def node(tmp_path: Path, source: FakeSource) -> Node:
    return Node(FakeNvml(["A100-40"]), FakeMpsCommands(), tmp_path, sources=(source,))


def test_readings_name_the_source_of_each_field(node: Node, source: FakeSource) -> None:
    devices, gpu = first_gpu(node)
    assert devices.read(gpu).sources == ("nvml",)
    source.answer = {(gpu, None): {SM: 0.4, TEMPERATURE: 77.0}}
    devices.refresh_counters()
    counters = devices.read(gpu).counters
    assert (counters.values[TEMPERATURE], counters.values[SM]) == (77.0, 0.4)
    assert (counters.sources[SM], counters.sources["DCGM_FI_DEV_FB_USED"]) == ("dcgm", "nvml")
    assert DRAM not in counters.sources
    assert counters.exported == frozenset()
    source.answer = None
    devices.refresh_counters()
    assert devices.read(gpu).sources == ("nvml",)
    hopper = Node(FakeNvml(["H100"]), FakeMpsCommands(), node.root).devices()
    assert hopper.read(hopper.uuids[0]).counters.sources[SM] == "nvml-gpm"


def test_pods_on_an_a100_get_their_sm_activity_from_dcgm_by_kernel_time(node: Node, source: FakeSource) -> None:
    devices, gpu = first_gpu(node)
    node.start(0, 42, "a", sm=0.6)
    node.start(0, 43, "b", sm=0.2)
    source.answer = {(gpu, None): {SM: 0.4, DRAM: 0.1}}
    for _ in range(11):
        devices.refresh_counters()
        reading = devices.read(gpu)
        node.advance(1)
    a, b = reading.processes
    assert (a.sm_s, b.sm_s) == (pytest.approx(0.3, rel=0.02), pytest.approx(0.1, rel=0.02))


def test_settings_choose_the_sources() -> None:
    names = [s.name for s in metrics_sources(AgentSettings(dcgm_exporter="http://x/metrics"))]
    assert names == ["dcgm-exporter", "dcgm"]
    assert metrics_sources(AgentSettings(dcgm_address="")) == []
