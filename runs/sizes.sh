#!/usr/bin/env bash
# How many recorded transitions does a dream need? For each number: data, experience model, start, and RL in the dream.
#   bash runs/sizes.sh webshop 3 "500 2000 5000 10000 40000"  # environment, seed, numbers of transitions
# Then: python -m runs.table runs/results/webshop-*.json
set -euo pipefail
cd "$(dirname "$0")/.."
env=$1 seed=$2 study=${STUDY:-out/study}
for n in $3; do
    export STUDY=$study-$n
    base=$STUDY/$env-$seed
    of=(--env "$env" --seed "$seed" --config "configs/tiny/$env.json")
    python collect.py "${of[@]}" --transitions "$n" --out "$base/data"
    python train_expmodel.py "${of[@]}" --data "$base/data" --out "$base/expmodel" --no-report-variants
    [ -d "$base/imitation" ] || python train_policy.py "${of[@]}" --data "$base/data" --expmodel "$base/expmodel" --out "$base" \
        --algo imitation --test-tasks 1 --eval-tasks 1
    bash runs/cell.sh "$env" "$seed" "start-$n" --algo imitation
    bash runs/cell.sh "$env" "$seed" "dream-$n"
done
