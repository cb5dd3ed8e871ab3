"""What a function is traced to."""

import jax
from jax.extend.core import jaxprs_in_params

# The name here of a product with an epilogue.
FUSED = "tilekern_contract with a function"


def name_of(eqn):
    """The name of an equation's primitive."""
    name = eqn.primitive.name
    return FUSED if name == "tilekern_contract" and "function" in eqn.params else name


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
    names = [name_of(eqn) for eqn in equations(jaxpr.jaxpr)]
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
