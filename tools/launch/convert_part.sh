#!/usr/bin/env bash
# Do some parts of a conversion: those of one process of several. The processes share a file system, and nothing else.
#
#   RANK=0 WORLD_SIZE=4 PARTS=16 tools/launch/convert_part.sh SRC DST --to megatron --tp 8 ...
#   torchrun --nnodes 4 --nproc-per-node 1 --no-python tools/launch/convert_part.sh SRC DST ...
#
# PARTS stays the same however many processes there are: one that torchrun starts again, with another number of them, finds
# the parts that are done, goes on with the one that was killed, and does what is left. When all have ended:
#
#   mcore-rlhf convert SRC DST --to megatron --tp 8 ... --finish
set -euo pipefail

for ((part = ${RANK:-0} + 1; part <= ${PARTS:-${WORLD_SIZE:-1}}; part += ${WORLD_SIZE:-1})); do
    mcore-rlhf convert "$@" --part "$part/${PARTS:-${WORLD_SIZE:-1}}"
done
