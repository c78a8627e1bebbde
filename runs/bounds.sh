#!/usr/bin/env bash
# The gap between dream and world under its bound, for each pair of experience model and policy of a seed.
#   bash runs/bounds.sh webshop 0 "expmodel expmodel-naive" "imitation dream lookup true-true"
# TASKS test tasks (300), REPEATS episodes of each (4). Reports go to runs/results/bounds/; runs/bounds.py prints
# the table and the rank correlation.
set -euo pipefail
cd "$(dirname "$0")/.."
env=$1 seed=$2 models=$3 policies=$4
label=$(basename "$env" .py)
base=${STUDY:-out/study}/$label-$seed
mkdir -p runs/results/bounds
for model in $models; do
    for policy in $policies; do
        python evaluate.py --env "$env" --policy "$base/$policy/policy" --expmodel "$base/$model" --data "$base/data" \
            --bound --temperatures 0.4 1 --tasks "${TASKS:-300}" --repeats "${REPEATS:-4}" --out "$base/bounds/$model-$policy"
        cp "$base/bounds/$model-$policy/report.json" "runs/results/bounds/$label-$seed-$model-$policy.json"
    done
done
python -m runs.bounds runs/results/bounds/*.json
