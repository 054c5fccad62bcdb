"""Which losses a replica scheme outlives.

n nodes in disjoint groups of r keep one another's images; a loss of k random nodes is outlived when every group keeps
a member. Counting: the subsets of size k that contain no whole group are the coefficient of x^k in
((1 + x)^r − x^r)^(n/r); divided by C(n, k). For pairs this is C(n/2, k)·2^k ÷ C(n, k).
"""

from __future__ import annotations

from functools import lru_cache
from math import comb

from surefoot.errors import ConfigError


@lru_cache(maxsize=4096)
def group_survival(nodes: int, group: int, lost: int) -> float:
    """P(every group keeps a member) when ``lost`` of ``nodes`` vanish together, at random.

    A remainder of nodes joins the last group. ``group`` 1 means no replica.
    """
    if group < 1 or nodes < 1:
        raise ConfigError(f"{nodes} nodes in groups of {group}: give 1 or more")
    if lost <= 0:
        return 1.0
    if group == 1 or lost >= nodes:
        return 0.0
    ways = [1]
    for size in _group_sizes(nodes, group):
        ways = _times(ways, _without_whole_group(size))
    return ways[lost] / comb(nodes, lost) if lost < len(ways) else 0.0


def _group_sizes(nodes: int, group: int) -> list[int]:
    full, rest = divmod(nodes, group)
    if full == 0:
        return [nodes]
    return [group] * (full - 1) + [group + rest]


def _without_whole_group(size: int) -> list[int]:
    return [comb(size, k) for k in range(size)]


def _times(left: list[int], right: list[int]) -> list[int]:
    product = [0] * (len(left) + len(right) - 1)
    for i, a in enumerate(left):
        for j, b in enumerate(right):
            product[i + j] += a * b
    return product
