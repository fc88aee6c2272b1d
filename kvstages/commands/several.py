"""``kvstages several``."""

from __future__ import annotations

import os
from pathlib import Path

import click

from kvstages.commands.arguments import lines

# Set by a workflow that was told to make files again (--force, --forcerun, --forceall).
AGAIN = "KVSTAGES_AGAIN"


@click.command("several", context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("words", metavar="STAGE ... [+ STAGE ...]...", nargs=-1, required=True, type=click.UNPROCESSED)
@click.pass_context
def command(context: click.Context, words: tuple[str, ...]) -> None:
    """Run several stages in one process, one after the other; each writes what it would write by itself.

    A job of a workflow skips a stage whose files are current: it has finished them before the job was killed, or an
    edit did not concern them.

    Example: kvstages several sweep --model model.safetensors --windows windows.safetensors --layer 0
    --output layer-00.csv + sweep --model model.safetensors --windows windows.safetensors --layer 1
    --output layer-01.csv
    """
    from kvstages.commands.arguments import asked
    from kvstages.files import finished, ledger
    from kvstages.provenance.code import stage_digest, stage_packages

    main = context.find_root().command
    plan = ledger.read_plan()
    known: dict[str, bool] = {}
    made: list[Path] = []
    for line in lines(words):
        names, arguments = asked(main, line)
        record = {"stage": " ".join(names), "arguments": arguments, "code": stage_digest(*names)}
        files = [Path(name) for name, planned in plan.items() if planned == record]
        made += files
        if files and AGAIN not in os.environ:
            for path in files:
                finished.put_back(path)
            packages = stage_packages(*names)
            if all(ledger.current(path, plan, known) for path in files) and all(
                ledger.recorded(path)["made"]["packages"] == packages for path in files
            ):
                continue
        main.main(line, prog_name="kvstages", standalone_mode=False)
        known.clear()
        finished.put_aside(files)
    finished.forget(made)
