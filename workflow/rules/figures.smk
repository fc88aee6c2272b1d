"""Figures and tables of a study, each from the files that it shows; the CSV beside each holds the plotted numbers.

Needs: results/{study}/scores/{source}.csv, results/{study}/policies/{policy}/..., results/{study}/adaptation/...
Makes: results/{study}/figures/{figure}.svg, .png and .csv; results/{study}/tables/{table}.html and .csv.
"""


include: "report_targets.smk"
include: "comparison_figures.smk"


rule draw_sensitivity:
    input:
        sensitivity=source_file,
    output:
        svg=report(
            "results/{study}/figures/sensitivity.svg",
            caption="../../report/sensitivity.rst",
            category="{study}",
            subcategory="Figures",
            labels={"figure": "1 Sensitivity of each head"},
        ),
        png="results/{study}/figures/sensitivity.png",
        csv="results/{study}/figures/sensitivity.csv",
    log:
        "logs/draw_sensitivity/{study}.log",
    params:
        code=code("figure"),
    message:
        "{wildcards.study}: draw the figure sensitivity"
    shell:
        "python -m kvstages figure sensitivity --sensitivity {input.sensitivity} --output {output.svg} 2> {log}"


rule draw_allocation:
    input:
        policies=policy_files(allocated_policies, "policy.json"),
    output:
        svg=report(
            "results/{study}/figures/allocation.svg",
            caption="../../report/allocation.rst",
            category="{study}",
            subcategory="Figures",
            labels={"figure": "2 Allocation of each budget"},
        ),
        png="results/{study}/figures/allocation.png",
        csv="results/{study}/figures/allocation.csv",
    log:
        "logs/draw_allocation/{study}.log",
    params:
        code=code("figure"),
    message:
        "{wildcards.study}: draw the figure allocation"
    shell:
        "python -m kvstages figure allocation {input.policies} --output {output.svg} 2> {log}"


rule draw_greedy_path:
    input:
        policies=policy_files(greedy_policies, "policy.json"),
        steps=policy_files(greedy_policies, "steps.csv"),
    output:
        svg=report(
            "results/{study}/figures/greedy-path.svg",
            caption="../../report/greedy-path.rst",
            category="{study}",
            subcategory="Figures",
            labels={"figure": "3 Greedy path"},
        ),
        png="results/{study}/figures/greedy-path.png",
        csv="results/{study}/figures/greedy-path.csv",
    log:
        "logs/draw_greedy_path/{study}.log",
    params:
        code=code("figure"),
    message:
        "{wildcards.study}: draw the figure greedy-path"
    shell:
        "python -m kvstages figure greedy-path {input.policies} --output {output.svg} 2> {log}"


rule draw_storage_kl:
    input:
        evaluations=policy_files(policies, "evaluation.json"),
    output:
        svg=report(
            "results/{study}/figures/storage-kl.svg",
            caption="../../report/storage-kl.rst",
            category="{study}",
            subcategory="Figures",
            labels={"figure": "4 Storage against KL"},
        ),
        png="results/{study}/figures/storage-kl.png",
        csv="results/{study}/figures/storage-kl.csv",
    log:
        "logs/draw_storage_kl/{study}.log",
    params:
        code=code("figure"),
    message:
        "{wildcards.study}: draw the figure storage-kl"
    shell:
        "python -m kvstages figure storage-kl {input.evaluations} --output {output.svg} 2> {log}"


rule draw_kl_by_position:
    input:
        evaluations=policy_files(policies, "evaluation.json"),
        positions=policy_files(policies, "positions.csv"),
    output:
        svg=report(
            "results/{study}/figures/kl-by-position.svg",
            caption="../../report/kl-by-position.rst",
            category="{study}",
            subcategory="Figures",
            labels={"figure": "5 KL by position"},
        ),
        png="results/{study}/figures/kl-by-position.png",
        csv="results/{study}/figures/kl-by-position.csv",
    log:
        "logs/draw_kl_by_position/{study}.log",
    params:
        code=code("figure"),
    message:
        "{wildcards.study}: draw the figure kl-by-position"
    shell:
        "python -m kvstages figure kl-by-position {input.evaluations} --output {output.svg} 2> {log}"


rule draw_kl_distribution:
    input:
        evaluations=policy_files(policies, "evaluation.json"),
        positions=policy_files(policies, "positions.csv"),
    output:
        svg=report(
            "results/{study}/figures/kl-distribution.svg",
            caption="../../report/kl-distribution.rst",
            category="{study}",
            subcategory="Figures",
            labels={"figure": "6 Distribution of the KL"},
        ),
        png="results/{study}/figures/kl-distribution.png",
        csv="results/{study}/figures/kl-distribution.csv",
    log:
        "logs/draw_kl_distribution/{study}.log",
    params:
        code=code("figure"),
    message:
        "{wildcards.study}: draw the figure kl-distribution"
    shell:
        "python -m kvstages figure kl-distribution {input.evaluations} --output {output.svg} 2> {log}"


rule draw_adaptation_curves:
    input:
        curves=adapted_files("curve.csv", by_policy=False),
    output:
        svg=report(
            "results/{study}/figures/adaptation-curves.svg",
            caption="../../report/adaptation-curves.rst",
            category="{study}",
            subcategory="Figures",
            labels={"figure": "7 Adaptation, training curves"},
        ),
        png="results/{study}/figures/adaptation-curves.png",
        csv="results/{study}/figures/adaptation-curves.csv",
    log:
        "logs/draw_adaptation_curves/{study}.log",
    params:
        code=code("figure"),
    message:
        "{wildcards.study}: draw the figure adaptation-curves"
    shell:
        "python -m kvstages figure adaptation-curves {input.curves} --output {output.svg} 2> {log}"


rule draw_adaptation:
    input:
        adapted=adapted_files("evaluation.json", by_policy=True),
        original=policy_files(adapted_policies, "evaluation.json"),
    output:
        svg=report(
            "results/{study}/figures/adaptation.svg",
            caption="../../report/adaptation.rst",
            category="{study}",
            subcategory="Figures",
            labels={"figure": "8 Adaptation, before and after"},
        ),
        png="results/{study}/figures/adaptation.png",
        csv="results/{study}/figures/adaptation.csv",
    log:
        "logs/draw_adaptation/{study}.log",
    params:
        original=repeated("--original", "original"),
        code=code("figure"),
    message:
        "{wildcards.study}: draw the figure adaptation"
    shell:
        "python -m kvstages figure adaptation {input.adapted} {params.original} --output {output.svg} 2> {log}"


rule make_results_table:
    input:
        evaluations=policy_files(policies, "evaluation.json"),
        policies=policy_files(policies, "policy.json"),
    output:
        html=report(
            "results/{study}/tables/results.html",
            caption="../../report/results-table.rst",
            category="{study}",
            subcategory="Tables",
            labels={"table": "1 Results of every policy"},
        ),
        csv="results/{study}/tables/results.csv",
    log:
        "logs/make_results_table/{study}.log",
    params:
        published=published_arguments,
        title=study_title,
        code=code("table"),
    message:
        "{wildcards.study}: make the table results"
    shell:
        "python -m kvstages table results {input.evaluations} {params.published} --title {params.title:q} --output {output.html} 2> {log}"


rule make_divergence_table:
    input:
        evaluations=policy_files(policies, "evaluation.json"),
    output:
        html=report(
            "results/{study}/tables/divergence.html",
            caption="../../report/divergence-table.rst",
            category="{study}",
            subcategory="Tables",
            labels={"table": "4 Divergence in full"},
        ),
        csv="results/{study}/tables/divergence.csv",
    log:
        "logs/make_divergence_table/{study}.log",
    params:
        title=study_title,
        code=code("table"),
    message:
        "{wildcards.study}: make the table divergence"
    shell:
        "python -m kvstages table divergence {input.evaluations} --title {params.title:q} --output {output.html} 2> {log}"


rule make_sensitivity_summary_table:
    input:
        evaluations=uniform_evaluations,
        sensitivity=sensitivity_files,
    output:
        html=report(
            "results/{study}/tables/sensitivity-summary.html",
            caption="../../report/sensitivity-summary-table.rst",
            category="{study}",
            subcategory="Tables",
            labels={"table": "2 Sensitivity in numbers"},
        ),
        csv="results/{study}/tables/sensitivity-summary.csv",
    log:
        "logs/make_sensitivity_summary_table/{study}.log",
    params:
        sensitivity=repeated("--sensitivity", "sensitivity"),
        published=published_arguments,
        title=study_title,
        code=code("table"),
    message:
        "{wildcards.study}: make the table sensitivity-summary"
    shell:
        "python -m kvstages table sensitivity-summary {input.evaluations} {params.sensitivity} {params.published} --title {params.title:q} --output {output.html} 2> {log}"


rule make_adaptation_table:
    input:
        adapted=adapted_files("evaluation.json", by_policy=True),
        original=policy_files(adapted_policies, "evaluation.json"),
    output:
        html=report(
            "results/{study}/tables/adaptation.html",
            caption="../../report/adaptation-table.rst",
            category="{study}",
            subcategory="Tables",
            labels={"table": "3 Adaptation by arm and seed"},
        ),
        csv="results/{study}/tables/adaptation.csv",
    log:
        "logs/make_adaptation_table/{study}.log",
    params:
        original=repeated("--original", "original"),
        published=published_arguments,
        title=study_title,
        code=code("table"),
    message:
        "{wildcards.study}: make the table adaptation"
    shell:
        "python -m kvstages table adaptation {input.adapted} {params.original} {params.published} --title {params.title:q} --output {output.html} 2> {log}"
