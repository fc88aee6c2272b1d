"""How much each single head matters: one sweep a layer, gathered into one table; or all heads at once, from gradients.

Needs: resources/{study}/model.safetensors, results/{study}/windows.safetensors.
Makes: results/{study}/sweep/{dtype}/layer-{layer}.csv, results/{study}/scores/measured-{dtype}.csv and gradients.csv,
results/{study}/gradients/projections.safetensors.
"""

for job in STUDIES.jobs("sweep_layers", "layer_runs", "layer"):

    rule:
        name:
            job.name
        input:
            model="resources/{study}/model.safetensors",
            windows="results/{study}/windows.safetensors",
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
            packages=stage_packages("sweep"),
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


rule gradients_sensitivity:
    input:
        model="resources/{study}/model.safetensors",
        windows="results/{study}/windows.safetensors",
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
        probes=STUDIES.ask("probes"),
        device=STUDIES.ask("device_arguments"),
        memory=config["memory_mb"],
        code=stage_digest("gradients"),
        packages=stage_packages("gradients"),
    message:
        "{wildcards.study}: estimate all sensitivities from gradients"
    shell:
        "kvstages --code {params.code} gradients --model {input.model} --windows {input.windows} --probes {params.probes}"
        " {params.device} --memory-mb {params.memory} --output-table {output.table}"
        " --projections {output.projections} 2> {log}"
