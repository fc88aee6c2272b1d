"""The record of a study: inputs, outputs, code, configuration and environment, and the results' checksums.

Needs: every input and every other result of the study; its configuration, which the Snakefile keeps as a file.
Makes: results/{study}/manifest.json (with a time stamp) and results/{study}/SHA256SUMS (without);
benchmarks/{study}/time.html and .csv, which are no results.
"""


rule write_manifest:
    input:
        STUDIES.ask("input_files"),
        STUDIES.ask("output_files"),
        STUDIES.ask("published_files"),
        settings=".ledger/{study}.configuration",
    output:
        manifest="results/{study}/manifest.json",
        checksums="results/{study}/SHA256SUMS",
    log:
        "logs/write_manifest/{study}.log",
    benchmark:
        "benchmarks/write_manifest/{study}.tsv"
    params:
        pinned=STUDIES.ask("pinned_arguments"),
        made=STUDIES.ask("made_arguments", workflow.rules),
        code=stage_digest("manifest"),
        packages=stage_packages("manifest"),
    message:
        "{wildcards.study}: record inputs, outputs, code and environment"
    shell:
        "kvstages --code {params.code} manifest --study {wildcards.study} --settings {input.settings}"
        " --output {output.manifest} --checksums {output.checksums} {params.pinned:q} {params.made:q} 2> {log}"


rule tabulate_time:
    input:
        "results/{study}/manifest.json",
    output:
        html=report(
            "benchmarks/{study}/time.html",
            caption="../../report/time-table.rst",
            category="{study}",
            subcategory="Tables",
            labels={"table": "Time and memory of the jobs"},
        ),
        csv="benchmarks/{study}/time.csv",
    log:
        "logs/tabulate_time/{study}.log",
    benchmark:
        "benchmarks/tabulate_time/{study}.tsv"
    params:
        title=STUDIES.ask("title"),
        code=stage_digest("time"),
        packages=stage_packages("time"),
    message:
        "{wildcards.study}: tabulate where time went"
    shell:
        "kvstages --code {params.code} time benchmarks --study {wildcards.study} --title {params.title:q}"
        " --output {output.html} 2> {log}"
