#!/usr/bin/env bash
# native_limit.sh <bench_native> [connections]: what iperf3 sends both ways over loopback with so many connections, a thread each on both ends
# where iperf3 is 3.16 or newer, and below it bench_native.
set -euo pipefail
bench=$1 n=${2:-4}
if command -v iperf3 >/dev/null; then
    iperf3 -s -1 -p 5290 >/dev/null 2>&1 &
    server=$!
    trap 'kill $server 2>/dev/null || true' EXIT
    sleep 1
    iperf3 -c 127.0.0.1 -p 5290 -P "$n" --bidir -t 4 -l 256K -J | python3 -c '
import json, sys
found = json.load(sys.stdin)["end"]
ways = [found[key]["bits_per_second"] / 1e9 for key in ("sum_received", "sum_received_bidir_reverse")]
print(f"iperf3 -P {sys.argv[1]}: {min(ways):.1f} Gbit/s each way")' "$n"
else
    echo "no iperf3: the limit is what sockets alone move"
fi
"$bench" --sockets "$n"
