#!/usr/bin/env bash
# What are generated tasks worth where tasks are scarce? RL in the dream knows only some of the training tasks; lambda bounds the
# share of generated ones. One seed.
#   bash runs/scarce.sh webshop 0 60                          # environment, seed, iterations
#   bash runs/scarce.sh webshop 0 60 "50" "0 0.25"            # some numbers of tasks, some lambdas
# Then: python -m runs.table runs/results/webshop-*.json --against tasks-50-lambda-0
set -euo pipefail
cd "$(dirname "$0")/.."
env=$1 seed=$2 iterations=$3
for tasks in ${4:-50 150 500}; do
    for lambda in ${5:-0 0.25 0.5}; do
        bash runs/cell.sh "$env" "$seed" "tasks-$tasks-lambda-$lambda" --iterations "$iterations" --train-tasks "$tasks" \
            --max-generated-fraction "$lambda"
    done
done
