"""`python -m hplm_openai`: runs the gateway until Ctrl-C or SIGTERM."""

from __future__ import annotations

import argparse
import logging
import socket
import sys
import threading

import uvicorn
from starlette.types import ASGIApp

from hplm_client.errors import HplmClientError
from hplm_client.settings import host_and_port
from hplm_openai.app import Gateway, RequestLimits
from hplm_openai.backbones import Backbones

SECONDS_TO_DRAIN = 10  # for answers on their way
SECONDS_IDLE = 75  # that a connection stays open; longer than a proxy keeps it
LONGEST_HEADERS = 65_536  # bytes


def parser() -> argparse.ArgumentParser:
    limits = RequestLimits()
    described = argparse.ArgumentParser(
        prog="python -m hplm_openai",
        description="Serves the interfaces of OpenAI and others (docs/openai.md) for the tenants of a Triton, without TLS.",
    )
    add = described.add_argument
    add("--url", default="127.0.0.1:8001", metavar="HOST:PORT", help="the Triton's gRPC port (default: %(default)s)")
    add("--address", default="127.0.0.1", help="address to listen on (default: 127.0.0.1, for this machine only)")
    add("--port", type=int, default=9000, help="default: %(default)s; 0: any free port")
    add("--decoder", action="append", default=[], metavar="NAME", help="a decoder to ask, and no encoder; default: all")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="without a part of an answer (default: %(default)g)")
    add("--largest-body", type=int, default=limits.largest_body, metavar="BYTES", help="of a request (default: %(default)s)")
    add("--at-once", type=int, default=limits.at_once, metavar="N", help="requests on their way (default: %(default)s)")
    add(
        "--chat-tokens",
        type=int,
        default=limits.usual_tokens,
        metavar="N",
        help="the most tokens of a chat's answer where the request names no `max_tokens` (default: %(default)s)",
    )
    # For `hplm serve`, which holds the listening socket and standard input:
    add("--socket", type=int, metavar="NUMBER", help=argparse.SUPPRESS)
    add("--until-stdin-closes", action="store_true", help=argparse.SUPPRESS)
    return described


def main() -> None:
    args = parser().parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(name)s: %(message)s")
    try:
        host_and_port(args.url)
        listening = _listen(args)
    except (HplmClientError, OSError) as error:
        sys.exit(f"hplm_openai: {error}")
    limits = RequestLimits(args.largest_body, args.at_once, args.chat_tokens)
    server = server_of(Gateway(lambda: Backbones(args.url, args.decoder, args.timeout), limits).app())
    if args.until_stdin_closes:
        threading.Thread(target=_stop_after_stdin, args=(server,), daemon=True).start()
    else:
        host, port = listening.getsockname()[:2]
        print(f"the gateway is at http://{host}:{port}/v1, for the Triton at {args.url}", flush=True)
    server.run(sockets=[listening])


def server_of(app: ASGIApp) -> uvicorn.Server:
    return uvicorn.Server(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=SECONDS_IDLE,
            timeout_graceful_shutdown=SECONDS_TO_DRAIN,
            h11_max_incomplete_event_size=LONGEST_HEADERS,
        )
    )


def _listen(args: argparse.Namespace) -> socket.socket:
    if args.socket is not None:
        return socket.socket(fileno=args.socket)
    listening = socket.socket(proto=socket.IPPROTO_TCP)  # else asyncio delays answers, by 40 ms
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((args.address, args.port))
    except OSError as error:
        raise OSError(f"cannot listen on {args.address}:{args.port} ({error.strerror}): choose another --port") from error
    return listening


def _stop_after_stdin(server: uvicorn.Server) -> None:
    """Lets the gateway drain when `hplm serve` has closed standard input, or has ended."""
    sys.stdin.buffer.read()
    server.should_exit = True


if __name__ == "__main__":
    main()
