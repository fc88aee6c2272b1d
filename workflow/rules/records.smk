"""The record of a study: inputs, outputs, code, configuration and environment, and the results' checksums.

Needs: every input and every other result of the study.
Makes: results/{study}/manifest.json (with a time stamp) and results/{study}/SHA256SUMS (without).
"""


rule write_manifest:
    input:
        STUDIES.ask("input_files"),
        STUDIES.ask("output_files"),
    output:
        manifest="results/{study}/manifest.json",
        checksums="results/{study}/SHA256SUMS",
    log:
        "logs/write_manifest/{study}.log",
    params:
        settings=STUDIES.ask("manifest_settings"),
        pinned=STUDIES.ask("pinned_arguments"),
        made=STUDIES.ask("made_arguments", workflow.rules),
        code=stage_digest("manifest"),
    message:
        "{wildcards.study}: record inputs, outputs, code and environment"
    shell:
        "python -m kvstages manifest --study {wildcards.study} --settings {params.settings:q}"
        " --output {output.manifest} --checksums {output.checksums} {params.pinned:q} {params.made:q} 2> {log}"
