"""How the baselines time a call: the two ways of `moewave bench` (docs/bench.md)."""
import torch

FLUSH_BYTES = 256 << 20  # several times the L2


class Timer:
    """`idle` waits until all GPUs of the run have nothing to do; `slowest` takes the largest of all ranks."""

    def __init__(self, warmup, iterations, idle=torch.cuda.synchronize, slowest=lambda ms: ms):
        self.warmup, self.iterations, self.idle, self.slowest = warmup, iterations, idle, slowest
        self.begin, self.end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flush = torch.empty(FLUSH_BYTES, device="cuda", dtype=torch.uint8)

    def time(self, function, calls):
        """Milliseconds for all calls, enqueued without waiting; before them the L2 is flushed and the GPUs are idle."""
        self.flush.zero_()
        self.idle()
        self.begin.record()
        for _ in range(calls):
            function()
        self.end.record()
        torch.cuda.synchronize()
        return self.slowest(self.begin.elapsed_time(self.end))

    def isolated_ms(self, function):
        """Of each call by itself, after the warm-up."""
        times = [self.time(function, 1) for _ in range(self.warmup + self.iterations)]
        return times[self.warmup:]

    def sustained_ms(self, function):
        """Of a call when all follow each other without a pause."""
        return self.time(function, self.iterations) / self.iterations
