"""Calibration on one text against calibration on another: domains and block lengths, each for making and for measuring.

The windows of a domain are drawn from its documents, and the same tokens are cut into blocks of each length. Scores of each domain
and length make a policy of each budget, and every policy is measured on every domain and length.

Needs: the study's model, its tokens and documents.
Makes: results/{study}/domains/windows.safetensors and windows.csv, {domain}/{length}/gradients.csv and projections.safetensors,
{budget}/policy-set.json, {domain}/{length}/joint.csv.
"""


use rule cut_windows as cut_domains with:
    output:
        windows="results/{study}/domains/windows.safetensors",
        places="results/{study}/domains/windows.csv",
    log:
        "logs/cut_domains/{study}.log",
    benchmark:
        "benchmarks/cut_domains/{study}.tsv"
    params:
        windows=STUDIES.ask("domain_window_arguments"),
        code=stage_digest("windows"),
        packages=stage_packages("windows"),
    message:
        "{wildcards.study}: cut the windows of the domains"


for job in STUDIES.jobs("score_domains", "domain_runs", "domain length"):

    rule:
        name:
            job.name
        input:
            model=STUDIES.ask("model"),
            windows="results/{study}/domains/windows.safetensors",
            calibration=STUDIES.ask("calibration_files"),
        output:
            update(
                [
                    f"results/{{study}}/domains/{domain}/{length}/{file}"
                    for domain, length in job.runs
                    for file in ("gradients.csv", "projections.safetensors")
                ]
            ),
        log:
            f"logs/score_domains/{{study}}{job.place}.log",
        benchmark:
            f"benchmarks/score_domains/{{study}}{job.place}.tsv"
        wildcard_constraints:
            study=job.studies,
        threads: config["threads"]
        resources:
            gpu=GPUS,
        params:
            stages=several(STUDIES.ask("domain_score_commands", job.runs)),
            packages=packages("gradients"),
        message:
            "{wildcards.study}: score every unit on each domain, from gradients"
        shell:
            "kvstages several {params.stages:q} 2> {log}"


rule make_domain_policies:
    input:
        sensitivities=STUDIES.ask("domain_score_files"),
        model=STUDIES.ask("model"),
    output:
        "results/{study}/domains/{budget}/policy-set.json",
    log:
        "logs/make_domain_policies/{study}/{budget}.log",
    benchmark:
        "benchmarks/make_domain_policies/{study}/{budget}.tsv"
    params:
        recipes=STUDIES.ask("domain_set_arguments", wildcards="budget"),
        tokens=STUDIES.ask("block"),
        code=stage_digest("policy-set"),
        packages=stage_packages("policy-set"),
    message:
        "{wildcards.study}: a policy of {wildcards.budget} from each domain's scores"
    shell:
        "kvstages --code {params.code} policy-set {params.recipes} --model {input.model} --tokens {params.tokens}"
        " --budget {wildcards.budget} --output {output} 2> {log}"


for job in STUDIES.jobs("measure_domains", "domain_runs", "domain length"):

    rule:
        name:
            job.name
        input:
            model=STUDIES.ask("model"),
            windows="results/{study}/domains/windows.safetensors",
            policies=STUDIES.ask("domain_set_files"),
            calibration=STUDIES.ask("calibration_files"),
        output:
            update([f"results/{{study}}/domains/{domain}/{length}/joint.csv" for domain, length in job.runs]),
        log:
            f"logs/measure_domains/{{study}}{job.place}.log",
        benchmark:
            f"benchmarks/measure_domains/{{study}}{job.place}.tsv"
        wildcard_constraints:
            study=job.studies,
        threads: config["threads"]
        resources:
            gpu=GPUS,
        params:
            stages=several(STUDIES.ask("domain_evaluation_commands", job.runs)),
            packages=packages("evaluate-set"),
        message:
            "{wildcards.study}: measure every domain's policies on each domain"
        shell:
            "kvstages several {params.stages:q} 2> {log}"
