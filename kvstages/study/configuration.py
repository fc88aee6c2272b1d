"""Checks of a whole configuration, in plain Python, because a schema cannot give each error in one line.

``config/config.yaml`` holds what all studies share (``check_shared``), ``config/studies/STUDY.yaml`` one study
(``load_study``, ``check_study``). config/README.md explains the keys. Imports neither torch nor snakemake, so that the
Snakefile can check before anything runs.

A budget names the folder of its policy by ``str(budget)``: what YAML reads as a number is written in its shortest
form, so 0.10 in the file gives ``greedy-0.1`` and 1e-3 gives ``greedy-0.001``.
"""

from __future__ import annotations

import difflib
import itertools
import math
import re
import sys
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from kvstages.analysis.published import SHIPPED, published_folder
from kvstages.cache import schemes
from kvstages.cache.precision_grid import UNITS
from kvstages.cache.precisions import QUANTIZED, by_size
from kvstages.policies.budgets import BITS, BYTES
from kvstages.policies.names import ALLOCATORS, AT_RANDOM, BUDGET, ENGINES, POLICY, policy_name, split_policy
from kvstages.policies.recipes import parse_recipe
from kvstages.study import arms
from kvstages.study.artifacts import HUGGINGFACE_SOURCES, check_artifact, check_inside
from kvstages.study.pinned import DOCUMENTS, FILES, GGUF, is_gguf, pinned_files
from kvstages.study.texts import names_of
from kvstages.study.windows import LENGTHS, SMALLEST_BLOCK, check_names, check_windows, window_of

SHARED = "config/config.yaml"
NAME = r"[a-z0-9][a-z0-9-]*"
# Folders of resources/, and of benchmarks/, that belong to no study.
RESERVED = ("bundled", "bundled-model", "results")
DEVICES = ("auto", "cpu", "cuda")
EXECUTIONS = ("one-pass", "token-by-token")
# What a study's policies come from: single-unit KL, or gradients (see ``gradients``).
SENSITIVITIES = ("measured", "gradients")
DTYPES = ("float32", "bfloat16", "float64")
WINDOWS = ("calibration", "adaptation", "reserved", "validation")
# Windows that every study has; the others serve the adaptation.
MEASURED_WINDOWS = ("calibration", "validation")
# Windows of every domain.
DOMAIN_WINDOWS = ("calibration", "validation")
FAMILIES = ("huggingface",)
# Where files of gpt2-nano come from.
SOURCES = ("bundled", "hub", "local")
ARM = r"[a-z][a-z0-9-]*"
# Importing torch alone takes about 220 MB.
LEAST_MEMORY_MB = 256
# What torch.manual_seed takes without wrapping round.
SEEDS = range(2**63)
# Beyond these a number is a slip: tokens, steps, blocks, megabytes; layers (each is a job); threads.
LARGEST = 10**9
MOST_LAYERS = MOST_HEADS = 10**4
MOST_THREADS = 4096
# The command line of a job has to fit into 128 KiB.
MOST_RUNS = 100
LONGEST_SHOWN = 60
LONGEST_NUMBER = 200  # bits

Check = Callable[[str, Any], None]


def check_shared(config: Mapping[str, Any]) -> None:
    """Check what all studies share; ValueError names the file, the key, what was found and what was expected."""
    try:
        keys(
            config,
            "",
            {
                "studies": studies,
                "device": one_of(DEVICES),
                "threads": whole(1, "a number of CPU threads", MOST_THREADS),
                "runs_a_job": whole(1, "sweeps, or adapted models, of one job", MOST_RUNS),
                "memory_mb": whole(LEAST_MEMORY_MB, "megabytes"),
                "container": image,
            },
        )
    except ValueError as error:
        raise ValueError(f"{SHARED}: {error}") from error


def check_study(name: str, study: Mapping[str, Any]) -> None:
    """Check one study; ValueError names its file, the key, what was found and what was expected."""
    study_name("config/studies", name)
    huggingface = isinstance(study, Mapping) and "model" in study
    try:
        keys(
            study,
            "",
            {
                "title": title,
                "layers": whole(1, "layers of the decoder", MOST_LAYERS),
                **(HUGGINGFACE_KEYS if huggingface else {"artifacts": artifacts}),
                "block": whole(SMALLEST_BLOCK, "tokens"),
                "windows": windows(MEASURED_WINDOWS if huggingface else WINDOWS),
                "execution": one_of(EXECUTIONS),
                "compute_dtype": one_of(DTYPES),
                "sensitivity": one_of(SENSITIVITIES),
                "probes": whole(1, "backward passes of the scores from gradients"),
                "unit": one_of(UNITS),
                "precisions": precisions,
                "allocators": allocators,
                "budgets": budgets,
                **({} if huggingface else {"adaptation": adaptation}),
            },
            {
                "comparison": comparison,
                "screening": screening,
                "export": export,
                "generation": generation,
                "domains": domains,
                **(
                    {"sample": whole(1, "heads whose scores are measured")} if huggingface else {"published": published}
                ),
            },
        )
        check_windows({name: window_of(value) for name, value in study["windows"].items()}, study["block"])
        drawn = [name for name, value in study["windows"].items() if isinstance(value, Mapping)]
        if huggingface:
            check_huggingface(study, drawn)
        else:
            if drawn and DOCUMENTS not in study["artifacts"]["files"]:
                raise ValueError(
                    f"windows.{drawn[0]}: drawn from documents, but artifacts.files.{DOCUMENTS} is missing"
                )
            check_adapted_policies(study)
        check_exported_policy(study)
        check_generation(study)
        check_domains(study)
    except ValueError as error:
        raise ValueError(f"{study_file(name)}: {error}") from error


def check_huggingface(study: Mapping[str, Any], drawn: Iterable[str]) -> None:
    """ValueError where keys of a study of a Hugging Face model do not go together."""
    stretches = [name for name in study["windows"] if name not in drawn]
    if stretches:
        raise ValueError(
            f"windows.{stretches[0]}: a list, expected documents, blocks and seed: texts have no positions"
        )
    if "sample" in study and study["sensitivity"] == "measured":
        raise ValueError("sample: every score is measured; take sensitivity gradients, or leave sample out")
    places: dict[str, str] = {}
    for file in pinned_files("study", study):
        try:
            check_artifact(file.source, file.location, file.revision, file.path, file.sha256, file.version)
        except ValueError as error:
            raise ValueError(f"{file.artifact} ({file.path}): {error}") from None
        if places.setdefault(file.lies("study"), file.path) != file.path:
            raise ValueError(f"files {places[file.lies('study')]} and {file.path}: the same file name, expected two")
    if is_gguf(study["model"]):
        if len(study["model"]["files"]) > 1:
            raise ValueError("model.files: a GGUF file among others, expected it alone")
    elif "config.json" not in {PurePosixPath(file["path"]).name for file in study["model"]["files"]}:
        raise ValueError(f"model.files: no config.json, expected a model's folder, or one file that ends in {GGUF}")


def check_adapted_policies(study: Mapping[str, Any]) -> None:
    """ValueError unless the policies of the adaptation are uniform or the study's own, and those that arms quantize by
    are measured."""
    allocated = [policy_name(*pair) for pair in itertools.product(study["allocators"], study["budgets"])]
    settings = study["adaptation"]
    used = {f"adaptation.policies[{index}]": policy for index, policy in enumerate(settings["policies"])}
    for name, arm in settings["arms"].items():
        found = arms.cache_of(arm)
        if found is None:
            continue
        where = f"adaptation.arms.{name}.{found[0]}"
        used[where] = found[1]
        if found[1] not in settings["policies"]:
            raise ValueError(f"{where}: {found[1]}, expected one of adaptation.policies, so that it is measured")
        if found[0] == "noise" and split_policy(found[1])[1] is None and found[1] not in QUANTIZED:
            raise ValueError(f"{where}: {found[1]}, expected one of {', '.join(QUANTIZED)} or an allocated policy")
    for where, policy in used.items():
        if split_policy(policy)[1] is not None and policy not in allocated:
            raise ValueError(f"{where}: {policy}, expected a precision or one of {', '.join(allocated)}")
        if split_policy(policy)[1] is None:
            precision(where, policy)


def check_exported_policy(study: Mapping[str, Any]) -> None:
    """ValueError unless the policy that engines are to run is one that an allocator of the study makes."""
    if "export" in study:
        allocated = [policy_name(*pair) for pair in itertools.product(study["allocators"], study["budgets"])]
        policy = study["export"]["policy"]
        if policy not in allocated:
            raise ValueError(f"export.policy: {policy}, expected an allocated one: {', '.join(allocated)}")


def check_generation(study: Mapping[str, Any]) -> None:
    """ValueError unless the validation window has the prompts, and its blocks room for a prompt and what follows."""
    if "generation" not in study:
        return
    settings, window = study["generation"], study["windows"]["validation"]
    drawn = isinstance(window, Mapping)
    block = window.get("block", study["block"]) if drawn else study["block"]
    blocks = window["blocks"] if drawn else (window[1] - window[0]) // block
    for name, most, what in (
        ("prompts", blocks, "blocks of the validation window"),
        ("tokens", block - 1, "tokens, so that one of a block is left for the prompt"),
        ("prompt", block - settings["tokens"], "tokens of a block, less those that follow"),
    ):
        if name in settings and settings[name] > most:
            raise ValueError(f"generation.{name}: {settings[name]}, expected at most {most} ({what})")


def check_domains(study: Mapping[str, Any]) -> None:
    """ValueError unless the lengths of domains come out of the longest one, and their texts are documents."""
    if "domains" not in study:
        return
    settings = study["domains"]
    longest = max(settings["lengths"])
    for index, length in enumerate(settings["lengths"]):
        if longest % length:
            raise ValueError(f"{LENGTHS}[{index}]: {length}, expected a divisor of the longest, {longest}")
    check_windows({f"domains.{name}": window_of(settings[name]) for name in DOMAIN_WINDOWS}, longest)
    if "artifacts" in study:
        if DOCUMENTS not in study["artifacts"]["files"]:
            raise ValueError(f"domains: drawn from documents, but artifacts.files.{DOCUMENTS} is missing")
        return
    files = [PurePosixPath(file["path"]).name for file in study["text"]["files"]]
    known = [name for file in files for name in names_of(file, study["text"].get("parts", 1))]
    for name, patterns in settings["texts"].items():
        try:
            check_names(known, patterns)
        except ValueError as error:
            raise ValueError(f"domains.texts.{name}: {error}") from None


def study_file(name: str) -> str:
    """Path of a study's configuration."""
    return f"config/studies/{name}.yaml"


class StudyLoader(yaml.SafeLoader):
    """YAML without repeated keys, and with 1e-6 read as a number (YAML 1.1 would have it a text)."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[str, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    problem=f"key {key.value} appears again (first in line {seen[key.value]})",
                    problem_mark=key.start_mark,
                )
            seen[key.value] = key.start_mark.line + 1
        return super().construct_mapping(node, deep)


StudyLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?[0-9]+(?:\.[0-9]*)?[eE][-+]?[0-9]+$"), list("-+0123456789")
)


def load_studies(folder: Path, asked: Iterable[str]) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The checked studies of a folder by name, and what is wrong with each other file there, a line each.

    A file whose name opens with a dot is an editor's or a file system's, and no study. ValueError if one that is asked
    for is missing or wrong.
    """
    studies: dict[str, dict[str, Any]] = {}
    wrong: dict[str, str] = {}
    for path in sorted(folder.glob("[!.]*.yaml")):
        try:
            study = load_study(path)
            check_study(path.stem, study)
        except ValueError as error:
            wrong[path.stem] = str(error)
        else:
            studies[path.stem] = study
    for name in asked:
        if name in wrong:
            raise ValueError(wrong[name])
        if name not in studies:
            known = ", ".join(studies)
            raise ValueError(f"{SHARED}: studies: no file {study_file(name)}; there are: {known}")
    return studies, list(wrong.values())


def load_study(path: Path) -> dict[str, Any]:
    """The mapping in a study's YAML file, unchecked; ValueError names the file and line of a mistake in the YAML."""
    try:
        study = yaml.load(Path(path).read_text(encoding="utf-8"), StudyLoader)
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror})") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = "" if mark is None else f"line {mark.line + 1}: "
        raise ValueError(f"{path}: {where}{error.problem or error.context}") from error
    except RecursionError:
        raise ValueError(f"{path}: not a study (nested too deep)") from None
    except (yaml.YAMLError, ValueError, AttributeError, TypeError) as error:  # PyYAML fails on odd dates and numbers
        raise ValueError(f"{path}: not a YAML file ({error})") from error
    if not isinstance(study, dict):
        raise ValueError(f"{path}: holds {kind(study)}, expected keys and values")
    return study


# Checks of one value. Each gets the value's key as a user would write it (artifacts.files.shard.path, budgets[1]).


def keys(value: Any, where: str, required: Mapping[str, Check], optional: Mapping[str, Check] | None = None) -> None:
    """Check a mapping: no unknown key, no missing one, and each value by its own check."""
    known = {**required, **(optional or {})}
    if not isinstance(value, Mapping):
        raise ValueError(f"{where + ': ' if where else ''}{kind(value)}, expected the keys {', '.join(known)}")
    for key in value:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {near[0]}?" if near else f"expected one of {', '.join(known)}"
            raise ValueError(f"{join(where, key)}: unknown key; {hint}")
    for key in required:
        if key not in value:
            raise ValueError(f"{join(where, key)}: missing")
    for key in value:
        known[key](join(where, key), value[key])


def join(where: str, key: Any) -> str:
    return f"{where}.{key}" if where else str(key)


def kind(value: Any) -> str:
    """A value's kind in the words of YAML."""
    for types, word in ((type(None), "nothing"), (bool, "true or false"), ((list, tuple), "a list"), (Mapping, "keys")):
        if isinstance(value, types):
            return word
    return f"the text {shown(value)}" if isinstance(value, str) else shown(value)


def shown(value: Any) -> str:
    """A value as Python writes it, cut short; Python refuses to write a number of thousands of digits."""
    if isinstance(value, int) and value.bit_length() > LONGEST_NUMBER:
        return "a number of more than 60 digits"
    text = repr(value)
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."


def text(where: str, value: Any) -> None:
    """A text that is not empty."""
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where}: {kind(value)}, expected a text")


def title(where: str, value: Any) -> None:
    """A text in one line; every letter and sign is shown as it is typed."""
    text(where, value)
    for letter in value:
        if unicodedata.category(letter) in ("Cc", "Cs", "Zl", "Zp"):
            raise ValueError(f"{where}: {kind(value)} holds a control character or line end, expected one line of text")


def image(where: str, value: Any) -> None:
    """An image without a password: the configuration is kept beside the results."""
    text(where, value)
    if re.search(r"://[^/]*@", value):
        raise ValueError(f"{where}: holds a user name or password (it is not shown), expected an image alone")


def one_of(choices: Iterable[str]) -> Check:
    """One of several words."""

    def check(where: str, value: Any) -> None:
        if not isinstance(value, str) or value not in choices:
            raise ValueError(f"{where}: {kind(value)}, expected one of {', '.join(choices)}")

    return check


def whole(least: int, unit: str, most: int = LARGEST) -> Check:
    """A whole number from ``least`` to ``most``."""

    def check(where: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int):
            raise ValueError(f"{where}: {kind(value)}, expected a whole number ({unit})")
        if value < least:
            raise ValueError(f"{where}: {shown(value)}, expected at least {least} ({unit})")
        if value > most:
            raise ValueError(f"{where}: {shown(value)}, expected at most {most} ({unit})")

    return check


def finite(value: float) -> bool:
    """Whether a number is one that floating point can hold."""
    return abs(value) <= sys.float_info.max


def number(positive: bool) -> Check:
    """A finite number, above 0 or of 0 or more."""

    def check(where: str, value: Any) -> None:
        expected = "a number above 0" if positive else "a number of 0 or more"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ValueError(f"{where}: {kind(value)}, expected {expected}")
        if not finite(value) or value < 0 or (positive and value == 0):
            raise ValueError(f"{where}: {shown(value)}, expected {expected}")

    return check


def each(where: str, value: Any, check: Check, what: str) -> None:
    """A list that is not empty, without repeated entries, each entry by its own check."""
    if not isinstance(value, list | tuple):
        raise ValueError(f"{where}: {kind(value)}, expected a list of {what}")
    if not value:
        raise ValueError(f"{where}: empty, expected at least one of {what}")
    for index, entry in enumerate(value):
        check(f"{where}[{index}]", entry)
        if entry in value[:index]:
            raise ValueError(f"{where}[{index}]: {entry} repeats {where}[{value.index(entry)}]")


def study_name(where: str, value: Any) -> None:
    """A name of a study: that of its file, and of its folders of inputs and results."""
    if not isinstance(value, str) or not re.fullmatch(NAME, value):
        raise ValueError(f"{where}: {kind(value)}, expected a name of lower-case letters, digits and hyphens")
    if value in RESERVED:
        raise ValueError(f"{where}: {kind(value)}, a name that a folder of the workflow has already")


def studies(where: str, value: Any) -> None:
    """Names of the studies to run."""
    each(where, value, study_name, "names of files in config/studies")


def artifacts(where: str, value: Any) -> None:
    """Where the two pinned files come from, and their checksums; what belongs together is checked as for a fetch."""
    required = {
        "source": one_of(SOURCES),
        "location": text,
        "files": lambda where, value: keys(value, where, dict.fromkeys(FILES, pinned_file), {DOCUMENTS: pinned_file}),
    }
    revision = {"revision": digits(40)}
    hub = isinstance(value, Mapping) and value.get("source") == "hub"
    keys(value, where, required | revision if hub else required, revision)
    for name, pinned in value["files"].items():
        try:
            check_artifact(value["source"], value["location"], value.get("revision"), pinned["path"], pinned["sha256"])
        except ValueError as error:
            raise ValueError(f"{where} ({name}): {error}") from error
    checkpoint = value["files"]["checkpoint"]["path"]
    if not checkpoint.endswith((".pt", ".safetensors")):
        raise ValueError(f"{where}.files.checkpoint.path: {checkpoint}, expected a .pt or .safetensors file")


def digits(count: int) -> Check:
    """A checksum or commit of so many hexadecimal digits."""

    def check(where: str, value: Any) -> None:
        if not isinstance(value, str) or not re.fullmatch(rf"[0-9a-f]{{{count}}}", value):
            raise ValueError(f"{where}: {kind(value)}, expected a text of {count} lower-case hexadecimal digits")

    return check


def huggingface_model(where: str, value: Any) -> None:
    """A model of Hugging Face's: family, source and pinned files."""
    source_keys(where, value, {"family": one_of(FAMILIES)})


def texts(where: str, value: Any) -> None:
    """Text files: source, pinned files, and how many documents each is cut into."""
    source_keys(where, value, {}, {"parts": whole(1, "documents of each file", MOST_LAYERS)})


def source_keys(
    where: str, value: Any, required: Mapping[str, Check], optional: Mapping[str, Check] | None = None
) -> None:
    """Where files come from, and each file's path and sha256; a hub needs a revision, a package a version and wheel."""
    pins: dict[str, dict[str, Check]] = {
        "hub": {"revision": digits(40)},
        "package": {"version": text, "wheel": pinned_file},
    }
    source = value.get("source") if isinstance(value, Mapping) else None
    keys(
        value,
        where,
        {
            **required,
            "source": one_of(HUGGINGFACE_SOURCES),
            "location": text,
            **pins.get(source, {}),
            "files": lambda where, value: each(where, value, pinned_file, "files, each with its path and sha256"),
        },
        optional,
    )


def pinned_file(where: str, value: Any) -> None:
    """A file's path at its source and its checksum."""
    keys(value, where, {"path": text, "sha256": digits(64)})


def windows(required: Iterable[str]) -> Check:
    """Windows, each a start and an end, or blocks drawn from documents; what they hold is checked with the block."""

    def window(where: str, value: Any) -> None:
        if isinstance(value, Mapping):
            drawn_window(where, value, {"block": whole(SMALLEST_BLOCK, "tokens")})
            return
        if not isinstance(value, list | tuple) or len(value) != 2:
            raise ValueError(
                f"{where}: {kind(value)}, expected [start, end] in token positions, or documents, blocks and seed"
            )
        for index, position in enumerate(value):
            whole(0, "a token position")(f"{where}[{index}]", position)

    return lambda where, value: keys(value, where, dict.fromkeys(required, window))


def drawn_window(where: str, value: Any, optional: Mapping[str, Check] | None = None) -> None:
    """A window that is drawn from documents."""
    counts = {name: whole(1, f"{name} of the window") for name in ("documents", "blocks")}
    keys(value, where, counts | {"seed": whole(0, "a seed")}, optional)


def precisions(where: str, value: Any) -> None:
    """Quantized precisions, most bytes first: the rungs below BF16."""
    each(where, value, precision, "precisions")
    ladder = by_size(value)
    if list(value) != ladder:
        raise ValueError(f"{where}: {', '.join(value)}; expected them from most bytes to fewest: {', '.join(ladder)}")


def precision(where: str, value: Any) -> None:
    """A quantized precision, of the published quantizer or another scheme."""
    if not isinstance(value, str):
        raise ValueError(f"{where}: {kind(value)}, expected a precision such as int8 or centred4")
    try:
        schemes.precision(value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def allocators(where: str, value: Any) -> None:
    """Allocators, each of which makes a policy of every budget."""
    each(where, value, one_of(ALLOCATORS), "allocators")


def published(where: str, value: Any) -> None:
    """Published figures that are there: those that ship with the project, or a folder below the working directory."""
    text(where, value)
    if "<" in value:  # it is a parameter of rules, which Snakemake writes into a script of the report
        raise ValueError(f"{where}: {kind(value)}, expected a folder without < in its path")
    try:
        if published_folder(value).parent != SHIPPED:
            check_inside("folder", value)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from error


def budgets(where: str, value: Any) -> None:
    """Limits on the KL proxy in nats, on a cache's bytes (400000B), or on its bits an element (4.25bits); each once as
    a number, whatever its text."""

    def budget(where: str, value: Any) -> None:
        if isinstance(value, str) and re.fullmatch(rf"{BYTES}|{BITS}", value):
            return
        nats(where, value)

    each(where, value, budget, "budgets: nats of KL, bytes such as 400000B, or bits an element such as 4.25bits")


def nats(where: str, value: Any) -> None:
    """A KL budget in nats, as it names a folder."""
    expected = "expected a KL budget of 0 or more, in nats"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{where}: {kind(value)} is not a number; {expected}")
    if not finite(value):
        raise ValueError(f"{where}: {shown(value)} is not finite; {expected}")
    if value < 0:
        raise ValueError(f"{where}: {shown(value)} is negative; {expected}")
    if not re.fullmatch(BUDGET, str(value)):  # -0.0
        raise ValueError(f"{where}: {shown(value)} does not name a folder; {expected}")


def comparison(where: str, value: Any) -> None:
    """Allocators, units and precisions at equal bytes, the frontier, and how the proxy compares with the joint KL."""
    keys(
        value,
        where,
        {
            "budgets": budgets,
            "precisions": precisions,
            "random": whole(1, "random policies to measure at each budget"),
            "draws": whole(1, "random policies to draw at each budget for their proxies"),
            "frontier": whole(2, "byte totals of the frontier"),
        },
        {"recipes": recipes},
    )


def recipes(where: str, value: Any) -> None:
    """Further recipes of a comparison, each NAME=ALLOCATOR:SOURCE:UNIT:PRECISIONS."""

    def recipe(where: str, value: Any) -> None:
        text(where, value)
        try:
            found = parse_recipe(value)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        precisions(where, found.precisions)
        if found.allocator == AT_RANDOM:
            raise ValueError(f"{where}: random policies are in every comparison; expected another allocator")

    each(where, value, recipe, "recipes, NAME=ALLOCATOR:SOURCE:UNIT:PRECISIONS")


def screening(where: str, value: Any) -> None:
    """Quantizer schemes beside each other, and the recommended recipe at some budgets."""

    def some_bits(where: str, value: Any) -> None:
        each(where, value, one_of_numbers(schemes.INTEGER_BITS), "numbers of bits")

    def in_cache(where: str, value: Any) -> None:
        if not isinstance(value, str) or not re.fullmatch(rf"{BYTES}|{BITS}", value):
            raise ValueError(f"{where}: {kind(value)}, expected bits an element, such as 4.25bits, or bytes")

    keys(
        value,
        where,
        {
            "schemes": lambda where, value: each(where, value, precision, "schemes, such as centred4"),
            "bits": some_bits,
            "measured": some_bits,
            "budgets": lambda where, value: each(where, value, in_cache, "budgets, such as 4.25bits"),
            "sample": whole(2, "units whose scores are checked"),
            "most": whole(0, "units beyond second order to measure"),
        },
    )


def one_of_numbers(choices: Iterable[int]) -> Check:
    """One of several numbers."""

    def check(where: str, value: Any) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or value not in choices:
            raise ValueError(f"{where}: {kind(value)}, expected one of {', '.join(map(str, choices))}")

    return check


def policy_of_study(where: str, value: Any) -> None:
    """The name of a policy."""
    if not isinstance(value, str) or not re.fullmatch(POLICY, value):
        raise ValueError(f"{where}: {kind(value)}, expected the name of a policy, such as greedy-0.01 or int8")


def generation(where: str, value: Any) -> None:
    """Prompts that are continued under every policy."""
    keys(
        value,
        where,
        {"prompts": whole(1, "prompts"), "tokens": whole(1, "tokens to continue with")},
        {"prompt": whole(1, "tokens of a prompt")},
    )


def domains(where: str, value: Any) -> None:
    """Texts by name, and lengths of blocks, on each of which policies are made and measured."""

    def pattern(where: str, value: Any) -> None:
        title(where, value)
        # | stands between patterns on a command line; Snakemake writes a rule's parameters into a script of the report.
        if re.search(r"[|<]", value):
            raise ValueError(f"{where}: {kind(value)}, expected a document's name without | and <")

    def texts_by_name(where: str, value: Any) -> None:
        if not isinstance(value, Mapping) or not value:
            raise ValueError(f"{where}: {kind(value) if value else 'empty'}, expected texts by name")
        for name, patterns in value.items():
            if not isinstance(name, str) or not re.fullmatch(NAME, name):
                raise ValueError(f"{where}: {kind(name)}, expected a name of lower-case letters, digits and hyphens")
            each(join(where, name), patterns, pattern, "names of documents, with * for any letters")

    def bits(where: str, value: Any) -> None:
        if not isinstance(value, str) or not re.fullmatch(BITS, value):
            raise ValueError(f"{where}: {kind(value)}, expected bits an element, such as 5bits")

    length = whole(SMALLEST_BLOCK, "tokens of a block")
    keys(
        value,
        where,
        {
            "texts": texts_by_name,
            "lengths": lambda where, value: each(where, value, length, "tokens of a block"),
            **dict.fromkeys(DOMAIN_WINDOWS, drawn_window),
            "probes": whole(1, "backward passes of the scores from gradients"),
            "budgets": lambda where, value: each(where, value, bits, "budgets, such as 5bits"),
        },
    )


def export(where: str, value: Any) -> None:
    """A policy in the words of engines."""
    keys(
        value,
        where,
        {
            "policy": policy_of_study,
            "engines": lambda where, value: each(where, value, one_of(ENGINES), "engines"),
        },
    )


def adaptation(where: str, value: Any) -> None:
    """Training with a noisy or quantized cache: what all arms share, the policies that they are measured with, and each
    arm by name; how arms fit together is checked afterwards (``arms.check_arms``)."""

    def seed(where: str, value: Any) -> None:
        whole(0, "a seed", most=math.inf)(where, value)
        if value not in SEEDS:
            raise ValueError(f"{where}: {shown(value)}, expected less than 2^63 (a seed)")

    def quantized(where: str, value: Any) -> None:
        policy_of_study(where, value)
        if value == "bf16":
            raise ValueError(f"{where}: bf16, expected a policy that quantizes; BF16 is measured in any case")

    def several(check: Check, what: str) -> Check:
        return lambda where, value: (
            each(where, value, check, what) if isinstance(value, list | tuple) else check(where, value)
        )

    def arm_name(where: str, value: Any) -> None:
        if not isinstance(value, str) or not re.fullmatch(ARM, value) or value == arms.ORIGINAL:
            raise ValueError(
                f"{where}: {kind(value)}, expected an arm's name of lower-case letters, digits and hyphens, "
                f"not {arms.ORIGINAL}"
            )

    def arm(where: str, value: Any) -> None:
        required = {
            "weights": one_of(DTYPES),
            "order": one_of(arms.ORDERS),
            "seeds": lambda where, value: each(where, value, seed, "seeds"),
        }
        optional = {
            "noise": quantized,
            "straight-through": quantized,
            "control": arm_name,
            "settings_of": arm_name,
            "steps": several(whole(1, "training steps"), "numbers of steps"),
            "learning_rate": several(number(positive=True), "learning rates"),
            "beta": several(number(positive=False), "weights of the KL"),
        }
        keys(value, where, required, optional)

    def named(where: str, value: Any) -> None:
        if not isinstance(value, Mapping) or not value:
            raise ValueError(f"{where}: {kind(value) if value else 'empty'}, expected arms by name")
        for name, entry in value.items():
            arm_name(where, name)
            arm(join(where, name), entry)

    keys(
        value,
        where,
        {
            "batch": whole(1, "blocks a step"),
            "weight_decay": number(positive=False),
            "clip": number(positive=True),
            "policies": lambda where, value: each(where, value, quantized, "policies"),
            "arms": named,
        },
    )
    arms.check_arms(value["arms"], join(where, "arms"))


# What a study of a Hugging Face model has in the place of artifacts.
HUGGINGFACE_KEYS: dict[str, Check] = {
    "heads": whole(1, "KV heads of a layer", MOST_HEADS),
    "model": huggingface_model,
    "text": texts,
}
