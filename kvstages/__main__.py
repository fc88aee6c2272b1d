"""``python -m kvstages``: the same as the command ``kvstages``."""

import gc

# Nearly all objects of a stage are its libraries', and live until it ends. Python looked through them all again and
# again while it imported PyTorch, which took a tenth of that time.
gc.set_threshold(50_000, 20, 20)

from kvstages.cli import main  # noqa: E402 (not before the line above)

main(prog_name="kvstages")
