"""Pinned artifacts, fetched and verified; the checkpoint as safetensors; the token windows.

Needs: the study's source (a folder in this repository, a local folder, or a pinned revision on a hub).
Makes: resources/{study}/{artifact}/{filename}, resources/{study}/model.safetensors, results/{study}/windows.safetensors
and windows.csv.
"""


rule fetch_artifact:
    output:
        ensure("resources/{study}/{artifact}/{filename}", sha256=artifact_sha256),
    log:
        "logs/fetch_artifact/{study}/{artifact}/{filename}.log",
    retries: 1
    params:
        source=artifact_arguments,
        code=code("fetch"),
    message:
        "{wildcards.study}: fetch and verify the {wildcards.artifact}"
    shell:
        "python -m kvstages fetch {params.source:q} --output {output:q} 2> {log:q}"


rule convert_checkpoint:
    input:
        lambda wildcards: artifact(wildcards.study, "checkpoint"),
    output:
        "resources/{study}/model.safetensors",
    log:
        "logs/convert_checkpoint/{study}.log",
    params:
        code=code("convert"),
    message:
        "{wildcards.study}: check the checkpoint and keep its weights as safetensors"
    shell:
        "python -m kvstages convert --checkpoint {input:q} --output {output} 2> {log}"


rule cut_windows:
    input:
        shard=lambda wildcards: artifact(wildcards.study, "shard"),
        model="resources/{study}/model.safetensors",
        documents=documents_file,
    output:
        windows="results/{study}/windows.safetensors",
        places="results/{study}/windows.csv",
    log:
        "logs/cut_windows/{study}.log",
    params:
        block=lambda wildcards: study_config(wildcards.study)["block"],
        windows=window_arguments,
        code=code("windows"),
    message:
        "{wildcards.study}: cut the token windows"
    shell:
        "python -m kvstages windows --shard {input.shard:q} --model {input.model} --block {params.block}"
        " {params.windows} --output {output.windows} --places {output.places} 2> {log}"
