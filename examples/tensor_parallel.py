"""QK-RMSNorm of whole projections under tensor parallelism: ranks hold parts of the columns and share 8 bytes per row.

Run: torchrun --nproc-per-node 2 examples/tensor_parallel.py
"""

import torch
import torch.distributed as dist

import onepass

cuda = torch.cuda.is_available()
dist.init_process_group("nccl" if cuda else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
device = torch.device("cuda", rank % torch.cuda.device_count()) if cuda else torch.device("cpu")

torch.manual_seed(0)  # the same tensors on every rank, each of which takes its part
q, k = torch.randn(16, 4096).bfloat16(), torch.randn(16, 1024).bfloat16()
gammas = 1 + 0.1 * torch.randn(4096), 1 + 0.1 * torch.randn(1024)
shards = [t.chunk(world, -1)[rank].contiguous().to(device) for t in (q, k, *gammas)]

q_out, k_out = onepass.qk_rms_norm(*shards, eps=1e-6, group=dist.group.WORLD)

whole = onepass.qk_rms_norm(q, k, *gammas, eps=1e-6)
for name, got, full in zip("qk", (q_out, k_out), whole, strict=True):
    equal = (got.cpu() == full.chunk(world, -1)[rank]).float().mean()
    if rank == 0:
        print(f"{name}: {equal:.2%} of this rank's values equal those of one device")
dist.destroy_process_group()
