"""Training with cache noise, and without as control; each adapted model against the original's reference.

Needs: resources/{study}/model.safetensors, results/{study}/windows.safetensors, results/{study}/reference/{window}.safetensors,
results/{study}/policies/{policy}/policy.json.
Makes: results/{study}/adaptation/{arm}/seed-{seed}/model.safetensors and curve.csv, and beside them
{policy}/evaluation.json and positions.csv.
"""

for job in STUDIES.jobs("adapt_models", "adapted_runs", "arm seed"):

    rule:
        name:
            job.name
        input:
            model=STUDIES.ask("model"),
            windows="results/{study}/windows.safetensors",
        output:
            update(
                [
                    f"results/{{study}}/adaptation/{arm}/seed-{seed}/{file}"
                    for arm, seed in job.runs
                    for file in ADAPTED_FILES
                ]
            ),
        log:
            f"logs/adapt_models/{{study}}{job.place}.log",
        benchmark:
            f"benchmarks/adapt_models/{{study}}{job.place}.tsv"
        wildcard_constraints:
            study=job.studies,
        threads: config["threads"]
        resources:
            gpu=GPUS,
        params:
            stages=several(STUDIES.ask("adapt_commands", job.runs)),
            packages=packages("adapt"),
        message:
            "{wildcards.study}: adapt the model"
        shell:
            "kvstages several {params.stages:q} 2> {log}"


for job in STUDIES.jobs("evaluate_adapted", "adapted_evaluation_runs", "arm seed policy"):

    rule:
        name:
            job.name
        input:
            models=once(
                f"results/{{study}}/adaptation/{arm}/seed-{seed}/model.safetensors" for arm, seed, _ in job.runs
            ),
            policies=once(f"results/{{study}}/policies/{policy}/policy.json" for _, _, policy in job.runs),
            windows="results/{study}/windows.safetensors",
            reference="results/{study}/reference/validation.safetensors",
        output:
            update(
                [
                    f"results/{{study}}/adaptation/{arm}/seed-{seed}/{policy}/{file}"
                    for arm, seed, policy in job.runs
                    for file in EVALUATION_FILES
                ]
            ),
        log:
            f"logs/evaluate_adapted/{{study}}{job.place}.log",
        benchmark:
            f"benchmarks/evaluate_adapted/{{study}}{job.place}.tsv"
        wildcard_constraints:
            study=job.studies,
        threads: config["threads"]
        resources:
            gpu=GPUS,
        params:
            stages=several(STUDIES.ask("adapted_evaluation_commands", job.runs)),
            packages=packages("evaluate"),
        message:
            "{wildcards.study}: evaluate adapted models"
        shell:
            "kvstages several {params.stages:q} 2> {log}"
