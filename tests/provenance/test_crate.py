"""`kvstages crate`: what is in the crate, what is refused, and what the maintained validator says."""

from __future__ import annotations

import json
import shutil
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from crates import findings
from signed_study import FOLDER, flip, make_study

from kvstages.cli import main
from kvstages.files.ledger import sha256
from kvstages.provenance.code import PACKAGE

pytest.importorskip("rocrate")
# What cannot be said: nobody knows who started a run, and the project has no address of its own yet.
UNKNOWN = ("have an agent", "Application SHOULD have a url", "`publisher`", "organization SHOULD have a URL")
# A profile's class is asked for what its members should have.
OF_THE_VALIDATOR = "SoftwareApplication id SHOULD be an absolute URI (http"


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small study, in the working directory."""
    make_study(tmp_path)
    monkeypatch.chdir(tmp_path)
    return FOLDER


def pack(output: str = "crate", folder: Path = FOLDER) -> Result:
    return CliRunner().invoke(main, ["crate", str(folder), "--output", output])


def entities(folder: Path) -> dict[str, dict]:
    graph = json.loads((folder / "ro-crate-metadata.json").read_text())["@graph"]
    return {entity["@id"]: entity for entity in graph}


def test_a_crate_holds_every_file_with_checksum_rule_and_source(study: Path) -> None:
    assert pack().exit_code == 0
    found = entities(Path("crate"))
    manifest = json.loads((study / "manifest.json").read_text())
    for path, entry in (manifest["inputs"] | manifest["outputs"]).items():
        assert found[path]["sha256"] == entry["sha256"] == sha256(Path("crate", path))
        assert found[path]["contentSize"] == str(Path(path).stat().st_size)
    assert found["results/small/policies/int8/steps.csv"]["exampleOfWork"] == {"@id": "#output-a_rule"}
    assert found["#input-shard"]["@type"] == "FormalParameter"
    run = found["#run"]
    assert run["instrument"] == {"@id": "Snakefile"} and run["endTime"] == manifest["created"]
    assert {entry["@id"] for entry in run["result"]} >= {"results/small/manifest.json", "results/small/SHA256SUMS"}
    assert len(run["result"]) == len(manifest["outputs"]) + 2
    assert {entry["@id"] for entry in run["object"]} == {*manifest["inputs"], "configuration.json"}
    assert json.loads(Path("crate", "configuration.json").read_text()) == manifest["configuration"]
    assert (
        Path("crate", "kvstages", "cache", "quantizer.py").read_bytes()
        == (PACKAGE / "cache" / "quantizer.py").read_bytes()
    )
    assert "startTime" not in run and "agent" not in run
    listed = {path for path in found if not path.startswith(("#", "http", "./"))}
    held = {path.relative_to("crate").as_posix() for path in Path("crate").rglob("*") if path.is_file()}
    assert listed == held


def test_a_verified_study_can_be_taken_out_of_its_crate(study: Path) -> None:
    pack()
    result = CliRunner().invoke(main, ["verify", "crate/results/small"])
    assert result.exit_code == 0, result.output


def test_the_validator_finds_nothing_but_what_is_not_known(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither of what the profiles require nor of what they recommend."""
    pack()
    found = findings(Path("crate"), "RECOMMENDED", monkeypatch)
    assert [line for line in found if OF_THE_VALIDATOR not in line and not any(text in line for text in UNKNOWN)] == []


def test_the_validator_does_find_what_is_missing(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack()
    path = Path("crate", "ro-crate-metadata.json")
    record = json.loads(path.read_text())
    for entity in record["@graph"]:
        if entity["@id"] == "#run":
            del entity["instrument"]
    path.write_text(json.dumps(record))
    assert any("instrument" in line for line in findings(Path("crate"), "REQUIRED", monkeypatch))


def test_a_zip_holds_the_same(study: Path) -> None:
    assert pack("crate.zip").exit_code == 0
    pack()
    names = set(zipfile.ZipFile("crate.zip").namelist())
    assert names == {path.relative_to("crate").as_posix() for path in Path("crate").rglob("*") if path.is_file()}


def test_an_artifact_of_a_hub_is_named_with_its_address_and_revision(study: Path) -> None:
    from kvstages.provenance.crate import describe

    record = json.loads((study / "manifest.json").read_text())
    shard = record["inputs"]["resources/small/shard/held-out.bin"]
    shard.update(source="hub", location="owner/name", revision="a" * 40, path="shards/x.bin")
    crate = describe(record, study, PACKAGE.parent)
    entity = crate.dereference("resources/small/shard/held-out.bin")
    assert entity["url"].endswith(f"/owner/name/resolve/{'a' * 40}/shards/x.bin")


def refused(result: Result, message: str) -> None:
    assert result.exit_code == 1 and result.output.count("\n") == 1
    assert message in result.output


def test_a_study_that_is_not_what_was_recorded_is_not_packed(study: Path) -> None:
    flip(study / "policies" / "int8" / "steps.csv", 5, 0)
    refused(pack(), "results/small: 1 files are not what was recorded, such as results/small/po")
    assert not Path("crate").exists()


def test_a_study_of_other_code_is_not_packed(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvstages.provenance.crate.stage_digest", lambda stage: "0" * 16)
    refused(pack(), "results/small: the code here is not the one that ran (stage ")


def test_an_output_that_exists_is_kept(study: Path) -> None:
    Path("crate").mkdir()
    refused(pack(), "crate: exists; a crate is written to a new folder or file")
    assert not list(Path("crate").iterdir())


def test_a_package_without_its_repository_is_refused(study: Path, tmp_path: Path) -> None:
    from kvstages.provenance.crate import write_crate

    with pytest.raises(ValueError, match="no Snakefile there"):
        write_crate(study, Path("crate"), tmp_path)


def test_a_failure_leaves_nothing(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from rocrate.rocrate import ROCrate

    def full(self, path):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(ROCrate, "write", full)
    refused(pack(), "No space left on device")
    assert sorted(path.name for path in Path().iterdir()) == ["resources", "results"]
    shutil.rmtree("results")


def test_without_the_library_it_is_one_line(study: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "rocrate.rocrate", None)
    refused(pack(), "the package rocrate is missing: pip install 'kvstages[crate]'")
