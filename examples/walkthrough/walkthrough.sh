#!/bin/sh
# From random weights to a Hugging Face folder, on a CPU: supervised training, export, RL, evaluation, export.
#   sh examples/walkthrough/walkthrough.sh [FOLDER]
# Started again it goes on where it was stopped; to begin anew, give it another FOLDER.
set -eu
runs=${1:-runs/walkthrough}
rl="@ configs/quickstart.yaml --run.folder $runs"

# 1. Examples teach it what counting looks like: a few digits, then the end.
async-rl train sft @ configs/train/sft.yaml --run.folder "$runs" --run.name sft
[ -d "$runs/sft/model" ] || async-rl model export @ "$runs/sft/config.yaml" --to "$runs/sft/model"

# 2. What is that worth to an environment which wants twelve digits? Not much: it ends too early.
async-rl eval "$runs/sft/model" $rl --run.name before --evaluation.tasks 20

# 3. The reward teaches it to go on.
async-rl run $rl --model.size null --model.folder "$runs/sft/model" --run.name rl --learner.steps 60

# 4. The newest checkpoint, evaluated in the same way, and as a folder that anything opens.
async-rl eval @ "$runs/rl/config.yaml" --evaluation.tasks 20
[ -d "$runs/rl/model" ] || async-rl model export @ "$runs/rl/config.yaml" --to "$runs/rl/model"
async-rl model inspect "$runs/rl/model"
