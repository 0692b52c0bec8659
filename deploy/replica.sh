#!/bin/sh
# Starts a replica of the model named by MODEL: finds the model (fetching it once if need be), then serves.
set -eu
: "${COLLM_REPLICA_MODEL_PATH:=$(collm models pull "${MODEL:-SmolLM2-135M-Instruct}")}"
: "${COLLM_REPLICA_MODEL:=$(basename "$COLLM_REPLICA_MODEL_PATH")}"
export COLLM_REPLICA_MODEL COLLM_REPLICA_MODEL_PATH
exec python -m services.replica
