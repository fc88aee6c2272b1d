"""The figures of a study, each from the files that it shows; the CSV beside each holds the plotted numbers.

One job draws all of a study's figures, and leaves those as they are that an edit does not concern.

Needs: the files that the figures' modules name as their inputs (kvstages/figures).
Makes: results/{study}/figures/{figure}.svg, .png and .csv.
"""

for study in STUDIES.values():

    rule:
        name:
            f"draw_figures_{study.identifier}"
        input:
            STUDIES.ask("figure_inputs"),
        output:
            update(
                [
                    report(
                        f"results/{{study}}/figures/{figure}.svg",
                        caption=f"../../report/{figure}.rst",
                        category="{study}",
                        subcategory="Figures",
                        labels={"figure": FIGURES[figure].label},
                    )
                    for figure in study.figure_names
                    if shows(f"results/{study.name}/figures/{figure}.svg")
                ]
            ),
            update(
                [
                    f"results/{{study}}/figures/{figure}{suffix}"
                    for figure in study.figure_names
                    for suffix in (".svg", ".png", ".csv")
                    if suffix != ".svg" or not shows(f"results/{study.name}/figures/{figure}.svg")
                ]
            ),
        log:
            "logs/draw_figures/{study}.log",
        benchmark:
            "benchmarks/draw_figures/{study}.tsv"
        wildcard_constraints:
            study=study.name,
        params:
            stages=several(STUDIES.ask("figure_commands")),
            packages=[stage_packages("figure", figure) for figure in study.figure_names],
        message:
            "{wildcards.study}: draw the figures"
        shell:
            "kvstages several {params.stages:q} 2> {log}"
