"""What a machine has for arrays on its GPU: CUDA, torch, NCCL, memory, and the libraries that torch loads.
--runtimes: instead the CUDA runtimes that torch brings, without loading it."""

import importlib.util
import os
import pathlib
import platform
import re
import sys

if sys.argv[1:] == ["--runtimes"]:
    for name, place in (("nvidia", "*/lib"), ("torch", "lib")):
        spec = importlib.util.find_spec(name)
        for folder in spec.submodule_search_locations if spec else ():
            for library in sorted(pathlib.Path(folder).glob(f"{place}/libcudart*.so.*")):
                print(library)
    sys.exit(0)

try:
    import torch
except ImportError as problem:
    print(f"skipped: {problem}")
    sys.exit(77)


def main():
    print(f"Python {platform.python_version()}, {platform.platform()}, {os.cpu_count()} cores")
    print(f"torch {torch.__version__}, CUDA {torch.version.cuda}, for {' '.join(torch.cuda.get_arch_list())}")
    if not torch.cuda.is_available():
        print("skipped: torch finds no CUDA device")
        return 77
    for number in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(number)
        print(
            f"GPU {number}: {about.name}, sm_{about.major}{about.minor}, {about.multi_processor_count} "
            f"multiprocessors, {about.total_memory / 2**30:.0f} GiB"
        )
    print(f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}")
    torch.zeros(1, device="cuda")
    with open("/proc/self/maps") as maps:
        for path in sorted(set(re.findall(r"/\S*lib(?:cudart|cuda|nccl)[.-]\S*", maps.read()))):
            print(path)
    for name in sorted(os.environ):
        if re.match("CUDA_|NVIDIA_|PYTORCH_|NCCL_", name):
            print(f"{name}={os.environ[name]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
