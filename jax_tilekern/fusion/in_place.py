"""Find the operands of epilogues whose memory results can take.

A product's result that an epilogue is the last to read needs no memory beside that of the
epilogue's own result. Any other reader must be a product on which the epilogue's product depends:
an elementwise equation may run later than it stands, as a part of a fusion of XLA's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from jax_tilekern.fusion.groups import Group, product_of
from jax_tilekern.interop import compat


class _Call(NamedTuple):
    """A product with its epilogue, or an equation; ``number`` identifies it."""

    number: int
    is_product: bool
    reads: tuple[Any, ...]
    results: tuple[Any, ...]


def operands_to_overwrite(
    jaxpr: compat.Jaxpr, groups: Sequence[Group], remaining: Iterable[int]
) -> list[tuple[tuple[int, int], ...]]:
    """Return, for each group, pairs of an operand and the result that takes its memory."""
    equations = [jaxpr.eqns[i] for i in sorted(remaining)]
    calls = [
        *(_call(i, True, _reads(group), group.results) for i, group in enumerate(groups)),
        *(
            _call(i, product_of(eqn) is not None, eqn.invars, eqn.outvars)
            for i, eqn in enumerate(equations, len(groups))
        ),
    ]
    made_by, readers = dict[Any, _Call](), defaultdict[Any, list[_Call]](list)
    for call in reversed(calls):
        made_by.update(dict.fromkeys(call.results, call))
        for x in set(call.reads):
            readers[x].append(call)
    returned = {x for x in jaxpr.outvars if not compat.is_literal(x)}

    def may_be_overwritten(x: Any, call: _Call) -> bool:
        others = [reader for reader in readers[x] if reader is not call]
        return (
            x in made_by
            and made_by[x].is_product
            and x not in returned
            and call.reads.count(x) == 1
            and all(reader.is_product for reader in others)
            and {reader.number for reader in others} <= _needed_by(call, made_by)
        )

    found = []
    for group, call in zip(groups, calls, strict=False):
        pairs, free = [], dict(enumerate(x.aval for x in group.results))
        for i, (x, dims) in enumerate(group.operands):
            whole = dims == tuple(range(len(dims)))
            like = x.aval.shape, x.aval.dtype
            same = [j for j, y in free.items() if whole and (y.shape, y.dtype) == like]
            if same and may_be_overwritten(x, call):
                pairs.append((i, same[0]))
                del free[same[0]]
        found.append(tuple(pairs))
    return found


def _call(number: int, is_product: bool, reads: Iterable[Any], results: Iterable[Any]) -> _Call:
    variables = tuple(x for x in reads if not compat.is_literal(x))
    return _Call(number, is_product, variables, tuple(results))


def _reads(group: Group) -> list[Any]:
    return [*group.eqn.invars, *(reading.array for reading in group.operands)]


def _needed_by(call: _Call, made_by: dict[Any, _Call]) -> set[int]:
    """Return the numbers of the calls that a call depends on."""
    found, waiting = set[int](), [call]
    while waiting:
        for x in waiting.pop().reads:
            needed = made_by.get(x)
            if needed is not None and needed.number not in found:
                found.add(needed.number)
                waiting.append(needed)
    return found
