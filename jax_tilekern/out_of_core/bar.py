"""A progress bar for a product; imported only when one is shown, because it needs rich."""

from __future__ import annotations

from types import TracebackType

import rich.console
import rich.progress

from jax_tilekern.out_of_core.plan import Plan
from jax_tilekern.out_of_core.progress import Progress


class Bar:
    """Prints a plan, and shows a bar inside its context."""

    def __init__(self, plan: Plan) -> None:
        console = rich.console.Console(stderr=True)
        console.print(str(plan), highlight=False)
        self._progress = rich.progress.Progress(
            *rich.progress.Progress.get_default_columns(),
            rich.progress.TimeElapsedColumn(),
            console=console,
        )
        self._task = self._progress.add_task("blocks", total=len(plan.tiles))

    def __enter__(self) -> Bar:
        self._progress.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._progress.stop()

    def __call__(self, progress: Progress) -> None:
        """Show the completed blocks."""
        self._progress.update(self._task, completed=progress.done)
