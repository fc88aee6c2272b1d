"""How much each single head matters: one sweep a layer, gathered into one table; or all heads at once, from gradients,
and a sample of heads measured to check these.

Needs: the study's model, results/{study}/windows.safetensors.
Makes: results/{study}/sweep/{dtype}/layer-{layer}.csv, results/{study}/scores/measured-{dtype}.csv and gradients.csv,
results/{study}/sample/layer-{layer}.csv, results/{study}/scores/sample.csv,
results/{study}/gradients/projections.safetensors; for schemes that need it results/{study}/calibration.safetensors.
"""


rule calibrate_model:
    input:
        model=STUDIES.ask("model"),
        windows="results/{study}/windows.safetensors",
    output:
        "results/{study}/calibration.safetensors",
    log:
        "logs/calibrate_model/{study}.log",
    benchmark:
        "benchmarks/calibrate_model/{study}.tsv"
    threads: config["threads"]
    resources:
        gpu=GPUS,
    params:
        device=STUDIES.ask("device_arguments"),
        memory=config["memory_mb"],
        code=code("calibrate"),
        packages=packages("calibrate"),
    message:
        "{wildcards.study}: what quantizer schemes need to know of keys and values"
    shell:
        "kvstages --code {params.code} calibrate --model {input.model} --windows {input.windows} {params.device}"
        " --memory-mb {params.memory} --output {output} 2> {log}"


for job in STUDIES.jobs("sweep_layers", "layer_runs", "layer"):

    rule:
        name:
            job.name
        input:
            model=STUDIES.ask("model"),
            windows="results/{study}/windows.safetensors",
            calibration=STUDIES.ask("calibration_files"),
        output:
            update([f"results/{{study}}/sweep/{{dtype}}/layer-{layer}.csv" for (layer,) in job.runs]),
        log:
            f"logs/sweep_layers/{{study}}/{{dtype}}{job.place}.log",
        benchmark:
            f"benchmarks/sweep_layers/{{study}}/{{dtype}}{job.place}.tsv"
        wildcard_constraints:
            study=job.studies,
        threads: config["threads"]
        resources:
            gpu=GPUS,
        params:
            stages=several(STUDIES.ask("sweep_commands", job.runs, wildcards="dtype")),
            packages=packages("sweep"),
        message:
            "{wildcards.study}: quantize one head of each layer at a time, in {wildcards.dtype}"
        shell:
            "kvstages several {params.stages:q} 2> {log}"


rule gather_sensitivity:
    input:
        STUDIES.ask("sweep_files", wildcards="dtype"),
    output:
        "results/{study}/scores/measured-{dtype}.csv",
    log:
        "logs/gather_sensitivity/{study}/{dtype}.log",
    benchmark:
        "benchmarks/gather_sensitivity/{study}/{dtype}.tsv"
    params:
        code=stage_digest("gather"),
        packages=stage_packages("gather"),
    message:
        "{wildcards.study}: gather the sensitivities"
    shell:
        "kvstages --code {params.code} gather {input} --source measured-{wildcards.dtype} --output {output} 2> {log}"


for job in STUDIES.jobs("sweep_sample", "sample_runs", "layer"):

    rule:
        name:
            job.name
        input:
            model=STUDIES.ask("model"),
            windows="results/{study}/windows.safetensors",
            calibration=STUDIES.ask("calibration_files"),
        output:
            update([f"results/{{study}}/sample/layer-{layer}.csv" for (layer,) in job.runs]),
        log:
            f"logs/sweep_sample/{{study}}{job.place}.log",
        benchmark:
            f"benchmarks/sweep_sample/{{study}}{job.place}.tsv"
        wildcard_constraints:
            study=job.studies,
        threads: config["threads"]
        resources:
            gpu=GPUS,
        params:
            stages=several(STUDIES.ask("sample_commands", job.runs)),
            packages=packages("sweep"),
        message:
            "{wildcards.study}: quantize one head of the sample at a time"
        shell:
            "kvstages several {params.stages:q} 2> {log}"


rule gather_sample:
    input:
        STUDIES.ask("sample_files"),
    output:
        "results/{study}/scores/sample.csv",
    log:
        "logs/gather_sample/{study}.log",
    benchmark:
        "benchmarks/gather_sample/{study}.tsv"
    params:
        source=STUDIES.ask("sample_source"),
        code=stage_digest("gather"),
        packages=stage_packages("gather"),
    message:
        "{wildcards.study}: gather the scores of the sample"
    shell:
        "kvstages --code {params.code} gather {input} --sample --source {params.source} --output {output} 2> {log}"


rule gradients_sensitivity:
    input:
        model=STUDIES.ask("model"),
        windows="results/{study}/windows.safetensors",
        calibration=STUDIES.ask("calibration_files"),
    output:
        table="results/{study}/scores/gradients.csv",
        projections="results/{study}/gradients/projections.safetensors",
    log:
        "logs/gradients_sensitivity/{study}.log",
    benchmark:
        "benchmarks/gradients_sensitivity/{study}.tsv"
    threads: config["threads"]
    resources:
        gpu=GPUS,
    params:
        scores=STUDIES.ask("gradient_arguments"),
        device=STUDIES.ask("device_arguments"),
        memory=config["memory_mb"],
        code=code("gradients"),
        packages=packages("gradients"),
    message:
        "{wildcards.study}: estimate all sensitivities from gradients"
    shell:
        "kvstages --code {params.code} gradients --model {input.model} --windows {input.windows} {params.scores}"
        " {params.device} --memory-mb {params.memory} --output-table {output.table}"
        " --projections {output.projections} 2> {log}"
