"""The tables of a study, for people (HTML) and in full precision (CSV), each from the files that it shows.

One job makes all of a study's tables, and leaves those as they are that an edit does not concern.

Needs: the files that the tables' modules name as their inputs (kvstages/tables).
Makes: results/{study}/tables/{table}.html and .csv.
"""

for study in STUDIES.values():

    rule:
        name:
            f"make_tables_{study.identifier}"
        input:
            STUDIES.ask("table_inputs"),
        output:
            update(
                [
                    report(
                        f"results/{{study}}/tables/{table}.html",
                        caption=f"../../report/{table}-table.rst",
                        category="{study}",
                        subcategory="Tables",
                        labels={"table": TABLES[table].label},
                    )
                    for table in study.table_names
                    if shows(f"results/{study.name}/tables/{table}.html")
                ]
            ),
            update(
                [
                    f"results/{{study}}/tables/{table}{suffix}"
                    for table in study.table_names
                    for suffix in (".html", ".csv")
                    if suffix != ".html" or not shows(f"results/{study.name}/tables/{table}.html")
                ]
            ),
        log:
            "logs/make_tables/{study}.log",
        benchmark:
            "benchmarks/make_tables/{study}.tsv"
        wildcard_constraints:
            study=study.name,
        params:
            stages=several(STUDIES.ask("table_commands")),
            title=STUDIES.ask("title"),
            packages=[stage_packages("table", table) for table in study.table_names],
        message:
            "{wildcards.study}: make the tables"
        shell:
            "kvstages several {params.stages:q} 2> {log}"
