"""Makes folders of weights in the many ways in which they are saved, from one that tagc export has written:
weights.py EXPORTED FOLDER."""

import array
import json
import os
import shutil
import struct
import sys


def read(path):
    """Returns name -> (dtype, shape, bytes)."""
    with open(path, "rb") as file:
        data = file.read()
    n = struct.unpack("<Q", data[:8])[0]
    body = data[8 + n :]
    return {
        name: (entry["dtype"], entry["shape"], body[slice(*entry["data_offsets"])])
        for name, entry in json.loads(data[8 : 8 + n]).items()
        if name != "__metadata__"
    }


def write(path, tensors):
    header, body = {}, b""
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [len(body), len(body) + len(data)]}
        body += data
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + body)


def doubles(entry):
    _, shape, data = entry
    return "F64", shape, array.array("d", array.array("f", data)).tobytes()


def transposed(entry):
    dtype, (n_rows, n_cols), data = entry
    values = array.array("f", data)
    turned = array.array("f", (values[r * n_cols + c] for c in range(n_cols) for r in range(n_rows)))
    return dtype, [n_cols, n_rows], turned.tobytes()


class Maker:
    def __init__(self, exported, folder):
        self.exported, self.root = exported, folder
        self.tensors = read(f"{exported}/model.safetensors")

    def folder(self, name, has_config=True):
        path = f"{self.root}/{name}"
        os.makedirs(path)
        if has_config:
            shutil.copy(f"{self.exported}/config.json", path)
        return path

    def whole(self, name, tensors):
        write(f"{self.folder(name)}/model.safetensors", tensors)

    def renamed(self, name, rename):
        self.whole(name, {rename(old): entry for old, entry in self.tensors.items()})

    def shards(self, name, change=lambda weight_map: None, leave_out=None):
        """Three files and an index, which `change` edits."""
        folder, weight_map = self.folder(name), {}
        for i in range(3):
            file = f"model-{i + 1:05d}-of-00003.safetensors"
            part = dict(list(self.tensors.items())[i::3])
            weight_map.update(dict.fromkeys(part, file))
            if i != leave_out:
                write(f"{folder}/{file}", part)
        change(weight_map)
        with open(f"{folder}/model.safetensors.index.json", "w") as file:
            json.dump({"metadata": {}, "weight_map": weight_map}, file)


def main():
    maker = Maker(sys.argv[1], sys.argv[2])
    tensors, wpe = maker.tensors, "transformer.wpe.weight"
    first, second = "model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors"

    # as good as the exported ones
    maker.shards("sharded")
    maker.renamed("compiled", lambda name: f"_orig_mod.{name}")
    maker.renamed("ddp", lambda name: f"module._orig_mod.{name}")
    maker.renamed("bare", lambda name: name.removeprefix("transformer."))
    maker.renamed("blocks", lambda name: name.replace("h.0.", "h.0._orig_mod._checkpoint_wrapped_module."))
    maker.renamed("fsdp", lambda name: name.replace("transformer.", "transformer._fsdp_wrapped_module."))
    maker.whole("f64", {name: doubles(entry) for name, entry in tensors.items()})

    # not these
    maker.whole("twice", {**tensors, "module.wpe.weight": tensors[wpe]})
    maker.whole("f8", {**tensors, wpe: ("F8_E4M3", tensors[wpe][1], b"\0" * (len(tensors[wpe][2]) // 4))})
    attention = "transformer.h.0.attn.c_attn.weight"
    maker.whole("transposed", {**tensors, attention: transposed(tensors[attention])})
    maker.whole("incomplete", {name: entry for name, entry in tensors.items() if "h.1.ln_2" not in name})
    maker.shards("absent", leave_out=1)
    maker.shards("lies", lambda names: names.update({wpe: second if names[wpe] == first else first}))
    maker.shards("outside", lambda names: names.update({wpe: "../sharded/" + names[wpe]}))
    maker.shards("deeper", lambda names: names.update({wpe: "more/" + names[wpe]}))
    shutil.copytree(f"{maker.root}/sharded", f"{maker.root}/deeper/more")
    maker.shards("short", lambda names: names.pop(wpe))
    for model in "llama", "mistral", "qwen2", "gpt_neox":
        folder = maker.folder(model, has_config=False)
        with open(f"{folder}/config.json", "w") as file:
            json.dump({"model_type": model, "hidden_size": 32, "num_hidden_layers": 2}, file)
        write(f"{folder}/model.safetensors", {"model.embed_tokens.weight": ("F32", [2, 2], bytes(16))})
    folder = maker.folder("unnamed", has_config=False)
    write(f"{folder}/model.safetensors", {"model.embed_tokens.weight": ("F32", [2, 2], bytes(16))})
    with open(f"{maker.folder('torch')}/pytorch_model.bin", "wb") as file:
        file.write(b"PK\3\4\x14\0\0\0" + bytes(100))
    with open(f"{maker.root}/old.pt", "wb") as file:
        file.write(b"\x80\x02}q\x01." * 20)
    with open(f"{maker.root}/q4.gguf", "wb") as file:
        file.write(b"GGUF\3\0\0\0" + bytes(100))


main()
