"""TEMP plan"""

from dataclasses import dataclass

Node = tuple[int, int]


def run_of(v, n, rank):
    base, extra = divmod(v, n)
    start = rank * base + min(rank, extra)
    return range(start, start + base + (rank < extra))


def split(start, stop):
    size = stop - start
    return None if size == 1 else start + (1 << (size - 1).bit_length() - 1)


def partials(start, stop, v, node=None):
    a, b = node or (0, v)
    if start <= a and b <= stop:
        return ((a, b),)
    if b <= start or stop <= a:
        return ()
    m = split(a, b)
    return partials(start, stop, v, (a, m)) + partials(start, stop, v, (m, b))


@dataclass(frozen=True)
class Plan:
    partials_per_member: int
    owner: dict
    additions: tuple
    root: Node

    @classmethod
    def of(cls, v, n):
        owner = {}
        most = 0
        for r in range(n):
            run = run_of(v, n, r)
            ps = partials(run.start, run.stop, v)
            most = max(most, len(ps))
            for i, p in enumerate(ps):
                owner[p] = (r, i)
        adds = []

        def visit(node):
            if node in owner:
                return
            m = split(*node)
            l, r = (node[0], m), (m, node[1])
            visit(l)
            visit(r)
            adds.append((l, r, node))

        visit((0, v))
        return cls(most, owner, tuple(adds), (0, v))
