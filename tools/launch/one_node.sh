#!/usr/bin/env bash
# Train on one machine: one process per GPU, or so many processes without any.
#
#   tools/launch/one_node.sh --algorithm grpo --tp 2 --steps 100 --save-interval 10 --output-dir runs
#   PROCESSES=4 tools/launch/one_node.sh --algorithm ppo --tp 2 --pp 2 ...
#
# The same line again, after a crash, a kill or a reboot, goes on from the newest whole checkpoint (--resume auto).
# SIGTERM and SIGUSR1 to torchrun are passed on: the processes save, commit and exit with 0 (torchrun itself then tells of
# the signal with a traceback and exits with 1; that is its way). It kills what has not ended after the time-out, so that
# has to be longer than a step and a save together.
set -euo pipefail

gpus=$(python -c "import torch; print(torch.cuda.device_count())")
processes=${PROCESSES:-$((gpus > 0 ? gpus : 2))}
if ((gpus == 0)); then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
fi

exec torchrun --standalone --nproc-per-node "$processes" \
    --signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1 --shutdown-timeout "${SHUTDOWN_SECONDS:-300}" \
    -m mcore_rlhf.demo.train "$@"
