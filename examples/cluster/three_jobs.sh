#!/bin/sh
# Three jobs share two slots of this machine: two train at once, and the last gets both slots when the others have ended.
set -e
cd "$(dirname "$0")"
export ACCEL_CLUSTER="${ACCEL_CLUSTER:-/tmp/accel-three-jobs}" OMP_NUM_THREADS=1
accel submit --name short --max 2 train.py 8
accel submit --name long --max 2 train.py 30
accel submit --name in-place --max 2 --in-place train.py 30
accel cluster up --slots 2 --interval 5 --until-empty
accel cluster status
accel cluster status --html "$ACCEL_CLUSTER/page.html"
accel logs long
