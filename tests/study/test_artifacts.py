import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from click.testing import CliRunner
from hub import hub
from huggingface_hub import close_session

from kvstages.cli import main
from kvstages.study.artifacts import check_artifact
from kvstages.study.hub import within

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40
BODY = b"weights " * 5000
SHA256 = hashlib.sha256(BODY).hexdigest()
REPOSITORIES = {"ada/nano": {COMMIT: {"checkpoints/final.pt": BODY}, OTHER: {}}}


def fetch_from_hub(
    endpoint: str, folder: Path, *changes: str, patience: float = 10.0, alone: bool = False, **environment: str
) -> tuple[int, str]:
    """Exit status and output of the command; ``alone`` in a process of its own."""
    options = {
        "--location": "ada/nano",
        "--revision": COMMIT,
        "--path": "checkpoints/final.pt",
        "--sha256": SHA256,
        "--output": str(folder / "final.pt"),
        **dict(zip(changes[::2], changes[1::2], strict=True)),
    }
    words = ["fetch", "--source", "hub", *(part for option in options.items() for part in option)]
    variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "home"), "NO_PROXY": "127.0.0.1", **environment}
    if alone:
        program = f"import kvstages.study.hub as h, kvstages.cli as c; h.PATIENCE_SECONDS = {patience}; c.main()"
        command = [sys.executable, "-c", program, *words]
        done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr
    close_session()  # it has read the proxies once
    with patch.dict(os.environ, variables), patch("kvstages.study.hub.PATIENCE_SECONDS", patience):
        result = CliRunner().invoke(main, words)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def one_line(result: tuple[int, str]) -> str:
    status, output = result
    assert status == 1
    lines = output.splitlines()
    assert len(lines) == 1
    return lines[0]


def left_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "home")


def fetch_locally(*changes: str) -> object:
    options = {
        "--source": "local",
        "--path": "final.pt",
        "--sha256": SHA256,
        "--output": "out/final.pt",
        **dict(zip(changes[::2], changes[1::2], strict=True)),
    }
    return CliRunner().invoke(main, ["fetch", *(part for option in options.items() for part in option)])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A working directory with the artifact in ``bundle/``."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "final.pt").write_bytes(BODY)
    return tmp_path


def test_hub_success_writes_the_file_and_nothing_else(tmp_path):
    with hub(REPOSITORIES) as endpoint:
        result = fetch_from_hub(endpoint, tmp_path)
    assert result == (0, "")
    assert (tmp_path / "final.pt").read_bytes() == BODY
    assert left_in(tmp_path) == ["final.pt"]
    assert not list((tmp_path / "home").rglob("final.pt")), "the user's cache is not used"


def test_hub_that_is_down(tmp_path):
    with socket.socket() as taken:  # bound but not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        endpoint = f"http://127.0.0.1:{taken.getsockname()[1]}"
        message = one_line(fetch_from_hub(endpoint, tmp_path))
    assert f"hub {endpoint} is not available for ada/nano at revision {COMMIT}" in message
    assert "Connection refused" in message
    assert "check the network, set HF_ENDPOINT to a hub that can be reached, or use source local" in message
    assert left_in(tmp_path) == []


def test_hub_that_fails_with_server_errors(tmp_path):
    with hub(REPOSITORIES, status=503) as endpoint:
        message = one_line(fetch_from_hub(endpoint, tmp_path))
    assert "is not available" in message
    assert "503" in message
    assert left_in(tmp_path) == []


def test_hub_offline_by_environment(tmp_path):
    message = one_line(fetch_from_hub("http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1", alone=True))
    assert "HF_HUB_OFFLINE is set" in message


def test_hub_that_never_answers_is_given_up(tmp_path):
    with hub(REPOSITORIES, delay=1.0) as endpoint:
        message = one_line(fetch_from_hub(endpoint, tmp_path, patience=0.1, alone=True))
    assert "is not available" in message
    assert "no answer within 0.1 seconds" in message
    assert left_in(tmp_path) == []


def test_hub_that_answers_with_another_revision(tmp_path):
    with hub(REPOSITORIES, answered_commit=OTHER) as endpoint:
        message = one_line(fetch_from_hub(endpoint, tmp_path))
    assert f"answered with revision '{OTHER}' of ada/nano, asked was {COMMIT}" in message
    assert left_in(tmp_path) == []


def test_wrong_bytes_of_the_right_length_are_caught_and_the_next_run_repairs(tmp_path):
    with hub(REPOSITORIES, alter=lambda path, body: bytes(len(body))) as endpoint:
        message = one_line(fetch_from_hub(endpoint, tmp_path))
    found = hashlib.sha256(bytes(len(BODY))).hexdigest()
    assert f"ada/nano at revision {COMMIT}: checkpoints/final.pt: sha256 is {found}, expected {SHA256}" in message
    assert left_in(tmp_path) == []
    with hub(REPOSITORIES) as endpoint:
        assert fetch_from_hub(endpoint, tmp_path)[0] == 0
    assert (tmp_path / "final.pt").read_bytes() == BODY


def test_a_download_that_is_cut_off_leaves_nothing_and_the_next_run_repairs(tmp_path):
    with hub(REPOSITORIES, cut=0.5) as endpoint:
        message = one_line(fetch_from_hub(endpoint, tmp_path))
    assert f"is not available for ada/nano at revision {COMMIT}" in message
    assert left_in(tmp_path) == []
    with hub(REPOSITORIES) as endpoint:
        assert fetch_from_hub(endpoint, tmp_path)[0] == 0
    assert (tmp_path / "final.pt").read_bytes() == BODY


def test_a_dropped_connection_goes_on_where_it_ended(tmp_path):
    seen = []
    with hub(REPOSITORIES, cut=0.5, drops=3, seen=seen) as endpoint:
        result = fetch_from_hub(endpoint, tmp_path)
    assert result == (0, "")
    assert (tmp_path / "final.pt").read_bytes() == BODY
    assert [headers.get("Range") for headers in seen][2:] == ["bytes=20000-", "bytes=30000-", "bytes=35000-"]


def test_a_hub_that_stalls_in_mid_body_is_given_up(tmp_path):
    with hub(REPOSITORIES, cut=0.5, stall=30) as endpoint:
        message = one_line(fetch_from_hub(endpoint, tmp_path, patience=0.5))
    assert "(stalled after 20000 bytes)" in message
    assert left_in(tmp_path) == []


CLIMB = "../../../../victim.txt"
LIES = {
    "etag": {"ETag": f'"{CLIMB}"', "X-Linked-Etag": f'"{CLIMB}"'},
    "etag of the whole path": {"ETag": '"VICTIM"', "X-Linked-Etag": '"VICTIM"'},
    "commit": {"X-Repo-Commit": CLIMB},
    "name": {"Content-Disposition": f'attachment; filename="{CLIMB}"'},
    "place": {"Content-Location": "file://VICTIM", "X-Linked-Path": "VICTIM"},
    "xet": {"X-Xet-Hash": CLIMB, "X-Xet-Refresh-Route": "file://VICTIM", "X-Xet-Cas-Url": "file://VICTIM"},
    "longer": {"Content-Length": "1000000", "X-Linked-Size": "1000000"},
    "shorter": {"Content-Length": "10"},
    "negative length": {"X-Linked-Size": "-5"},
    "more than a disk": {"X-Linked-Size": str(1 << 60)},
    "no length": {"Content-Length": "many"},
    "encoding": {"Content-Encoding": "gzip"},
    "warning": {"X-HF-Warning": "a; \x1b[2Jcleared"},
}

# What huggingface_hub would make a path of, and this project does not look at.
HARMLESS = {"etag", "etag of the whole path", "name", "place", "warning"}


@pytest.mark.parametrize("status", [200, 302, 307])
@pytest.mark.parametrize("lie", LIES)
def test_a_hub_that_lies_reaches_no_other_file(tmp_path, lie, status):
    victim, folder = tmp_path / "victim.txt", tmp_path / "a" / "b" / "c"
    folder.mkdir(parents=True)
    for place in (folder, *folder.parents[:3]):
        (place / "victim.txt").write_text("mine")
    headers = {name: value.replace("VICTIM", str(victim)) for name, value in LIES[lie].items()}
    if status != 200:
        headers["Location"] = f"file://{victim}"
    before = everything(tmp_path)
    with hub(REPOSITORIES, lies=headers, status=None if status == 200 else status) as endpoint:
        result = fetch_from_hub(endpoint, folder, patience=1)
    written = {folder / "final.pt": BODY} if result == (0, "") else {}
    assert everything(tmp_path) == before | written
    assert written or one_line(result).isprintable()
    assert written or status != 200 or lie not in HARMLESS


def everything(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_redirect_takes_no_token_elsewhere_and_the_checksum_decides(tmp_path):
    here, elsewhere = [], []
    with hub(REPOSITORIES, seen=elsewhere) as other:
        target = f"{other}/ada/nano/resolve/{COMMIT}/checkpoints/final.pt"
        lies = {"Location": target, "X-Linked-Size": str(len(BODY)), "X-Repo-Commit": COMMIT}
        with hub(REPOSITORIES, status=302, lies=lies, seen=here) as endpoint:
            result = fetch_from_hub(endpoint, tmp_path, HF_TOKEN="hf_secret")
    assert result == (0, "")
    assert {headers["Authorization"] for headers in here} == {"Bearer hf_secret"}
    assert elsewhere and not any("Authorization" in headers for headers in elsewhere)


USER, PASSWORD, TOKEN = "grace", "pa55word", "hf_t0ken"


@pytest.mark.parametrize(
    "environment",
    [
        {"HF_ENDPOINT": f"http://{USER}:{PASSWORD}@HOST"},
        {"HF_ENDPOINT": f"http://{USER}:{PASSWORD}@nowhere.invalid"},
        {"HF_ENDPOINT": f"http://{USER}:{PASSWORD}/x@HOST"},
        {"HF_ENDPOINT": f"http://{USER}:{PASSWORD}@HOST?token={TOKEN}"},
        {"HF_ENDPOINT": f"{USER}:{PASSWORD}@HOST"},
        {"HF_ENDPOINT": f"http://{USER}:p%20{PASSWORD}@HOST:99999"},
        {"http_proxy": f"http://{USER}:{PASSWORD}@127.0.0.1:9", "NO_PROXY": ""},
        {"http_proxy": f"http://{USER}:{PASSWORD}/x@127.0.0.1:9", "NO_PROXY": ""},
        {"ALL_PROXY": f"socks9://{USER}:{PASSWORD}@127.0.0.1:9", "NO_PROXY": ""},
        {"HF_TOKEN": f"{TOKEN}\u00e4"},
        {"HF_TOKEN": f"{TOKEN}\r\nX: y"},
        {"HF_TOKEN": TOKEN, "HF_DEBUG": "1"},
    ],
)
def test_no_credentials_in_any_message(tmp_path, environment):
    with hub(REPOSITORIES, status=503) as endpoint:
        host = endpoint.removeprefix("http://")
        variables = {name: value.replace("HOST", host) for name, value in environment.items()}
        message = one_line(fetch_from_hub(variables.pop("HF_ENDPOINT", endpoint), tmp_path, **variables))
    assert "HF_ENDPOINT" in message or "hub http://" in message
    assert not any(secret in message for secret in (USER, PASSWORD, TOKEN))


def test_a_hub_that_wants_a_password_gets_it(tmp_path):
    seen = []
    with hub(REPOSITORIES, seen=seen) as endpoint:
        address = endpoint.replace("http://", f"http://{USER}:{PASSWORD}@")
        assert fetch_from_hub(address, tmp_path)[0] == 0
    assert all(headers["Authorization"].startswith("Basic ") for headers in seen)


@pytest.mark.parametrize("variable", ["SSL_CERT_FILE", "SSL_CERT_DIR"])
def test_certificates_that_are_not_there_are_named(tmp_path, variable):
    message = one_line(fetch_from_hub("https://127.0.0.1:9", tmp_path, **{variable: "/nowhere/ca"}))
    assert f"{variable} is '/nowhere/ca', which is not there; correct or unset this variable" in message


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (("--path", "final.pt"), f"ada/nano at revision {COMMIT} has no file final.pt"),
        (("--revision", "a" * 40), f"has no revision {'a' * 40} of ada/nano"),
        (("--location", "ada/mini"), "has no repository ada/mini, or it is private or gated and needs HF_TOKEN"),
    ],
)
def test_what_the_hub_does_not_have(tmp_path, changes, expected):
    with hub(REPOSITORIES) as endpoint:
        assert expected in one_line(fetch_from_hub(endpoint, tmp_path, *changes))
    assert left_in(tmp_path) == []


@pytest.mark.parametrize("source", ["local", "bundled"])
def test_folder_success(folder, source):
    result = fetch_locally("--source", source, "--location", "bundle")
    assert (result.exit_code, result.output) == (0, "")
    assert (folder / "out" / "final.pt").read_bytes() == BODY


def test_links_of_a_hub_snapshot_are_followed(folder):
    (folder / "snapshot").mkdir()
    (folder / "snapshot" / "final.pt").symlink_to("../bundle/final.pt")
    assert fetch_locally("--location", "snapshot").exit_code == 0
    assert not (folder / "out" / "final.pt").is_symlink()


def test_wrong_sha256_keeps_what_was_there(folder):
    (folder / "out").mkdir()
    (folder / "out" / "final.pt").write_bytes(b"before")
    result = fetch_locally("--location", "bundle", "--sha256", "0" * 64)
    assert result.exit_code == 1
    assert result.output == (
        f"Error: bundle/final.pt: sha256 is {SHA256}, expected {'0' * 64}; out/final.pt was not written\n"
    )
    assert (folder / "out" / "final.pt").read_bytes() == b"before"
    assert left_in(folder / "out") == ["final.pt"]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (("--path", "other.pt"), "bundle/other.pt: no such file"),
        (("--location", "nowhere"), "nowhere/final.pt: no folder nowhere"),
        (("--location", ".", "--path", "bundle"), "bundle: is a folder, expected a file"),
        (("--path", "../bundle/final.pt"), "path '../bundle/final.pt': expected a path inside its folder"),
        (("--path", "/etc/hostname"), "path '/etc/hostname': expected a path inside its folder"),
        (("--source", "bundled", "--location", "../elsewhere"), "location '../elsewhere': expected a path inside"),
        (("--revision", COMMIT), f"revision '{COMMIT}': only source hub has revisions, this is local"),
        (("--sha256", SHA256[:-1]), f"sha256 '{SHA256[:-1]}': expected 64 lower-case hexadecimal digits"),
        (("--source", "hub", "--location", "a/b"), "revision: source hub needs the 40-hex commit of a/b"),
        (("--source", "hub", "--location", "a/b", "--revision", "main"), "revision 'main': expected a commit of 40"),
        (("--source", "hub", "--location", "nano", "--revision", COMMIT), "location 'nano': expected a hub repository"),
    ],
)
def test_refused_folder_requests(folder, changes, expected):
    result = fetch_locally("--location", "bundle", *changes)
    assert result.exit_code == 1
    assert len(result.output.splitlines()) == 1
    assert expected in result.output
    assert not (folder / "out" / "final.pt").exists()


def test_a_pointer_in_place_of_a_file_is_named(folder):
    (folder / "bundle" / "final.pt").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    result = fetch_locally("--location", "bundle")
    assert result.exit_code == 1
    assert "sha256 of a pointer of Git LFS (run `git lfs pull` there) is " in result.output


def test_unknown_source():
    with pytest.raises(ValueError, match="source 'ftp': expected one of bundled, hub, local"):
        check_artifact("ftp", "bundle", None, "final.pt", SHA256)


def test_within_hands_on_results_and_errors():
    assert within(5, lambda: 3) == 3
    with pytest.raises(KeyError):
        within(5, lambda: {}["missing"])
