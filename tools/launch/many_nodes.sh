#!/usr/bin/env bash
# Train on several machines without a scheduler: start this on each of them, with the same arguments.
#
#   NODES=4 HEAD=node-0 tools/launch/many_nodes.sh --algorithm grpo --tp 8 --pp 2 --output-dir /shared/runs ...
#
# HEAD is a machine that all others can reach; --output-dir lies on a file system that all of them share (the manager
# checks that with a probe file, and says so when it does not). When a machine dies, stop the others, and start again on
# whatever is left: another number of machines is another data-parallel size, and the checkpoint loads all the same.
set -euo pipefail

: "${NODES:?number of machines}" "${HEAD:?name of the machine at which they meet}"

exec torchrun --nnodes "$NODES" --nproc-per-node "${PROCESSES:-gpu}" \
    --rdzv-backend c10d --rdzv-endpoint "$HEAD:${PORT:-29500}" --rdzv-id "${RUN_ID:-mcore-rlhf}" --max-restarts 0 \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout "${SHUTDOWN_SECONDS:-300}" \
    -m mcore_rlhf.demo.train "$@"
