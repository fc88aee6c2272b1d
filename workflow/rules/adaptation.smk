"""Training with cache noise, and without as control; each adapted model against the original's reference.

Needs: resources/{study}/model.safetensors, results/{study}/windows.safetensors, results/{study}/reference/{window}.safetensors,
results/{study}/policies/{policy}/policy.json.
Makes: results/{study}/adaptation/{arm}/seed-{seed}/model.safetensors and curve.csv, and beside them
{policy}/evaluation.json and positions.csv.
"""

for study in STUDIES.values():
    for name, models in study.jobs("adapt_models", study.adapted_models).items():

        rule:
            name:
                name
            input:
                model="resources/{study}/model.safetensors",
                windows="results/{study}/windows.safetensors",
            output:
                update(
                    [
                        f"results/{{study}}/adaptation/{arm}/seed-{seed}/{file}"
                        for arm, seed in models
                        for file in ADAPTED_FILES
                    ]
                ),
            log:
                f"logs/{name}/{{study}}.log",
            wildcard_constraints:
                study=study.name,
            threads: config["threads"]
            resources:
                gpu=GPUS,
            params:
                stages=several(STUDIES.ask("adapt_commands", models)),
                packages=stage_packages("adapt"),
            message:
                "{wildcards.study}: adapt the model in each arm with each seed"
            shell:
                "kvstages several {params.stages:q} 2> {log}"


for study in STUDIES.values():
    for name, models in study.jobs("evaluate_adapted", study.adapted_models).items():

        rule:
            name:
                name
            input:
                models=[f"results/{{study}}/adaptation/{arm}/seed-{seed}/model.safetensors" for arm, seed in models],
                windows="results/{study}/windows.safetensors",
                policies=study.files_of(study.adapted_policies, "policy.json"),
                reference="results/{study}/reference/validation.safetensors",
            output:
                update(
                    [
                        f"results/{{study}}/adaptation/{arm}/seed-{seed}/{policy}/{file}"
                        for arm, seed in models
                        for policy in study.adapted_policies
                        for file in EVALUATION_FILES
                    ]
                ),
            log:
                f"logs/{name}/{{study}}.log",
            wildcard_constraints:
                study=study.name,
            threads: config["threads"]
            resources:
                gpu=GPUS,
            params:
                stages=several(STUDIES.ask("adapted_evaluation_commands", models)),
                packages=stage_packages("evaluate"),
            message:
                "{wildcards.study}: evaluate the adapted models"
            shell:
                "kvstages several {params.stages:q} 2> {log}"
