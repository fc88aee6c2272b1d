"""The front page of the study: configuration, checks, rules by topic, and everything that `rule all` asks for.

Needs: config/config.yaml, and one file a study in config/studies (config/README.md explains every key).
Makes: results/{study}/... for each study listed under `studies`; any other study file's results by their path.
"""

import os
import re
import shlex
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.logging import logger
from snakemake.utils import min_version

if not workflow.modifier.is_main_snakefile():
    raise WorkflowError(
        "kvstages is not used as a module, for a module cannot check what it signs: run it by itself, with "
        "snakemake --snakefile PATH/Snakefile --directory FOLDER"
    )
# This repository's own package, whatever the working directory holds, and whatever is installed.
REPOSITORY = os.path.abspath(workflow.current_basedir)
sys.path.insert(0, REPOSITORY)

import kvstages

if not os.path.samefile(os.path.dirname(kvstages.__file__), os.path.join(REPOSITORY, "kvstages")):
    raise WorkflowError(f"another kvstages than that of {REPOSITORY} is imported: {kvstages.__file__}")

from kvstages.analysis.entries import entries
from kvstages.cli import main
from kvstages.commands.planning import check_start, current_files, make_again, of_decoder, plan, several
from kvstages.files import ledger
from kvstages.policies import names
from kvstages.provenance.code import stage_digest, stage_packages
from kvstages.provenance.environment import RUN, run_record
from kvstages.study.configuration import check_shared, load_studies
from kvstages.study.arguments import once, options_of
from kvstages.study.layout import ADAPTED_FILES, Studies, Study
from kvstages.study.paths import ALLOCATION_FILES, EVALUATION_FILES, EXPORT_FILES
from kvstages.study.pinned import ARTIFACTS

min_version("9.0")


configfile: "config/config.yaml"


try:
    check_shared(config)
    FIGURES, TABLES = entries("kvstages.figures"), entries("kvstages.tables")
    found, unusable = load_studies(Path("config", "studies"), config["studies"])
    STUDIES = Studies({study: Study(study, settings, config, FIGURES, TABLES) for study, settings in found.items()})
except ValueError as error:
    raise WorkflowError(str(error)) from None
for line in unusable if workflow.is_main_process else []:
    logger.warning(f"{line}: nothing can be asked for of this study")

# Digest and packages of a stage that opens a study's decoder.
code, packages = of_decoder(STUDIES, stage_digest), of_decoder(STUDIES, stage_packages)

# What a torch job takes of the resource `gpu`; the device itself is a key of the configuration.
GPUS = 0 if config["device"] == "cpu" else 1

# `kvstages` in a rule's command is this repository's package, in containers and on clusters too. -P keeps the working
# directory out of where modules are looked for; an empty part of PYTHONPATH would bring it in.
OTHERS = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
PATHS = os.pathsep.join(dict.fromkeys([REPOSITORY, *OTHERS]))
shell.prefix(
    "set -euo pipefail; "
    f"export PYTHONPATH={shlex.quote(PATHS)}; ".replace("{", "{{").replace("}", "}}")
    + 'kvstages() {{ python -P -m kvstages "$@"; }}; '
)
# Snakemake's own processes on a cluster start as `python -m snakemake`.
os.environ.update(PYTHONSAFEPATH="1")

# The manifest names the command and the code's revision, which a job sees neither of; a container takes variables by
# names of their own.
os.environ.setdefault(RUN, run_record(sys.argv))
os.environ.setdefault(f"APPTAINERENV_{RUN}", os.environ[RUN])


# A report shows what is there and current; --report-after-run reports on what this very command makes.
REPORT = any(word.split("=")[0] == "--report" for word in sys.argv) and "--report-after-run" not in sys.argv
SETTINGS = {study: STUDIES[study].configuration for study in STUDIES}
SHOWN = {study: STUDIES[study].report_files for study in STUDIES}
if REPORT:
    SHOWN = {study: current_files(files, study, SETTINGS[study]) for study, files in SHOWN.items()}
# Whether a rule marks a file for the report: one job makes figures that are current and others that are not.
shows = {path for files in SHOWN.values() for path in files}.__contains__
if not REPORT:
    for study, settings in SETTINGS.items():
        ledger.write_settings(study, settings)


onstart:
    make_again(workflow.dag_settings)
    # Stages record what they write, and check what they read by this plan (kvstages/files/ledger.py).
    made = plan(main, [(job.output, job.shellcmd) for job in workflow.dag.jobs if job.shellcmd])
    ledger.write_plan(made, SETTINGS)
    # --touch makes nothing: it keeps every file.
    kept = [job for job in workflow.dag.jobs if workflow.touch or not workflow.dag.needrun(job)]
    try:
        check_start([path for job in kept for path in job.output], made)
    except ValueError as error:
        raise WorkflowError(str(error)) from None


report: "report/workflow.rst"


container: config["container"]


wildcard_constraints:
    study="|".join(re.escape(study) for study in STUDIES),
    artifact="|".join(ARTIFACTS),
    # A model's record is made, and not fetched.
    filename=r"(?!decoder\.json$)[^/]+",
    reference=rf"(?:(?:{names.DTYPE}|exact-cache)/)?[a-z]+",
    uniform=rf"(?:{names.UNIFORM})(?:/(?:{names.DTYPE}))?",
    set=rf"comparison/{names.BUDGET}|frontier",
    measured=rf"(?:comparison/{names.BUDGET}|frontier)(?:/(?:{names.DTYPE}))?|gradients|screening|export",
    layer=names.LAYER,
    dtype=names.DTYPE,
    budget=names.BUDGET,
    policy=names.POLICY,
    arm="[a-z][a-z0-9-]*",
    seed="[0-9]+",
    domain="[a-z0-9][a-z0-9-]*",
    length="[0-9]+",


include: "workflow/rules/inputs.smk"
include: "workflow/rules/scores.smk"
include: "workflow/rules/policies.smk"
include: "workflow/rules/measurement.smk"
include: "workflow/rules/comparison.smk"
include: "workflow/rules/screening.smk"
include: "workflow/rules/domains.smk"
include: "workflow/rules/export.smk"
include: "workflow/rules/adaptation.smk"
include: "workflow/rules/figures.smk"
include: "workflow/rules/tables.smk"
include: "workflow/rules/records.smk"


rule all:
    default_target: True
    input:
        [SHOWN[study] if REPORT else STUDIES[study].all_files for study in config["studies"]],
