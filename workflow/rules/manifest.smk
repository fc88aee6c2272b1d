"""The record of a study: inputs, outputs, code, configuration and environment, and the results' checksums.

Needs: every input and every other result of the study.
Makes: results/{study}/manifest.json (with a time stamp) and results/{study}/SHA256SUMS (without).
"""


rule write_manifest:
    input:
        lambda wildcards: study_inputs(wildcards.study) + study_outputs(wildcards.study),
    output:
        manifest="results/{study}/manifest.json",
        checksums="results/{study}/SHA256SUMS",
    log:
        "logs/write_manifest/{study}.log",
    params:
        settings=manifest_settings,
        pinned=pinned_arguments,
        made=made_arguments,
        code=code("manifest"),
        packages=packages("manifest"),
    message:
        "{wildcards.study}: record inputs, outputs, code and environment"
    shell:
        "kvstages --code {params.code} manifest --study {wildcards.study} --settings {params.settings:q}"
        " --output {output.manifest} --checksums {output.checksums} {params.pinned:q} {params.made:q} 2> {log}"
