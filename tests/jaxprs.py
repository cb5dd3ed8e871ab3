"""What a function is traced to."""

import jax
from jax.extend.core import jaxprs_in_params


def equations(jaxpr):
    """Yield every equation of a jaxpr, and of those inside its equations."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from equations(inner)


def parameters(eqn):
    """What an equation of the library says of the call, without the settings it is traced under."""
    return {name: value for name, value in eqn.params.items() if name != "contexts"}


def products(jaxpr):
    """Count the products of a jaxpr: the library's own, and JAX's."""
    names = [eqn.primitive.name for eqn in equations(jaxpr.jaxpr)]
    ours, jaxs = (
        sum(map(names.count, group))
        for group in (
            ("tilekern_contract",),
            ("dot_general", "ragged_dot_general"),
        )
    )
    return ours, jaxs


def traced(function, *args):
    """Count the products that a function is traced to: the library's own, and JAX's."""
    return products(jax.make_jaxpr(function)(*args))
