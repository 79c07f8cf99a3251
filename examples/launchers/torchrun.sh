#!/bin/bash
# Trains with torchrun on several machines. Start it on each of them, with its own NODE_RANK:
#
#   NODES=2 NODE_RANK=0 MASTER_ADDR=10.0.0.1 PROCESSES=8 examples/launchers/torchrun.sh train.toml
#   NODES=2 NODE_RANK=1 MASTER_ADDR=10.0.0.1 PROCESSES=8 examples/launchers/torchrun.sh train.toml
#
# docs/launching.md explains each line.
set -eu

# torchrun passes these signals on, and then gives the processes ten minutes for their checkpoint.
export PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1
export PET_SHUTDOWN_TIMEOUT=600

exec torchrun \
  --nnodes "${NODES:?the number of machines}" \
  --node-rank "${NODE_RANK:?0 on the machine of MASTER_ADDR}" \
  --nproc-per-node "${PROCESSES:?processes on each machine}" \
  --master-addr "${MASTER_ADDR:?the address of the first machine}" \
  --master-port "${MASTER_PORT:-29500}" \
  --max-restarts "${RESTARTS:-3}" \
  -m fusedops train "$@"
