"""Which head gets which precision: greedily under a budget, or the same for all.

Needs: results/{study}/scores/{source}.csv, resources/{study}/model.safetensors (for its shape).
Makes: results/{study}/policies/{policy}/policy.json and steps.csv.
"""


rule allocate_policy:
    input:
        sensitivity=source_file,
        model="resources/{study}/model.safetensors",
    output:
        policy="results/{study}/policies/{policy}/policy.json",
        steps="results/{study}/policies/{policy}/steps.csv",
    log:
        "logs/allocate_policy/{study}/{policy}.log",
    params:
        allocation=allocation_arguments,
        tokens=lambda wildcards: study_config(wildcards.study)["block"],
        code=code("allocate"),
    message:
        "{wildcards.study}: allocate precisions for {wildcards.policy}"
    shell:
        "python -m kvstages allocate {params.allocation} --sensitivity {input.sensitivity} --model {input.model}"
        " --tokens {params.tokens} --policy {wildcards.policy} --output {output.policy} --steps {output.steps} 2> {log}"
