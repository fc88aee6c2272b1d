"""At equal bytes: allocators, scores, units and precisions against the published recipe, and against random policies.

The published recipe (greedy on scores in BF16 arithmetic) sets the bytes of each budget; every other recipe gets those.
The exact allocator's policy of them is measured around and refined. measurement.smk measures the policies of each budget
and of the frontier; what gradients predict of the largest sets stands beside that.

Needs: results/{study}/scores/..., resources/{study}/model.safetensors, results/{study}/windows.safetensors,
results/{study}/sweep/..., results/{study}/gradients/projections.safetensors and joint.csv.
Makes: results/{study}/comparison/{budget}/{published,exact}/policy.json and steps.csv, moves/layer-{layer}.csv, moves.csv,
refined.json and policy-set.json; results/{study}/frontier/policy-set.json; results/{study}/gradients/predictions.csv.
"""

for job in STUDIES.jobs("allocate_bases", "base_runs", "budget"):

    rule:
        name:
            job.name
        input:
            sensitivity=STUDIES.ask("base_score_files"),
            model=STUDIES.ask("model"),
        output:
            update(
                [
                    f"results/{{study}}/comparison/{budget}/{policy}/{file}"
                    for (budget,) in job.runs
                    for policy in ("published", "exact")
                    for file in ALLOCATION_FILES
                ]
            ),
        log:
            f"logs/allocate_bases/{{study}}{job.place}.log",
        benchmark:
            f"benchmarks/allocate_bases/{{study}}{job.place}.tsv"
        wildcard_constraints:
            study=job.studies,
        params:
            stages=several(STUDIES.ask("base_commands", job.runs)),
            packages=stage_packages("allocate"),
        message:
            "{wildcards.study}: the published recipe's policy of each budget, and the exact one at its bytes"
        shell:
            "kvstages several {params.stages:q} 2> {log}"


for job in STUDIES.jobs("sweep_moves", "move_runs", "budget layer"):

    rule:
        name:
            job.name
        input:
            bases=STUDIES.ask("move_base_files", job.runs),
            model=STUDIES.ask("model"),
            windows="results/{study}/windows.safetensors",
            calibration=STUDIES.ask("calibration_files"),
        output:
            update([f"results/{{study}}/comparison/{budget}/moves/layer-{layer}.csv" for budget, layer in job.runs]),
        log:
            f"logs/sweep_moves/{{study}}{job.place}.log",
        benchmark:
            f"benchmarks/sweep_moves/{{study}}{job.place}.tsv"
        wildcard_constraints:
            study=job.studies,
        threads: config["threads"]
        resources:
            gpu=GPUS,
        params:
            stages=several(STUDIES.ask("move_commands", job.runs)),
            packages=packages("sweep"),
        message:
            "{wildcards.study}: move one head at a time, around the exact policies"
        shell:
            "kvstages several {params.stages:q} 2> {log}"


for job in STUDIES.jobs("refine_policies", "base_runs", "budget"):

    rule:
        name:
            job.name
        input:
            moves=STUDIES.ask("refine_inputs", job.runs),
            sensitivity=STUDIES.ask("own_score_files"),
            model=STUDIES.ask("model"),
        output:
            update(
                [
                    f"results/{{study}}/comparison/{budget}/{file}"
                    for (budget,) in job.runs
                    for file in ("moves.csv", "refined.json")
                ]
            ),
        log:
            f"logs/refine_policies/{{study}}{job.place}.log",
        benchmark:
            f"benchmarks/refine_policies/{{study}}{job.place}.tsv"
        wildcard_constraints:
            study=job.studies,
        params:
            stages=several(STUDIES.ask("refine_commands", job.runs)),
            packages=[stage_packages("gather"), stage_packages("refine")],
        message:
            "{wildcards.study}: gather the moves around the exact policies and allocate again"
        shell:
            "kvstages several {params.stages:q} 2> {log}"


for job in STUDIES.jobs("make_policy_sets", "set_runs", "set"):

    rule:
        name:
            job.name
        input:
            sensitivities=STUDIES.ask("score_files"),
            model=STUDIES.ask("model"),
        output:
            update([f"results/{{study}}/{folder}/policy-set.json" for (folder,) in job.runs]),
        log:
            f"logs/make_policy_sets/{{study}}{job.place}.log",
        benchmark:
            f"benchmarks/make_policy_sets/{{study}}{job.place}.tsv"
        wildcard_constraints:
            study=job.studies,
        params:
            stages=several(STUDIES.ask("set_commands", job.runs)),
            packages=stage_packages("policy-set"),
        message:
            "{wildcards.study}: policies at equal bytes and along the frontier"
        shell:
            "kvstages several {params.stages:q} 2> {log}"


rule predict_policies:
    input:
        sweeps=STUDIES.ask("own_sweep_files"),
        model=STUDIES.ask("model"),
        projections="results/{study}/gradients/projections.safetensors",
        policies=STUDIES.ask("predicted_set_files"),
        joint="results/{study}/gradients/joint.csv",
    output:
        "results/{study}/gradients/predictions.csv",
    log:
        "logs/predict_policies/{study}.log",
    benchmark:
        "benchmarks/predict_policies/{study}.tsv"
    params:
        policies=lambda wildcards, input: options_of("--policies", input.policies),
        code=stage_digest("predict"),
        packages=stage_packages("predict"),
    message:
        "{wildcards.study}: predict the joint KL of policies"
    shell:
        "kvstages --code {params.code} predict {input.sweeps} --model {input.model} --projections {input.projections}"
        " {params.policies} --joint {input.joint} --output {output} 2> {log}"
