"""Subcommands of `carpool` that the core brings."""

from pathlib import Path

import click


@click.command()
@click.option(
    "--out",
    "folders",
    type=click.Path(file_okay=False, path_type=Path),
    multiple=True,
    help="Folder to write carpool.dev_*.yaml into; may be given several times. Printed where left out.",
)
def crds(folders: tuple[Path, ...]) -> None:
    """Print the CustomResourceDefinitions, or write them.

    `carpool crds | kubectl apply --server-side --force-conflicts -f -` installs them, and brings those that
    Helm installed up to date.
    """
    from carpool_core import crdgen  # the types take their time to import, and `carpool --help` does without

    for folder in folders:
        for file in crdgen.write(folder):
            click.echo(f"wrote {file}", err=True)
    if not folders:
        click.echo("---\n".join(crdgen.as_yaml(definition) for definition in crdgen.DEFINITIONS), nl=False)
