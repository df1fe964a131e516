"""`edgert serve`: models over HTTP."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from edgert import store
from edgert.cli.flags import Finite, Parts, Threads, flag, model_flags, request_of, sampling_flags
from edgert.cli.loading import model_path, options_of
from edgert.cli.text import text_of
from edgert.cli.verb import verb
from edgert.errors import RequestError


@verb()
@model_flags
@flag("-a", "--alias", multiple=True, help="Another name of the model; may be given several times.")
@flag(
    "--config",
    type=click.Path(exists=True, dir_okay=False),
    is_eager=True,
    callback=lambda ctx, _, path: _configured(ctx, path),
    help="A TOML file: flags by their long names, and a table [models.NAME] for each model.",
)
@flag("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@flag("--port", type=click.IntRange(0, 65535), default=8080, show_default=True, help="Port; 0: a free one.")
@flag("--api-key", multiple=True, metavar="KEY", help="A key that requests must bring; may be given several times.")
@flag("--api-key-file", type=click.Path(exists=True, dir_okay=False), help="A file with a key on each line.")
@flag("--open", "is_open", is_flag=True, help="Let other machines in without a key.")
@flag("--allowed-host", multiple=True, metavar="NAME", help="A name of this machine that requests may use; *: any.")
@flag("--cors-origin", multiple=True, metavar="ORIGIN", help="A web site whose pages may use the server; *: any.")
@flag("-np", "--parallel", type=click.IntRange(1, 256), default=8, show_default=True, help="Answers made at once.")
@flag("--queue", type=click.IntRange(0, 100_000), default=256, show_default=True, help="Requests that may wait.")
@flag("--cache-tokens", type=click.IntRange(0), help="Tokens cached in all.  [4 contexts, if they fit]")
@flag("--prefix-cache", help="Whose cached beginnings a prompt may use: shared, user, off.  [shared]")
@flag("--window", type=Finite(0, 10), help="Seconds in which an idle engine gathers requests.  [0]")
@flag("--stall", type=Finite(1), help="Running answers may wait so many times as long beside a prompt.  [3]")
@flag("--comfort", type=Finite(0, 10), help="Or so many seconds, if that is longer.  [by backend]")
@flag("--patience", type=Finite(0), help="Seconds until who gets nothing takes a place of others.  [1]")
@flag("--timeout", type=Finite(0), default=0, help="Seconds that an answer may take; 0: any.  [0]")
@flag("--queue-timeout", type=Finite(0), default=0, help="Seconds that a request may wait; 0: any.  [0]")
@flag("--max-body", type=click.IntRange(1024), default=16 << 20, help="Most bytes of a request.  [16 MiB]")
@flag("--keep-alive", default="-1", help="Put a model away when idle for so long, such as 5m; -1: never.  [-1]")
@flag("--models-max", type=click.IntRange(0), default=0, help="Models in memory at once; 0: as many as fit.  [0]")
@flag("--upstream", metavar="URL", help="Another server of OpenAI's API that takes what does not fit here.")
@flag("--upstream-key", metavar="KEY", help="Its key.")
@flag("--upstream-model", metavar="NAME", help="The model to ask it for.  [the request's]")
@flag("--result-cache", type=click.IntRange(0), default=0, help="Keep so many answers that never change.  [0]")
@sampling_flags
@flag("--metrics", is_flag=True, hidden=True, help="Taken for llama-server's sake: they are always there.")
@flag("-v", "--verbose", is_flag=True, help="Tell of every request (its route and status, never its text).")
def command(**flags: Any) -> None:
    """Serves models to other programs: OpenAI's API at /v1, Ollama's at /api, a page at /.

    Without a key only this machine is let in. Sampling flags are defaults of requests that say nothing.
    """
    doors = settings_of(flags)
    _logging(flags.pop("verbose"))
    from edgert.server import registry, running
    from edgert.server.service import Settings
    from edgert.server.upstream import Upstream

    host, port = flags.pop("host"), flags.pop("port")
    url, key, known = flags.pop("upstream"), flags.pop("upstream_key"), flags.pop("upstream_model")
    upstream = Upstream(url, key or "", known or "") if url else None
    sampling = request_of(flags)
    limit = sampling.pop("max_tokens", None)
    flags.pop("metrics"), flags.pop("config")
    aliases, keep_alive = flags.pop("alias"), registry.duration(flags.pop("keep_alive"))
    parallel, queue, most = flags.pop("parallel"), flags.pop("queue"), flags.pop("models_max")
    kept = {name: flags.pop(name) for name in ("prefix_cache", "window", "stall", "comfort", "patience")}
    kept = {name: value for name, value in kept.items() if value is not None}
    options = options_of(flags) | {"sampling": sampling}
    cached, name = flags.pop("cache_tokens"), flags.pop("model")
    specs, choices = click.get_current_context().obj or ([], {})
    if name or not specs:
        path, name = model_path(name), name or store.DEFAULT
        name = path.stem if Path(name).suffix == ".gguf" else name
        specs = [registry.Spec(name, path, dict(options), aliases, keep_alive), *specs]
        for own in ("draft", "chat_template"):  # which another model could not use
            options.pop(own, None)
    load = running.loader(parallel, cached, **options, **kept)
    service = running.service_of(
        specs,
        load,
        Settings(**doors, max_tokens=limit),
        parallel=parallel,
        queue=queue,
        models_max=most,
        upstream=upstream,
        result_cache=flags.pop("result_cache"),
        choices=choices,
    )
    asyncio.run(running.Runner(service, host, port, lambda url: click.echo(f"listening on {url}", err=True)).run())


def _configured(ctx: click.Context, path: str | None) -> str | None:
    """Takes a configuration's flags as defaults, and leaves its models in the context."""
    if path:
        from edgert.server import config

        given, models, choices = config.read(path)
        flags = {parameter.name or "": parameter for parameter in ctx.command.params}
        given = {{"open": "is_open"}.get(name, name): value for name, value in given.items()}
        if unknown := next((name for name in given if name not in flags), None):
            written = unknown.replace("_", "-")
            names = [flag[2:] for parameter in flags.values() for flag in parameter.opts if flag.startswith("--")]
            near = get_close_matches(written, names, 1)
            meant = f"did you mean {near[0]}?" if near else "`edgert serve --help` shows those there are."
            raise click.UsageError(f"--config: {path}: {written} is no flag of this command; {meant}")

        def value_of(key: str, value: object) -> object:
            if (parameter := flags.get(key.replace("-", "_"))) is None:
                return value
            try:
                return parameter.type(_typed(key, value, parameter), parameter, ctx)
            except click.BadParameter as error:
                raise RequestError(key, f"is refused: {error.message.rstrip('.')}") from error

        try:
            ctx.default_map = {
                name: _typed({"is_open": "open"}.get(name, name.replace("_", "-")), value, flags[name])
                for name, value in given.items()
            }
        except RequestError as error:
            raise click.UsageError(f"--config: {path}: {error.field} {error.reason}.") from error
        ctx.obj = config.specs(models, path, value_of), choices
    return path


def _typed(key: str, value: object, parameter: click.Parameter) -> object:
    """A file's value for a flag, whose type a command line could not have mistaken. Raises: RequestError."""
    if parameter.multiple:
        return [_typed(key, one, _ONE) for one in (value if isinstance(value, list) else [value])]
    of = parameter.type
    kinds: tuple[type, ...]
    if isinstance(of, click.types.BoolParamType):
        words, kinds = "true or false", (bool,)
    elif isinstance(of, Threads | click.types.IntParamType):
        words, kinds = "an integer", (int,)
    elif isinstance(of, click.types.FloatParamType):
        words, kinds = "a number", (int, float)
    elif isinstance(of, Parts):
        words, kinds = "a list or a text", (list, str)
    elif parameter.name == "keep_alive":
        words, kinds = 'a number or a text such as "5m"', (str, int, float)
    else:
        words, kinds = "a text", (str,)
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise RequestError.wrong(key, words, value)
    return value


_ONE = click.Option(["--one"])


def settings_of(flags: dict[str, Any]) -> dict[str, Any]:
    """Takes what concerns the server's door out of the flags. Raises: click.UsageError."""
    keys = list(flags.pop("api_key"))
    if path := flags.pop("api_key_file"):
        keys += [line.strip() for line in text_of(path).splitlines() if line.strip()]
    if not keys and not flags.pop("is_open") and not _is_loopback(flags["host"]):
        raise click.UsageError(
            f"--host {flags['host']} lets other machines in: give --api-key, or --open to let in anyone."
        )
    flags.pop("is_open", None)
    hosts = (*flags.pop("allowed_host"), *([] if _is_address(flags["host"]) else [flags["host"]]))
    return {
        "api_keys": tuple(keys),
        "hosts": tuple(host.lower() for host in hosts),
        "origins": flags.pop("cors_origin"),
        "max_body": flags.pop("max_body"),
        "timeout": flags.pop("timeout"),
        "queue_timeout": flags.pop("queue_timeout"),
    }


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _logging(verbose: bool) -> None:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", "%H:%M:%S"))
    logger = logging.getLogger("edgert")
    logger.addHandler(handler)
    logger.setLevel(logging.DEBUG if verbose else logging.INFO)
    logging.getLogger("edgert").propagate = False
