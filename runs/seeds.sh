#!/usr/bin/env bash
# The main table of one environment, for some seeds: every policy starts from the same imitation of its seed.
#   bash runs/seeds.sh webshop 60 52000 "0 1 2"        # environment, dream iterations, real transitions, seeds
# Seeds run one after another; run two shells for two cores. What is done is kept, so the same command continues.
set -euo pipefail
cd "$(dirname "$0")/.."
env=$1 iterations=$2 real=$3 seeds=${4:-"0 1 2"}
label=$(basename "$env" .py)
for seed in $seeds; do
    base=${STUDY:-out/study}/$label-$seed
    cell() { bash runs/cell.sh "$env" "$seed" "$@"; }
    cell imitation --algo imitation
    python -m runs.dpo --env "$env" --seed "$seed" --data "$base/data" --policy "$base/imitation" --out "$base/dpo-start"
    cell dpo --algo imitation --imitation "$base/dpo-start"
    cell own-successes --algo rft --iterations "$iterations"
    for algo in grpo ppo; do
        cell "dream-$algo" --algo "$algo" --iterations "$iterations"
        cell "real-$algo" --algo "$algo" --world real --real-transitions "$real"
    done
    cell dream-then-real --iterations "$iterations" --real-transitions 5000
    cell real-5k --world real --real-transitions 5000
done
python -m runs.table runs/results/"$label"-*.json
