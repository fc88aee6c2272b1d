"""One file of a model repository on a Hugging Face hub.

huggingface_hub says where the file lies, sends the user's token, and knows proxies and HF_HUB_OFFLINE. Its own
download is not used: it builds paths from what the hub answers (an ETag of ``../../x`` names a file outside its
folder), and it waits a minute and more for a hub that stalls. Here the bytes go into one open file, so no header,
redirect or length can name another. The user's hub cache is neither read nor written: a wrong file in it would be
found again by every later run.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, TypeVar
from urllib.parse import unquote, urlsplit

from kvstages.files.atomic import NO_ROOM
from kvstages.files.ledger import sha256
from kvstages.files.read import read_record

DEFAULT_ENDPOINT = "https://huggingface.co"
ENDPOINT = re.compile(r"https?://(?:[^/?#@\s]*@)?(?:[\w.-]+|\[[0-9a-fA-F:.]+\])(?::\d{1,5})?(?:/[^?#\s]*)?")
T = TypeVar("T")
# Seconds for one answer, and for all that comes before it (a name server that is down, several addresses that each
# time out). A body that brings fewer than LEAST_BYTES in PATIENCE_SECONDS has stalled.
ANSWER_SECONDS = 5.0
PATIENCE_SECONDS = 10.0
LEAST_BYTES = 1000
PROXIES = ("http_proxy", "https_proxy", "all_proxy")
TOKENS = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")


def download(repository: str, revision: str, path: str, output: Path) -> None:
    """Write one file of a model repository to ``output``; its bytes are not checked here.

    HF_ENDPOINT names another hub. ValueError for what the hub does not have or answers wrongly, OSError for a hub that
    does not answer or stalls, within seconds.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.utils import build_hf_headers, logging

    logging.set_verbosity_error()  # it tells of each new attempt in several lines; the last error says it all
    endpoint = hub_endpoint()
    check_certificates()
    with hub_errors(endpoint, repository, revision, path):
        url = hf_hub_url(repository, path, revision=revision, endpoint=endpoint)
        answer = within(PATIENCE_SECONDS, lambda: get_hf_file_metadata(url, timeout=ANSWER_SECONDS, endpoint=endpoint))
    if answer.commit_hash != revision:  # huggingface_hub itself accepts any
        raise ValueError(
            f"hub {shown(endpoint)} answered with revision {answer.commit_hash!r:.60} of {repository}, "
            f"asked was {revision}"
        )
    if answer.size is None:
        raise ValueError(f"hub {shown(endpoint)} does not say how long {path} of {repository} is")
    if answer.size > (free := shutil.disk_usage(output.parent).free):
        raise OSError(f"{path} of {repository}: {answer.size} bytes, as the hub says; the disk has {free}")
    with hub_errors(endpoint, repository, revision, path), output.open("wb") as file:
        headers = build_hf_headers() | {"Accept-Encoding": "identity"}
        received = Counter()
        within(PATIENCE_SECONDS, lambda: receive(url, headers, file, answer.size, received), lambda: received.bytes)


class Counter:
    """Bytes received so far, over all attempts."""

    bytes = 0


def receive(url: str, headers: dict[str, str], file: BinaryIO, size: int, received: Counter) -> None:
    """Read at most ``size`` bytes of ``url`` into ``file``; a dropped connection goes on where it ended.

    Raises what the connection raised once an attempt brings nothing new.
    """
    from huggingface_hub.utils import get_session

    while (before := file.tell()) < size:
        rest = {"Range": f"bytes={before}-"} if before else {}
        try:
            with get_session().stream("GET", url, headers=headers | rest, timeout=ANSWER_SECONDS) as response:
                if response.status_code not in (200, 206):
                    raise OSError(f"status {response.status_code}")
                if response.status_code == 200:  # from the start, whatever was asked
                    file.seek(0)
                    file.truncate()
                for chunk in response.iter_raw():
                    received.bytes += len(chunk)
                    file.write(chunk[: size - file.tell()])
                    if file.tell() == size:
                        return
        except Exception:
            if file.tell() <= before:
                raise
        if file.tell() <= before:
            return  # the hub has no more; the checksum says the rest


def hub_endpoint() -> str:
    """The hub's address; ValueError, without its value (it may hold a password), where HF_ENDPOINT is none."""
    endpoint = (os.environ.get("HF_ENDPOINT") or DEFAULT_ENDPOINT).rstrip("/")
    if not ENDPOINT.fullmatch(endpoint):
        raise ValueError(
            f"HF_ENDPOINT: expected the address of a hub, such as {DEFAULT_ENDPOINT} (its value is not shown, for it "
            "may hold a password)"
        )
    return endpoint


def shown(endpoint: str) -> str:
    """An address without user name and password."""
    parts = urlsplit(endpoint)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def check_certificates() -> None:
    """ValueError where a variable names certificates that are not there: the HTTP library would not say which."""
    for name, there in (("SSL_CERT_FILE", os.path.isfile), ("SSL_CERT_DIR", os.path.isdir)):
        value = os.environ.get(name)
        if value and not there(value):
            raise ValueError(f"{name} is {value!r}, which is not there; correct or unset this variable")


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

    hub, commit = f"hub {shown(endpoint)}", f"{repository} at revision {revision}"
    try:
        yield
    except HFValidationError as error:
        raise ValueError(f"location {repository!r}: expected a hub repository as owner/name ({error})") from error
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{hub} has no repository {repository}, or it is private or gated and needs HF_TOKEN"
        ) from error
    except RevisionNotFoundError as error:
        raise ValueError(f"{hub} has no revision {revision} of {repository}") from error
    except OfflineModeIsEnabled as error:
        raise OSError(
            f"{hub}: HF_HUB_OFFLINE is set; unset it, or use source local with a folder that holds {path}"
        ) from error
    except Exception as error:
        if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
            raise ValueError(f"{hub}: {commit} has no file {path}") from error
        if isinstance(error, OSError) and error.errno in NO_ROOM:
            raise
        # What is left is the transport, whose errors belong to whichever HTTP library huggingface_hub uses.
        raise OSError(
            f"{hub} is not available for {commit} ({reason(error)}): check the network, set "
            "HF_ENDPOINT to a hub that can be reached, or use source local with a folder that holds the files"
        ) from error


def reason(error: BaseException) -> str:
    """What an error says, in one line; its kind alone where that holds a user name, password or token."""
    cause = error.__cause__ or error
    text = (str(cause).strip() or type(cause).__name__).splitlines()[0]
    return type(cause).__name__ if any(secret in text for secret in secrets()) else text


def secrets() -> set[str]:
    """User names, passwords and tokens of the environment, in every form that a message could show them in."""
    from huggingface_hub import get_token

    found = {os.environ.get(name) for name in TOKENS} | {get_token()}
    for name in ("HF_ENDPOINT", *PROXIES, *map(str.upper, PROXIES)):
        userinfo = os.environ.get(name, "").partition("://")[2].rpartition("@")[0]
        found |= {userinfo, *re.split("[:/?#@]", userinfo)}
    found |= {unquote(text) for text in found if text}
    return {text for text in found if text}


def within(seconds: float, call: Callable[[], T], progress: Callable[[], int] = lambda: 0) -> T:
    """The result of ``call``; TimeoutError once it makes less than LEAST_BYTES of ``progress`` in ``seconds``.

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
    before = 0
    while thread.is_alive() and (now := progress()) >= before + LEAST_BYTES:
        before = now
        thread.join(seconds)
    if failure:
        raise failure[0]
    if not outcome:
        raise TimeoutError(f"stalled after {before} bytes" if before else f"no answer within {seconds:g} seconds")
    return outcome[0]


def described(repository: str, revision: str, path: str) -> tuple[str, str | None] | None:
    """Commit of a file of a repository, and its sha256 where the hub says it (of large files); None where there is no
    such file. Errors as in ``download``."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url
    from huggingface_hub.errors import EntryNotFoundError
    from huggingface_hub.utils import logging

    logging.set_verbosity_error()
    endpoint = hub_endpoint()
    check_certificates()
    with hub_errors(endpoint, repository, revision, path):
        url = hf_hub_url(repository, path, revision=revision, endpoint=endpoint)
        try:
            answer = within(
                PATIENCE_SECONDS, lambda: get_hf_file_metadata(url, timeout=ANSWER_SECONDS, endpoint=endpoint)
            )
        except EntryNotFoundError:
            return None
    etag = answer.etag or ""
    return str(answer.commit_hash), etag if re.fullmatch(r"[0-9a-f]{64}", etag) else None


def resolve(repository: str, revision: str, path: str) -> str:
    """The commit that a branch or tag of a repository is at; ValueError where that has no file ``path``."""
    found = described(repository, revision, path)
    if found is None:
        raise ValueError(f"{repository}: no {path} at {revision}; expected a model in transformers' own format")
    return found[0]


def resolved_files(
    repository: str,
    commit: str,
    small: list[str],
    weights: list[str],
    index: str,
    optional: tuple[str, ...],
    folder: Path,
) -> list[dict[str, str]]:
    """Path and sha256 of a model's files at a commit; those of no weights are downloaded into ``folder``.

    ``weights`` are one file, or those that ``index`` lists. ValueError where neither is there, or where the hub does
    not say the sha256 of weights.
    """
    found = []
    if any(described(repository, commit, name) is None for name in weights):
        if described(repository, commit, index) is None:
            raise ValueError(f"{repository}: neither {', '.join(weights)} nor {index} at {commit}")
        small = [*small, index]
    for name in [*small, *(name for name in optional if described(repository, commit, name) is not None)]:
        download(repository, commit, name, folder / name)
        found.append({"path": name, "sha256": sha256(folder / name)})
    if index in small:
        weights = sorted(set(read_record(folder / index, ["weight_map"])["weight_map"].values()))
    for name in weights:
        answer = described(repository, commit, name)
        if answer is None or answer[1] is None:
            raise ValueError(f"{repository}: the hub does not say the sha256 of {name} at {commit}")
        found.append({"path": name, "sha256": answer[1]})
    return found
