#!/bin/bash
# One training run on all hosts of a TPU slice, from your own machine: NAME=my-slice ZONE=us-central2-b OUT=/mnt/shared/run bash tpu.sh
# OUT must be a folder that all hosts see, e.g. a bucket that is mounted on each of them.
set -euo pipefail
: "${NAME:?the name of the slice}" "${ZONE:?its zone}" "${OUT:?a folder that all hosts see}"

gcloud compute tpus tpu-vm scp run.py "$NAME:" --zone="$ZONE" --worker=all
gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all \
    --command="pip install -q 'jax[tpu]' fedjax-meta && python run.py --distributed --out '$OUT' --rounds ${ROUNDS:-1000}"
