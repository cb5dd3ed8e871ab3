"""How a call is shared out among the devices of a mesh."""
