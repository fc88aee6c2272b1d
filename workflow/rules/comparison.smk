"""At equal bytes: allocators, scores, units and precisions against the published recipe, and against random policies.

The published recipe (greedy on scores in BF16 arithmetic) sets the bytes of each budget; every other recipe gets those.
The exact allocator's policy of them is measured around and refined. All policies of a budget, and all of the frontier,
are measured in one job each and arithmetic, against the reference in that arithmetic and against the FP32 model that
stores keys and values exactly. What gradients predict of the largest sets is measured
on the calibration window too.

Needs: results/{study}/scores/..., resources/{study}/model.safetensors, results/{study}/windows.safetensors,
results/{study}/reference/{window}.safetensors, results/{study}/sweep/..., results/{study}/gradients/projections.safetensors.
Makes: results/{study}/comparison/{budget}/{published,exact}/policy.json and steps.csv, moves/layer-{layer}.csv, moves.csv,
refined.json, policy-set.json and joint.csv; results/{study}/frontier/policy-set.json and joint.csv; joint.csv of another
arithmetic in a folder {dtype} beside them; results/{study}/gradients/joint.csv and predictions.csv.
"""


rule allocate_published_recipe:
    input:
        sensitivity="results/{study}/scores/measured-bfloat16.csv",
        model=STUDIES.ask("model"),
    output:
        policy="results/{study}/comparison/{budget}/published/policy.json",
        steps="results/{study}/comparison/{budget}/published/steps.csv",
    log:
        "logs/allocate_published_recipe/{study}/{budget}.log",
    benchmark:
        "benchmarks/allocate_published_recipe/{study}/{budget}.tsv"
    params:
        tokens=STUDIES.ask("block"),
        code=stage_digest("allocate"),
        packages=stage_packages("allocate"),
    message:
        "{wildcards.study}: the published recipe's policy of budget {wildcards.budget}"
    shell:
        "kvstages --code {params.code} allocate --policy published --allocator greedy --budget {wildcards.budget} --unit head"
        " --precisions int8,int4 --sensitivity {input.sensitivity} --model {input.model} --tokens {params.tokens}"
        " --output {output.policy} --steps {output.steps} 2> {log}"


rule allocate_base:
    input:
        sensitivity=STUDIES.ask("own_score_files"),
        model=STUDIES.ask("model"),
        limit="results/{study}/comparison/{budget}/published/policy.json",
    output:
        policy="results/{study}/comparison/{budget}/exact/policy.json",
        steps="results/{study}/comparison/{budget}/exact/steps.csv",
    log:
        "logs/allocate_base/{study}/{budget}.log",
    benchmark:
        "benchmarks/allocate_base/{study}/{budget}.tsv"
    params:
        tokens=STUDIES.ask("block"),
        code=stage_digest("allocate"),
        packages=stage_packages("allocate"),
    message:
        "{wildcards.study}: the exact policy at the published recipe's bytes of budget {wildcards.budget}"
    shell:
        "kvstages --code {params.code} allocate --policy exact --allocator exact --bytes-of {input.limit} --unit head"
        " --precisions int8,int4 --sensitivity {input.sensitivity} --model {input.model} --tokens {params.tokens}"
        " --output {output.policy} --steps {output.steps} 2> {log}"


for job in STUDIES.jobs("sweep_moves", "move_runs", "layer"):

    rule:
        name:
            job.name
        input:
            model=STUDIES.ask("model"),
            windows="results/{study}/windows.safetensors",
            base="results/{study}/comparison/{budget}/exact/policy.json",
            calibration=STUDIES.ask("calibration_files"),
        output:
            update([f"results/{{study}}/comparison/{{budget}}/moves/layer-{layer}.csv" for (layer,) in job.runs]),
        log:
            f"logs/sweep_moves/{{study}}/{{budget}}{job.place}.log",
        benchmark:
            f"benchmarks/sweep_moves/{{study}}/{{budget}}{job.place}.tsv"
        wildcard_constraints:
            study=job.studies,
        threads: config["threads"]
        resources:
            gpu=GPUS,
        params:
            stages=several(STUDIES.ask("move_commands", job.runs, wildcards="budget")),
            packages=packages("sweep"),
        message:
            "{wildcards.study}: move one head at a time, around the policy of budget {wildcards.budget}"
        shell:
            "kvstages several {params.stages:q} 2> {log}"


rule gather_moves:
    input:
        STUDIES.ask("move_files", wildcards="budget"),
    output:
        "results/{study}/comparison/{budget}/moves.csv",
    log:
        "logs/gather_moves/{study}/{budget}.log",
    benchmark:
        "benchmarks/gather_moves/{study}/{budget}.tsv"
    params:
        code=stage_digest("gather"),
        packages=stage_packages("gather"),
    message:
        "{wildcards.study}: gather the moves around the policy of budget {wildcards.budget}"
    shell:
        "kvstages --code {params.code} gather {input} --source around-{wildcards.budget} --output {output} 2> {log}"


rule refine_policy:
    input:
        base="results/{study}/comparison/{budget}/exact/policy.json",
        moves="results/{study}/comparison/{budget}/moves.csv",
        sensitivity=STUDIES.ask("own_score_files"),
        model=STUDIES.ask("model"),
    output:
        "results/{study}/comparison/{budget}/refined.json",
    log:
        "logs/refine_policy/{study}/{budget}.log",
    benchmark:
        "benchmarks/refine_policy/{study}/{budget}.tsv"
    params:
        code=stage_digest("refine"),
        packages=stage_packages("refine"),
    message:
        "{wildcards.study}: reallocate around the policy of budget {wildcards.budget}"
    shell:
        "kvstages --code {params.code} refine --base {input.base} --moves {input.moves} --sensitivity {input.sensitivity}"
        " --model {input.model} --output {output} 2> {log}"


rule make_policy_set:
    input:
        sensitivities=STUDIES.ask("score_files"),
        model=STUDIES.ask("model"),
    output:
        "results/{study}/comparison/{budget}/policy-set.json",
    log:
        "logs/make_policy_set/{study}/{budget}.log",
    benchmark:
        "benchmarks/make_policy_set/{study}/{budget}.tsv"
    params:
        sensitivities=STUDIES.ask("score_arguments"),
        recipes=STUDIES.ask("equal_bytes_arguments"),
        tokens=STUDIES.ask("block"),
        code=stage_digest("policy-set"),
        packages=stage_packages("policy-set"),
    message:
        "{wildcards.study}: policies at the bytes of budget {wildcards.budget}"
    shell:
        "kvstages --code {params.code} policy-set {params.sensitivities} --model {input.model} --tokens {params.tokens}"
        " {params.recipes} --budget {wildcards.budget} --output {output} 2> {log}"


rule make_frontier:
    input:
        sensitivities=STUDIES.ask("score_files"),
        model=STUDIES.ask("model"),
    output:
        "results/{study}/frontier/policy-set.json",
    log:
        "logs/make_frontier/{study}.log",
    benchmark:
        "benchmarks/make_frontier/{study}.tsv"
    params:
        sensitivities=STUDIES.ask("score_arguments"),
        recipes=STUDIES.ask("frontier_arguments"),
        tokens=STUDIES.ask("block"),
        code=stage_digest("policy-set"),
        packages=stage_packages("policy-set"),
    message:
        "{wildcards.study}: policies along the frontier"
    shell:
        "kvstages --code {params.code} policy-set {params.sensitivities} --model {input.model} --tokens {params.tokens}"
        " {params.recipes} --output {output} 2> {log}"


rule evaluate_policy_set:
    input:
        model=STUDIES.ask("model"),
        windows="results/{study}/windows.safetensors",
        reference="results/{study}/reference/validation.safetensors",
        truth="results/{study}/reference/exact-cache/validation.safetensors",
        policies=STUDIES.ask("set_files", wildcards="budget"),
        calibration=STUDIES.ask("calibration_files"),
    output:
        "results/{study}/comparison/{budget}/joint.csv",
    log:
        "logs/evaluate_policy_set/{study}/{budget}.log",
    benchmark:
        "benchmarks/evaluate_policy_set/{study}/{budget}.tsv"
    threads: config["threads"]
    resources:
        gpu=GPUS,
    params:
        policies=STUDIES.ask("set_arguments", wildcards="budget"),
        execution=STUDIES.ask("measuring_arguments"),
        without=[],
        code=code("evaluate-set"),
        packages=packages("evaluate-set"),
    message:
        "{wildcards.study}: measure the policies at the bytes of budget {wildcards.budget}"
    shell:
        "kvstages --code {params.code} evaluate-set --model {input.model} --windows {input.windows} --window validation"
        " {params.policies} --reference {input.reference}"
        " --truth {input.truth} {params.without} {params.execution} --output {output} 2> {log}"


use rule evaluate_policy_set as evaluate_policy_set_in with:
    input:
        model=STUDIES.ask("model"),
        windows="results/{study}/windows.safetensors",
        reference="results/{study}/reference/{dtype}/validation.safetensors",
        truth="results/{study}/reference/exact-cache/validation.safetensors",
        policies=STUDIES.ask("set_files", wildcards="budget"),
        calibration=STUDIES.ask("calibration_files"),
    output:
        "results/{study}/comparison/{budget}/{dtype}/joint.csv",
    log:
        "logs/evaluate_policy_set_in/{study}/{budget}/{dtype}.log",
    benchmark:
        "benchmarks/evaluate_policy_set_in/{study}/{budget}/{dtype}.tsv"
    params:
        policies=STUDIES.ask("set_arguments", wildcards="budget"),
        execution=STUDIES.ask("measuring_arguments", wildcards="dtype"),
        # Random policies are there for their spread, which the study's own arithmetic shows.
        without="--without random",
        code=code("evaluate-set"),
        packages=packages("evaluate-set"),
    message:
        "{wildcards.study}: measure the policies at the bytes of budget {wildcards.budget} in {wildcards.dtype}"


rule evaluate_frontier:
    input:
        model=STUDIES.ask("model"),
        windows="results/{study}/windows.safetensors",
        reference="results/{study}/reference/validation.safetensors",
        truth="results/{study}/reference/exact-cache/validation.safetensors",
        policies="results/{study}/frontier/policy-set.json",
        calibration=STUDIES.ask("calibration_files"),
    output:
        "results/{study}/frontier/joint.csv",
    log:
        "logs/evaluate_frontier/{study}.log",
    benchmark:
        "benchmarks/evaluate_frontier/{study}.tsv"
    threads: config["threads"]
    resources:
        gpu=GPUS,
    params:
        execution=STUDIES.ask("measuring_arguments"),
        without=[],
        code=code("evaluate-set"),
        packages=packages("evaluate-set"),
    message:
        "{wildcards.study}: measure the policies along the frontier"
    shell:
        "kvstages --code {params.code} evaluate-set --model {input.model} --windows {input.windows} --window validation"
        " --policies {input.policies} --reference {input.reference} --truth {input.truth}"
        " {params.without} {params.execution} --output {output} 2> {log}"


use rule evaluate_frontier as evaluate_frontier_in with:
    input:
        model=STUDIES.ask("model"),
        windows="results/{study}/windows.safetensors",
        reference="results/{study}/reference/{dtype}/validation.safetensors",
        truth="results/{study}/reference/exact-cache/validation.safetensors",
        policies="results/{study}/frontier/policy-set.json",
        calibration=STUDIES.ask("calibration_files"),
    output:
        "results/{study}/frontier/{dtype}/joint.csv",
    log:
        "logs/evaluate_frontier_in/{study}/{dtype}.log",
    benchmark:
        "benchmarks/evaluate_frontier_in/{study}/{dtype}.tsv"
    params:
        execution=STUDIES.ask("measuring_arguments", wildcards="dtype"),
        # Below INT4 rounding of either arithmetic no longer counts beside the quantizer.
        without="--without exact-low --without exact-split-low",
        code=code("evaluate-set"),
        packages=packages("evaluate-set"),
    message:
        "{wildcards.study}: measure the policies along the frontier in {wildcards.dtype}"


rule measure_on_calibration:
    input:
        model=STUDIES.ask("model"),
        windows="results/{study}/windows.safetensors",
        reference="results/{study}/reference/calibration.safetensors",
        policies=STUDIES.ask("predicted_set_files"),
        calibration=STUDIES.ask("calibration_files"),
    output:
        "results/{study}/gradients/joint.csv",
    log:
        "logs/measure_on_calibration/{study}.log",
    benchmark:
        "benchmarks/measure_on_calibration/{study}.tsv"
    threads: config["threads"]
    resources:
        gpu=GPUS,
    params:
        policies=lambda wildcards, input: options_of("--policies", input.policies),
        execution=STUDIES.ask("measuring_arguments"),
        code=code("evaluate-set"),
        packages=packages("evaluate-set"),
    message:
        "{wildcards.study}: measure policies on the window of the sensitivities"
    shell:
        "kvstages --code {params.code} evaluate-set --model {input.model} --windows {input.windows} --window calibration"
        " {params.policies} --reference {input.reference} {params.execution} --output {output} 2> {log}"


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
