#!/usr/bin/env bash
# Runs the ranks of a program on two hosts that are network namespaces joined by a virtual cable.
#
# usage: two_hosts.sh RANKS_PER_HOST PROGRAM [ARGUMENT...]
#
# Every rank finds what torchrun would set, and the name of its host in TWO_HOSTS_NAME: the kernel is one, so that the
# ranks could share memory after all. Exits with 0 if all ranks do; with 77, and a line that says why, where this
# machine does not allow it. Prints how many bytes went between the hosts. TWO_HOSTS_LOOPBACK=PORT: without namespaces, over the loopback address, where PORT is free.
set -uo pipefail

ranks_per_host=$1
shift

refuse() {
  echo "two_hosts: $*" >&2
  exit 77
}

if [[ -z ${TWO_HOSTS_LOOPBACK:-} && -z ${TWO_HOSTS_INSIDE:-} ]]; then
  for tool in ip nsenter unshare; do
    command -v "$tool" >/dev/null || refuse "there is no program $tool"
  done
  flags=(--net)
  unshare "${flags[@]}" true 2>/dev/null || flags=(--user --map-root-user --net)
  error=$(unshare "${flags[@]}" true 2>&1) || refuse "no new network namespace: $error"
  TWO_HOSTS_INSIDE=1 exec unshare "${flags[@]}" "$0" "$ranks_per_host" "$@"
fi

# Host 0 is this namespace, host 1 that of a process that only waits.
other=
if [[ -z ${TWO_HOSTS_LOOPBACK:-} ]]; then
  unshare --net sleep 600 &
  other=$!
  trap 'kill "$other" 2>/dev/null' EXIT
  for _ in {1..1000}; do
    [[ $(readlink "/proc/$other/ns/net") != "$(readlink /proc/self/ns/net)" ]] && break
    sleep 0.01
  done
  on_other=(nsenter "--net=/proc/$other/ns/net")
  {
    ip link add cable0 type veth peer name cable1 netns "$other" &&
      ip address add 10.77.0.1/24 dev cable0 && ip link set cable0 up && ip link set lo up &&
      "${on_other[@]}" ip address add 10.77.0.2/24 dev cable1 && "${on_other[@]}" ip link set cable1 up &&
      "${on_other[@]}" ip link set lo up
  } || refuse "no cable between two network namespaces"
fi

export WORLD_SIZE=$((2 * ranks_per_host)) LOCAL_WORLD_SIZE=$ranks_per_host
export MASTER_ADDR=10.77.0.1 MASTER_PORT=29500
[[ -z ${TWO_HOSTS_LOOPBACK:-} ]] || export MASTER_ADDR=127.0.0.1 MASTER_PORT=$TWO_HOSTS_LOOPBACK

ranks=()
for ((rank = 0; rank < WORLD_SIZE; ++rank)); do
  host=$((rank / ranks_per_host))
  enter=()
  [[ $host == 0 || -z $other ]] || enter=("${on_other[@]}")
  TWO_HOSTS_NAME=host$host RANK=$rank LOCAL_RANK=$((rank % ranks_per_host)) ${enter[@]+"${enter[@]}"} "$@" &
  ranks+=($!)
done
code=0
for rank in "${ranks[@]}"; do
  wait "$rank" || code=$?
done
if [[ -n $other ]]; then
  # The kernel's counters of this namespace: bytes received, seven others, bytes sent.
  read -r _ received _ _ _ _ _ _ _ sent _ < <(grep cable0 /proc/net/dev)
  echo "between the hosts went $((received + sent)) bytes"
fi
exit "$code"
