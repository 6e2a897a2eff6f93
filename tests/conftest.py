"""Fixtures that start real clusters, and the CI rule: only tests that need hardware may be skipped."""

import os
import socket
from collections.abc import Callable, Generator, Iterator
from pathlib import Path

import pytest
from carpool_e2e.cluster import BARE, FULL, Cluster, running, why_no_kubelets

HARDWARE: dict[str, tuple[str, Callable[[], bool]]] = {
    "gpu": ("an NVIDIA GPU", lambda: Path("/dev/nvidiactl").exists())
}
"""Markers of tests that may be skipped in CI: what they need, and whether it is there."""


def in_ci() -> bool:
    return os.environ.get("CARPOOL_CI") == "1"


@pytest.fixture(scope="session")
def published() -> Path:
    """The folder of measurements by others, which tests read in place; CI always has it."""
    folder = os.environ.get("CARPOOL_DATA")
    if not folder:
        pytest.skip("needs published measurements: set CARPOOL_DATA to their folder (docs/development.md)")
    return Path(folder)


LUCID_SOLO = "model,dataset,batchsize,amp,speed,gpu_util,gmem_util,gmem,label\n" + "".join(
    f"{model},D,32,0,100,{util},10,2000,0\n"
    for model, util in (("ResNet18", 40), ("MobileNetV2", 60), ("EfficientNet", 20))
)
LUCID_PAIRS = (
    "model1,dataset1,gpu_num1,batchsize1,amp1,speed1,model2,dataset2,gpu_num2,batchsize2,amp2,speed2,gpu_util,gmem_util,"
    "gmem\n" + 5 * "ResNet18,D,1,32,0,0.8,MobileNetV2,D,1,32,0,0.5,90,20,4000\n"
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A folder of measurements in the form of Lucid's, with synthetic numbers: three models and one pair of them."""
    folder = tmp_path / "lucid"
    folder.mkdir()
    (folder / "solo_rtx3090.csv").write_text(LUCID_SOLO)
    (folder / "colocate_rtx3090.csv").write_text(LUCID_PAIRS)
    return tmp_path


@pytest.fixture
def taken() -> Iterator[int]:
    """A port on which something listens already."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        found.listen()
        yield found.getsockname()[1]


@pytest.fixture(scope="session")
def control_plane() -> Iterator[Cluster]:
    """etcd, API server and controller manager with everything of the chart but its workloads; no nodes."""
    with running(BARE) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A whole cluster: two nodes with kubelet, containerd and agent, twenty without, operator and scheduler."""
    if reason := why_no_kubelets():
        pytest.skip(reason)
    with running(FULL) as cluster:
        yield cluster


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m e2e`, leave out folders that have no such test: importing them takes longer than a cluster's start."""
    is_folder_of_tests = collection_path.is_dir() and collection_path.parent == Path(__file__).parent
    if config.option.markexpr == "e2e" and is_folder_of_tests:
        return not any("mark.e2e" in file.read_text() for file in collection_path.rglob("*.py")) or None
    return None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests of NVIDIA's programs, which need a network, unless they are asked for.

    Those of programs that no registry has need the variable that names a checkout, too.
    """

    def runs(item: pytest.Item) -> bool:
        vendor = item.get_closest_marker("vendor")
        return vendor is None or ("vendor" in config.option.markexpr and all(map(os.environ.get, vendor.args)))

    deselected = [item for item in items if not runs(item)]
    config.hook.pytest_deselected(items=deselected)
    items[:] = [item for item in items if runs(item)]


def pytest_runtest_setup(item: pytest.Item) -> None:
    for marker, (needed, present) in HARDWARE.items():
        if item.get_closest_marker(marker) and not present():
            pytest.skip(f"needs {needed}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    may_skip = any(item.get_closest_marker(marker) for marker in HARDWARE)
    if report.skipped and not hasattr(report, "wasxfail") and in_ci() and not may_skip:
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid}: skipped, which is an error in CI: {_reason(report)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    if report.skipped and in_ci():
        report.outcome = "failed"
        report.longrepr = f"{collector.nodeid}: skipped as a whole, which is an error in CI: {report.longrepr}"
    return report


def _reason(report: pytest.TestReport) -> str:
    return report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the tests that had no hardware; their reports come from all of xdist's processes."""
    reports = (one for one in terminalreporter.stats.get("skipped", []) if isinstance(one, pytest.TestReport))
    without = [report.nodeid for report in reports if HARDWARE.keys() & report.keywords]
    if without:
        terminalreporter.section(
            f"{len(without)} skipped, which need {' or '.join(what for what, _ in HARDWARE.values())}"
        )
        for nodeid in without:
            terminalreporter.line(nodeid)
