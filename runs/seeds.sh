#!/usr/bin/env bash
# The main table of one environment: dream GRPO and real GRPO from the same start, for some seeds.
#   bash runs/seeds.sh webshop 60 40000 "0 1 2"        # environment, dream iterations, real transitions, seeds
# Everything lands in out/study/ENV-SEED; runs/table.py prints the table. Seeds run one after another; run two shells for two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
env=$1 iterations=$2 real=$3 seeds=${4:-"0 1 2"}
for seed in $seeds; do
    out=out/study/$env-$seed
    python train_policy.py --env "$env" --seed "$seed" --out "$out" --iterations "$iterations"
    python train_policy.py --env "$env" --seed "$seed" --out "$out/real" --world real --real-transitions "$real" \
        --data "$out/data" --expmodel "$out/expmodel" --imitation "$out/imitation"
done
python runs/table.py out/study/"$env"-*/result.json out/study/"$env"-*/real/result.json
