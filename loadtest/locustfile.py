"""Load for a served repository, from Locust's web page or without it:

    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000
    locust -f loadtest/locustfile.py --host http://127.0.0.1:8000 --headless -u 50 -r 50 --scenario Gamma --html report.html

--scenario chooses one or several: Steady, Burst, Poisson, Gamma, Replay, or Chat for decoders. More in docs/loadtest.md.
"""

from __future__ import annotations

import argparse
import atexit
import json
import logging
import math
import os
import socket
import sys
import time
from functools import cache
from http.client import HTTPException
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import gevent
from flask import Response, g, request
from gevent.event import Event
from gevent.queue import Queue
from locust import events
from locust.env import Environment
from locust.runners import STATE_INIT, STATE_STOPPED, LocalRunner
from locust.stats import CSV_STATS_INTERVAL_SEC
from locust.web import WebUI

from hplm.errors import HplmError, InvalidInput
from hplm.parameters import LONGEST_MS
from hplm.tenants.manager import exported_folder
from hplm.tenants.snapshot import Snapshot
from hplm.tenants.state_folder import EXPORTED_TENANTS
from hplm_client import HplmClientError
from hplm_client.settings import ClientSettings
from loadtest.monitoring import ServerCount, difference
from loadtest.outcomes import COLUMNS, OutcomeCounts
from loadtest.scenarios import Burst, Chat, Gamma, Poisson, Replay, Scenario, ScenarioTenant, Steady
from loadtest.texts import TextSource, read_texts, standard_library
from loadtest.traffic import lengths_of

__all__ = ["Burst", "Chat", "Gamma", "Poisson", "Replay", "Steady"]  # the scenarios that Locust finds

SCENARIOS: dict[str, type[Scenario]] = {one.__name__: one for one in (Poisson, Gamma, Steady, Burst, Replay, Chat)}
REPOSITORY = "model_repository"
log = logging.getLogger(__name__)
LOOKS = 0.2  # seconds between checks whether the run has ended
CONNECT_S = 5.0  # for the server to take a connection
PLAN_S = 60.0  # to make a plan
LATE_MS = 50.0  # requests that are sent later say more of Locust than of the server


@events.init_command_line_parser.add_listener
def add_options(parser: argparse.ArgumentParser) -> None:
    def add(name: str, default: str | float | list[str], text: str, **more: Any) -> None:
        parser.add_argument(name, default=default, help=text, include_in_web_ui=True, **more)

    chosen = "the scenarios to run together; classes that are named without an option go before"
    add("--scenario", ["Poisson"], chosen, nargs="+", choices=list(SCENARIOS), is_multiple=True)
    repository = f"the served repository on this machine, for its tenants and its tokenizer (without tenants: {REPOSITORY})"
    add("--repository", "", repository)
    add("--backbone", "", "name of the backbone (default: the only one of the repository, or of the server)")
    add("--tenant-ids", "", "tenants, separated by commas (default: all in the repository)")
    add("--protocol", "http", "http or grpc", choices=("http", "grpc"))
    add("--grpc", "", "HOST:PORT of gRPC (default: the port after that of --host; with https:// the same port)")
    add("--ca-file", "", "PEM file of the certificate of an https:// --host, or of the authority that signed it")
    add("--rate", 20.0, "requests a second of Poisson, Gamma and Chat", type=float)
    add("--duration", 30.0, "seconds of Poisson, Gamma and Chat", type=float)
    add("--max-tokens", 32, "tokens of an answer in Chat", type=int)
    add("--cv", 3.0, "coefficient of variation of Gamma's gaps", type=float)
    add("--period", 20.0, "seconds between a tenant's requests in Steady", type=float)
    add("--zipf", 0.0, "skew over tenants; 0: uniform; 1: the k-th sends 1/k as many requests as the first", type=float)
    add("--metrics", "", "HOST:PORT of the server's metrics (default: two ports after that of --host)")
    add("--lengths", "normal:20,20", "tokens of a text: a number, normal:MEAN,VARIANCE, or real for uncut texts")
    add("--deadline", "0", "milliseconds, or LOW-HIGH for a uniform distribution; 0: no deadline")
    add("--rung", 0, "rung that answers; 1: the dearest; 0: the server chooses", type=int)
    add("--texts", "", "file of texts, one a line or JSONL (default: the standard library's docstrings)")
    add("--trace", "", "JSONL file of requests for Replay")
    add("--patience", 30.0, "seconds that an answer without a deadline may take", type=float)
    add("--seed", 0, "seed of all random choices", type=int)
    parser.add_argument("--api-key", default="", help="API key, sent as authorization: Bearer KEY", is_secret=True)
    parser.add_argument(
        "--outcomes", default="", help="JSON file to write with the outcomes of the requests", include_in_web_ui=False
    )


@events.init.add_listener
def set_up(environment: Environment, **_: object) -> None:
    """Makes a new plan at each start. Without a web page, wrong options end the program before anything starts."""
    runner = environment.runner
    if not isinstance(runner, LocalRunner):
        sys.exit("these scenarios run in one process: start Locust without --master, --worker and --processes")
    outcomes, planned = OutcomeCounts(), Queue[str | None]()
    if environment.web_ui:
        _show(environment.web_ui, outcomes, runner, planned)
    elif problem := _problem(environment, outcomes):
        sys.exit(problem)

    def begin(**_: object) -> None:
        outcomes.clear()
        planned.put(problem := _problem(environment, outcomes))
        if problem:
            log.error("%s", problem)
            gevent.spawn(runner.stop)

    environment.events.test_start.add_listener(begin)
    environment.events.spawning_complete.add_listener(lambda **_: _start_clocks(environment, runner))
    environment.events.quitting.add_listener(lambda **_: _report(environment, outcomes))


def _show(page: WebUI, outcomes: OutcomeCounts, runner: LocalRunner, planned: Queue[str | None]) -> None:
    """Adds the outcomes to the web page: a tab, a part of the report, and /outcomes as JSON. It also shows wrong options.

    `planned`: what is wrong with each start, or None.
    """
    assert page.app is not None  # made by the web page
    page.app.add_url_rule("/outcomes", "outcomes", outcomes.summary)
    columns = [{"key": key, "title": title} for key, title in COLUMNS.items()]
    page.template_args |= {
        "extended_tabs": [{"title": "Outcomes", "key": "outcomes"}],
        "extended_tables": [{"key": "outcomes", "structure": columns}],
    }

    @page.app.before_request
    def remember() -> None:
        g.is_start = request.path == "/swarm" and runner.state in (STATE_INIT, STATE_STOPPED)

    @page.app.after_request
    def add(response: Response) -> Response:
        if request.path == "/stats/requests":
            stats = [{"key": "outcomes", "data": outcomes.rows()}]
            response.set_data(json.dumps({**(response.json or {}), "extended_stats": stats}))
        elif request.path == "/stats/report":
            response.set_data(outcomes.in_report(response.get_data(as_text=True)))
        elif g.is_start and (response.json or {}).get("success") and (problem := planned.get(timeout=PLAN_S)):
            response.set_data(json.dumps({"success": False, "message": problem}))
        return response


def _problem(environment: Environment, outcomes: OutcomeCounts) -> str | None:
    """Makes the plans. Returns an error message if that fails."""
    Scenario.can_run = False
    try:
        _plan(environment, outcomes)
    except (HplmError, HplmClientError, OSError) as error:
        return str(error)
    Scenario.can_run = True
    return None


def _plan(environment: Environment, outcomes: OutcomeCounts) -> None:
    options = _checked(_given(environment), environment.host)
    tenants, tokenizer = _tenants(options)
    texts = TextSource(read_texts([Path(options.texts)]) if options.texts else standard_library(), tokenizer)
    try:
        outcomes.server = ServerCount(options.metrics)
    except (OSError, HTTPException) as error:
        outcomes.server = None
        log.warning("the server's own count cannot be compared, because %s does not answer: %s", options.metrics, error)
    Scenario.options, Scenario.tenants, Scenario.all_texts = options, tenants, texts
    Scenario.outcomes, Scenario.begun = outcomes, Event()
    if options.protocol == "grpc":
        import grpc.experimental.gevent

        grpc.experimental.gevent.init_gevent()
        _end_without_channels(environment)
    environment.user_classes = [*_chosen(environment)]
    for scenario in _chosen(environment):
        scenario.check_tenants()
        scenario.prepare()


@cache
def _end_without_channels(environment: Environment) -> None:
    """Ends the process behind all other steps of its exit. The interpreter would then close gRPC's channels, and wait for ever:
    what they wait for are greenlets, which have ended.
    """
    codes: list[int] = []
    environment.events.quit.add_listener(lambda exit_code, **_: codes.append(exit_code))

    def end() -> None:
        if codes:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(codes[-1])

    atexit.register(end)


def _given(environment: Environment) -> argparse.Namespace:
    assert environment.parsed_options is not None  # of the command line, on which this file was named
    return environment.parsed_options


def _chosen(environment: Environment) -> list[type[Scenario]]:
    given = _given(environment)
    if given.user_classes or given.class_picker:
        return [scenario for scenario in environment.user_classes if issubclass(scenario, Scenario)]
    return [SCENARIOS[name] for name in given.scenario]


def _checked(given: argparse.Namespace, host: str | None) -> argparse.Namespace:
    options = argparse.Namespace(**vars(given))
    url = urlsplit(host or given.host or "")
    is_secure = url.scheme == "https"
    try:
        port = url.port or (443 if is_secure else None)
    except ValueError:  # no number, or none that a port can have
        port = None
    if url.scheme not in ("http", "https") or not url.hostname or port is None:
        raise InvalidInput(
            f"--host {host!r}: give the address of Triton's HTTP, http://HOST:PORT, or https://HOST:PORT for TLS"
        )
    host_name = f"[{url.hostname}]" if ":" in url.hostname else url.hostname
    options.ca_file = given.ca_file or None
    if options.ca_file is not None and not is_secure:
        raise InvalidInput(f"--ca-file is for TLS, but --host is {host!r}: begin it with https://")
    options.address = {"http": f"{host_name}:{port}", "grpc": given.grpc or f"{host_name}:{port + (not is_secure)}"}
    if is_secure:
        options.address = {protocol: f"https://{address}" for protocol, address in options.address.items()}
    ClientSettings(options.address[given.protocol], given.protocol, ca_file=options.ca_file)  # raises if it is wrong
    asked, _, asked_port = options.address[given.protocol].removeprefix("https://").rpartition(":")
    try:
        socket.create_connection((asked.strip("[]"), int(asked_port)), CONNECT_S).close()
    except OSError as error:
        raise InvalidInput(f"nobody answers at {asked}:{asked_port} ({error}): start the server, or correct --host") from None
    options.metrics = given.metrics or f"{host_name}:{port + 2}"
    options.lengths = None if given.lengths == "real" else lengths_of(given.lengths)
    low, _, high = given.deadline.partition("-")
    try:
        options.deadline_ms = least, most = float(low), float(high or low)
        if not 0 <= least <= most <= LONGEST_MS:
            raise ValueError
    except ValueError:
        raise InvalidInput(
            f"--deadline {given.deadline!r}: give milliseconds, or LOW-HIGH with the smaller one first, {LONGEST_MS:,} at most"
        ) from None
    for name in ("rate", "duration", "cv", "period", "patience", "max_tokens"):
        if not 0 < getattr(given, name) < math.inf:
            raise InvalidInput(f"--{name.replace('_', '-')} {getattr(given, name)}: give a number above 0")
    for name in ("zipf", "seed"):
        if not 0 <= getattr(given, name) < math.inf:
            raise InvalidInput(f"--{name} {getattr(given, name)}: give 0 or more")
    options.api_key, options.trace = given.api_key or None, given.trace or None
    return options


def _tenants(options: argparse.Namespace) -> tuple[list[ScenarioTenant], Path | None]:
    """Returns the tenants, and the path of the tokenizer if the repository is known."""
    named = [ScenarioTenant(name) for name in options.tenant_ids.split(",") if name]
    if not named and not options.repository and Path(REPOSITORY).is_dir():
        options.repository = REPOSITORY
    if not options.repository:
        if not named:
            raise InvalidInput("no tenants are named: give --repository DIR for all tenants in it, or --tenant-ids a,b,c")
        options.backbone = options.backbone or None
        return named, None
    folder = exported_folder(Path(options.repository), options.backbone or None)
    options.backbone = folder.parent.name
    known = {one.id: ScenarioTenant(one.id, one.task) for one in Snapshot.load(folder / EXPORTED_TENANTS).tenants}
    if missing := [tenant.id for tenant in named if tenant.id not in known]:
        raise InvalidInput(f"--tenant-ids: {missing[0]!r} is not in {options.repository}: it has {', '.join(list(known)[:5])}")
    return [known[tenant.id] for tenant in named] or list(known.values()), folder / "tokenizer.json"


def _start_clocks(environment: Environment, runner: LocalRunner) -> None:
    now = time.time()
    for scenario in _chosen(environment):
        scenario.plan.started = now
    Scenario.begun.set()
    gevent.spawn(_end_when_done, environment, runner)


def _end_when_done(environment: Environment, runner: LocalRunner) -> None:
    """Ends a headless run after its last answer. With a web page, stops and waits for the next start."""
    scenarios = _chosen(environment)
    while runner.state == "running":
        if all(scenario.plan.done for scenario in scenarios):
            if environment.web_ui:
                runner.stop()
            else:
                gevent.sleep(2 * CSV_STATS_INTERVAL_SEC)  # otherwise the last rows would be missing from the files
                runner.quit()
            return
        gevent.sleep(LOOKS)


def _report(environment: Environment, outcomes: OutcomeCounts) -> None:
    if not outcomes.counts:
        return
    print(outcomes.table(), file=sys.stderr)
    if (late := max(outcomes.latest_ms.values())) > LATE_MS:
        print(f"requests were sent up to {late:,.0f} ms late, since all users were busy: give more users (-u)", file=sys.stderr)
    given = _given(environment)
    if given.html_file and (page := Path(given.html_file)).exists() and page.stat().st_mtime >= outcomes.began:
        page.write_text(outcomes.in_report(page.read_text("utf-8")), "utf-8")
    if to := given.outcomes:
        Path(to).write_text(json.dumps(outcomes.summary(), indent=1) + "\n", "utf-8")
    if outcomes.server is not None:  # asked last: a server that has ended leaves the file complete
        client, server = outcomes.in_time, outcomes.server.in_time()
        print(
            f"in time by the client's clock: {client}, by the server's: {server} ({difference(client, server):+.1%})",
            file=sys.stderr,
        )
