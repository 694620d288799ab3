"""``autofit run``: the real training, under the best plan or the one given."""

from __future__ import annotations

from pathlib import Path

import click

from autofit.cli import types
from autofit.cli.out import say
from autofit.cli.script import ScriptCommand, script_argument, the_launch


@script_argument
@click.command("run", cls=ScriptCommand)
@click.option(
    "--plan",
    metavar="FILE",
    type=click.Path(dir_okay=False),
    help="Use the plan in this file (json or toml), not the best stored plan.",
)
@click.option(
    "--memory",
    metavar="SIZE",
    callback=types.size,
    help="Memory budget per device, such as 24GiB (default: that of the search).",
)
@click.option(
    "--resume-arg",
    "resume",
    metavar="ARGS",
    help="If memory runs out and SCRIPT starts again, add these arguments to resume, such as"
    ' "--resume {checkpoint}"; {folder} is the folder of the checkpoint.',
)
@click.option(
    "--gpus-per-trial",
    "ranks",
    metavar="K",
    type=click.IntRange(min=1),
    help="Ranks to start (default: as the launch line says, else as in the search).",
)
@click.option(
    "--address",
    metavar="RAY",
    help="Spread the plan's ranks over the hosts of this Ray cluster: auto or host:port.",
)
@click.option(
    "--verify-only",
    is_flag=True,
    help="Only verify the plan in a short launch; exit with 1 if it fails.",
)
@click.option("--storage", metavar="URL", help="Store, a file or a URL (default: ./autofit.db).")
def command(
    script: str | None,
    module: str | None,
    plan: str | None,
    memory: int | None,
    resume: str | None,
    ranks: int | None,
    address: str | None,
    verify_only: bool,
    storage: str | None,
) -> int:
    """Train: run SCRIPT to its end under the best plan.

    Exits with the script's own code. Instead of SCRIPT, a launch line may follow --, such as:
    torchrun --nproc-per-node 2 train.py.
    """
    launch = the_launch(script, module)

    from autofit.export.load import load_plan
    from autofit.launch_lines import differing
    from autofit.running.run import run

    given = None if plan is None else load_plan(Path(plan))

    for line in (*launch.lines, *(differing(launch, ranks) if ranks else ())):
        say(line)
    return run(
        launch.script,
        plan=given,
        storage=types.url_of(storage),
        memory=memory,
        resume=resume,
        ranks=ranks or launch.ranks,
        address=address,
        verify_only=verify_only,
        say=say,
    )
