"""Makes gpt2_untied.safetensors and gpt2_tied.safetensors: weights, a batch, and the loss and gradients that
PyTorch's own layers give for them in float64. Needs torch only; run in this folder to make the files again.

Every tensor T of the model is there as "T", its gradient as "grad.T", and "tokens", "targets" (B, T), "loss"
(1)."""

import json
import struct

import torch
import torch.nn.functional as F


def make(path, seed, n_layer, n_head, n_embd, block_size, vocab_size, tied, n_batch, n_tokens):
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape, deviation=0.2):
        return (torch.randn(*shape, generator=generator) * deviation).float()

    weights = {"wte.weight": normal(vocab_size, n_embd), "wpe.weight": normal(block_size, n_embd)}
    norms = [f"h.{i}.ln_{j}" for i in range(n_layer) for j in (1, 2)] + ["ln_f"]
    for name in norms:
        weights[name + ".weight"] = 1 + normal(n_embd)
        weights[name + ".bias"] = normal(n_embd)
    for i in range(n_layer):
        for name, n_in, n_out in (
            ("attn.c_attn", 1, 3),
            ("attn.c_proj", 1, 1),
            ("mlp.c_fc", 1, 4),
            ("mlp.c_proj", 4, 1),
        ):
            weights[f"h.{i}.{name}.weight"] = normal(n_in * n_embd, n_out * n_embd)
            weights[f"h.{i}.{name}.bias"] = normal(n_out * n_embd)
    if not tied:
        weights["lm_head.weight"] = normal(vocab_size, n_embd)
    tokens = torch.randint(vocab_size, (n_batch, n_tokens), generator=generator)
    targets = torch.randint(vocab_size, (n_batch, n_tokens), generator=generator)

    w = {name: value.double().requires_grad_() for name, value in weights.items()}

    def norm(x, name):
        return F.layer_norm(x, (n_embd,), w[name + ".weight"], w[name + ".bias"], eps=1e-5)

    def linear(x, name):
        return x @ w[name + ".weight"] + w[name + ".bias"]

    x = w["wte.weight"][tokens] + w["wpe.weight"][:n_tokens]
    for i in range(n_layer):
        qkv = linear(norm(x, f"h.{i}.ln_1"), f"h.{i}.attn.c_attn").view(n_batch, n_tokens, 3, n_head, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + linear(attended.transpose(1, 2).reshape(n_batch, n_tokens, n_embd), f"h.{i}.attn.c_proj")
        wide = F.gelu(linear(norm(x, f"h.{i}.ln_2"), f"h.{i}.mlp.c_fc"), approximate="tanh")
        x = x + linear(wide, f"h.{i}.mlp.c_proj")
    logits = norm(x, "ln_f") @ w["wte.weight" if tied else "lm_head.weight"].T
    loss = F.cross_entropy(logits.view(-1, vocab_size), targets.view(-1))
    loss.backward()

    tensors = dict(weights)
    tensors.update({"grad." + name: value.grad.float() for name, value in w.items()})
    tensors.update(tokens=tokens.float(), targets=targets.float(), loss=loss.detach().float().view(1))
    header, data = {}, b""
    for name, value in tensors.items():
        raw = value.contiguous().numpy().tobytes()
        header[name] = {
            "dtype": "F32",
            "shape": list(value.shape),
            "data_offsets": [len(data), len(data) + len(raw)],
        }
        data += raw
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
    print(path, 8 + len(text) + len(data), "bytes, loss", loss.item())


make("gpt2_untied.safetensors", 1, 2, 3, 24, 136, 61, False, 2, 131)
make("gpt2_tied.safetensors", 2, 2, 2, 20, 48, 67, True, 3, 40)
