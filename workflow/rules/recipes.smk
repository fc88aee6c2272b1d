"""Which recipes a comparison holds against each other, as arguments of `candidates`.

A recipe is NAME=ALLOCATOR:SOURCE:UNIT:PRECISIONS (see `kvstages policy-set --help`).

Needs: the functions of common.smk.
Makes: nothing; functions only.
"""

PUBLISHED = "measured-bfloat16"


def comparison_budgets(study):
    """Budgets of the published recipe whose bytes are compared at; none where the study compares nothing."""
    return STUDIES[study].get("comparison", {}).get("budgets", [])


def sensitivity_files(wildcards):
    """The sensitivity tables of all sources."""
    return [f"results/{wildcards.study}/scores/{name}.csv" for name in sensitivity_sources(wildcards.study)]


def measured_files(wildcards):
    """The sensitivity tables that were measured: the only ones with floors."""
    return [f"results/{wildcards.study}/scores/measured-{dtype}.csv" for dtype in sweep_dtypes(wildcards.study)]


def other_dtypes(study):
    """Arithmetics other than the study's own that scores are measured in."""
    return [dtype for dtype in sweep_dtypes(study) if dtype != STUDIES[study]["compute_dtype"]]


def uniform_evaluations(wildcards):
    """The uniform policies, measured jointly in every arithmetic that scores are measured in."""
    places = ["", *(f"{dtype}/" for dtype in other_dtypes(wildcards.study))]
    return [
        f"results/{wildcards.study}/policies/{policy}/{place}evaluation.json"
        for policy in uniform_policies(wildcards.study)
        for place in places
    ]


def sensitivity_arguments(wildcards, input):
    """The sensitivity tables, as arguments of `candidates`."""
    return [word for path in input.sensitivities for word in ("--sensitivity", path)]


def extensions(study):
    """What the exact allocator gains beyond heads in INT8 and INT4: keys and values apart, more precisions, both."""
    own, more = source(study), ",".join(STUDIES[study]["comparison"]["precisions"])
    recipes = [f"exact-split=exact:{own}:keys-values:int8,int4"]
    if more != "int8,int4":
        recipes += [f"exact-low=exact:{own}:head:{more}", f"exact-split-low=exact:{own}:keys-values:{more}"]
    return recipes


def other_source(study):
    """The exact allocator on the study's other scores: from gradients where its own are measured, and the reverse."""
    own, more = source(study), ",".join(STUDIES[study]["comparison"]["precisions"])
    name, other = (
        ("measured", f"measured-{STUDIES[study]['compute_dtype']}") if own == GRADIENTS else (GRADIENTS, GRADIENTS)
    )
    recipes = [f"exact-{name}=exact:{other}:head:int8,int4"]
    return recipes + ([f"exact-{name}-split-low=exact:{other}:keys-values:{more}"] if more != "int8,int4" else [])


def recipe_arguments(recipes):
    """Recipes as arguments of `candidates`."""
    return [word for recipe in recipes for word in ("--recipe", recipe)]


def equal_bytes_arguments(wildcards):
    """The published recipe, which sets the bytes; every allocator on the study's own scores; random ones."""
    settings, own = STUDIES[wildcards.study]["comparison"], source(wildcards.study)
    recipes = [
        f"published=greedy:{PUBLISHED}:head:int8,int4",
        f"exact-bf16=exact:{PUBLISHED}:head:int8,int4",
        *(
            f"{name}={name}:{own}:head:int8,int4"
            for name in ("greedy", "exact", "by-layer", "by-depth", "reconstruction")
        ),
        *extensions(wildcards.study),
        *other_source(wildcards.study),
        f"random=at-random:{own}:head:int8,int4",
    ]
    return [*recipe_arguments(recipes), "--random", settings["random"], "--draws", settings["draws"]]


def frontier_arguments(wildcards):
    """The published recipe and the exact allocator, by bytes, with what extends it."""
    recipes = [
        f"published=greedy:{PUBLISHED}:head:int8,int4",
        f"exact=exact:{source(wildcards.study)}:head:int8,int4",
        *extensions(wildcards.study),
    ]
    return [*recipe_arguments(recipes), "--points", STUDIES[wildcards.study]["comparison"]["frontier"]]


def predicted_sets(name):
    """Input function: a file of the sets of policies whose joint KL is predicted, the frontier and the policies of
    equal bytes at the largest budget, where most is quantized."""
    return lambda wildcards: [
        f"results/{wildcards.study}/frontier/{name}",
        f"results/{wildcards.study}/comparison/{max(comparison_budgets(wildcards.study))}/{name}",
    ]


def measured_sweeps(wildcards):
    """The sweeps of all layers in the study's own arithmetic."""
    dtype = STUDIES[wildcards.study]["compute_dtype"]
    return [f"results/{wildcards.study}/sweep/{dtype}/layer-{layer}.csv" for layer in layers(wildcards.study)]


def measured_file(wildcards):
    """The sensitivities measured in the study's own arithmetic."""
    return f"results/{wildcards.study}/scores/measured-{STUDIES[wildcards.study]['compute_dtype']}.csv"


def comparison_files(study):
    """Every result of the comparison, by its path in the study's folder; none where the study compares nothing."""
    if "comparison" not in STUDIES[study]:
        return []
    names = [
        *(f"{policy}/{name}" for policy in ("published", "exact") for name in ("policy.json", "steps.csv")),
        *(f"moves/layer-{layer}.csv" for layer in layers(study)),
        *("moves.csv", "refined.json", "policy-set.json", "joint.csv"),
    ]
    return [
        *(f"comparison/{budget}/{name}" for budget in comparison_budgets(study) for name in names),
        *("frontier/policy-set.json", "frontier/joint.csv"),
        *("reference/calibration.safetensors", "gradients/joint.csv", "gradients/predictions.csv"),
        *(f"reference/{dtype}/validation.safetensors" for dtype in other_dtypes(study)),
        *(
            f"policies/{policy}/{dtype}/{name}"
            for policy in uniform_policies(study)
            for dtype in other_dtypes(study)
            for name in ("evaluation.json", "positions.csv")
        ),
    ]
