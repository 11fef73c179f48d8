"""What long work is doing, on standard error."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress_of(show: bool | None = None) -> Iterator[Callable[[str], None]]:
    """Shows what is being done and for how long, while a block runs.

    Args:
        show: whether to; by default where standard error is a terminal.

    Yields:
        A function that takes what is being done now.
    """
    if not (sys.stderr.isatty() if show is None else show):
        yield lambda doing: None
        return
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda doing: progress.reset(task, description=doing)
