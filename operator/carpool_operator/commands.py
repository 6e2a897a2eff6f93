"""`carpool operator`."""

import logging

import click
import uvloop
from carpool_core import logs
from carpool_core.kube.credentials import KubeConfigError
from carpool_core.kube.errors import KubeError
from carpool_core.settings import MisconfiguredError, SettingsError, click_options

from carpool_operator.serve import NotInstalledError, serve
from carpool_operator.settings import OperatorSettings


@click.command(short_help="Run the operator, which carries jobs from admission to their end.")
@click_options(OperatorSettings)
def operator(settings: OperatorSettings) -> None:
    """Run the operator: it predicts GpuTrainingJobs, creates and follows their pods, and keeps their status true."""
    logs.configure(settings.log, "operator")
    # kopf tells of each event that it handed over; what became of it we log ourselves.
    logging.getLogger("kopf.objects").setLevel(logging.WARNING)
    try:
        uvloop.run(serve(settings))
    except (KubeConfigError, SettingsError) as error:
        raise MisconfiguredError(str(error)) from error
    except (NotInstalledError, KubeError) as error:
        raise click.ClickException(str(error)) from error
