#!/usr/bin/env bash
# One cell of a table: one policy, trained with some flags, its test episodes recorded for runs/table.py.
#   bash runs/cell.sh webshop 0 imitation --algo imitation
#   bash runs/cell.sh webshop 0 dream-grpo --iterations 60
#   bash runs/cell.sh webshop 0 lookup --iterations 60 --no-enrich --max-generated-fraction 0 --dream pages=lookup rewards=rule
# Data, experience model and imitation of a seed are shared by its cells, in $STUDY/ENV-SEED (made by the first).
# TASKS test tasks (128), REPEATS episodes of each (16) at T=0.4 and at T=1, one greedily.
set -euo pipefail
cd "$(dirname "$0")/.."
env=$1 seed=$2 name=$3
shift 3
label=$(basename "$env" .py)
base=${STUDY:-out/study}/$label-$seed
shared=(--env "$env" --seed "$seed")
[ -d "$base/imitation" ] || python train_policy.py "${shared[@]}" --out "$base" --algo imitation --test-tasks 1 --eval-tasks 1
python train_policy.py "${shared[@]}" --out "$base/$name" --data "$base/data" --expmodel "$base/expmodel" \
    --imitation "$base/imitation" --test-tasks 1 --eval-every 1000 "$@"
python evaluate.py --env "$env" --policy "$base/$name/policy" --data "$base/data" --tasks "${TASKS:-128}" --repeats "${REPEATS:-16}" \
    --out "$base/$name/test"
python -m runs.record "$base/$name" "$label-$seed-$name"
