"""Trains random parameters with torch.optim.Adam(fused=True) and writes all that the parity tests replay.

usage: record_adam.py FOLDER CONFIG...     with CONFIG = WORKERS,WEIGHT_DECAY,BETA1,LATE
Writes FOLDER/0.bin, 1.bin ..., one a CONFIG, of raw float32: for each parameter its start; then for each step,
for each worker, each parameter's gradient; then for each parameter its end, exp_avg and exp_avg_sq. With LATE=1
the last parameter has no gradient in the first two steps. The workers' gradients are added in order and
divided, as tensors. Sizes and steps must be those of recorded.h.
"""
import ctypes
import sys

import torch

SIZES = [(3,), (7,), (13,), (15,), (1,), (64,), (65,), (31, 33), (100003,), (40, 301)]
STEPS = 50


def record(out, workers, weight_decay, beta1, late):
    def write(tensor):
        tensor = tensor.detach().contiguous()
        out.write(ctypes.string_at(tensor.data_ptr(), tensor.numel() * 4))

    params = [torch.nn.Parameter(torch.randn(size)) for size in SIZES]
    optimizer = torch.optim.Adam(params, lr=1e-3, betas=(beta1, 0.999), weight_decay=weight_decay, fused=True)
    for param in params:
        write(param)
    for step in range(STEPS):
        scale = 10.0 ** ((step % 7) - 4)
        gradients = [[torch.randn(size) * scale for size in SIZES] for _ in range(workers)]
        for worker in gradients:
            for gradient in worker:
                write(gradient)
        for index, param in enumerate(params):
            total = gradients[0][index].clone()
            for worker in gradients[1:]:
                total += worker[index]
            if workers > 1:
                total /= workers
            undefined = late and index == len(params) - 1 and step < 2
            param.grad = None if undefined else total
        optimizer.step()
    for param in params:
        write(param)
        write(optimizer.state[param]["exp_avg"])
        write(optimizer.state[param]["exp_avg_sq"])


torch.set_num_threads(1)  # OpenMP barriers crawl on a busy machine; the values do not depend on it.
torch.manual_seed(1234)
for number, config in enumerate(sys.argv[2:]):
    count, decay, beta1, late = config.split(",")
    with open(f"{sys.argv[1]}/{number}.bin", "wb") as out:
        record(out, int(count), float(decay), float(beta1), late == "1")
