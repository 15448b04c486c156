#!/usr/bin/env bash
# How long mpirun lives on after the link between two hosts has died: sudo lab/hosts/dead_link.sh [tagc [mpirun's options]]
# Two network namespaces, a rank in each, and in the middle of the run one end of the link goes down. RETRIES=5 sets
# net.ipv4.tcp_retries2 in both; the kernel's default is 15. LIMIT: seconds after which mpirun is killed (60).
set -uo pipefail
tagc=$(realpath "${1:-build/tagc}")
[ $# -eq 0 ] || shift
[ "$(id -u)" = 0 ] || { echo "dead_link: namespaces need root" >&2; exit 2; }
one=tagc-lab-$$-h1 two=tagc-lab-$$-h2 folder=$(mktemp -d)
export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 TAGC_LAB=tagc-lab-$$
processes() { { ip netns pids $one; ip netns pids $two; } 2>/dev/null; }
end() {
    processes | xargs -r kill -KILL 2>/dev/null
    for name in $one $two; do ip netns del $name 2>/dev/null; done
    rm -rf "$folder"
}
trap end EXIT
ip netns add $one && ip netns add $two && ip -n $one link add eth0 type veth peer name eth0 netns $two || exit 1
for n in 1 2; do
    name=tagc-lab-$$-h$n
    ip -n $name addr add 10.77.0.$n/24 dev eth0
    for device in lo eth0; do ip -n $name link set $device up; done
    ip netns exec $name sysctl -qw net.ipv4.tcp_retries2="${RETRIES:-15}"
done

for i in $(seq 8000); do echo "line $((i * i % 997)) of text"; done >"$folder/text.txt"
"$tagc" data --quiet --out "$folder/data" "$folder/text.txt" || exit 1
run=$folder/run subnet=10.77.0.0/24
timeout -k 3 "${LIMIT:-60}" nsenter --net=/run/netns/$one unshare --uts sh -c 'hostname h1 && exec "$@"' sh \
    mpirun --mca plm_rsh_agent "$(realpath "$(dirname "$0")")/agent" --host 10.77.0.1:1,10.77.0.2:1 --bind-to none --mca btl tcp,self \
    --mca btl_tcp_if_include $subnet --mca oob_tcp_if_include $subnet "$@" "$tagc" train --data "$folder/data" --model tiny \
    --steps 1000000 --eval-every never --save-every 20 --timeout 5 --quiet --out "$run" >"$folder/log" 2>&1 </dev/null &
job=$!
for _ in $(seq 600); do [ -d "$run/step-00000020" ] && break; sleep 0.1; done
[ -d "$run/step-00000020" ] || { cat "$folder/log" >&2; exit 1; }
ip -n $two link set eth0 down
begin=${EPOCHREALTIME/./} ranks=
since() { echo $(((${EPOCHREALTIME/./} - begin) / 100000)) | sed 's/.$/.&/'; }
while kill -0 $job 2>/dev/null; do
    [ -n "$ranks" ] || processes | xargs -r -I% cat /proc/%/comm 2>/dev/null | grep -x tagc >/dev/null || ranks=$(since)
    sleep 0.2
done
ended=$(since) code=0
wait $job || code=$?
case $code in 124 | 137) ended="killed after $ended" ;; *) ended="after $ended" ;; esac
echo "tcp_retries2 ${RETRIES:-15}, options \"$*\": ranks gone after ${ranks:-(never)} s, mpirun $ended s; still on the other host:" \
    "$(ip netns pids $two | xargs -r -I% cat /proc/%/comm | tr '\n' ' ')"
