"""Quantizer schemes beside each other: scores of all from one set of gradients, the best at each budget, all measured.

Needs: the model, results/{study}/windows.safetensors, results/{study}/calibration.safetensors.
Makes: results/{study}/screening/gradients.csv and projections.safetensors, scores.csv and checks.csv (those beyond second
order measured), policies.json; measurement.smk measures these.
"""


rule score_schemes:
    input:
        model=STUDIES.ask("model"),
        windows="results/{study}/windows.safetensors",
        calibration="results/{study}/calibration.safetensors",
    output:
        table="results/{study}/screening/gradients.csv",
        projections="results/{study}/screening/projections.safetensors",
    log:
        "logs/score_schemes/{study}.log",
    benchmark:
        "benchmarks/score_schemes/{study}.tsv"
    wildcard_constraints:
        study=STUDIES.pattern("screens_alone"),
    threads: config["threads"]
    resources:
        gpu=GPUS,
    params:
        probes=STUDIES.ask("probes"),
        precisions=STUDIES.ask("screened_precision_arguments"),
        device=STUDIES.ask("device_arguments"),
        memory=config["memory_mb"],
        code=code("gradients"),
        packages=packages("gradients"),
    message:
        "{wildcards.study}: score every quantizer scheme from one set of gradients"
    shell:
        "kvstages --code {params.code} gradients --model {input.model} --windows {input.windows}"
        " --calibration {input.calibration} --probes {params.probes} {params.precisions} {params.device}"
        " --memory-mb {params.memory} --output-table {output.table} --projections {output.projections} 2> {log}"


rule score_schemes_and_engines:
    input:
        model=STUDIES.ask("model"),
        windows="results/{study}/windows.safetensors",
        calibration="results/{study}/calibration.safetensors",
    output:
        table="results/{study}/screening/gradients.csv",
        projections="results/{study}/screening/projections.safetensors",
    log:
        "logs/score_schemes_and_engines/{study}.log",
    benchmark:
        "benchmarks/score_schemes_and_engines/{study}.tsv"
    wildcard_constraints:
        study=STUDIES.pattern("screens_for_engines"),
    threads: config["threads"]
    resources:
        gpu=GPUS,
    params:
        probes=STUDIES.ask("probes"),
        precisions=STUDIES.ask("screened_precision_arguments"),
        engines=STUDIES.ask("engine_arguments"),
        device=STUDIES.ask("device_arguments"),
        memory=config["memory_mb"],
        code=code("score-engines"),
        packages=packages("score-engines"),
    message:
        "{wildcards.study}: score every quantizer scheme, and the formats of engines, from one set of gradients"
    shell:
        "kvstages --code {params.code} score-engines --model {input.model} --windows {input.windows} {params.engines}"
        " --calibration {input.calibration} --probes {params.probes} {params.precisions} {params.device}"
        " --memory-mb {params.memory} --output-table {output.table} --projections {output.projections} 2> {log}"


rule check_scheme_scores:
    input:
        model=STUDIES.ask("model"),
        windows="results/{study}/windows.safetensors",
        calibration="results/{study}/calibration.safetensors",
        sensitivity="results/{study}/screening/gradients.csv",
    output:
        scores="results/{study}/screening/scores.csv",
        checks="results/{study}/screening/checks.csv",
    log:
        "logs/check_scheme_scores/{study}.log",
    benchmark:
        "benchmarks/check_scheme_scores/{study}.tsv"
    threads: config["threads"]
    resources:
        gpu=GPUS,
    params:
        checked=STUDIES.ask("checked_precision_arguments"),
        execution=STUDIES.ask("execution_arguments"),
        code=code("check-scores"),
        packages=packages("check-scores"),
    message:
        "{wildcards.study}: measure a sample of the scores, and those beyond second order"
    shell:
        "kvstages --code {params.code} check-scores --sensitivity {input.sensitivity} --model {input.model}"
        " --windows {input.windows} --calibration {input.calibration} {params.checked} {params.execution}"
        " --output {output.scores} --checks {output.checks} 2> {log}"


rule screen_schemes:
    input:
        sensitivity="results/{study}/screening/scores.csv",
        model=STUDIES.ask("model"),
    output:
        "results/{study}/screening/policies.json",
    log:
        "logs/screen_schemes/{study}.log",
    benchmark:
        "benchmarks/screen_schemes/{study}.tsv"
    params:
        screen=STUDIES.ask("screen_arguments"),
        tokens=STUDIES.ask("block"),
        code=stage_digest("screen"),
        packages=stage_packages("screen"),
    message:
        "{wildcards.study}: choose the best scheme at each budget"
    shell:
        "kvstages --code {params.code} screen --sensitivity {input.sensitivity} --model {input.model}"
        " --tokens {params.tokens} {params.screen} --output {output} 2> {log}"
