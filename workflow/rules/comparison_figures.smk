"""Figures and tables of the floor and of the comparison, each from the files that it shows.

Needs: results/{study}/scores/{source}.csv, results/{study}/comparison/{budget}/joint.csv and policy-set.json,
results/{study}/frontier/joint.csv.
Makes: results/{study}/figures/{figure}.svg, .png and .csv; results/{study}/tables/{table}.html and .csv.
"""


rule draw_floor:
    input:
        sensitivities=measured_files,
    output:
        svg=report(
            "results/{study}/figures/floor.svg",
            caption="../../report/floor.rst",
            category="{study}",
            subcategory="Figures",
            labels={"figure": "9 Scores and their floor"},
        ),
        png="results/{study}/figures/floor.png",
        csv="results/{study}/figures/floor.csv",
    log:
        "logs/draw_floor/{study}.log",
    params:
        code=code("figure"),
    message:
        "{wildcards.study}: draw the figure floor"
    shell:
        "python -m kvstages figure floor {input.sensitivities} --output {output.svg} 2> {log}"


rule draw_equal_bytes:
    input:
        comparisons=comparison_tables,
        candidates=comparison_candidates,
    output:
        svg=report(
            "results/{study}/figures/equal-bytes.svg",
            caption="../../report/equal-bytes.rst",
            category="{study}",
            subcategory="Figures",
            labels={"figure": "10 Recipes at equal bytes"},
        ),
        png="results/{study}/figures/equal-bytes.png",
        csv="results/{study}/figures/equal-bytes.csv",
    log:
        "logs/draw_equal_bytes/{study}.log",
    params:
        code=code("figure"),
    message:
        "{wildcards.study}: draw the figure equal-bytes"
    shell:
        "python -m kvstages figure equal-bytes {input.comparisons} --output {output.svg} 2> {log}"


rule draw_frontier:
    input:
        frontier="results/{study}/frontier/joint.csv",
    output:
        svg=report(
            "results/{study}/figures/frontier.svg",
            caption="../../report/frontier.rst",
            category="{study}",
            subcategory="Figures",
            labels={"figure": "11 Frontier"},
        ),
        png="results/{study}/figures/frontier.png",
        csv="results/{study}/figures/frontier.csv",
    log:
        "logs/draw_frontier/{study}.log",
    params:
        code=code("figure"),
    message:
        "{wildcards.study}: draw the figure frontier"
    shell:
        "python -m kvstages figure frontier {input.frontier} --output {output.svg} 2> {log}"


rule draw_proxy_joint:
    input:
        comparisons=comparison_tables,
        frontier="results/{study}/frontier/joint.csv",
    output:
        svg=report(
            "results/{study}/figures/proxy-joint.svg",
            caption="../../report/proxy-joint.rst",
            category="{study}",
            subcategory="Figures",
            labels={"figure": "12 Proxy against joint KL"},
        ),
        png="results/{study}/figures/proxy-joint.png",
        csv="results/{study}/figures/proxy-joint.csv",
    log:
        "logs/draw_proxy_joint/{study}.log",
    params:
        code=code("figure"),
    message:
        "{wildcards.study}: draw the figure proxy-joint"
    shell:
        "python -m kvstages figure proxy-joint {input.comparisons} {input.frontier} --output {output.svg} 2> {log}"


rule make_equal_bytes_table:
    input:
        comparisons=comparison_tables,
        candidates=comparison_candidates,
    output:
        html=report(
            "results/{study}/tables/equal-bytes.html",
            caption="../../report/equal-bytes-table.rst",
            category="{study}",
            subcategory="Tables",
            labels={"table": "5 Recipes at equal bytes"},
        ),
        csv="results/{study}/tables/equal-bytes.csv",
    log:
        "logs/make_equal_bytes_table/{study}.log",
    params:
        title=study_title,
        code=code("table"),
    message:
        "{wildcards.study}: make the table equal-bytes"
    shell:
        "python -m kvstages table equal-bytes {input.comparisons} --title {params.title:q} --output {output.html} 2> {log}"


rule make_frontier_table:
    input:
        frontier="results/{study}/frontier/joint.csv",
    output:
        html=report(
            "results/{study}/tables/frontier.html",
            caption="../../report/frontier-table.rst",
            category="{study}",
            subcategory="Tables",
            labels={"table": "6 Frontier"},
        ),
        csv="results/{study}/tables/frontier.csv",
    log:
        "logs/make_frontier_table/{study}.log",
    params:
        title=study_title,
        code=code("table"),
    message:
        "{wildcards.study}: make the table frontier"
    shell:
        "python -m kvstages table frontier {input.frontier} --title {params.title:q} --output {output.html} 2> {log}"


rule make_proxy_joint_table:
    input:
        comparisons=comparison_tables,
        frontier="results/{study}/frontier/joint.csv",
    output:
        html=report(
            "results/{study}/tables/proxy-joint.html",
            caption="../../report/proxy-joint-table.rst",
            category="{study}",
            subcategory="Tables",
            labels={"table": "7 Proxy against joint KL"},
        ),
        csv="results/{study}/tables/proxy-joint.csv",
    log:
        "logs/make_proxy_joint_table/{study}.log",
    params:
        title=study_title,
        code=code("table"),
    message:
        "{wildcards.study}: make the table proxy-joint"
    shell:
        "python -m kvstages table proxy-joint {input.comparisons} {input.frontier} --title {params.title:q} --output {output.html} 2> {log}"
