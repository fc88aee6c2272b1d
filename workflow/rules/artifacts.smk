"""Pinned artifacts, fetched and verified; the checkpoint as safetensors; the token windows.

Needs: the study's source (a folder in this repository, a local folder, or a pinned revision on a hub).
Makes: resources/{study}/{artifact}/{filename}, resources/{study}/model.safetensors, results/{study}/windows.safetensors.
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
        packages=packages("fetch"),
    message:
        "{wildcards.study}: fetch and verify the {wildcards.artifact}"
    shell:
        "kvstages --code {params.code} fetch {params.source:q} --output {output:q} 2> {log:q}"


rule convert_checkpoint:
    input:
        lambda wildcards: artifact(wildcards.study, "checkpoint"),
    output:
        "resources/{study}/model.safetensors",
    log:
        "logs/convert_checkpoint/{study}.log",
    params:
        code=code("convert"),
        packages=packages("convert"),
    message:
        "{wildcards.study}: check the checkpoint and keep its weights as safetensors"
    shell:
        "kvstages --code {params.code} convert --checkpoint {input:q} --output {output} 2> {log}"


rule cut_windows:
    input:
        shard=lambda wildcards: artifact(wildcards.study, "shard"),
        model="resources/{study}/model.safetensors",
    output:
        "results/{study}/windows.safetensors",
    log:
        "logs/cut_windows/{study}.log",
    params:
        block=lambda wildcards: study_config(wildcards.study)["block"],
        windows=window_arguments,
        code=code("windows"),
        packages=packages("windows"),
    message:
        "{wildcards.study}: cut the token windows"
    shell:
        "kvstages --code {params.code} windows --shard {input.shard:q} --model {input.model} --block {params.block}"
        " {params.windows} --output {output} 2> {log}"
