"""What the rules of figures and tables ask about a study: which there are, and which files each reads.

Needs: the functions of common.smk.
Makes: nothing; functions only.
"""

FIGURES = ["sensitivity", "allocation", "greedy-path", "storage-kl", "kl-by-position", "kl-distribution"]
FLOOR_FIGURES = ["floor"]
ADAPTATION_FIGURES = ["adaptation-curves", "adaptation"]
COMPARISON_FIGURES = ["equal-bytes", "frontier", "proxy-joint", "gradients"]
TABLES = ["results", "divergence", "sensitivity-summary"]
ADAPTATION_TABLES = ["adaptation"]
COMPARISON_TABLES = ["equal-bytes", "frontier", "proxy-joint", "gradients", "prediction"]


def figure_files(study):
    """Every figure of a study, with its plotted numbers; of adaptation and comparison only if the study has one."""
    figures = FIGURES + (ADAPTATION_FIGURES if arms(study) else []) + (FLOOR_FIGURES if sweep_dtypes(study) else [])
    figures += COMPARISON_FIGURES if comparison_budgets(study) else []
    return [f"results/{study}/figures/{figure}.{suffix}" for figure in figures for suffix in ("svg", "png", "csv")]


def table_files(study):
    """Every table of a study, for people and for programs; of adaptation and comparison only if the study has one."""
    tables = TABLES + (ADAPTATION_TABLES if arms(study) else [])
    tables += COMPARISON_TABLES if comparison_budgets(study) else []
    return [f"results/{study}/tables/{table}.{suffix}" for table in tables for suffix in ("html", "csv")]


def policy_files(chosen, filename):
    """Input function: a file of each policy that ``chosen`` (a function of the study) names."""
    return lambda wildcards: [
        f"results/{wildcards.study}/policies/{policy}/{filename}" for policy in chosen(wildcards.study)
    ]


def uniform_policies(study):
    """The quantized uniform policies."""
    return STUDIES[study]["precisions"]


def adapted_files(filename, by_policy):
    """Input function: a file of each adapted arm and seed, and of each of its policies if ``by_policy``."""
    return lambda wildcards: [
        f"results/{wildcards.study}/{folder}/{policy}{filename}"
        for folder in adapted_models(wildcards.study)
        for policy in ([f"{name}/" for name in adapted_policies(wildcards.study)] if by_policy else [""])
    ]


def comparison_tables(wildcards):
    """The joint measurements at equal bytes, one a budget."""
    budgets = comparison_budgets(wildcards.study)
    return [f"results/{wildcards.study}/comparison/{budget}/joint.csv" for budget in budgets]


def comparison_candidates(wildcards):
    """The sets of policies beside them, which say where the random ones lie."""
    return [path.replace("joint.csv", "policy-set.json") for path in comparison_tables(wildcards)]


def repeated(option, name):
    """Params function: an option again before each file of the input ``name``."""
    return lambda wildcards, input: [part for path in input[name] for part in (option, path)]


def study_title(wildcards):
    """The study's title, for its tables and the report."""
    return study_config(wildcards.study)["title"]


def published_arguments(wildcards):
    """The published figures that a study repeats, as arguments of `table`; nothing where it repeats none."""
    name = study_config(wildcards.study).get("published")
    return ["--published", name] if name else []
