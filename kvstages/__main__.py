"""``python -m kvstages``: the same as the command ``kvstages``."""

import atexit
import gc

# Nearly all objects of a stage are its libraries', and live until it ends. Python looked through them all again and
# again while it imported PyTorch, and once more at the end: a quarter of the time of a stage that does little else.
gc.set_threshold(50_000, 20, 20)
atexit.register(gc.freeze)

from kvstages.cli import main  # noqa: E402 (not before the lines above)

main(prog_name="kvstages")
