"""Pinned artifacts: one file from one source, verified by sha256 before it exists under its own name.

Sources: ``bundled`` (a folder of the repository), ``local`` (any folder) and ``hub`` (a Hugging Face model repository
at a 40-hex revision, through huggingface_hub). The user's hub cache is not used: a wrong file in it would be found
again by every later run.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import TypeVar

from kvstages.files.atomic import PARTIAL, atomic_path
from kvstages.files.ledger import sha256 as sha256_of

SOURCES = ("bundled", "hub", "local")
DEFAULT_ENDPOINT = "https://huggingface.co"
T = TypeVar("T")
# Seconds for the hub's first answer, and for everything before it (a name server that is down, several addresses
# that each time out). huggingface_hub alone retries for 23 s and more before it gives up.
ANSWER_SECONDS = 5.0
PATIENCE_SECONDS = 10.0


def fetch(source: str, location: str, revision: str | None, path: str, sha256: str, output: Path) -> None:
    """Copy or download ``path`` of ``location`` to ``output``; nothing is left there unless its sha256 matches.

    ValueError or OSError names the artifact and says what was found and what was expected.
    """
    check_artifact(source, location, revision, path, sha256)
    with atomic_path(output) as temporary:
        if source == "hub":
            with tempfile.TemporaryDirectory(
                dir=temporary.parent, prefix=f".{Path(output).name}.", suffix=PARTIAL
            ) as folder:
                download(location, str(revision), path, Path(folder)).replace(temporary)
            origin = f"{location} at revision {revision}: {path}"
        else:
            file = Path(location).expanduser() / path
            copy(file, temporary)
            origin = str(file)
        found = sha256_of(temporary)
        if found != sha256:
            raise ValueError(f"{origin}: sha256 is {found}, expected {sha256}; {output} was not written")


def check_artifact(source: str, location: str, revision: str | None, path: str, sha256: str) -> None:
    """ValueError unless the five say, without doubt, which bytes of which place are meant."""
    if source not in SOURCES:
        raise ValueError(f"source {source!r}: expected one of {', '.join(SOURCES)}")
    if not re.fullmatch(r"[0-9a-f]{64}", sha256):
        raise ValueError(f"sha256 {sha256!r}: expected 64 lower-case hexadecimal digits")
    check_inside("path", path)
    if source == "hub":
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", location, re.ASCII) or ".." in location:
            raise ValueError(f"location {location!r}: expected a hub repository as owner/name")
        if revision is None:
            raise ValueError(f"revision: source hub needs the 40-hex commit of {location}")
        if not re.fullmatch(r"[0-9a-f]{40}", revision):
            raise ValueError(
                f"revision {revision!r}: expected a commit of 40 lower-case hexadecimal digits, not a branch or a tag"
            )
        return
    if revision is not None:
        raise ValueError(f"revision {revision!r}: only source hub has revisions, this is {source}")
    if source == "bundled":
        check_inside("location", location)
    elif not location:
        raise ValueError("location is empty; expected a folder")


def check_inside(key: str, path: str) -> None:
    """ValueError for a path that is empty, absolute or climbs out of its folder, or that no file should have.

    Snakemake takes braces in a path for wildcards; line ends and other control characters belong in no name. Links are
    not followed: the snapshots of the hub's own cache consist of links to its blobs.
    """
    parts = PurePosixPath(path).parts
    if not parts or "\\" in path or ".." in parts or PurePosixPath(path).is_absolute():
        raise ValueError(f"{key} {path!r}: expected a path inside its folder, without .. and not absolute")
    if re.search(r"[\x00-\x1f\x7f{}\ud800-\udfff]", path):
        raise ValueError(f"{key} {path!r}: expected a path inside its folder, without braces and control characters")


def copy(file: Path, temporary: Path) -> None:
    """Copy a file of a folder; ValueError says whether the folder or the file is missing."""
    if not file.is_file():
        if file.is_dir():
            raise ValueError(f"{file}: is a folder, expected a file")
        raise ValueError(f"{file}: no such file" if file.parent.is_dir() else f"{file}: no folder {file.parent}")
    shutil.copyfile(file, temporary)


def download(repository: str, revision: str, path: str, folder: Path) -> Path:
    """Download one file of a model repository into ``folder``, used as a private cache; the path it has there.

    ValueError for what the hub does not have or answers wrongly, OSError for a hub that does not answer, within
    seconds. HF_ENDPOINT names another hub.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_download, hf_hub_url
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()  # it tells of each new attempt in several lines; the last error says it all
    endpoint = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    with hub_errors(endpoint, repository, revision, path):
        url = hf_hub_url(repository, path, revision=revision, endpoint=endpoint)
        answer = within(PATIENCE_SECONDS, lambda: get_hf_file_metadata(url, timeout=ANSWER_SECONDS, endpoint=endpoint))
    # huggingface_hub itself accepts any commit in the answer.
    if answer.commit_hash != revision:
        raise ValueError(
            f"hub {endpoint} answered with revision {answer.commit_hash} of {repository}, asked was {revision}"
        )
    with hub_errors(endpoint, repository, revision, path):
        # force_download: the client's only mode that gives up at once if the hub went away after that answer.
        file = hf_hub_download(
            repository, path, revision=revision, cache_dir=folder, endpoint=endpoint, force_download=True
        )
    return Path(file).resolve()


@contextmanager
def hub_errors(endpoint: str, repository: str, revision: str, path: str) -> Iterator[None]:
    """Turn the client's errors into one line each: ValueError for a wrong request, OSError for a hub that is down."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"location {repository!r}: expected a hub repository as owner/name ({error})") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"hub {endpoint} has no repository {repository}, or it is private or gated and needs HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"hub {endpoint} has no revision {revision} of {repository}") from error
    except OfflineModeIsEnabled as error:
        raise OSError(
            f"hub {endpoint}: HF_HUB_OFFLINE is set; unset it, or use source local with a folder that holds {path}"
        ) from error
    except Exception as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise ValueError(f"hub {endpoint}: {repository} at revision {revision} has no file {path}") from error
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's own errors carry a number
        # What is left is the transport, whose errors belong to whichever HTTP library huggingface_hub uses.
        raise OSError(unavailable(endpoint, f"{repository} at revision {revision}", error)) from error


def unavailable(endpoint: str, what: str, error: BaseException) -> str:
    """One line for a hub that does not answer, with what to do."""
    cause = error.__cause__ or error
    reason = (str(cause).strip() or type(cause).__name__).splitlines()[0]
    return (
        f"hub {endpoint} is not available for {what} ({reason}): check the network, set HF_ENDPOINT to a hub that "
        "can be reached, or use source local with a folder that holds the files"
    )


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of ``call``; TimeoutError once ``seconds`` have passed.

    In a thread, since neither a name lookup nor a list of addresses heeds the client's timeout; a daemon, so that
    the process can end while it still hangs.
    """
    outcome: list[T] = []
    failure: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            failure.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:g} seconds")
    return outcome[0]
