"""``python -m benchmarks``."""

from benchmarks.command_line import main

raise SystemExit(main())
