"""``tune``: the measured choice of a kernel."""
