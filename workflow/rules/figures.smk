"""The figures of a study, each from the files that it shows; the CSV beside each holds the plotted numbers.

Needs: the files that the figure's module names as its inputs (kvstages/figures).
Makes: results/{study}/figures/{figure}.svg, .png and .csv.
"""

for figure, entry in FIGURES.items():

    rule:
        name:
            f"draw_{figure.replace('-', '_')}"
        input:
            STUDIES.ask("figure_inputs", figure),
        output:
            svg=report(
                f"results/{{study}}/figures/{figure}.svg",
                caption=f"../../report/{figure}.rst",
                category="{study}",
                subcategory="Figures",
                labels={"figure": entry.label},
            ),
            png=f"results/{{study}}/figures/{figure}.png",
            csv=f"results/{{study}}/figures/{figure}.csv",
        log:
            f"logs/draw_figure/{{study}}/{figure}.log",
        params:
            name=lambda wildcards, output: Path(output.svg).stem,
            inputs=STUDIES.ask("figure_arguments", figure),
            code=stage_digest("figure", figure),
            packages=stage_packages("figure", figure),
        message:
            "{wildcards.study}: draw the figure {params.name}"
        shell:
            "kvstages --code {params.code} figure {params.name} {params.inputs} --output {output.svg} 2> {log}"
