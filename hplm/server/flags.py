"""The flags of tritonserver that our contract rests on, in a container as here; deploy/ documents the same ones."""

from __future__ import annotations

from collections.abc import Sequence

# Triton compares this header with the secret it was started with before it answers a restricted API.
# Over gRPC the header's name begins with `triton-grpc-protocol-`.
SECRET_HEADER = "hplm-admin"

# APIs through which a client could run code, write files or read others' memory: registering a stub's own shared memory
# is part of CVE-2025-23319, -23320 and -23334, a model can be loaded from files sent along, logs and traces go to any path.
_RESTRICTED = "shared-memory,model-repository,logging,trace"

# Triton's expressions are RE2. HTTP clients choose the case of a header, gRPC knows lower case only.
_KEY_HEADER = "(?i)^authorization$"


def contract_flags(secret: str, load: Sequence[str] = ("*",)) -> list[str]:
    return [
        # Explicit, though it loads everything as the default mode would: only in this mode can a model be loaded again,
        # which is how a dead stub is revived and a new backbone joins, and unloaded, which is how we drain.
        "--model-control-mode=explicit",
        *(f"--load-model={model}" for model in load),
        # Our configurations are complete; completing them would start each Python model once more, only to ask it.
        "--disable-auto-complete-config",
        f"--http-header-forward-pattern={_KEY_HEADER}",
        f"--grpc-header-forward-pattern={_KEY_HEADER}",
        f"--http-restricted-api={_RESTRICTED}:{SECRET_HEADER}={secret}",
        f"--grpc-restricted-protocol={_RESTRICTED}:{SECRET_HEADER}={secret}",
    ]
