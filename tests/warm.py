"""Programs of Python that start warm: forked from a process that has imported what takes long, and no module of ours.

A workflow of the tests starts dozens of processes, each of which would spend a second or two on importing PyTorch or
Snakemake. Here `python -m kvstages` and `python -m snakemake` are run by a server's child instead, with the words, the
working directory, the environment and the open files of whoever called; everything else runs in Python itself.
"""

from __future__ import annotations

import atexit
import gc
import marshal
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PRELOADED = (
    *("jsonschema", "matplotlib.backends.backend_agg", "matplotlib.backends.backend_svg", "matplotlib.figure"),
    *("numpy", "pandas", "safetensors.torch", "snakemake.cli", "snakemake.report", "torch", "yaml"),
    # Which those import when they are used.
    *("click", "jinja2.ext", "matplotlib.style", "requests", "smart_open", "snakemake.report.html_reporter"),
    *("snakemake.storage", "sympy", "torch.fx.experimental.symbolic_shapes", "torch.utils._device"),
)
# Who calls: a program named `python`, so small that it starts in no time; what `socket` and `json` import takes longer.
CLIENT = """#!{python} -IS
import _socket, array, marshal, os, sys

words = sys.argv[1:]
safe = "-P" in words[:1] or "PYTHONSAFEPATH" in os.environ
program = words[1:] if "-P" in words[:1] else words
if program[:2] not in (["-m", "kvstages"], ["-m", "snakemake"]):
    os.execv({python!r}, [{python!r}, *words])
asked = {{"module": program[1], "words": program[2:], "safe": safe}}
asked |= {{"folder": os.getcwd(), "environment": dict(os.environ)}}
server = _socket.socket(_socket.AF_UNIX)
server.connect({address!r})
message = marshal.dumps(asked)
files = (_socket.SOL_SOCKET, _socket.SCM_RIGHTS, array.array("i", [0, 1, 2]))
server.sendmsg([len(message).to_bytes(8, "big")], [files])
server.sendall(message)
status = int.from_bytes(server.recv(8), "big", signed=True)
if status < 0:
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@contextmanager
def warm(folder: Path) -> Iterator[Path]:
    """A server, and the folder with the program `python` that calls it; ``folder`` is for both, and new.

    Its children hash texts alike, and another server's otherwise.
    """
    (folder / "bin").mkdir(parents=True)
    address, client = folder / "server", folder / "bin" / "python"
    client.write_text(CLIENT.format(python=sys.executable, address=str(address)))
    client.chmod(0o755)
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-P", __file__, str(address)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout.readline() == b"ready\n"
        try:
            yield client.parent
        finally:
            server.stdin.close()
            server.wait()


def preload() -> None:
    """Import what takes long; the first caller waits for it.

    The children neither collect what the server holds nor take it down, which would cost as much as to import it. Nor
    does Snakemake look for what it could collect of its own, which would be a tenth of its time.
    """
    gc.disable()
    for name in PRELOADED:
        __import__(name)
    sys.modules["snakemake.cli"].get_argument_parser()  # finds Snakemake's plugins
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False
    gc.freeze()


def serve(address: str) -> dict[str, Any]:
    """Answer callers until the standard input ends. Returns in a child only: what it is to run."""
    # The process of each program and who called it, by the file that tells when it has ended.
    running: dict[int, tuple[int, socket.socket]] = {}
    stopped = False
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        print("ready", flush=True)
        while running or not stopped:
            callers = [caller for _, caller in running.values()]
            ready, _, _ = select.select([*running, *callers, *([] if stopped else [listener, sys.stdin])], [], [])
            stopped = stopped or sys.stdin in ready
            for ended, (process, caller) in list(running.items()):
                if ended in ready:
                    answer(caller, os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]))
                    os.close(ended)
                    del running[ended]
                elif caller in ready:  # it was killed
                    os.kill(process, signal.SIGKILL)
            if listener in ready:
                if "torch" not in sys.modules:
                    preload()
                caller, _ = listener.accept()
                asked, files = received(caller)
                process = os.fork() if asked else None
                if process == 0:
                    for number, file in enumerate(files):
                        os.dup2(file, number)
                for file in files:
                    os.close(file)
                if process == 0:
                    return asked
                if process:
                    running[os.pidfd_open(process)] = process, caller
    os._exit(0)


def received(caller: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """What a caller asks for, None where it was killed before it had said so, and its open files."""
    head, files, _, _ = socket.recv_fds(caller, 8, 3)
    message, length = bytearray(), int.from_bytes(head, "big")
    while len(message) < length and (part := caller.recv(1 << 16)):
        message += part
    return (marshal.loads(message) if 0 < length == len(message) else None), files


def answer(caller: socket.socket, status: int) -> None:
    """Tell a caller the exit status of what it asked for."""
    with caller, suppress(OSError):  # it may be gone
        caller.sendall(status.to_bytes(8, "big", signed=True))


def become(asked: Mapping[str, Any]) -> None:
    """What the interpreter does with such words, in an environment, in a folder."""
    os.chdir(asked["folder"])
    os.environ.clear()
    os.environ.update(asked["environment"])
    first = [] if asked["safe"] else [asked["folder"]]
    sys.path[:0] = [*first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    for path in sys.path:
        custom = Path(path, "sitecustomize.py")
        if custom.is_file():
            runpy.run_path(str(custom), run_name="sitecustomize")
            break
    spec = find_spec(asked["module"])
    if spec.submodule_search_locations is not None:
        spec = find_spec(f"{asked['module']}.__main__")
    if asked["module"] == "kvstages":
        gc.enable()
    sys.argv = [spec.origin, *asked["words"]]
    runpy.run_module(asked["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    asked = serve(sys.argv[1])
    try:
        become(asked)
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status & 0xFF)
