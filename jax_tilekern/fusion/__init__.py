"""``fuse``: elementwise equations of a function's jaxpr become epilogues of its products.

``groups.py`` finds products and the equations that each takes, ``scalar_steps.py`` makes those a
function of scalars, and ``fuse.py`` evaluates the jaxpr with the products fused.
"""
