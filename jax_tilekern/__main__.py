"""``python -m jax_tilekern``."""

from jax_tilekern.cli import main

raise SystemExit(main())
