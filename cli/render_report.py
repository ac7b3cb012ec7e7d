"""What a person sees of ``epcache report``."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from epcache.cli.render import LiveView, facts, next_step, note, screen, stream_is_terminal

if TYPE_CHECKING:
    from rich.status import Status

    from epcache.pipelines.report import ReportStudy

SHOWN = 3
"""Problems; the page has more."""


class ReportView(LiveView):
    """Says which figure is being drawn, on a terminal."""

    _status: Status | None = None

    def __exit__(self, *arguments: object) -> None:
        """Take the line away."""
        super().__exit__(*arguments)
        if self._status is not None:
            self._status.stop()

    def say(self, text: str) -> None:
        """Replace the line."""
        if not stream_is_terminal(stderr=True):
            return
        if self._status is None:
            self._status = screen(stderr=True).status(text)
            self._status.start()
        self._status.update(text)


def reported(written: ReportStudy) -> None:
    """Where everything is."""
    names = [path.stem for path in written.figures if path.suffix == ".png"]
    out = written.report.parent
    facts(
        [
            ("rows", f"{written.num_rows:,}"),
            ("figures", f"{', '.join(names) or 'none'} (PNG and SVG in {out / 'figures'})"),
            ("tables", f"{len({path.stem for path in written.tables})} (CSV, Markdown and LaTeX in "
                       f"{out / 'tables'})"),
        ]
    )  # fmt: skip
    for problem in written.problems[:SHOWN]:
        note(f"left out: {problem}")
    if len(written.problems) > SHOWN:
        note(f"and {len(written.problems) - SHOWN} more files that cannot be read")
    next_step(f"wrote {written.report}", f"python -m webbrowser {shlex.quote(str(written.report))}")
