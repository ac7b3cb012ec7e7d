"""``epcache``: the app, and what happens to errors on their way to the user."""

from __future__ import annotations

import json
import sys
import traceback

import typer

from epcache.cli import (
    attention,
    bench,
    catalog,
    demo,
    extract,
    features,
    layerwise,
    lowshot,
    poolers,
    probe,
    report,
    store,
    sweep,
)
from epcache.errors import EpcacheError

app = typer.Typer(
    name="epcache",
    help="Probe a frozen vision backbone many times while running it once.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
for module in (
    demo, extract, store, probe, features, layerwise, lowshot, sweep, attention, report, catalog,
    poolers, bench,
):  # fmt: skip
    module.register(app)


@app.callback(invoke_without_command=True)
def root(
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    """Probe a frozen vision backbone many times while running it once.

    Every command takes --json (one JSON object on stdout) and --debug (tracebacks).
    """
    if version:
        import epcache

        typer.echo(epcache.__version__)
        raise typer.Exit


def main(arguments: list[str] | None = None) -> None:
    """Entry point. Exit 0 done, 1 an error in one line, 2 usage, 130 interrupted."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug, json_too = "--debug" in arguments, "--json" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    try:
        app(arguments, prog_name="epcache", obj=arguments)  # exits by itself, with 2 for usage
    except SystemExit as stop:
        words = {2: "wrong usage; stderr says what", 130: "interrupted"}
        if json_too and stop.code in words:
            print(json.dumps({"error": words[int(stop.code)]}))
        raise
    except EpcacheError as error:
        fail(str(error), json_too=json_too, debug=debug)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left; nothing is lost
    except OSError as error:
        place = f" {error.filename}" if error.filename else ""
        fail(f"cannot use{place}: {error.strerror or error}", json_too=json_too, debug=debug)
    except Exception as error:
        text = f"unexpected {type(error).__name__}: {error} (a fault of epcache; see --debug)"
        fail(text, json_too=json_too, debug=debug)
    sys.exit(1)


def fail(text: str, *, json_too: bool, debug: bool) -> None:
    """One red line on stderr; with ``--json`` the same as an object on stdout."""
    from epcache.cli import render

    if debug:
        traceback.print_exc()
    render.error(" ".join(text.split()))
    if json_too:
        print(json.dumps({"error": " ".join(text.split())}))
