"""Training with a noisy or quantized cache, and without as control; each adapted model against the original and itself.

Needs: resources/{study}/model.safetensors, results/{study}/windows.safetensors, results/{study}/reference/{window}.safetensors,
results/{study}/policies/{policy}/policy.json.
Makes: results/{study}/adaptation/{arm}/settings.csv (of an arm whose settings are chosen on the reserved window),
results/{study}/adaptation/{arm}/seed-{seed}/model.safetensors, curve.csv and training.json, and beside them evaluation.csv.
"""

for job in STUDIES.jobs("try_settings", "grid_runs", "arm"):

    rule:
        name:
            job.name
        input:
            STUDIES.ask("grid_inputs", job.runs),
        output:
            update([f"results/{{study}}/adaptation/{arm}/settings.csv" for (arm,) in job.runs]),
        log:
            f"logs/try_settings/{{study}}{job.place}.log",
        benchmark:
            f"benchmarks/try_settings/{{study}}{job.place}.tsv"
        wildcard_constraints:
            study=job.studies,
        threads: config["threads"]
        resources:
            gpu=GPUS,
        params:
            stages=several(STUDIES.ask("grid_commands", job.runs)),
            packages=packages("adapt-grid"),
        message:
            "{wildcards.study}: choose settings on the reserved window"
        shell:
            "kvstages several {params.stages:q} 2> {log}"


for job in STUDIES.jobs("adapt_models", "adapted_runs", "arm seed"):

    rule:
        name:
            job.name
        input:
            STUDIES.ask("adapt_inputs", job.runs),
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


for job in STUDIES.jobs("evaluate_adapted", "adapted_evaluation_runs", "arm seed"):

    rule:
        name:
            job.name
        input:
            STUDIES.ask("adapted_evaluation_inputs", job.runs),
        output:
            update([f"results/{{study}}/adaptation/{arm}/seed-{seed}/evaluation.csv" for arm, seed in job.runs]),
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
            packages=packages("evaluate-adapted"),
        message:
            "{wildcards.study}: measure adapted models"
        shell:
            "kvstages several {params.stages:q} 2> {log}"
