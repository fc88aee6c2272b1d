"""Which head gets which precision: greedily under a budget, or the same for all.

Needs: results/{study}/scores/{source}.csv, resources/{study}/model.safetensors (for its shape).
Makes: results/{study}/policies/{policy}/policy.json and steps.csv.
"""


rule allocate_policy:
    input:
        sensitivity=STUDIES.ask("own_score_files"),
        model=STUDIES.ask("model"),
    output:
        policy="results/{study}/policies/{policy}/policy.json",
        steps="results/{study}/policies/{policy}/steps.csv",
    log:
        "logs/allocate_policy/{study}/{policy}.log",
    benchmark:
        "benchmarks/allocate_policy/{study}/{policy}.tsv"
    params:
        allocation=STUDIES.ask("allocation_arguments", wildcards="policy"),
        tokens=STUDIES.ask("block"),
        code=stage_digest("allocate"),
        packages=stage_packages("allocate"),
    message:
        "{wildcards.study}: allocate precisions for {wildcards.policy}"
    shell:
        "kvstages --code {params.code} allocate {params.allocation} --sensitivity {input.sensitivity} --model {input.model}"
        " --tokens {params.tokens} --policy {wildcards.policy} --output {output.policy} --steps {output.steps} 2> {log}"
