"""`carpool profile`."""

import re
from pathlib import Path

import click
from rich.console import Console

from carpool_predictor.profiler.ports import Machine
from carpool_predictor.profiler.rows import MeasuredRow, RowsError, RowWriter, done
from carpool_predictor.profiler.session import Session, run_sweep
from carpool_predictor.profiler.sweep import SWEEPS, points

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0}


class InputError(click.ClickException):
    """The command's input is wrong, or there is no GPU."""

    exit_code = 2


def parse_budget(text: str) -> float:
    """Read `90s`, `9m` or `1.5h`; returns seconds.

    Raises:
        InputError: It is none of these.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if found is None or float(found[1]) == 0:
        raise InputError(f"--budget expects a time such as 90s, 9m or 1.5h; found {text!r}")
    return float(found[1]) * _UNITS[found[2]]


@click.command(short_help="Measure training steps on this machine's GPU, alone and in pairs.")
@click.option("--sweep", type=click.Choice(SWEEPS), default="default", show_default=True, help="What is measured.")
@click.option("--budget", default="9m", show_default=True, help="Time that it may take, such as 90s, 9m or 1.5h.")
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True, help="File of rows; continued.")
@click.option("--gpu-index", type=click.IntRange(0), default=0, show_default=True, help="Which GPU, by NVML's number.")
def profile(sweep: str, budget: str, out: Path, gpu_index: int) -> None:
    """Measure training steps on this machine's GPU, alone and in pairs; nobody else should use it meanwhile.

    Rows are written as they come. The same command continues a file where it was left off.
    """
    budget_s = parse_budget(budget)
    # Loads NVML's bindings.
    from carpool_predictor.profiler.hardware import HardwareError, NvmlMachine

    try:
        with NvmlMachine(gpu_index) as machine:
            measure(machine, sweep, budget_s, out, Console(stderr=True))
    except (HardwareError, RowsError, OSError) as e:
        raise InputError(str(e)) from e


def measure(machine: Machine, sweep: str, budget_s: float, out: Path, console: Console) -> int:
    """Measure a sweep into a file, and tell each row; return how many were measured.

    Raises:
        RowsError: The file cannot be continued.
    """
    session = Session(machine)
    known = done(out, session.description.product)
    with RowWriter(out) as writer:

        def write(row: MeasuredRow) -> None:
            writer.write(row)
            console.print(_told(row), highlight=False)

        measured = run_sweep(session, machine, points(sweep), known, budget_s, write)
    console.print(f"{measured} rows measured, {len(known)} were there before: {out}", highlight=False)
    return measured


def _told(row: MeasuredRow) -> str:
    what = f"{row.model} × {row.batch_size}" + (f" beside {row.partner_model}" if row.partner_model else "")
    if row.status != "ok":
        return f"{what}: {row.status.replace('_', ' ')} {row.reason}".rstrip()
    slowed = (
        f", slowed {row.slowdown:.2f} and {row.partner_slowdown:.2f}" if row.slowdown and row.partner_slowdown else ""
    )
    return f"{what}: {1000 * (row.step_time_s or 0):.1f} ms a step{slowed}, {row.elapsed_s:.1f} s"
