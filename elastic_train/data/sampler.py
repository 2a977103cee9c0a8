"""TEMP"""

import numpy as np


class Sampler:
    def __init__(self, n, b, v, seed, shuffle=True):
        self.n, self.b, self.v, self.seed = n, b, v, seed
        self.rows = -(-b // v)

    def shard_ids(self, first, s):
        base, extra = divmod(self.b, self.v)
        a = s * base + min(s, extra)
        k = base + (s < extra)
        pos = first + a + np.arange(self.rows)
        w = (np.arange(self.rows) < k).astype(np.float32)
        pos = np.minimum(pos, first + a + k - 1)
        out = np.array(
            [np.random.default_rng((self.seed, int(p) // self.n)).permutation(self.n)[int(p) % self.n] for p in pos]
        )
        return out, w

    def spans(self, first):
        return [(first // self.n, first % self.n, self.b)]
