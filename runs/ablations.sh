#!/usr/bin/env bash
# Each row leaves one part out. The full run is cell "dream-grpo" of runs/seeds.sh; all but "tried" start from its imitation.
#   bash runs/ablations.sh webshop 0 60                   # environment, seed, iterations
#   bash runs/ablations.sh webshop 0 60 "reasoning naive"    # some rows
# Then: python -m runs.table runs/results/webshop-*.json --against dream-grpo
set -euo pipefail
cd "$(dirname "$0")/.."
env=$1 seed=$2 iterations=$3 rows=${4:-reasoning replay history generation curriculum naive tried}
label=$(basename "$env" .py)
base=${STUDY:-out/study}/$label-$seed
cell() { # name, flags of train_policy.py
    bash runs/cell.sh "$env" "$seed" "without-$1" --iterations "$iterations" "${@:2}"
}
own() { # name, flags of train_expmodel.py, --, flags of train_policy.py: an experience model of its own
    local name=$1 flags=()
    shift
    while [ "$1" != -- ]; do flags+=("$1"); shift; done
    python train_expmodel.py --env "$env" --seed "$seed" --data "$base/data" --out "$base/expmodel-$name" "${flags[@]}"
    cell "$name" --expmodel "$base/expmodel-$name" "${@:2}"
}
bash runs/cell.sh "$env" "$seed" dream-grpo --algo grpo --iterations "$iterations"
for row in $rows; do
    case $row in
    reasoning) own $row --no-reasoning -- ;;
    replay) own $row --k 0 -- --no-enrich ;;
    history) own $row --history 0 -- ;;
    naive) own $row --counterfactual-share 0 -- ;;
    generation) cell $row --max-generated-fraction 0 ;;
    curriculum) cell $row --no-curriculum ;;
    tried) # the start, too, reads other prompts
        python train_policy.py --env "$env" --seed "$seed" --data "$base/data" --out "$base/start-$row" --expmodel "$base/expmodel" \
            --algo imitation --test-tasks 1 --eval-tasks 1 --tried-actions 0
        cell $row --tried-actions 0 --imitation "$base/start-$row/imitation"
        ;;
    *)
        echo "runs/ablations.sh: expected reasoning, replay, history, generation, curriculum, naive or tried, found $row" >&2
        exit 2
        ;;
    esac
done
