# SPDX-License-Identifier: Apache-2.0
"""The `qualify` command: parses, prints, and maps every ending to its exit status. All work is elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import click

from qualify import __version__
from qualify.errors import ExitCode, Interrupted, QualifyError, UsageError

if TYPE_CHECKING:  # commands import what they need, so that `review` starts quickly
    from qualify.profiles import Profile
    from qualify.targets import Target

DEFAULT_PROFILE = "cpu-smoke"

Note = Callable[[str], None]


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="qualify")
def cli() -> None:
    """Qualify an LLM serving engine and leave a receipt that anyone can re-check offline."""


@cli.command()
@click.option(
    "--profile", "profile_name", default=DEFAULT_PROFILE, show_default=True, help="Shipped name or TOML file."
)
@click.option("--target", "target_name", default="local", show_default=True, help="local, image:REF or url:URL.")
@click.option(
    "--model",
    "model_folder",
    type=click.Path(path_type=Path),
    help="Model folder; by default made from the profile's recipe.",
)
@click.option("--out", type=click.Path(path_type=Path), help="Folder for receipt and evidence; must not exist.")
@click.option("--strict", is_flag=True, help="Exit 3 on WARNED.")
def run(profile_name: str, target_name: str, model_folder: Path | None, out: Path | None, strict: bool) -> None:
    """Run the whole qualification: boots, probes, evidence, receipt, report."""
    from qualify import profiles
    from qualify.environment import cache_folder
    from qualify.receipt.verdict import exit_code
    from qualify.report.progress import Progress
    from qualify.report.table import render_receipt
    from qualify.run import qualify

    profile = profiles.load(profile_name)
    started = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    bundle = (out or Path("out") / f"{profile.name}-{started}").absolute()
    click.echo(
        f"qualify {__version__}: profile {profile.name} ({profile.digest()[:12]}), target {target_name},"
        f" tensor parallel {profile.engine.tensor_parallel}, {len(profile.boots)} boots; evidence in {bundle}",
        err=True,
    )
    progress = Progress()
    cache = cache_folder()
    target, model = _open(target_name, profile, model_folder, cache, progress.note)
    receipt, failure = qualify(profile, target, model, bundle, cache / "work", progress)
    click.echo(render_receipt(receipt, bundle))
    if failure is not None:
        _complain(failure)
        sys.exit(failure.exit_code)
    sys.exit(exit_code(receipt, strict=strict))


@cli.command()
@click.argument("path")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
@click.option("--html", type=click.Path(path_type=Path), help="Also write the HTML report to this file.")
def review(path: str, as_json: bool, html: Path | None) -> None:
    """Verify a receipt: digests, schema, and every claim recomputed from its evidence."""
    with contextlib.ExitStack() as stack:
        folder = Path(path)
        if path.startswith("oci://"):
            from qualify.publish import fetch

            scratch = stack.enter_context(tempfile.TemporaryDirectory(prefix="qualify-"))
            folder = fetch(path, Path(scratch) / "receipt")
        _review(folder, path, as_json=as_json, html=html)


def _review(folder: Path, shown: str, *, as_json: bool, html: Path | None) -> None:
    from qualify.receipt.verify import review as verify
    from qualify.report.table import render_review

    reviewed = verify(folder)
    if html is not None and reviewed.receipt is not None:
        from qualify.report.html import render_html

        html.write_text(render_html(reviewed.receipt, folder), encoding="utf-8")
    click.echo(reviewed.model_dump_json(indent=1) if as_json else render_review(reviewed, shown))
    sys.exit(reviewed.exit_code)


@cli.command()
@click.argument("folder", type=click.Path(path_type=Path))
@click.argument("reference")
def publish(folder: Path, reference: str) -> None:
    """Push the image that a receipt is about to REFERENCE and attach the receipt to its manifest."""
    from qualify.publish import publish_receipt

    published = publish_receipt(folder, reference, lambda text: click.echo(text, err=True))
    tag = "the tag names it" if published.tag_moved else f"the tag was left alone: {published.kept}"
    click.echo(f"published {published.manifest_digest} with its receipt {published.receipt_digest}; {tag}")
    sys.exit(ExitCode.PASSED if published.tag_moved or published.reference.tag is None else ExitCode.FAILED)


@cli.command()
@click.argument("left", type=click.Path(path_type=Path))
@click.argument("right", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def diff(left: Path, right: Path, as_json: bool) -> None:
    """What changed between two receipts: pins, claims, figures with intervals."""
    from qualify.receipt.diff import diff as compare
    from qualify.receipt.diff import render

    difference = compare(left, right)
    click.echo(difference.model_dump_json(indent=1) if as_json else render(difference))
    sys.exit(difference.exit_code)


@cli.command()
@click.argument("profile_name", metavar="PROFILE")
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def expect(profile_name: str, as_json: bool) -> None:
    """What a profile predicts before any run."""
    from qualify import profiles
    from qualify.expect import expect as predict
    from qualify.expect import render

    expectation = predict(profiles.load(profile_name))
    click.echo(expectation.model_dump_json(indent=1) if as_json else render(expectation))


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def doctor(as_json: bool) -> None:
    """What this host can run, and what is missing, each with its remedy."""
    from qualify.doctor import examine, render, render_json
    from qualify.environment import cache_folder

    findings = examine(cache_folder())
    click.echo(render_json(findings) if as_json else render(findings))


@cli.command()
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Folder for manifest, unpacker and parts.")
@click.option("--part-size", default=62, show_default=True, type=click.IntRange(1), help="MB of one part.")
@click.option("--python", default="python3.12", show_default=True, help="A Python 3.12 with venv and pip.")
@click.option("--harness-only", is_flag=True, help="Renew the harness in an existing bundle.")
def bundle(out: Path, part_size: int, python: str, harness_only: bool) -> None:
    """Build the CUDA engine and this harness for a GPU host without a network."""
    from qualify.bundle import make, renew_harness
    from qualify.report.progress import Progress

    note, part_bytes = Progress().note, part_size * 10**6
    if harness_only:
        manifest = renew_harness(out.absolute(), part_bytes, note)
    else:
        manifest = make(out.absolute(), python, part_bytes, note)
    click.echo(f"{manifest}: copy its folder to the host and run python3 unpack.py FOLDER there")


@cli.command()
@click.argument("logs", nargs=-1, required=True)
@click.option("--json", "as_json", is_flag=True, help="One JSON document on stdout.")
def explain(logs: tuple[str, ...], as_json: bool) -> None:
    """Read engine logs (- for standard input) and say what they prove, and the first fatal cause."""
    from qualify.observe.explain import explain_command

    sys.exit(explain_command(logs, as_json))


def _open(
    target_name: str, profile: Profile, model: Path | None, cache: Path, note: Note
) -> tuple[Target, Path | None]:
    """The target and the folder of the model it will serve, both made if they are not cached yet.

    Raises UsageError for a target of unknown kind, PreflightError if this host cannot run the target.
    """
    from qualify import doctor, environment, gpus

    if target_name.startswith("url:"):
        from qualify.targets.endpoint import EndpointTarget

        return EndpointTarget(target_name.removeprefix("url:"), note), None
    if target_name.startswith("image:"):
        from qualify.targets.container import ContainerTarget

        served = _model(profile, model, cache, note)
        return ContainerTarget(target_name.removeprefix("image:"), cache, note), served
    if target_name == "local":
        from qualify.targets.local import LocalTarget

        doctor.refuse_if_unable(profile, cache)
        if profile.engine.kind == "cuda":
            engine = environment.bundled_engine()
            chosen = gpus.pick_idle(profile.engine.tensor_parallel)
            return LocalTarget(profile, engine, note, chosen), _model(profile, model, cache, note)
        engine = environment.ensure_cpu_engine(cache, note)
        return LocalTarget(profile, engine, note), _model(profile, model, cache, note)
    raise UsageError(f"there is no target {target_name!r}", remedy="use local, image:REF or url:URL")


def _model(profile: Profile, given: Path | None, cache: Path, note: Note) -> Path:
    from qualify import models

    if given is None:
        return models.ensure(cache, profile.model.recipe, profile.model.seed, note)
    models.check(given)
    return given


def _complain(error: QualifyError) -> None:
    """One line: what, where, remedy; then the last lines of the process that failed, if there are any."""
    for line in error.tail:
        click.echo(f"  | {line}", err=True)
    click.echo(f"error: {error}", err=True)


def main() -> None:
    """Entry point. Every ending has its exit status; bad input never shows a traceback."""
    try:
        cli.main(standalone_mode=False)
    except click.exceptions.Exit as leaving:
        sys.exit(leaving.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(ExitCode.USAGE)
    except (click.Abort, KeyboardInterrupt):
        _complain(Interrupted("stopped by the user"))
        sys.exit(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our output went away (| head): nothing is wrong with the run.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(ExitCode.PASSED)
    except QualifyError as error:
        _complain(error)
        sys.exit(error.exit_code)
