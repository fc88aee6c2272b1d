"""Training with cache noise, and without as control; each adapted model against the original's reference.

Needs: resources/{study}/model.safetensors, results/{study}/windows.safetensors, results/{study}/reference/{window}.safetensors,
results/{study}/policies/{policy}/policy.json.
Makes: results/{study}/adaptation/{arm}/seed-{seed}/model.safetensors and curve.csv, and beside them
{policy}/evaluation.json and positions.csv.
"""


rule adapt_model:
    input:
        model="resources/{study}/model.safetensors",
        windows="results/{study}/windows.safetensors",
    output:
        model="results/{study}/adaptation/{arm}/seed-{seed}/model.safetensors",
        curve="results/{study}/adaptation/{arm}/seed-{seed}/curve.csv",
    log:
        "logs/adapt_model/{study}/{arm}/seed-{seed}.log",
    threads: config["threads"]
    resources:
        gpu=GPUS,
    params:
        training=STUDIES.ask("training_arguments", wildcards="arm seed"),
        code=stage_digest("adapt"),
        packages=stage_packages("adapt"),
    message:
        "{wildcards.study}: adapt with seed {wildcards.seed}, arm {wildcards.arm}"
    shell:
        "kvstages --code {params.code} adapt --model {input.model} --windows {input.windows}"
        " {params.training} --output {output.model} --curve {output.curve} 2> {log}"


rule evaluate_adapted:
    input:
        model="results/{study}/adaptation/{arm}/seed-{seed}/model.safetensors",
        windows="results/{study}/windows.safetensors",
        policy="results/{study}/policies/{policy}/policy.json",
        reference="results/{study}/reference/validation.safetensors",
    output:
        evaluation="results/{study}/adaptation/{arm}/seed-{seed}/{policy}/evaluation.json",
        positions="results/{study}/adaptation/{arm}/seed-{seed}/{policy}/positions.csv",
    log:
        "logs/evaluate_adapted/{study}/{arm}/seed-{seed}/{policy}.log",
    threads: config["threads"]
    resources:
        gpu=GPUS,
    params:
        execution=STUDIES.ask("execution_arguments"),
        code=stage_digest("evaluate"),
        packages=stage_packages("evaluate"),
    message:
        "{wildcards.study}: evaluate {wildcards.policy} on the model adapted with seed {wildcards.seed}, arm {wildcards.arm}"
    shell:
        "kvstages --code {params.code} evaluate --model {input.model} --windows {input.windows} --window validation"
        " --policy {input.policy} --reference {input.reference} {params.execution}"
        " --output {output.evaluation} --positions {output.positions} 2> {log}"
