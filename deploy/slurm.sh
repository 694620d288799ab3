#!/usr/bin/env bash
# Search on the nodes of a Slurm job, in a Ray cluster that ends with the job. See
# docs/how-to/use-slurm.md.
#     sbatch deploy/slurm.sh --gpus 8 --storage "$HOME/autofit.db" train.py -- --epochs 3
# The environment that has autofit must be active at sbatch, and be on every node.
#SBATCH --job-name=autofit
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=04:00:00
# Two minutes before the end the search stops in good order; the same command carries on.
#SBATCH --signal=B:TERM@120
set -euo pipefail

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
on() { # NODE COMMAND...: in a subshell, become the step that runs it there, beside others
    exec srun --nodes=1 --ntasks=1 --overlap --nodelist="$1" "${@:2}"
}

# Only this job's processes are let in: the token is in their environment, and nowhere else.
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token RAY_USAGE_STATS_ENABLED=0
port=$((20000 + SLURM_JOB_ID % 10000))
# The first address of the node: of its private network. AUTOFIT_HEAD_IP names another one.
ip=${AUTOFIT_HEAD_IP:-$(on "${nodes[0]}" hostname --ip-address | cut -d' ' -f1)}

steps=()
# shellcheck disable=SC2329  # the trap calls it
end() {
    trap - EXIT
    for ((i = ${#steps[@]} - 1; i >= 0; i--)); do # the head last: the others say goodbye to it
        kill "${steps[i]}" 2>/dev/null || true
        wait "${steps[i]}" || true
    done
}
trap end EXIT

join=(ray start --block --num-cpus="${SLURM_CPUS_PER_TASK:-1}" --num-gpus="${SLURM_GPUS_ON_NODE:-0}")
on "${nodes[0]}" "${join[@]}" --head --node-ip-address="$ip" --port="$port" \
    --ray-client-server-port=$((port + 10000)) --include-dashboard=false \
    --temp-dir="/tmp/ray-$SLURM_JOB_ID" &
steps+=($!)

# until_there COUNT: wait until so many nodes have joined
until_there() {
    local deadline=$((SECONDS + 120))
    while (($(ray status --address="$ip:$port" 2>/dev/null | grep -c ' node_') < $1)); do
        if ((SECONDS > deadline)) || ! kill -0 "${steps[@]}"; then
            echo "autofit: not all of ${nodes[*]:0:$1} have joined the Ray cluster at $ip:$port" >&2
            exit 1
        fi
        sleep 1
    done
}
until_there 1
for node in "${nodes[@]:1}"; do
    on "$node" "${join[@]}" --address="$ip:$port" &
    steps+=($!)
done
until_there "${#nodes[@]}"

autofit search --address "$ip:$port" "$@" &
search=$!
trap 'kill -TERM "$search"' TERM INT
code=0
wait "$search" || code=$?
if ((code > 128)) && kill -0 "$search" 2>/dev/null; then # a signal ended the wait, not the search
    code=0
    wait "$search" || code=$?
fi
exit "$code"
