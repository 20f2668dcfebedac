"""A LightningCLI with the strategies registered: ``python -m lightning_ntp fit --config config.yaml``.

The model and the data are any classes (``class_path`` and ``init_args``), found from the working directory as well as
among the installed packages. ``lightning-ntp`` is the same command. Besides LightningCLI's subcommands there are those
of :mod:`lightning_ntp.commands`, which plan or speak to a running job.

The ranks of ``strategy: ntp`` run this command again, each for itself. The command is therefore the same whoever runs
it: it reads its arguments and its configuration, and whether it supervises or trains is the strategy's affair.
"""

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch.cli import LightningCLI

#: What the extra ``cli`` brings: ``jsonargparse[signatures]``, whose extra brings the latter two.
CLI_REQUIREMENTS = ("jsonargparse", "docstring_parser", "typeshed_client")

#: Modules of :mod:`lightning_ntp.commands`; none of them needs :data:`CLI_REQUIREMENTS`.
COMMANDS = ("doctor", "plan", "status", "drain", "restart", "relayout", "restore-power")

_ABOUT = {
    "description": "Train with Lightning's command line, the strategies ntp, ntp_spawn and ntp_notebook registered.",
    "epilog": "Besides these, each with a --help of its own (`lightning-ntp doctor --help`): `doctor` says whether"
    " training would survive a loss on this machine, `plan` prints what the loss of a rank would cost; of"
    " a running job, `status` shows it, `drain SLOT` lets a rank leave, `restart SLOT` starts one again,"
    " `relayout` lets slots go back to their places; `restore-power` puts back power limits that a job has"
    " left which was killed.",
}


def main(args: Sequence[str] | None = None) -> None:
    """Run the command line ``args`` (default: the process's arguments).

    That is a module of :mod:`lightning_ntp.commands`, or a subcommand of LightningCLI.

    Raises:
        SystemExit: with a message, when the packages for the command line are missing; and as LightningCLI does.
    """
    given = sys.argv[1:] if args is None else list(args)
    if given and given[0] in COMMANDS:
        import_module(f"lightning_ntp.commands.{given[0].replace('-', '_')}").main(given[1:])
        return
    build(args)


def build(args: Sequence[str] | None = None, run: bool = True) -> "LightningCLI":
    """Make the LightningCLI, and run its subcommand unless ``run`` is false.

    Raises:
        SystemExit: as :func:`main` does.
    """
    missing = [package for package in CLI_REQUIREMENTS if find_spec(package) is None]
    if missing:
        raise SystemExit(
            f"The command line of lightning-ntp needs {' and '.join(missing)}, which is not installed here."
            f' Install it: pip install "lightning-ntp[cli]"'
        )
    if "" not in sys.path and os.getcwd() not in sys.path:
        # The console script starts with its own directory there, so `class_path: my_model.Model` would not be found.
        sys.path.insert(0, os.getcwd())

    from lightning.pytorch import LightningDataModule, LightningModule
    from lightning.pytorch.cli import LightningCLI

    from lightning_ntp._autoload import autoload

    autoload()  # for TORCH_DEVICE_BACKEND_AUTOLOAD=0
    try:
        return LightningCLI(
            LightningModule,
            LightningDataModule,
            subclass_mode_model=True,
            subclass_mode_data=True,
            # A second run in the same directory is ordinary here (ranks re-run the command, runs are resumed).
            save_config_kwargs={"overwrite": True},
            parser_kwargs={"version": f"lightning-ntp {version('lightning-ntp')}", **_ABOUT} if run else {},
            args=list(args) if args is not None else None,
            run=run,
        )
    except ValueError as error:
        refusal = _refusal_in(error)
        if not refusal:
            raise
    print(f"lightning-ntp: error: {refusal}", file=sys.stderr)
    raise SystemExit(2)


def _refusal_in(error: ValueError) -> str:
    """What a class of the configuration has said of its arguments; empty if this is another error.

    jsonargparse 4.53 tries whatever the type allows (``Union[str, Strategy]``), and its error lists what each try said.
    """
    lines = str(error).splitlines()
    if not lines or "Does not validate against any of the Union subtypes" not in lines[0]:
        return ""
    return "; ".join(line[4:] for line in lines if line.startswith("  - ") and not line.startswith("  - Expected a "))
