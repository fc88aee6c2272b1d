import hashlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from hub import hub

from kvstages.cli import main
from kvstages.study.artifacts import check_artifact, within

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "f" * 40
BODY = b"weights " * 5000
SHA256 = hashlib.sha256(BODY).hexdigest()
REPOSITORIES = {"ada/nano": {COMMIT: {"checkpoints/final.pt": BODY}, OTHER: {}}}


COMMAND = "import kvstages.cli as c; c.main()"


def fetch_from_hub(
    endpoint: str, folder: Path, *changes: str, program: str = COMMAND, **environment: str
) -> subprocess.CompletedProcess:
    """The command in a process of its own: huggingface_hub reads the environment when it is imported."""
    options = {
        "--location": "ada/nano",
        "--revision": COMMIT,
        "--path": "checkpoints/final.pt",
        "--sha256": SHA256,
        "--output": str(folder / "final.pt"),
        **dict(zip(changes[::2], changes[1::2], strict=True)),
    }
    arguments = [part for option in options.items() for part in option]
    variables = {"HF_ENDPOINT": endpoint, "HF_HOME": str(folder / "home"), "NO_PROXY": "127.0.0.1", **environment}
    return subprocess.run(
        [sys.executable, "-c", program, "fetch", "--source", "hub", *arguments],
        env=os.environ | variables,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def one_line(result: subprocess.CompletedProcess) -> str:
    assert result.returncode == 1
    assert result.stdout == ""
    lines = result.stderr.splitlines()
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
    assert (result.returncode, result.stderr) == (0, "")
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
    message = one_line(fetch_from_hub("http://127.0.0.1:9", tmp_path, HF_HUB_OFFLINE="1"))
    assert "HF_HUB_OFFLINE is set" in message


def test_hub_that_never_answers_is_given_up(tmp_path):
    program = "import kvstages.study.artifacts as a, kvstages.cli as c; a.PATIENCE_SECONDS = 0.1; c.main()"
    with hub(REPOSITORIES, delay=1.0) as endpoint:
        message = one_line(fetch_from_hub(endpoint, tmp_path, program=program))
    assert "is not available" in message
    assert "no answer within 0.1 seconds" in message
    assert left_in(tmp_path) == []


def test_hub_that_answers_with_another_revision(tmp_path):
    with hub(REPOSITORIES, answered_commit=OTHER) as endpoint:
        message = one_line(fetch_from_hub(endpoint, tmp_path))
    assert f"answered with revision {OTHER} of ada/nano, asked was {COMMIT}" in message
    assert left_in(tmp_path) == []


def test_wrong_bytes_of_the_right_length_are_caught_and_the_next_run_repairs(tmp_path):
    with hub(REPOSITORIES, alter=lambda path, body: bytes(len(body))) as endpoint:
        message = one_line(fetch_from_hub(endpoint, tmp_path))
    found = hashlib.sha256(bytes(len(BODY))).hexdigest()
    assert f"ada/nano at revision {COMMIT}: checkpoints/final.pt: sha256 is {found}, expected {SHA256}" in message
    assert left_in(tmp_path) == []
    with hub(REPOSITORIES) as endpoint:
        assert fetch_from_hub(endpoint, tmp_path).returncode == 0
    assert (tmp_path / "final.pt").read_bytes() == BODY


def test_a_download_that_is_cut_off_leaves_nothing_and_the_next_run_repairs(tmp_path):
    with hub(REPOSITORIES, cut=0.5) as endpoint:
        message = one_line(fetch_from_hub(endpoint, tmp_path))
    assert f"is not available for ada/nano at revision {COMMIT}" in message
    assert left_in(tmp_path) == []
    with hub(REPOSITORIES) as endpoint:
        assert fetch_from_hub(endpoint, tmp_path).returncode == 0
    assert (tmp_path / "final.pt").read_bytes() == BODY


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


def test_unknown_source():
    with pytest.raises(ValueError, match="source 'ftp': expected one of bundled, hub, local"):
        check_artifact("ftp", "bundle", None, "final.pt", SHA256)


def test_within_hands_on_results_and_errors():
    assert within(5, lambda: 3) == 3
    with pytest.raises(KeyError):
        within(5, lambda: {}["missing"])
