"""The front page of the study: configuration, checks, rules by topic, and everything that `rule all` asks for.

Needs: config/config.yaml, and one file a study in config/studies (config/README.md explains every key).
Makes: results/{study}/... for each study listed under `studies`; any other study file's results by their path.
"""

import os
import re
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError
from snakemake.utils import min_version

from kvstages.analysis.entries import entries
from kvstages.files import ledger
from kvstages.policies import names
from kvstages.policies.budgets import NATS
from kvstages.provenance.code import stage_digest
from kvstages.provenance.environment import RUN, run_record
from kvstages.study.configuration import FILES, check_shared, check_study, load_study
from kvstages.study.layout import Studies, Study, options_of

min_version("9.0")


configfile: "config/config.yaml"


try:
    check_shared(config)
    FIGURES, TABLES = entries("kvstages.figures"), entries("kvstages.tables")
    STUDIES = Studies()
    for path in sorted(Path("config", "studies").glob("*.yaml")):
        settings = load_study(path)
        check_study(path.stem, settings)
        STUDIES[path.stem] = Study(path.stem, settings, config, FIGURES, TABLES)
    for study in config["studies"]:
        if study not in STUDIES:
            known = ", ".join(STUDIES)
            raise ValueError(f"config/config.yaml: studies: no file config/studies/{study}.yaml; there are: {known}")
except ValueError as error:
    raise WorkflowError(str(error)) from None


# What a torch job takes of the resource `gpu`; the device itself is a key of the configuration.
GPUS = 0 if config["device"] == "cpu" else 1

# This repository's own package answers `python -m kvstages`, wherever the working directory is.
os.environ.update(PYTHONPATH=os.pathsep.join([workflow.basedir, *filter(None, [os.environ.get("PYTHONPATH")])]))

# The manifest names the command and the code's revision, which a job sees neither of; a container takes variables by
# names of their own.
os.environ.setdefault(RUN, run_record(sys.argv))
os.environ.setdefault(f"APPTAINERENV_{RUN}", os.environ[RUN])


onstart:
    # From now on stages record what they write, and check what they read (kvstages/files/ledger.py).
    Path(ledger.FOLDER).mkdir(exist_ok=True)


report: "report/workflow.rst"


container: config["container"]


wildcard_constraints:
    study="|".join(re.escape(study) for study in STUDIES),
    artifact="|".join(FILES),
    filename="[^/]+",
    window="[a-z]+",
    layer=names.LAYER,
    dtype="float32|bfloat16|float64",
    budget=NATS,
    policy=names.POLICY,
    arm="[a-z][a-z0-9-]*",
    seed="[0-9]+",


include: "workflow/rules/inputs.smk"
include: "workflow/rules/scores.smk"
include: "workflow/rules/policies.smk"
include: "workflow/rules/measurement.smk"
include: "workflow/rules/comparison.smk"
include: "workflow/rules/adaptation.smk"
include: "workflow/rules/figures.smk"
include: "workflow/rules/tables.smk"
include: "workflow/rules/records.smk"


rule all:
    default_target: True
    input:
        [STUDIES[study].all_files for study in config["studies"]],
