"""The tables of a study, for people (HTML) and in full precision (CSV), each from the files that it shows.

Needs: the files that the table's module names as its inputs (kvstages/tables).
Makes: results/{study}/tables/{table}.html and .csv.
"""

for table, entry in TABLES.items():

    rule:
        name:
            f"make_{table.replace('-', '_')}_table"
        input:
            STUDIES.ask("table_inputs", table),
        output:
            html=report(
                f"results/{{study}}/tables/{table}.html",
                caption=f"../../report/{table}-table.rst",
                category="{study}",
                subcategory="Tables",
                labels={"table": entry.label},
            ),
            csv=f"results/{{study}}/tables/{table}.csv",
        log:
            f"logs/make_table/{{study}}/{table}.log",
        params:
            name=lambda wildcards, output: Path(output.html).stem,
            inputs=STUDIES.ask("table_arguments", table),
            title=STUDIES.ask("title"),
            code=stage_digest("table", table),
            packages=stage_packages("table", table),
        message:
            "{wildcards.study}: make the table {params.name}"
        shell:
            "kvstages --code {params.code} table {params.name} {params.inputs:q} --title {params.title:q} --output {output.html} 2> {log}"
