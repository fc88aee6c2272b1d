"""How much each single head matters: one sweep a layer, gathered into one table; or all heads at once, from gradients.

Needs: resources/{study}/model.safetensors, results/{study}/windows.safetensors.
Makes: results/{study}/sweep/{dtype}/layer-{layer}.csv, results/{study}/scores/measured-{dtype}.csv and gradients.csv,
results/{study}/gradients/projections.safetensors.
"""


rule sweep_layer:
    input:
        model="resources/{study}/model.safetensors",
        windows="results/{study}/windows.safetensors",
    output:
        "results/{study}/sweep/{dtype}/layer-{layer}.csv",
    log:
        "logs/sweep_layer/{study}/{dtype}/layer-{layer}.log",
    threads: config["threads"]
    resources:
        gpu=GPUS,
    params:
        layer=lambda wildcards: int(wildcards.layer),
        interventions=STUDIES.ask("intervention_arguments", wildcards="dtype"),
        execution=STUDIES.ask("execution_arguments", wildcards="dtype"),
        code=stage_digest("sweep"),
        packages=stage_packages("sweep"),
    message:
        "{wildcards.study}: quantize one head of layer {wildcards.layer} at a time, in {wildcards.dtype}"
    shell:
        "kvstages --code {params.code} sweep --model {input.model} --windows {input.windows} --layer {params.layer}"
        " {params.interventions} {params.execution} --output {output} 2> {log}"


rule gather_sensitivity:
    input:
        STUDIES.ask("sweep_files", wildcards="dtype"),
    output:
        "results/{study}/scores/measured-{dtype}.csv",
    log:
        "logs/gather_sensitivity/{study}/{dtype}.log",
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
