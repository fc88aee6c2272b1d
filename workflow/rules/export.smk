"""A policy in the words of engines, and what their restrictions cost: for studies with the key `export`.

Needs: results/{study}/policies/{policy}/policy.json, the scores that it was made from, resources/{study}/model.safetensors,
results/{study}/windows.safetensors, results/{study}/calibration.safetensors.
Makes: results/{study}/export/{engine}/{policy}/ (policy.json, export.json and the engine's own file);
results/{study}/export/scores.csv and projections.safetensors of the engines' formats, unless a screening scores them;
results/{study}/export/policy-set.json, which measurement.smk measures.
"""

for study in STUDIES.values():
    if study.engines:

        rule:
            name:
                f"export_policy_{study.identifier}"
            input:
                STUDIES.ask("exported_policy_files"),
            output:
                update(
                    [
                        f"results/{{study}}/export/{engine}/{study.exported_policy}/{name}"
                        for engine in study.engines
                        for name in EXPORT_FILES[engine]
                    ]
                ),
            log:
                "logs/export_policy/{study}.log",
            benchmark:
                "benchmarks/export_policy/{study}.tsv"
            wildcard_constraints:
                study=study.name,
            params:
                stages=several(STUDIES.ask("export_commands")),
                packages=stage_packages("export"),
            message:
                "{wildcards.study}: the policy in the words of engines"
            shell:
                "kvstages several {params.stages:q} 2> {log}"


rule score_engines:
    input:
        model=STUDIES.ask("model"),
        windows="results/{study}/windows.safetensors",
        calibration="results/{study}/calibration.safetensors",
    output:
        table="results/{study}/export/scores.csv",
        projections="results/{study}/export/projections.safetensors",
    log:
        "logs/score_engines/{study}.log",
    benchmark:
        "benchmarks/score_engines/{study}.tsv"
    threads: config["threads"]
    resources:
        gpu=GPUS,
    params:
        engines=STUDIES.ask("engine_arguments"),
        probes=STUDIES.ask("probes"),
        device=STUDIES.ask("device_arguments"),
        memory=config["memory_mb"],
        code=code("score-engines"),
        packages=packages("score-engines"),
    message:
        "{wildcards.study}: score the formats of engines from gradients"
    shell:
        "kvstages --code {params.code} score-engines --model {input.model} --windows {input.windows} {params.engines}"
        " --probes {params.probes} --calibration {input.calibration} {params.device} --memory-mb {params.memory}"
        " --output-table {output.table} --projections {output.projections} 2> {log}"


rule make_engine_set:
    input:
        policy=STUDIES.ask("exported_policy_files"),
        sensitivity=STUDIES.ask("own_score_files"),
        scores=STUDIES.ask("engine_score_files"),
        model=STUDIES.ask("model"),
    output:
        "results/{study}/export/policy-set.json",
    log:
        "logs/make_engine_set/{study}.log",
    benchmark:
        "benchmarks/make_engine_set/{study}.tsv"
    params:
        engines=STUDIES.ask("engine_arguments"),
        code=stage_digest("engine-set"),
        packages=stage_packages("engine-set"),
    message:
        "{wildcards.study}: policies that tell what the restrictions of engines cost"
    shell:
        "kvstages --code {params.code} engine-set --policy {input.policy} --sensitivity {input.sensitivity}"
        " --engine-scores {input.scores} {params.engines} --model {input.model} --output {output} 2> {log}"
