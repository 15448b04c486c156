"""Is the result of the smoke experiment whole, and do its bytes agree with each other?"""

import json
import sys

result = json.load(open(sys.argv[1]))
assert (result["type"], result["format"], result["experiment"]) == ("lab", 1, "smoke")
for member in ("version", "commit", "date", "command", "machine"):
    assert member in result["origin"], member
assert result["origin"]["machine"]["hosts"] == ["h1", "h2"]
blas = result["origin"]["machine"]["blas"]
assert blas["name"].startswith("OpenBLAS ") and blas["kernel"], blas
assert result["settings"]["arms"] == ["experiments/configs/fsdp.conf", "experiments/configs/packed.conf"]
(case,) = result["cases"]
assert (case["hosts"], case["ranks_per_host"]) == (2, 1)
link = case["link"]
for way in ("tcp_one_way_bits_per_s", "tcp_both_ways_bits_per_s"):
    assert len(link[way]) == 2, way
    # A slow machine may stay below the rates, which are of the slower end of each way; nothing may exceed
    # them.
    assert all(1e6 < bits < 1.05 * rate for bits, rate in zip(link[way], (200e6, 150e6), strict=True)), link
assert (link["ways"], link["tunnel"]) == (["200mbit", "150mbit"], None), link
dense, packed = case["runs"]
assert [run["label"] for run in case["runs"]] == ["fsdp", "packed"]
for run in case["runs"]:
    assert run["world_size"] == 2 and run["n_steps"] >= 4
assert dense["options"] | case["options"] != packed["options"] | case["options"]
# Gradients of a dense step: 32 bits per parameter, half of which stay at home.
assert abs(dense["bits_per_param"]["values"] / 32 - 1) < 0.01, dense["bits_per_param"]
assert packed["bits_per_param"]["values"] < 0.5 * dense["bits_per_param"]["values"]
interface = case["interface"]
counted = sum(
    sum(run["bits_per_param"].values()) / 16 * run["n_params"] * run["n_steps"] for run in case["runs"]
)
assert counted > 5e6 and abs(interface["counted_bytes"] / counted - 1) < 1e-6
for name in ("sent_bytes", "received_bytes", "shaped_bytes"):
    assert len(interface[name]) == 2
    # Two ranks that do the same: each host sends what the other receives, and about as much.
    assert all(1.0 <= n / counted <= 1.15 for n in interface[name]), (name, interface)
assert 1.0 <= interface["overhead"] <= 1.15, interface
