"""Shows the progress of long operations on standard error."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def show_progress(show: bool | None = None) -> Iterator[Callable[[str], None]]:
    """Yields a function that shows a description of the current activity, by default only on a terminal."""
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda activity: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda activity: progress.reset(task, description=activity)
