"""Trains parameters with gradients accumulated over several backwards and torch.optim.Adam(fused=True).

usage: record_accumulation.py FILE WORKERS
Writes raw float32: each parameter's start; then for each step, worker and backward each parameter's factor c of
the loss, sum(w * w * c); then each parameter's end. The workers' sums are added in order and divided. Sizes,
counts and used() must be those of accumulation_test.cc.
"""
import ctypes
import sys

import torch

SIZES = [(3,), (65,), (31, 33), (7,), (20000,)]
STEPS = 8


def backwards(step):
    return step % 4 + 1


def used(step, backward, parameter):
    if parameter == 1:  # In scopes alone.
        return backward + 1 < backwards(step)
    if parameter == 2:  # In the last backward alone.
        return backward + 1 == backwards(step)
    return parameter != 3 or step % 3 != 0  # Parameter 3: sometimes not at all.


def write(out, tensor):
    tensor = tensor.detach().contiguous()
    out.write(ctypes.string_at(tensor.data_ptr(), tensor.numel() * 4))


def main(path, workers):
    torch.set_num_threads(1)
    torch.manual_seed(77)
    params = [torch.nn.Parameter(torch.randn(size)) for size in SIZES]
    optimizer = torch.optim.Adam(params, lr=1e-2, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01, fused=True)
    with open(path, "wb") as out:
        for param in params:
            write(out, param)
        for step in range(1, STEPS + 1):
            sums = []
            for _ in range(workers):
                optimizer.zero_grad(set_to_none=True)
                for backward in range(backwards(step)):
                    factors = [torch.randn(size) * 10.0 ** (backward * 2 - 3) for size in SIZES]
                    for factor in factors:
                        write(out, factor)
                    terms = [(w * w * c).sum() for i, (w, c) in enumerate(zip(params, factors))
                             if used(step, backward, i)]
                    sum(terms[1:], terms[0]).backward()
                sums.append([param.grad for param in params])
            for index, param in enumerate(params):
                total = sums[0][index]
                for other in sums[1:]:
                    total = None if total is None else total + other[index]
                param.grad = None if total is None else total / workers if workers > 1 else total
            optimizer.step()
        for param in params:
            write(out, param)


main(sys.argv[1], int(sys.argv[2]))
