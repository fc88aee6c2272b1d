"""``python -m kvstages``: the same as the command ``kvstages``."""

from kvstages.cli import main

main(prog_name="kvstages")
