"""`hplm manager`: runs the manager beside a server, and adds owners and operators."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from cyclopts import App

from hplm.cli.options import AtLeastOne, Device, NotNegative, Numbers, about
from hplm.cli.served import StateLocation, state_of
from hplm.errors import HplmError, InvalidInput

CORES = "numbers of the cores of jobs, between commas (default: all, at the lowest priority)"
NAME = "name of the owner: its models are NAME and NAME.*"
FOLDER = "folder of the manager: its records, files and secrets"
Folder = Annotated[Path, about(FOLDER)]
HERE = Path(".hplm/manager")
RECORDS = "records.db"


def register(hplm: App) -> None:
    """Registered as the entry point `manager` of the group `hplm.commands`."""
    about = "Let owners bring labelled text by OpenAI's API, and get models that are served."
    app = App(name="manager", help=about, version_flags=())
    app.default(run)
    for noun, help, add in (("owner", "Add owners.", add_owner), ("operator", "Add operators.", add_operator)):
        app.command(App(name=noun, help=help, version_flags=()))
        app[noun].command(add, name="add", version_flags=())
    hplm.command(app)


def run(
    *, store: Annotated[tuple[Path, ...], about("folders of stores, each of another backbone of the repository")],
    repository: Path = Path("model_repository"), state: StateLocation = None, folder: Folder = HERE,
    url: str = "127.0.0.1:8001", address: str = "127.0.0.1", port: int = 9000, at_once: AtLeastOne = 1,
    cores: Annotated[Numbers, about(CORES)] = (), servers: tuple[str, ...] = (),
    memory: NotNegative = 0.0, device: Device = "auto",
) -> None:  # fmt: skip
    """Run the manager until Ctrl-C or SIGTERM, beside `hplm serve` with the same repository and state.

    docs/manager.md describes what owners and operators do with it. Let others reach it only by a proxy with TLS.

    :param repository: the served model repository
    :param url: HOST:PORT of the server's gRPC
    :param address: address to listen on: 127.0.0.1 is for this machine only
    :param port: 0: any free port
    :param at_once: so many jobs at a time
    :param servers: HOST:PORT of the metrics of all replicas; a name of several hosts stands for all of them (default: the port
        after that of --url)
    :param memory: GB that a job may have; 0: no limit
    """
    import tempfile

    from hplm.server.ports import listen, reachable
    from hplm.tenants.taken import check_addresses
    from hplm_openai.__main__ import server_of
    from hplm_openai.app import Gateway, RequestLimits
    from hplm_openai.backbones import Backbones
    from manager.app import application
    from manager.children import Manner
    from manager.console import Console
    from manager.models import Base
    from manager.site import Site

    if (place := state_of(state)) is None:
        raise InvalidInput("--state is missing: give the folder of `hplm serve --state`")
    host, _, grpc_port = url.rpartition(":")
    check_addresses(servers := servers or (f"{host}:{int(grpc_port) + 1}",))
    bases = [Base.open(one, repository, place) for one in store]
    site = Site.open(folder.absolute(), bases, Manner(cores, round(memory * 1e9), device), at_once)
    tempfile.tempdir = str(folder.absolute())  # uploads are on the disk that was looked at for their room
    gateway = Gateway(lambda: Backbones(url, [], 600.0), RequestLimits())
    listening = listen(address, port, "--port")
    host, number = listening.getsockname()[:2]
    here = f"http://{reachable(host)}:{number}"
    print(f"the manager is at {here}/v1, its console at {here}, for the Triton at {url}", flush=True)
    server_of(application(site, gateway, Console(site, gateway, servers).routes())).run(sockets=[listening])
    site.close()


def add_owner(name: Annotated[str, about(NAME)], /, *, folder: Folder = HERE) -> dict[str, Any]:
    """Add an owner. Prints its first key, which is shown once."""
    from manager.rights import COMMAND_LINE

    secret, key = _rights(folder).add_owner(name, COMMAND_LINE)
    print(f"owner {name}, key {key.id}; its secret, which is shown only now:\n{secret}", flush=True)
    return {"owner": name, "key": key.id, "secret": secret}


def add_operator(*, folder: Folder = HERE) -> dict[str, Any]:
    """Add an operator's key, which may do everything. It is shown once."""
    from manager.rights import COMMAND_LINE, OPERATOR

    secret, key = _rights(folder).add_key(None, OPERATOR, 0, COMMAND_LINE)
    print(f"operator's key {key.id}; its secret, which is shown only now:\n{secret}", flush=True)
    return {"key": key.id, "secret": secret}


def _rights(folder: Path) -> Any:
    try:
        from manager.records import Records
        from manager.rights import Rights
    except ModuleNotFoundError as error:
        way = "install it in the checkout with `pip install -e '.[manager]' -e 'clients[openai]'`"
        raise HplmError(f"{error}: {way}") from error
    return Rights(Records(folder / RECORDS), folder)
