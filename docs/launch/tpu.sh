#!/bin/bash
# One training run on all hosts of a TPU slice, from your own machine:
# NAME=my-slice ZONE=us-central2-b OUT=/mnt/shared/run WHEEL=dist/fedjax_meta-0.1.0-py3-none-any.whl bash tpu.sh
# OUT must be a folder that all hosts see, e.g. a bucket that is mounted on each of them. `python -m build --wheel` makes WHEEL in a
# checkout; the package is not on PyPI yet.
set -euo pipefail
: "${NAME:?the name of the slice}" "${ZONE:?its zone}" "${OUT:?a folder that all hosts see}" "${WHEEL:?a wheel of fedjax_meta}"

gcloud compute tpus tpu-vm scp run.py "$WHEEL" "$NAME:" --zone="$ZONE" --worker=all
gcloud compute tpus tpu-vm ssh "$NAME" --zone="$ZONE" --worker=all \
    --command="pip install -q './$(basename "$WHEEL")[tpu]' && python run.py --distributed --out '$OUT' --rounds ${ROUNDS:-1000}"
