"""The configuration of the nginx that serves a live state to followers: deploy/nginx/source.conf with its values."""

from __future__ import annotations

import grp
import os
import pwd
import re
from pathlib import Path

from hplm.errors import InvalidInput

TEMPLATE = Path(__file__).parents[2] / "deploy" / "nginx" / "source.conf"
_TOKEN = re.compile(r"[A-Za-z0-9._~+/=-]+")  # RFC 6750
_ADDRESS = re.compile(r"[A-Za-z0-9.:\[\]-]+")
_SPECIAL = set('"\\$;{}\n')  # to nginx


def source_config(state: Path, address: str, port: int, token: str, folder: Path) -> str:
    """Returns a whole nginx.conf for `nginx -c FILE -p FOLDER -g 'daemon off;'`, which any user may run.

    It contains the token, so only the owner may be able to read the file. `folder` exists, and nginx writes into it.
    """
    if not _TOKEN.fullmatch(token):
        raise InvalidInput("the token is empty or has a character that no bearer token has: take one of `openssl rand -hex 24`")
    if not _ADDRESS.fullmatch(address):
        raise InvalidInput(f"nginx cannot listen on {address!r}: give an IP address, such as 10.0.0.1")
    if not TEMPLATE.exists():
        raise InvalidInput(f"{TEMPLATE} is missing: work in a checkout of hplm")
    values = {
        "STATE": _path(state),
        "ADDRESS": address,
        "PORT": str(port),
        "TOKEN": token,
        "FOLDER": _path(folder),
    }
    unused = ["#"]
    if os.geteuid() == 0:
        values["USER"] = _owner(state)
    else:
        unused.append("user ")  # nginx stays who it is, and would warn
    settings = [line for line in TEMPLATE.read_text("utf-8").splitlines(keepends=True) if not line.startswith(tuple(unused))]
    return re.sub(r"\$\{HPLM_([A-Z]+)\}", lambda found: values[found[1]], "".join(settings))


def _owner(state: Path) -> str:
    """Returns the user and the group that own the state. As another user, nginx could not write reports into it."""
    owner = (state if state.exists() else state.parent).stat()
    try:
        return f"{pwd.getpwuid(owner.st_uid).pw_name} {grp.getgrgid(owner.st_gid).gr_name}"
    except KeyError:  # a container's user may have no name
        raise InvalidInput(f"the owner of {state} (user {owner.st_uid}) has no name here: start nginx as that user") from None


def _path(path: Path) -> str:
    """Returns the absolute path. Relative ones would be relative to nginx's prefix."""
    absolute = str(path.absolute())
    if _SPECIAL & set(absolute):
        raise InvalidInput(f"nginx cannot read the path {absolute!r}: name one without quotes, $, ;, braces and backslashes")
    return absolute
