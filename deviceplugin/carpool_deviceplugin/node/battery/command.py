"""`carpool node battery`."""

import errno
import shutil
import sys
import tempfile
from collections import Counter
from importlib.metadata import version
from pathlib import Path

import click
from carpool_core.values import GpuUuid

from carpool_deviceplugin.app import metrics_sources
from carpool_deviceplugin.devices.gpu import DeviceError
from carpool_deviceplugin.devices.port import NoDevicesError
from carpool_deviceplugin.node.battery.hardware import RealMachine
from carpool_deviceplugin.node.battery.ports import Machine, Trial
from carpool_deviceplugin.node.battery.recording import record
from carpool_deviceplugin.node.battery.report import TRIALS, Outcome, Report, Verdict, tried, write
from carpool_deviceplugin.node.input import InputError, find_gpu, no_gpus, node_settings
from carpool_deviceplugin.nvml.library import installed
from carpool_deviceplugin.quoting import quoted


@click.command(short_help="Try the agent on a real GPU that nobody uses.")
@click.option(
    "--gpu",
    default="0",
    show_default=True,
    help="Index or UUID of a GPU that nobody uses, or UUID of a MIG device on it.",
)
@click.option("--only", multiple=True, type=click.Choice([*TRIALS]), help="Try this; several times for several.")
@click.option("--python", default=sys.executable, help="An interpreter with PyTorch; this one where left out.")
@click.option("--mig", is_flag=True, help="MIG instances may be made and destroyed on this GPU.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="File to write what came of it to.")
@click.pass_context
def battery(context: click.Context, gpu: str, only: tuple[str, ...], python: str, mig: bool, out: Path | None) -> None:
    """Try the agent on a real GPU that nobody uses: MPS, limits, measures, energy, faults. Takes about ten minutes."""
    try:
        temporary = tempfile.TemporaryDirectory(prefix="carpool-battery-")
    except OSError as e:
        raise InputError(f"expected a directory for what takes minutes, found {e}; set TMPDIR to a writable one") from e
    with temporary as directory:
        machine = context.obj if context.obj is not None else _machine(Path(directory), python)
        try:
            outcomes = _run(
                Trial(machine, _idle(machine, find_gpu(machine.devices, gpu)), may_divide=mig), set(only or TRIALS), out
            )
        except DeviceError as e:
            raise InputError(str(e)) from e
        finally:
            if isinstance(machine, RealMachine):
                machine.close()
    count = Counter(outcome.verdict for outcome in outcomes)
    passed, failed = count[Verdict.PASSED], count[Verdict.FAILED]
    click.echo(f"{passed} passed, {failed} failed, {count[Verdict.SKIPPED]} skipped")
    context.exit(1 if failed else 0 if passed else 2)


def _machine(directory: Path, python: str) -> RealMachine:
    settings = node_settings()
    if shutil.which(python) is None:
        raise InputError(f"--python: expected an interpreter, found no program {quoted(Path(python))}; give its path")
    try:
        return RealMachine(
            installed(),
            directory,
            python=python,
            sources=metrics_sources(settings),
            cdi=(Path("/etc/cdi"), settings.cdi_dir),
        )
    except NoDevicesError as e:
        raise no_gpus(e, settings) from e


def _idle(machine: Machine, uuid: GpuUuid) -> GpuUuid:
    """Return a GPU if nobody uses it; raises DeviceError."""
    actual = machine.devices.actual(uuid)
    if actual.tenants or actual.problem:
        raise DeviceError(
            f"GPU {uuid}: expected one that is well and that nobody uses, found "
            f"{actual.problem or f'pods {sorted(actual.tenants)}'}; the battery starts and kills processes there"
        )
    return uuid


def _run(trial: Trial, names: set[str], out: Path | None) -> list[Outcome]:
    session = trial.machine.devices.session
    recording = record(session, trial.gpu)
    click.echo(f"{recording.product}, driver {recording.driver}  {trial.gpu}")
    report = Report(carpool=version("carpool"), gpu=trial.gpu, nvml=recording, outcomes=[])
    _keep(report, out)  # before the first of ten minutes: it may not be possible
    for outcome in tried(trial, names):
        click.echo(f"{outcome.verdict:<8} {outcome.name:<12} {outcome.said}")
        report.outcomes.append(outcome)
        _keep(report, out)
    if out is not None:
        click.echo(f"written to {quoted(out)}")
    return report.outcomes


def _keep(report: Report, out: Path | None) -> None:
    if out is None:
        return
    try:
        write(report, out)
    except OSError as e:
        do = {
            errno.ENOENT: "give a file in a directory that is there",
            errno.ENOSPC: "free some space, or give a file elsewhere",
        }
        raise DeviceError(
            f"--out: expected to write to {quoted(out)}, found {e.strerror}; "
            f"{do.get(e.errno or 0, 'give a file that can be written')}"
        ) from e
