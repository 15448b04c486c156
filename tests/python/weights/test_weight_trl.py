"""trl's own client of vLLM's server, with a server that answers on the routes of vLLM and has a fake engine's
model. scripts/loops.sh runs it; without trl it is skipped."""

import http.server
import json
import threading
import urllib.parse

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl", reason="trl is not installed: scripts/loops.sh")
import fake_engine
from test_weight_layout import packed
from weight_checks import bits, step

from tagc.weights import Follower
from tagc.weights.layout import Rank, engine_layout


def server_of(model, calls):
    """Answers as vLLM's server does, and keeps what it was asked."""
    follower = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def answer(self, body):
            url = urllib.parse.urlparse(self.path)
            calls.append((url.path, body))
            if url.path == "/init_weight_transfer_engine":
                follower[:] = [Follower(engine_layout(model, Rank(0, 1)), body["init_info"]["store"])]
            if url.path == "/update_weights":
                follower[0].update(body["update_info"]["version"])
            self.send_response(200)
            self.end_headers()

        def do_GET(self):
            self.answer(None)

        def do_POST(self):
            data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self.answer(json.loads(data) if data else None)

        def log_message(self, *_):
            pass

    made = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=made.serve_forever, daemon=True).start()
    return made


def test_trl_sends_versions_to_a_server(tmp_path):
    """The interface that AsyncGRPOTrainer calls, in its order; experts as transformers has them."""
    import accelerate

    from tagc.weights.engines.trl import StoreWeightTransfer

    accelerate.PartialState(cpu=True)  # as every trainer makes one; trl's client writes to its log
    weights, generator = fake_engine.checkpoint(), torch.Generator().manual_seed(1)
    model, right, calls = fake_engine.Model(), fake_engine.Model(), []
    server = server_of(model, calls)
    try:
        transfer = StoreWeightTransfer(str(tmp_path), f"http://127.0.0.1:{server.server_port}", timeout_s=60)
        transfer.init_weight_transfer()
        for version in range(1, 4):
            transfer.pause()
            sent = {name: tensor for name, tensor in weights.items() if ".experts." not in name}
            of_experts = {f"model.layers.1.mlp.experts.{k}": v for k, v in packed(weights).items()}
            transfer.send_weights(iter((sent | of_experts).items()))
            transfer.resume()
            right.load_weights(weights.items())
            assert bits(model) == bits(right)
            paths = [path for path, _ in calls[-5:]]
            assert paths == [
                "/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"
            ]  # fmt: skip
            assert calls[-3][1] == {"update_info": {"version": version}}
            step(weights, generator)
        transfer.destroy()
    finally:
        server.shutdown()
        server.server_close()


def test_trl_has_the_interface():
    """What its trainer calls is what the transfer has."""
    import inspect

    from trl.experimental.async_grpo import async_grpo_trainer

    from tagc.weights.engines.trl import StoreWeightTransfer

    protocol = async_grpo_trainer.WeightTransferProtocol
    names = [name for name, value in vars(protocol).items() if inspect.isfunction(value) and name[0] != "_"]
    assert {"init_weight_transfer", "pause", "send_weights", "resume", "destroy"} <= set(names)
    for name in names:
        wanted, there = (inspect.signature(getattr(one, name)) for one in (protocol, StoreWeightTransfer))
        assert list(wanted.parameters) == list(there.parameters)
