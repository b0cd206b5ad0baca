"""`hplm generate`: sends a prompt to a decoder through hplm_client and prints the answer."""

from __future__ import annotations

import argparse
import json
from typing import Any

from hplm.cli.client import connection_options, open_client
from hplm.errors import InvalidInput


def register(commands: Any) -> None:
    summary = "let a decoder of a running server go on with a text, or answer in a chat"
    command: argparse.ArgumentParser = commands.add_parser("generate", help=summary, description=summary.capitalize() + ".")
    command.add_argument("prompt", nargs="?", help="the text to go on with")
    command.add_argument("--chat", metavar="TEXT", help="what the user writes in a chat; give it instead of the prompt")
    command.add_argument("--system", metavar="TEXT", help="instructions that the chat begins with (its system message)")
    command.add_argument("--tenant", required=True, help="the tenant that answers")
    command.add_argument("--stream", action="store_true", help="print the answer while it grows")
    connection_options(command, "address of the server (default: 127.0.0.1:8000, for gRPC 127.0.0.1:8001)")
    command.add_argument(
        "--backbone",
        metavar="NAME",
        help="name of the decoder (default: the only one of the server); hplm: whole answers through the front door",
    )
    command.add_argument("--max-tokens", type=int, metavar="N", help="most tokens of the answer (default: 16)")
    command.add_argument("--temperature", type=float, metavar="T", help="0 takes the likeliest token (default: 1)")
    command.add_argument("--top-p", type=float, metavar="P", help="choose among the likeliest tokens, which sum up to P")
    command.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    command.add_argument("--stop", action="append", metavar="TEXT", help="end the answer before this text; may be given again")
    command.add_argument(
        "--sampling", metavar="JSON", help="further settings, such as '{\"top_k\": 40}' (docs/generation.md has all)"
    )
    command.add_argument(
        "--deadline-ms", type=float, metavar="MS", help="time after which the answer ends (default: the tenant's own)"
    )
    command.add_argument("--truncate", action="store_true", help="leave out the beginning of a prompt that is too long")
    command.add_argument("--json", action="store_true", help="one line of JSON instead of the text")
    command.set_defaults(run=run)


def run(args: argparse.Namespace) -> dict[str, Any]:
    asked: dict[str, Any] = {
        "prompt": args.prompt, "messages": messages(args), "tenant": args.tenant, "deadline_ms": args.deadline_ms,
        "truncate": args.truncate, **sampling(args),
    }  # fmt: skip
    with open_client(args, args.backbone) as client:
        if not args.stream or args.json:
            answer = client.generate(**asked)
            if not args.json:
                print("\n\n".join(answer.texts))
            return {
                "tenant": args.tenant,
                "texts": answer.texts,
                "finish_reasons": answer.finish_reasons,
                "prompt_tokens": answer.prompt_tokens,
                "generated_tokens": answer.generated_tokens,
            }
        for piece in client.stream(**asked):
            print(piece.text, end="", flush=True)
        print()
        return {}


def messages(args: argparse.Namespace) -> list[dict[str, str]] | None:
    """Returns the messages of a chat, or None if a prompt was given."""
    if (args.prompt is None) == (args.chat is None):
        raise InvalidInput("give either a text to go on with, or --chat and what the user writes")
    if args.chat is None:
        if args.system is not None:
            raise InvalidInput("--system begins a chat: give --chat instead of a text to go on with")
        return None
    said = {"system": args.system, "user": args.chat}
    return [{"role": role, "content": content} for role, content in said.items() if content is not None]


def sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the settings that were given."""
    settings: dict[str, Any] = {}
    if args.sampling:
        try:
            settings = json.loads(args.sampling)
        except ValueError as error:
            raise InvalidInput(f"--sampling is not JSON ({error}): give an object such as '{{\"top_k\": 40}}'") from error
        if not isinstance(settings, dict):
            raise InvalidInput("--sampling is no object: give one such as '{\"top_k\": 40}'")
    named = {name: getattr(args, name) for name in ("max_tokens", "temperature", "top_p", "seed", "stop")}
    settings |= {name: value for name, value in named.items() if value is not None}
    if args.stream and settings.get("n", 1) != 1:
        raise InvalidInput("--stream prints one answer: leave it out, or 'n' out of --sampling")
    return settings
