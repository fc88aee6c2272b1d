"""What a policy does to the whole model: reference logits, then every policy measured jointly against them.

Needs: resources/{study}/model.safetensors, results/{study}/windows.safetensors, results/{study}/policies/{policy}/policy.json.
Makes: results/{study}/reference/{window}.safetensors, results/{study}/policies/{policy}/evaluation.json and positions.csv;
with keys and values stored exactly, in FP32, results/{study}/reference/exact-cache/{window}.safetensors;
in another arithmetic than the study's results/{study}/reference/{dtype}/{window}.safetensors and
results/{study}/policies/{policy}/{dtype}/evaluation.json and positions.csv;
for studies with the key `generation` results/{study}/generation/continuations.csv.
"""


rule compute_reference:
    input:
        model=STUDIES.ask("model"),
        windows="results/{study}/windows.safetensors",
    output:
        "results/{study}/reference/{window}.safetensors",
    log:
        "logs/compute_reference/{study}/{window}.log",
    benchmark:
        "benchmarks/compute_reference/{study}/{window}.tsv"
    threads: config["threads"]
    resources:
        gpu=GPUS,
    params:
        execution=STUDIES.ask("execution_arguments"),
        code=code("reference"),
        packages=packages("reference"),
    message:
        "{wildcards.study}: reference logits of the {wildcards.window} window"
    shell:
        "kvstages --code {params.code} reference --model {input.model} --windows {input.windows} --window {wildcards.window}"
        " {params.execution} --output {output} 2> {log}"


rule evaluate_policy:
    input:
        model=STUDIES.ask("model"),
        windows="results/{study}/windows.safetensors",
        policy="results/{study}/policies/{policy}/policy.json",
        reference="results/{study}/reference/validation.safetensors",
        calibration=STUDIES.ask("calibration_files"),
    output:
        evaluation="results/{study}/policies/{policy}/evaluation.json",
        positions="results/{study}/policies/{policy}/positions.csv",
    log:
        "logs/evaluate_policy/{study}/{policy}.log",
    benchmark:
        "benchmarks/evaluate_policy/{study}/{policy}.tsv"
    threads: config["threads"]
    resources:
        gpu=GPUS,
    params:
        execution=STUDIES.ask("measuring_arguments"),
        code=code("evaluate"),
        packages=packages("evaluate"),
    message:
        "{wildcards.study}: evaluate {wildcards.policy} on the validation window"
    shell:
        "kvstages --code {params.code} evaluate --model {input.model} --windows {input.windows} --window validation"
        " --policy {input.policy} --reference {input.reference} {params.execution}"
        " --output {output.evaluation} --positions {output.positions} 2> {log}"


use rule compute_reference as compute_reference_in with:
    output:
        "results/{study}/reference/{dtype}/{window}.safetensors",
    log:
        "logs/compute_reference_in/{study}/{dtype}/{window}.log",
    benchmark:
        "benchmarks/compute_reference_in/{study}/{dtype}/{window}.tsv"
    params:
        execution=STUDIES.ask("execution_arguments", wildcards="dtype"),
        code=code("reference"),
        packages=packages("reference"),
    message:
        "{wildcards.study}: reference logits of the {wildcards.window} window in {wildcards.dtype}"


use rule compute_reference as compute_exact_reference with:
    output:
        "results/{study}/reference/exact-cache/{window}.safetensors",
    log:
        "logs/compute_exact_reference/{study}/{window}.log",
    benchmark:
        "benchmarks/compute_exact_reference/{study}/{window}.tsv"
    params:
        execution=STUDIES.ask("exact_cache_arguments"),
        code=code("reference"),
        packages=packages("reference"),
    message:
        "{wildcards.study}: logits of the {wildcards.window} window in FP32 with keys and values stored exactly"


use rule evaluate_policy as evaluate_policy_in with:
    input:
        model=STUDIES.ask("model"),
        windows="results/{study}/windows.safetensors",
        policy="results/{study}/policies/{policy}/policy.json",
        reference="results/{study}/reference/{dtype}/validation.safetensors",
        calibration=STUDIES.ask("calibration_files"),
    output:
        evaluation="results/{study}/policies/{policy}/{dtype}/evaluation.json",
        positions="results/{study}/policies/{policy}/{dtype}/positions.csv",
    log:
        "logs/evaluate_policy_in/{study}/{policy}/{dtype}.log",
    benchmark:
        "benchmarks/evaluate_policy_in/{study}/{policy}/{dtype}.tsv"
    params:
        execution=STUDIES.ask("measuring_arguments", wildcards="dtype"),
        code=code("evaluate"),
        packages=packages("evaluate"),
    message:
        "{wildcards.study}: evaluate {wildcards.policy} on the validation window in {wildcards.dtype}"


rule generate_text:
    input:
        model=STUDIES.ask("model"),
        windows="results/{study}/windows.safetensors",
        policies=STUDIES.ask("generating_policy_files"),
        calibration=STUDIES.ask("calibration_files"),
    output:
        "results/{study}/generation/continuations.csv",
    log:
        "logs/generate_text/{study}.log",
    benchmark:
        "benchmarks/generate_text/{study}.tsv"
    threads: config["threads"]
    resources:
        gpu=GPUS,
    params:
        arguments=STUDIES.ask("generation_arguments"),
        code=code("generate"),
        packages=packages("generate"),
    message:
        "{wildcards.study}: continue held-out prompts under every policy"
    shell:
        "kvstages --code {params.code} generate --model {input.model} --windows {input.windows} --window validation"
        " {params.arguments} --output {output} 2> {log}"
