"""How figures are written, whatever a user's matplotlib is set to."""

from __future__ import annotations

import os
import subprocess
import sys


def test_the_backend_of_a_notebook_does_not_matter_and_is_left_as_it_was() -> None:
    """A process started from a notebook has its MPLBACKEND, which need not be installed here."""
    program = (
        "import os; from kvstages.figures.style import style\n"
        "with style():\n"
        "    from matplotlib.figure import Figure; Figure().savefig(os.devnull, format='svg')\n"
        "print(os.environ['MPLBACKEND'])"
    )
    backend = "module://a_notebook.backend_inline"
    environment = os.environ | {"MPLBACKEND": backend}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.stderr == "" and done.stdout == f"{backend}\n"
