"""The command line: flags in, exit code out. Every command's work is done in `batchmla.jobs`.

Nothing heavy is imported before a command runs, so that help and wrong usage answer at once.
"""

import json
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from batchmla import __version__
from batchmla.errors import BatchmlaError, ExitCode

app = typer.Typer(
    name="batchmla",
    help="Offline batch inference: rows in, reasoning and content out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

JobFile = Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=C", help="Override a field; repeatable. C is YAML."),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, no tables.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug messages.")]


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Offline batch inference: rows in, reasoning and content out."""
    if version:
        typer.echo(f"batchmla {__version__}")
        raise typer.Exit()


@app.command()
def run(
    job: JobFile,
    overrides: Overrides = None,
    limit: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Only the first N rows.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Start over: delete our output.")] = False,
    retry_failed: Annotated[
        bool, typer.Option("--retry-failed", help="Run rows with an error again.")
    ] = False,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Go on although job, model or input changed."),
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Run a job, or go on with it: finished rows are never redone."""
    with reported(debug) as report:
        from batchmla.jobs.run import run_job
        from batchmla.jobs.spec import load_spec

        loaded = load_spec(job, overrides or [])
        report.run_log = Path(loaded.spec.output.path, "_batchmla", "run.log")
        with redirect_stdout(sys.stderr):  # libraries print, too, but stdout is the summary's
            summary = run_job(
                loaded,
                limit=limit,
                fresh=fresh,
                retry_failed=retry_failed,
                accept_changes=accept_changes,
            )
        report.exit_code = summary.exit_code
        if as_json:
            print_json(summary.as_dict())


@app.command()
def plan(
    job: JobFile,
    overrides: Overrides = None,
    hardware: Annotated[
        str | None, typer.Option(metavar="8xH200", help="Plan for other machines (2x8xH200: two).")
    ] = None,
    calibrate: Annotated[
        bool, typer.Option(help="Load the model and time some of its steps, for 20 seconds.")
    ] = False,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Memory, capacity, prompts and predicted time of a job, without weights or GPU."""
    with reported(debug):
        from batchmla.jobs.plan import plan_job
        from batchmla.jobs.plan_view import print_plan
        from batchmla.jobs.spec import load_spec

        made = plan_job(load_spec(job, overrides or []), hardware, calibrates=calibrate)
        if as_json:
            print_json(made.to_json())
        else:
            print_plan(made)


@app.command()
def preview(
    job: JobFile,
    overrides: Overrides = None,
    count: Annotated[int, typer.Option("-n", "--count", min=1, help="How many prompts.")] = 3,
    debug: Debug = False,
) -> None:
    """The first prompts exactly as the model gets them, without loading weights."""
    with reported(debug):
        from batchmla.jobs.preview import preview as make_preview
        from batchmla.jobs.preview import print_preview
        from batchmla.jobs.spec import load_spec

        print_preview(make_preview(load_spec(job, overrides or []), count))


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, id or builtin:tally.")],
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """What a model is, and what its KV cache costs beside MHA and GQA."""
    with reported(debug):
        from batchmla.jobs.inspect import inspect_model, print_inspect

        facts = inspect_model(model)
        if as_json:
            print_json(facts)
        else:
            print_inspect(facts)


@app.command()
def status(
    output: Annotated[Path, typer.Argument(metavar="OUT", help="A job's output folder.")],
    debug: Debug = False,
) -> None:
    """Rows done, failed and left of a running or finished job."""
    with reported(debug):
        from batchmla.jobs.status import print_status, read_status

        print_status(read_status(output))


@app.command()
def report(
    output: Annotated[Path, typer.Argument(metavar="OUT", help="A job's output folder.")],
    file: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Default: OUT/_batchmla/report.html."),
    ] = None,
    debug: Debug = False,
) -> None:
    """One HTML file about a running or finished job: rates, memory, lengths, errors."""
    with reported(debug):
        from batchmla.jobs.report import write_report

        typer.echo(f"wrote {write_report(output, file)}")


@app.command()
def bench(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Folder, id or builtin:tally.")],
    concurrency: Annotated[
        str, typer.Option(metavar="N,N,…", help="Rows in the engine at once.")
    ] = "1,4,16,64",
    prompt_tokens: Annotated[str, typer.Option(metavar="N,N,…", help="Lengths.")] = "512",
    output_tokens: Annotated[str, typer.Option(metavar="N,N,…", help="Lengths.")] = "128",
    rows: Annotated[
        int | None, typer.Option(min=1, help="Rows a run; default: two for each at once.")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of which medians are taken.")] = 3,
    seed: Annotated[int, typer.Option(min=0, help="Of the random prompts.")] = 0,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Also write bench.json, bench.png and bench.html."),
    ] = None,
    as_json: Json = False,
    debug: Debug = False,
) -> None:
    """Offline throughput at several concurrencies, and the latency that each costs a row.

    --set takes the settings of a job's sections model and engine.
    """
    with reported(debug):
        from batchmla.bench.command import run_bench
        from batchmla.bench.view import print_sweep, write_sweep

        sweep = run_bench(
            model,
            concurrency=concurrency,
            prompt_tokens=prompt_tokens,
            output_tokens=output_tokens,
            rows=rows,
            repeats=repeats,
            seed=seed,
            settings=overrides or [],
            out=out,
        )
        if as_json:
            print_json(sweep.to_json())
        else:
            print_sweep(sweep)
        for path in [] if out is None else write_sweep(sweep, out):
            typer.echo(f"wrote {path}", err=True)


@app.command()
def init(
    recipe: Annotated[str | None, typer.Argument(metavar="RECIPE", help="Which one.")] = None,
    file: Annotated[
        Path | None, typer.Argument(metavar="FILE", help="Default: RECIPE.yaml.")
    ] = None,
    debug: Debug = False,
) -> None:
    """Write a commented job file from a recipe; without arguments list the recipes."""
    with reported(debug):
        from batchmla.jobs.init import list_recipes, write_recipe

        if recipe is None:
            recipes = list_recipes()
            width = max(map(len, recipes))
            for name, line in recipes.items():
                typer.echo(f"{name:<{width}}  {line}")
            return
        path = write_recipe(recipe, file)
        typer.echo(f"wrote {path}; fill in its paths, then: batchmla plan {path}")


class Report:
    """What a command leaves to say when it ends."""

    def __init__(self) -> None:
        self.exit_code: int = ExitCode.OK
        self.run_log: Path | None = None


@contextmanager
def reported(is_debug: bool) -> Iterator[Report]:
    """Every way a command can end as an exit code; every error as one sentence on stderr."""
    configure_logging(is_debug)
    report = Report()
    try:
        yield report
    except BatchmlaError as fault:
        end(fault, f"error: {fault}", fault.exit_code, is_debug)
    except KeyboardInterrupt:
        typer.echo("stopped", err=True)
        raise typer.Exit(ExitCode.SIGINT) from None
    except BrokenPipeError:
        pass  # the reader of our output has gone, which is no error
    except Exception as fault:
        where = keep_traceback(report.run_log)
        hint = f" (traceback in {where})" if where else "; --debug shows the traceback"
        words = " ".join(str(fault).split()) or "no message"
        sentence = f"internal error: {type(fault).__name__}: {words}{'' if is_debug else hint}"
        end(fault, sentence, ExitCode.INTERNAL, is_debug)
    if report.exit_code:
        raise typer.Exit(int(report.exit_code))


def end(fault: Exception, sentence: str, exit_code: int, is_debug: bool) -> None:
    """Say what was wrong and leave."""
    if is_debug:
        traceback.print_exception(fault, file=sys.stderr)
    typer.echo(sentence, err=True)
    raise typer.Exit(int(exit_code)) from None


def keep_traceback(run_log: Path | None) -> Path | None:
    """Append the traceback in hand to the job's log, if the job got as far as having one."""
    if run_log is None or not run_log.exists():
        return None
    try:
        with run_log.open("a", encoding="utf-8") as stream:
            stream.write(traceback.format_exc())
    except OSError:
        return None
    return run_log


def configure_logging(is_debug: bool) -> None:
    """Messages of ours go to stderr as plain lines; of other packages only warnings."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s"))
    if not is_debug:
        handler.setFormatter(logging.Formatter("%(message)s"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("batchmla").setLevel(logging.DEBUG if is_debug else logging.INFO)


def print_json(values: Any) -> None:
    """One JSON object on stdout; NaN, which JSON lacks, is refused."""
    sys.stdout.write(json.dumps(values, indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def main() -> NoReturn:
    """The console entry. When all is said it leaves at once: the interpreter would take seconds to
    dismantle what is loaded, and whoever sent a signal waits for the end.
    """
    exit_code = ending(app)
    logging.shutdown()
    os._exit(exit_code)


def ending(call: Callable[[], Any]) -> int:
    """The exit code of a call of the app, once stdout and stderr have all they are to get."""
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors="backslashreplace")  # a C locale must not end a job
    exit_code = exit_code_of(call)
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # its reader has gone
            stream.flush()
    return exit_code


def exit_code_of(call: Callable[[], Any]) -> int:
    """What a call that may end in `SystemExit` would tell the shell."""
    try:
        call()
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return end.code or ExitCode.OK
        raise
    return ExitCode.OK


if __name__ == "__main__":
    main()
