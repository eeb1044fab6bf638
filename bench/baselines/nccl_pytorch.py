#!/usr/bin/env python3
"""The layer as it is commonly written with NCCL and PyTorch, one process a GPU. Starts its processes itself.

Forward: all-to-all of expert ids and of one row a route, with splits that the host already knows (the count exchange and
its synchronisation are left out, in the baseline's favour); sort by expert; torch._grouped_mm; SwiGLU;
torch._grouped_mm; unsort; all-to-all back; weighted sum. Backward by autograd, for x, router weights and both weights.

Prints a table, and JSON with --json FILE. Timed as `moewave bench` times the layer: isolated calls of the slowest rank,
with the L2 flushed and all GPUs idle before each (median, minimum, maximum), then all without a pause (sustained).
"""
import argparse
import json
import os
import statistics
import struct

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
import torch.nn.functional as functional

from shapes import SHAPES
from timing import Timer


class AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(context, rows, out_splits, in_splits):
        context.splits = in_splits, out_splits
        out = rows.new_empty(sum(out_splits), *rows.shape[1:])
        dist.all_to_all_single(out, rows.contiguous(), out_splits, in_splits)
        return out

    @staticmethod
    def backward(context, grad):
        out = grad.new_empty(sum(context.splits[0]), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), *context.splits)
        return out, None, None


def layer(x, ids, weights, w_gate_up, w_down, splits):
    """x [T, H], ids and weights [T, k], w_gate_up [E_local, H, 2I], w_down [E_local, I, H] -> [T, H]."""
    out_splits, in_splits = splits
    tokens, topk = ids.shape
    experts = w_gate_up.shape[0]
    order = ids.view(-1).argsort(stable=True)  # by owner too: a rank's experts are neighbours
    sent = x[order // topk]
    received = AllToAll.apply(sent, out_splits, in_splits)
    received_ids = torch.empty(sum(out_splits), device=x.device, dtype=ids.dtype)
    dist.all_to_all_single(received_ids, ids.view(-1)[order], out_splits, in_splits)
    local = received_ids - dist.get_rank() * experts
    by_expert = local.argsort(stable=True)
    ends = torch.bincount(local, minlength=experts).cumsum(0).int()
    gate, up = torch._grouped_mm(received[by_expert], w_gate_up, offs=ends).chunk(2, dim=-1)
    y = torch._grouped_mm(functional.silu(gate) * up, w_down, offs=ends)
    returned = torch.empty_like(y).index_copy(0, by_expert, y)
    combined = AllToAll.apply(returned, in_splits, out_splits)
    routes = torch.empty_like(combined).index_copy(0, order, combined).view(tokens, topk, -1)
    return (routes * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def idle_everywhere():
    dist.barrier()
    torch.cuda.synchronize()


def slowest(ms):
    time = torch.tensor(ms, device="cuda")
    dist.all_reduce(time, dist.ReduceOp.MAX)
    return time.item()


def times_ms(function, arguments):
    timer = Timer(arguments.warmup, arguments.iterations, idle_everywhere, slowest)
    times = timer.isolated_ms(function)
    return {"median": statistics.median(times), "min": min(times), "max": max(times), "all": times,
            "sustained": timer.sustained_ms(function)}


def ids_of_file(path, shape, rank, ranks):
    """topk_ids (I32) and topk_weights of an inputs file of moewave (docs/files.md), the rows of this rank."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
        data = file.read()
    parts = []
    for name, kind, dtype in (("topk_ids", "I32", torch.int32), ("topk_weights", "F32", torch.float32)):
        entry = header[name]
        wanted = [shape.tokens * ranks, shape.topk]
        if entry["dtype"] != kind or entry["shape"] != wanted:
            raise SystemExit(f"{path}: {name} is {entry['dtype']} {entry['shape']}; it must be {kind} {wanted}")
        begin, end = entry["data_offsets"]
        values = torch.frombuffer(bytearray(data[begin:end]), dtype=dtype).view(wanted)
        parts.append(values[rank * shape.tokens:(rank + 1) * shape.tokens].cuda())
    return parts[0].long(), parts[1]


def zipf_ids(shape, experts, generator):
    probability = 1.0 / torch.arange(1, experts + 1, device="cuda", dtype=torch.float64)
    shuffled = probability[torch.randperm(experts, device="cuda", generator=torch.Generator("cuda").manual_seed(9))]
    return torch.multinomial(shuffled.expand(shape.tokens, -1), shape.topk, generator=generator)


def measure(shape, arguments):
    rank, ranks = dist.get_rank(), dist.get_world_size()
    experts = shape.experts_per_rank * ranks
    tokens = arguments.tokens or shape.tokens
    shape = type(shape)(shape.hidden, shape.intermediate, shape.experts_per_rank, shape.topk, tokens)
    generator = torch.Generator("cuda").manual_seed(rank)
    make = lambda *size: torch.randn(*size, device="cuda", dtype=torch.bfloat16, generator=generator)
    x = make(tokens, shape.hidden)
    w_gate_up = (make(shape.experts_per_rank, 2 * shape.intermediate, shape.hidden) * shape.hidden**-0.5).transpose(1, 2)
    w_down = (make(shape.experts_per_rank, shape.hidden, shape.intermediate) *
              shape.intermediate**-0.5).transpose(1, 2)
    weights = torch.rand(tokens, shape.topk, device="cuda", generator=generator).softmax(-1)
    if arguments.routes:
        ids, weights = ids_of_file(arguments.routes, shape, rank, ranks)
    elif arguments.routing == "zipf":
        ids = zipf_ids(shape, experts, generator)
    else:
        ids = torch.rand(tokens, experts, device="cuda", generator=generator).topk(shape.topk).indices
    in_splits = torch.bincount(ids.view(-1) // shape.experts_per_rank, minlength=ranks)
    out_splits = torch.empty_like(in_splits)
    dist.all_to_all_single(out_splits, in_splits)
    splits = out_splits.tolist(), in_splits.tolist()

    result = {"tokens": tokens, "ranks": ranks, "routing": "file" if arguments.routes else arguments.routing}
    with torch.no_grad():
        result["forward_ms"] = times_ms(lambda: layer(x, ids, weights, w_gate_up, w_down, splits), arguments)
    if arguments.backward:
        leaves = [tensor.requires_grad_() for tensor in (x, weights, w_gate_up, w_down)]
        grad = make(tokens, shape.hidden)

        def step():
            for leaf in leaves:
                leaf.grad = None
            layer(x, ids, weights, w_gate_up, w_down, splits).backward(grad)

        result["forward_backward_ms"] = times_ms(step, arguments)
    return result


def run_rank(rank, ranks, arguments):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(arguments.port))
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=ranks, device_id=torch.device("cuda", rank))
    results = {}
    for name in arguments.shapes:
        results[name] = measure(SHAPES[name], arguments)
        torch.cuda.empty_cache()
        if rank == 0:
            forward = results[name]["forward_ms"]
            line = f"{name:5} {ranks:5} {results[name]['tokens']:7} {forward['median']:9.3f} {forward['min']:9.3f}"
            if arguments.backward:
                line += f" {results[name]['forward_backward_ms']['median']:12.3f}"
            print(line, flush=True)
    if rank == 0 and arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "shapes": results}, file,
                      indent=2)
    dist.destroy_process_group()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", default="ABC", help="of A, B, C (default ABC)")
    parser.add_argument("--tokens", type=int, default=0, help="of a rank (default: the shape's)")
    parser.add_argument("--routing", choices=["uniform", "zipf"], default="uniform")
    parser.add_argument("--routes", metavar="FILE", help="take all ranks' ids and router weights from an inputs file")
    parser.add_argument("--backward", action="store_true")
    parser.add_argument("--warmup", type=int, default=5)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--port", type=int, default=29531)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    ranks = torch.cuda.device_count()
    if ranks == 0:
        raise SystemExit("nccl_pytorch.py needs at least one CUDA GPU; none is visible")
    print("shape ranks  tokens   fwd, ms  min" + ("   fwd+bwd, ms" if arguments.backward else ""))
    multiprocessing.spawn(run_rank, (ranks, arguments), nprocs=ranks)


if __name__ == "__main__":
    main()
