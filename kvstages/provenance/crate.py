"""A study's results as a Workflow Run RO-Crate: a folder or ZIP that names inputs, code, run and outputs.

Profile: Workflow Run Crate 0.5 (https://w3id.org/ro/wfrun/workflow), on RO-Crate 1.1. In it: the results with manifest
and checksums, the pinned inputs, the converted weights, the workflow's code and the configuration used. What the
manifest does not know (who ran it, when it began) is left out, not invented.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstages import __version__
from kvstages.files.atomic import PARTIAL, atomic_path, json_text, remove_leftovers
from kvstages.provenance.code import PACKAGE, stage_digest
from kvstages.provenance.manifest import CHECKSUMS, MANIFEST, read_manifest
from kvstages.provenance.verify import verify
from kvstages.study.hub import DEFAULT_ENDPOINT

if TYPE_CHECKING:
    from rocrate.rocrate import ROCrate

WFRUN = "https://w3id.org/ro/wfrun"
PROFILES = {"process": "Process Run Crate", "workflow": "Workflow Run Crate"}
PROFILE_VERSION = "0.5"
AUTHORS = "kvstages authors"
WORKFLOW_TERMS = "https://bioschemas.org/profiles/ComputationalWorkflow/1.0-RELEASE"
LICENSE = "https://spdx.org/licenses/MIT"
FORMATS = {
    ".csv": "text/csv", ".md": "text/markdown", ".txt": "text/plain", ".toml": "application/toml", ".smk": "text/plain",
    ".html": "text/html", ".json": "application/json", ".png": "image/png", ".py": "text/x-python",
    ".rst": "text/x-rst", ".svg": "image/svg+xml", ".yaml": "application/yaml",
}  # fmt: skip
# What a repository holds beside the package that the workflow needs to run.
CODE = ("workflow", "report", "envs")


def write_crate(folder: Path, output: Path, repository: Path = PACKAGE.parent) -> None:
    """Write the crate of the results in ``folder`` to ``output``: a ZIP by that ending, else a new folder.

    ValueError if anything of the study is not what its manifest says, if the code is not the code that ran, if the
    package rocrate is missing, or if ``output`` exists.
    """
    folder, output = Path(folder), Path(output)
    if output.exists():
        raise ValueError(f"{output}: exists; a crate is written to a new folder or file")
    problems, _, _ = verify(folder)
    if problems:
        raise ValueError(f"{folder}: {len(problems)} files are not what was recorded, such as {problems[0]}")
    record = read_manifest(folder / MANIFEST)
    ran = {
        (made["stage"], made["code"]) for output in record["outputs"].values() if (made := output["made"]) is not None
    }
    ran |= set(record["code"]["stages"].items())
    changed = sorted(stage for stage, digest in ran if not is_code(stage, digest))
    if changed:
        raise ValueError(
            f"{folder}: the code here is not the one that ran (stage {changed[0]}); pack it with the revision "
            f"{record['code']['revision'] or 'that made it'}, or run the study again"
        )
    if not (repository / "Snakefile").is_file():
        raise ValueError(f"{repository}: no Snakefile there; pack it from a clone of the repository")
    crate = describe(record, folder, repository)
    if output.suffix == ".zip":
        with atomic_path(output) as temporary:
            crate.write_zip(temporary)
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(output)
    temporary = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}.", suffix=PARTIAL))
    try:
        crate.write(temporary)
        temporary.chmod(0o755)
        temporary.rename(output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def is_code(stage: str, digest: str) -> bool:
    """Whether the code of a stage (``figure frontier``) is the one with this digest."""
    try:
        return stage_digest(*stage.split()) == digest
    except ValueError:
        return False  # there is no such stage any more


def describe(record: Mapping[str, Any], folder: Path, repository: Path) -> ROCrate:
    """The crate of a study whose manifest is ``record``, not yet written."""
    try:
        from rocrate.rocrate import ROCrate
    except ImportError:
        raise ValueError("the package rocrate is missing: pip install 'kvstages[crate]'") from None
    crate = ROCrate(version="1.1")
    title = record["configuration"]["study"].get("title", record["study"])
    crate.name = f"kvstages: {title}"
    crate.description = (
        f"A run of the kvstages workflow on the study {record['study']}: how far each attention head's KV cache can be "
        "quantized, and what it does to the output."
    )
    crate.datePublished = record["created"]
    crate.root_dataset["author"] = add(crate, "#authors", "Organization", name=AUTHORS)
    crate.license = add(crate, LICENSE, "CreativeWork", name="MIT License", identifier=LICENSE)
    crate.root_dataset["conformsTo"] = [
        add(crate, f"{WFRUN}/{name}/{PROFILE_VERSION}", "CreativeWork", name=words, version=PROFILE_VERSION)
        for name, words in PROFILES.items()
    ] + [add(crate, "https://w3id.org/workflowhub/workflow-ro-crate/1.0", "CreativeWork", name="Workflow RO-Crate")]
    workflow = add_code(crate, record, repository)
    root = study_root(folder, record["folder"])
    inputs = [add_input(crate, workflow, root, path, entry) for path, entry in sorted(record["inputs"].items())]
    configuration = crate.add_file(
        StringIO(json_text(record["configuration"])), "configuration.json", properties=properties("configuration.json")
    )
    configuration["exampleOfWork"] = parameter(crate, workflow, "input", "configuration", "What was asked for.")
    configuration["description"] = "The configuration used, as the manifest holds it."
    inputs.append(configuration)
    results = add_outputs(crate, workflow, root, folder, record)
    action = crate.add_action(
        workflow,
        identifier="#run",
        object=inputs,
        result=results,
        properties={
            "name": f"Run of the study {record['study']}",
            "description": (
                f"{record['command']}, on {record['environment']['platform']} ({record['environment']['processor']}), "
                f"devices {', '.join(record['environment']['devices'])}"
            ),
            "endTime": record["created"],
            "actionStatus": "http://schema.org/CompletedActionStatus",
        },
    )
    crate.root_dataset["mentions"] = action
    return crate


def add(crate: ROCrate, iri: str, kind: str, **values: Any) -> Any:
    """Add an entity that is no file."""
    from rocrate.model.contextentity import ContextEntity

    return crate.add(ContextEntity(crate, iri, properties={"@type": kind, **values}))


def properties(path: str) -> dict[str, str]:
    """Type and format of a file, from its name."""
    suffix = Path(path).suffix
    return {"name": path, "encodingFormat": FORMATS.get(suffix, "application/octet-stream")}


def study_root(folder: Path, recorded: str) -> Path:
    """The working directory of a run, seen from its results' folder."""
    root = folder.absolute()
    for _ in Path(recorded).parts:
        root = root.parent
    return root


def parameter(crate: ROCrate, workflow: Any, side: str, name: str, description: str) -> Any:
    """An input or output of the workflow, which files are then examples of."""
    made = crate.add_formal_parameter(name, "File", identifier=f"#{side}-{name}", description=description)
    workflow.append_to(side, made)
    return made


def add_code(crate: ROCrate, record: Mapping[str, Any], repository: Path) -> Any:
    """The workflow (main entity) and the code that it runs."""
    revision = record["code"]["revision"]
    version = (
        __version__ if revision is None else f"{__version__}+{revision}{'-dirty' if record['code']['dirty'] else ''}"
    )
    versions = record["environment"]["packages"]
    workflow = crate.add_workflow(
        repository / "Snakefile", "Snakefile", main=True, lang="snakemake", lang_version=versions.get("snakemake"),
        properties={
            "name": "kvstages", "version": version, "license": {"@id": LICENSE}, "encodingFormat": "text/plain",
            "conformsTo": {"@id": WORKFLOW_TERMS},
        },
    )  # fmt: skip
    folders = (repository / name for name in (*CODE, PACKAGE.name))
    for path in [*(path for top in folders for path in files(top)), *files(repository, deep=False)]:
        name = path.relative_to(repository).as_posix()
        file = crate.add_file(path, name, properties=properties(name))
        if name == "README.md":
            file["about"] = crate.root_dataset
    return workflow


def files(folder: Path, deep: bool = True) -> Iterable[Path]:
    """Files of the code, sorted; of a repository's own folder (not ``deep``) licence, readme and project file."""
    if not deep:
        return [folder / name for name in ("LICENSE", "README.md", "pyproject.toml") if (folder / name).is_file()]
    hidden = ("__pycache__", ".egg-info")
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and not any(part.startswith(".") or part.endswith(hidden) for part in path.parts[len(folder.parts) :])
    )


def add_input(crate: ROCrate, workflow: Any, root: Path, path: str, entry: Mapping[str, Any]) -> Any:
    """A pinned artifact, with where it came from."""
    file = crate.add_file(root / path, path, properties={**properties(path), "sha256": entry["sha256"]})
    file["contentSize"] = str(os.path.getsize(root / path))
    if entry["source"] == "hub":
        file["url"] = f"{DEFAULT_ENDPOINT}/{entry['location']}/resolve/{entry['revision']}/{entry['path']}"
        file["description"] = f"{entry['path']} of {entry['location']} at revision {entry['revision']}"
    else:
        file["description"] = f"{entry['path']} of a {entry['source']} folder"
    file["exampleOfWork"] = parameter(crate, workflow, "input", entry["artifact"], f"The study's {entry['artifact']}.")
    return file


def add_outputs(crate: ROCrate, workflow: Any, root: Path, folder: Path, record: Mapping[str, Any]) -> list[Any]:
    """Every file that was made, an example of the output that its rule stands for; manifest and checksums."""
    outputs, added = {}, []
    within = Path(record["folder"])
    entries = [(path, entry["rule"], entry["sha256"]) for path, entry in sorted(record["outputs"].items())]
    entries += [
        ((within / MANIFEST).as_posix(), "write_manifest", None),
        ((within / CHECKSUMS).as_posix(), "write_manifest", record["checksums"]),
    ]
    for path, rule, digest in entries:
        if rule not in outputs:
            outputs[rule] = parameter(crate, workflow, "output", rule, f"What the rule {rule} makes.")
        source = folder / Path(path).relative_to(within) if Path(path).is_relative_to(within) else root / path
        file = crate.add_file(source, path, properties=properties(path) | ({"sha256": digest} if digest else {}))
        file["contentSize"] = str(os.path.getsize(source))
        file["exampleOfWork"] = outputs[rule]
        added.append(file)
    return added
