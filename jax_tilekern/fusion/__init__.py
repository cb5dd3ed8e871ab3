"""``fuse``: elementwise equations of a function's jaxpr become epilogues of its products.

``elementwise.py`` says which equations are elementwise, ``groups.py`` which of them each product
takes, ``in_place.py`` whose memory its results take, ``scalars.py`` evaluates them on scalars, and
``fuse.py`` the jaxpr with the products fused.
"""
