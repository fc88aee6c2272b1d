"""How much each single head matters: one sweep a layer, gathered into one table.

Needs: resources/{study}/model.safetensors, results/{study}/windows.safetensors.
Makes: results/{study}/sweep/layer-{layer}.csv, results/{study}/sensitivity.csv.
"""


rule sweep_layer:
    input:
        model="resources/{study}/model.safetensors",
        windows="results/{study}/windows.safetensors",
    output:
        "results/{study}/sweep/layer-{layer}.csv",
    log:
        "logs/sweep_layer/{study}/layer-{layer}.log",
    threads: config["threads"]
    resources:
        gpu=GPUS,
    params:
        layer=lambda wildcards: int(wildcards.layer),
        precisions=precision_arguments,
        execution=execution_arguments,
        code=code("sweep"),
    message:
        "{wildcards.study}: quantize one head of layer {wildcards.layer} at a time"
    shell:
        "python -m kvstages sweep --model {input.model} --windows {input.windows} --layer {params.layer}"
        " {params.precisions} {params.execution} --output {output} 2> {log}"


rule gather_sensitivity:
    input:
        lambda wildcards: [f"results/{wildcards.study}/sweep/layer-{layer}.csv" for layer in layers(wildcards.study)],
    output:
        "results/{study}/sensitivity.csv",
    log:
        "logs/gather_sensitivity/{study}.log",
    params:
        code=code("sensitivity"),
    message:
        "{wildcards.study}: gather the sensitivities"
    shell:
        "python -m kvstages sensitivity {input} --output {output} 2> {log}"
