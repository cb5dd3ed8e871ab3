"""What a launch plan reads and writes."""

from jax_tilekern.plans.launch import Buffer, TensorMap


def assert_within_buffers(plan, sizes):
    """Every buffer of these sizes in bytes is used, and no parameter goes beyond its own."""
    used = set()
    for launch in plan.launches:
        for parameter in launch.parameters:
            if isinstance(parameter, TensorMap):
                used.add(parameter.buffer)
                assert parameter.offset_bytes + parameter.extent_bytes <= sizes[parameter.buffer]
            elif isinstance(parameter, Buffer):
                used.add(parameter.index)
                assert parameter.offset_bytes < sizes[parameter.index]
    assert used == set(range(len(sizes)))
