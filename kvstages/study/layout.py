"""Class ``Study``: everything that the rule files ask about a study, and the jobs of several studies.

The rule files hold patterns of paths and shell commands; whatever depends on a study's configuration they ask here. A
study is built up in three steps: what there is in it (``contents``), where its files are (``paths``), and what its
stages are told (``arguments``). Here are what it shows and what it makes in all: figures and tables name their inputs
by properties that end in ``_files`` (kvstages/analysis/entries.py), and a study has those whose inputs it has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from kvstages.analysis.entries import Entry
from kvstages.study.arguments import Arguments, once, options_of
from kvstages.study.paths import ALLOCATION_FILES, EVALUATION_FILES

FIGURE_SUFFIXES = (".svg", ".png", ".csv")
TABLE_SUFFIXES = (".html", ".csv")
ADAPTED_FILES = ("model.safetensors", "curve.csv", "training.json")


@dataclass(frozen=True)
class Study(Arguments):
    """One study: ``settings`` are those of its file in config/studies, ``shared`` those of config/config.yaml.

    ``figures`` and ``tables`` are all that there are; which of them this study has, ``figure_names`` and
    ``table_names`` say.
    """

    figures: Mapping[str, Entry] = field(default_factory=dict)
    tables: Mapping[str, Entry] = field(default_factory=dict)

    @property
    def figure_names(self) -> list[str]:
        """The figures whose inputs the study has."""
        return [name for name, entry in self.figures.items() if self.has(entry)]

    @property
    def table_names(self) -> list[str]:
        """The tables whose inputs the study has."""
        return [name for name, entry in self.tables.items() if self.has(entry)]

    @property
    def figure_files(self) -> list[str]:
        """Every figure of the study, with its plotted numbers."""
        return self.result(*(f"figures/{name}{suffix}" for name in self.figure_names for suffix in FIGURE_SUFFIXES))

    @property
    def table_files(self) -> list[str]:
        """Every table of the study, for people and for programs."""
        return self.result(*(f"tables/{name}{suffix}" for name in self.table_names for suffix in TABLE_SUFFIXES))

    @property
    def output_files(self) -> list[str]:
        """Every result but the manifest: the outputs of all stages, not only of the last."""
        return [
            *self.result("windows.safetensors", "windows.csv"),
            *self.reference_files,
            *(path for dtype in self.sweep_dtypes for path in self.sweep_files(dtype)),
            *self.sample_files,
            *self.score_files,
            *self.sample_score_files,
            *self.projection_files,
            *(self.result("calibration.safetensors") if self.calibrates else []),
            *(path for name in ALLOCATION_FILES + EVALUATION_FILES for path in self.files_of(self.policies, name)),
            *self.result(*(f"{folder}/{name}" for folder in self.adapted_folders for name in ADAPTED_FILES)),
            *self.adapted_evaluation_files,
            *self.grid_files,
            *self.comparison_output_files,
            *self.screening_output_files,
            *self.export_output_files,
            *self.domain_output_files,
            *self.continuation_files,
            *self.figure_files,
            *self.table_files,
        ]

    @property
    def all_files(self) -> list[str]:
        """Everything that the workflow makes of the study."""
        return [*self.input_files, *self.output_files, *self.manifest_files, *self.time_files]

    @property
    def report_files(self) -> list[str]:
        """The files that the report shows."""
        files = (*self.figure_files, *self.table_files, *self.time_files)
        return [path for path in files if path.endswith((".svg", ".html"))]

    def files(self, name: str) -> list[str]:
        """The files of the property ``name``, as an entry of a figure or table calls them."""
        return getattr(self, name)

    def has(self, entry: Entry) -> bool:
        """Whether the study has every file that a figure or table is made of."""
        return all(self.files(given.files) for given in entry.inputs.values())

    def entry_files(self, entry: Entry) -> list[str]:
        """The files that a figure or table reads."""
        names = [*(given.files for given in entry.inputs.values()), *entry.beside]
        return [path for name in names for path in self.files(name)]

    def entry_arguments(self, entry: Entry) -> list[str]:
        """The inputs of a figure or table, as arguments of its command."""
        (_, first), *others = entry.inputs.items()
        options = [options_of(f"--{word.replace('_', '-')}", self.files(given.files)) for word, given in others]
        return [*self.files(first.files), *(word for option in options for word in option)]

    @property
    def figure_inputs(self) -> list[str]:
        """What the study's figures read."""
        return once(path for name in self.figure_names for path in self.entry_files(self.figures[name]))

    @property
    def figure_commands(self) -> list[list[str]]:
        """The stages that draw the study's figures."""
        return [
            ["figure", name, *self.figure_arguments(name), "--output", *self.result(f"figures/{name}.svg")]
            for name in self.figure_names
        ]

    def figure_arguments(self, figure: str) -> list[str]:
        """The inputs of a figure, as arguments of ``figure``."""
        return self.entry_arguments(self.figures[figure])

    @property
    def table_inputs(self) -> list[str]:
        """What the study's tables read: the files that they name as inputs, and published figures."""
        files = [path for name in self.table_names for path in self.entry_files(self.tables[name])]
        shows = any(self.tables[name].published for name in self.table_names)
        return once([*files, *(self.published_files if shows else [])])

    @property
    def table_commands(self) -> list[list[str]]:
        """The stages that make the study's tables."""
        return [
            [
                *("table", name, *self.table_arguments(name), "--title", self.title),
                *("--output", *self.result(f"tables/{name}.html")),
            ]
            for name in self.table_names
        ]

    def table_arguments(self, table: str) -> list[str]:
        """The inputs of a table, and the published figures that the study repeats, as arguments of ``table``."""
        entry, published = self.tables[table], self.settings.get("published")
        more = ["--published", published] if entry.published and published else []
        return [*self.entry_arguments(entry), *more]

    def made_arguments(self, rules: Iterable[Producer]) -> list[str]:
        """Everything else that rules made, each with its rule, as arguments of ``manifest``."""
        pinned = {file.lies(self.name) for file in self.pinned}
        made = [path for path in (*self.input_files, *self.output_files) if path not in pinned]
        rules = list(rules)
        return [f"{next(rule.name for rule in rules if rule.is_producer(path))}={path}" for path in made]


class Producer(Protocol):
    """A rule of the workflow, as Snakemake has it."""

    name: str

    def is_producer(self, path: str) -> bool: ...


@dataclass(frozen=True)
class Job:
    """A rule whose job does several runs, each of which is named by the values of some wildcards.

    ``studies`` is a pattern of the studies that the rule is for; ``place`` ends the paths of its logs, before .log.
    """

    name: str
    studies: str
    runs: Sequence[Sequence[str]]
    place: str


class Studies(dict[str, Study]):
    """The studies by name, with the functions that rules call."""

    def ask(self, question: str, *about: Any, wildcards: str = "") -> Callable[[Any], Any]:
        """An input or params function: what the job's study answers to ``question``, a property or method of ``Study``.

        A method gets ``about``, with the job's wildcards filled in, and the values of the ``wildcards`` that are named,
        with spaces between.
        """

        def answer(given: Any) -> Any:
            found = getattr(self[given.study], question)
            if not callable(found):
                return found
            return found(*(filled(value, given) for value in about), *(given[name] for name in wildcards.split()))

        return answer

    def pattern(self, question: str) -> str:
        """A pattern of the studies that answer yes to ``question``; one that nothing matches where none does."""
        return "|".join(re.escape(name) for name, study in self.items() if getattr(study, question)) or "(?!)"

    def jobs(self, rule: str, question: str, wildcards: str, apart: str = "") -> list[Job]:
        """The rules that do the runs which each study answers to ``question``, as many a job as is configured.

        One a job: one rule for all studies, whose runs are named by ``wildcards``. Else rules of each study, for what a
        job makes is written into the rule. A study that answers yes to ``apart`` has long runs, and one in each job, so
        that cores share them.
        """
        jobs = []
        for study in self.values():
            most = study.shared["runs_a_job"]
            if most == 1:
                each = tuple(f"{{{name}}}" for name in wildcards.split())
                return [Job(rule, "|".join(map(re.escape, self)), [each], "/" + "/".join(each))]
            most = 1 if apart and getattr(study, apart) else most
            runs = getattr(study, question)
            parts = [runs[start : start + most] for start in range(0, len(runs), most)]
            for number, part in enumerate(parts):
                name, several = f"{rule}_{study.identifier}", len(parts) > 1
                place = f"/{number}" if several else ""
                jobs.append(Job(f"{name}.{number}" if several else name, re.escape(study.name), part, place))
        return jobs


def filled(value: Any, wildcards: Any) -> Any:
    """A text, or texts in lists, with the values of wildcards in the place of their names in braces."""
    if isinstance(value, str):
        return value.format_map(wildcards)
    return [filled(part, wildcards) for part in value] if isinstance(value, list | tuple) else value
