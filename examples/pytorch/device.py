"""--device: where an example trains. With cuda each rank has the GPU of its number in its host, on which
whatever is made lies, and NCCL carries what torch exchanges."""

import os

import torch
import torch.distributed as dist


def add_device(parser):
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="cuda: a GPU for each rank, and NCCL (cpu)"
    )


def start_on(name, has_peers=True, **options):
    """Makes the process group, and chooses the device. options: of init_process_group()."""
    device = torch.device(name, int(os.environ.get("LOCAL_RANK", 0))) if name == "cuda" else None
    if device is not None:
        torch.cuda.set_device(device)
        torch.set_default_device(device)
    if has_peers:
        dist.init_process_group("gloo" if device is None else "cpu:gloo,cuda:nccl", **options)
