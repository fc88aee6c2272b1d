"""What gradients say of policies: predicted joint KL beside the measured one, and scores beside measured scores.

Needs: results/{study}/gradients/projections.safetensors, results/{study}/sweep/..., results/{study}/scores/...,
policy-set.json and joint.csv of results/{study}/frontier and of a comparison.
Makes: results/{study}/gradients/joint.csv and predictions.csv; results/{study}/figures/gradients.svg, .png and .csv;
results/{study}/tables/{gradients,prediction}.html and .csv.
"""


rule measure_on_calibration:
    input:
        model="resources/{study}/model.safetensors",
        windows="results/{study}/windows.safetensors",
        reference="results/{study}/reference/calibration.safetensors",
        policies=predicted_sets("policy-set.json"),
    output:
        "results/{study}/gradients/joint.csv",
    log:
        "logs/measure_on_calibration/{study}.log",
    threads: config["threads"]
    resources:
        gpu=GPUS,
    params:
        policies=repeated("--policies", "policies"),
        execution=execution_arguments,
        code=code("evaluate-set"),
    message:
        "{wildcards.study}: measure policies on the window of the sensitivities"
    shell:
        "python -m kvstages evaluate-set --model {input.model} --windows {input.windows} --window calibration"
        " {params.policies} --reference {input.reference} {params.execution} --output {output} 2> {log}"


rule predict_policies:
    input:
        sweeps=measured_sweeps,
        model="resources/{study}/model.safetensors",
        projections="results/{study}/gradients/projections.safetensors",
        policies=predicted_sets("policy-set.json"),
        joint="results/{study}/gradients/joint.csv",
    output:
        "results/{study}/gradients/predictions.csv",
    log:
        "logs/predict_policies/{study}.log",
    params:
        policies=repeated("--policies", "policies"),
        code=code("predict"),
    message:
        "{wildcards.study}: predict the joint KL of policies"
    shell:
        "python -m kvstages predict {input.sweeps} --model {input.model} --projections {input.projections}"
        " {params.policies} --joint {input.joint} --output {output} 2> {log}"


rule draw_gradients:
    input:
        measured=measured_file,
        estimated="results/{study}/scores/gradients.csv",
    output:
        svg=report(
            "results/{study}/figures/gradients.svg",
            caption="../../report/gradients.rst",
            category="{study}",
            subcategory="Figures",
            labels={"figure": "13 Scores from gradients"},
        ),
        png="results/{study}/figures/gradients.png",
        csv="results/{study}/figures/gradients.csv",
    log:
        "logs/draw_gradients/{study}.log",
    params:
        code=code("figure"),
    message:
        "{wildcards.study}: draw the figure gradients"
    shell:
        "python -m kvstages figure gradients --measured {input.measured} --estimated {input.estimated}"
        " --output {output.svg} 2> {log}"


rule make_fisher_table:
    input:
        measured=measured_file,
        projections="results/{study}/gradients/projections.safetensors",
    output:
        html=report(
            "results/{study}/tables/gradients.html",
            caption="../../report/gradients-table.rst",
            category="{study}",
            subcategory="Tables",
            labels={"table": "8 Scores from gradients"},
        ),
        csv="results/{study}/tables/gradients.csv",
    log:
        "logs/make_fisher_table/{study}.log",
    params:
        title=study_title,
        code=code("table"),
    message:
        "{wildcards.study}: make the table gradients"
    shell:
        "python -m kvstages table gradients --measured {input.measured} --projections {input.projections}"
        " --title {params.title:q} --output {output.html} 2> {log}"


rule make_prediction_table:
    input:
        predictions="results/{study}/gradients/predictions.csv",
        held_out=predicted_sets("joint.csv"),
    output:
        html=report(
            "results/{study}/tables/prediction.html",
            caption="../../report/prediction-table.rst",
            category="{study}",
            subcategory="Tables",
            labels={"table": "9 Predicted and measured joint KL"},
        ),
        csv="results/{study}/tables/prediction.csv",
    log:
        "logs/make_prediction_table/{study}.log",
    params:
        held_out=repeated("--held-out", "held_out"),
        title=study_title,
        code=code("table"),
    message:
        "{wildcards.study}: make the table prediction"
    shell:
        "python -m kvstages table prediction {input.predictions} {params.held_out} --title {params.title:q}"
        " --output {output.html} 2> {log}"
