#!/usr/bin/env bash
# What must a dream get right? One seed of the nulls, of {true, learnt} pages x {true, learnt} rewards, or of the
# dose-response; every cell is one run of runs/cell.sh from the same imitation, with the same tasks.
#   bash runs/worlds.sh webshop 0 nulls 60         # environment, seed, which part, iterations
#   bash runs/worlds.sh webshop 0 factorial 60     # learnt pages and learnt rewards are the nulls' "learnt"
#   bash runs/worlds.sh webshop 0 doses 60
# Then: python -m runs.table runs/results/webshop-*.json --picture doses.png
set -euo pipefail
cd "$(dirname "$0")/.."
env=$1 seed=$2 part=$3 iterations=$4
cell() { # name, flags of --dream
    bash runs/cell.sh "$env" "$seed" "$1" --iterations "$iterations" --no-enrich --max-generated-fraction 0 --dream "${@:2}"
}
case $part in
nulls)
    bash runs/cell.sh "$env" "$seed" imitation --algo imitation
    cell learnt pages=learnt
    cell lookup pages=lookup rewards=rule
    ;;
factorial)
    cell true-true pages=true
    cell true-learnt pages=true rewards=learnt
    cell learnt-true pages=learnt rewards=rule
    ;;
doses)
    for rate in 0.4 0.1 0.2 0.05 0.02; do        # a study that is stopped early has the widest range first
        for fixed in false true; do
            cell "fp-$rate-$fixed" pages=true false_positives=$rate fixed=$fixed
            cell "fn-$rate-$fixed" pages=true false_negatives=$rate fixed=$fixed
            cell "page-$rate-$fixed" pages=true swapped_pages=$rate fixed=$fixed
        done
    done
    for reward in 0.1 0.4; do
        for page in 0.1 0.4; do
            cell "both-$reward-$page" pages=true false_positives=$reward false_negatives=$reward swapped_pages=$page
        done
    done
    ;;
*)
    echo "runs/worlds.sh: expected nulls, factorial or doses, found $part" >&2
    exit 2
    ;;
esac
