"""What a policy does to the whole model: reference logits, then every policy measured jointly against them.

An allocated policy is measured in a job of its own, so that a budget can be tried again alone. The uniform ones, and the
sets of policies of comparison, screening and export, are measured by one job each kind; of a Hugging Face model each set
by a job of its own, for these take minutes. The longest jobs have priority, so that no core waits for one at the end.

Needs: resources/{study}/model.safetensors, results/{study}/windows.safetensors, results/{study}/policies/{policy}/policy.json,
results/{study}/comparison/{budget}/policy-set.json and refined.json, and the sets of frontier, screening and export.
Makes: results/{study}/reference/{window}.safetensors, results/{study}/policies/{policy}/evaluation.json and positions.csv;
with keys and values stored exactly, in FP32, results/{study}/reference/exact-cache/{window}.safetensors;
in another arithmetic than the study's results/{study}/reference/{dtype}/{window}.safetensors and
results/{study}/policies/{policy}/{dtype}/evaluation.json and positions.csv; the joint.csv of each set of policies, in
another arithmetic in a folder {dtype} beside it; results/{study}/gradients/joint.csv on the calibration window;
for studies with the key `generation` results/{study}/generation/continuations.csv.
"""

for job in STUDIES.jobs("compute_references", "reference_runs", "reference"):

    rule:
        name:
            job.name
        input:
            model=STUDIES.ask("model"),
            windows="results/{study}/windows.safetensors",
        output:
            update([f"results/{{study}}/reference/{name}.safetensors" for (name,) in job.runs]),
        log:
            f"logs/compute_references/{{study}}{job.place}.log",
        benchmark:
            f"benchmarks/compute_references/{{study}}{job.place}.tsv"
        wildcard_constraints:
            study=job.studies,
        threads: config["threads"]
        resources:
            gpu=GPUS,
        params:
            stages=several(STUDIES.ask("reference_commands", job.runs)),
            packages=packages("reference"),
        message:
            "{wildcards.study}: reference logits"
        shell:
            "kvstages several {params.stages:q} 2> {log}"


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
    wildcard_constraints:
        policy=names.ALLOCATED,
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


for job in STUDIES.jobs("evaluate_uniform", "uniform_runs", "uniform"):

    rule:
        name:
            job.name
        input:
            STUDIES.ask("uniform_inputs", job.runs),
        output:
            update([f"results/{{study}}/policies/{name}/{file}" for (name,) in job.runs for file in EVALUATION_FILES]),
        log:
            f"logs/evaluate_uniform/{{study}}{job.place}.log",
        benchmark:
            f"benchmarks/evaluate_uniform/{{study}}{job.place}.tsv"
        wildcard_constraints:
            study=job.studies,
        threads: config["threads"]
        resources:
            gpu=GPUS,
        params:
            stages=several(STUDIES.ask("uniform_commands", job.runs)),
            packages=packages("evaluate"),
        message:
            "{wildcards.study}: evaluate the uniform policies on the validation window"
        shell:
            "kvstages several {params.stages:q} 2> {log}"


for job in STUDIES.jobs("evaluate_policy_sets", "joint_runs", "measured", apart="is_huggingface"):

    rule:
        name:
            job.name
        input:
            STUDIES.ask("joint_inputs", job.runs),
        output:
            update([f"results/{{study}}/{name}/joint.csv" for (name,) in job.runs]),
        log:
            f"logs/evaluate_policy_sets/{{study}}{job.place}.log",
        benchmark:
            f"benchmarks/evaluate_policy_sets/{{study}}{job.place}.tsv"
        wildcard_constraints:
            study=job.studies,
        priority: 1
        threads: config["threads"]
        resources:
            gpu=GPUS,
        params:
            stages=several(STUDIES.ask("joint_commands", job.runs)),
            packages=packages("evaluate-set"),
        message:
            "{wildcards.study}: measure sets of policies jointly"
        shell:
            "kvstages several {params.stages:q} 2> {log}"


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
    priority: 1
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
