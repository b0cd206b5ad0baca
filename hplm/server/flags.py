"""The flags of tritonserver that hPLMs need, in a container as here. deploy/ documents the same flags."""

from __future__ import annotations

# Before Triton answers a restricted API, it compares this header with the secret that it was started with.
# Over gRPC the header's name begins with `triton-grpc-protocol-`.
SECRET_HEADER = "hplm-admin"

# Through these APIs a client could run code, write files or read other clients' memory. Registering a stub's own shared memory
# is part of CVE-2025-23319, -23320 and -23334. A model can be loaded from files in the request. Logs and traces go to any path.
_RESTRICTED = "shared-memory,model-repository,logging,trace"

# These headers become parameters of a request. Triton's expressions are RE2. HTTP clients choose the case of a header, gRPC
# allows lower case only.
_HEADERS = "(?i)^(authorization|hplm-arrived|hplm-tenant)$"
_HTTP_HEADERS = "(?i)^(authorization|hplm-arrived|hplm-resend|hplm-tenant)$"


def contract_flags(secret: str) -> list[str]:
    return [
        # This mode loads everything, as the default mode does. But only here can models be loaded again, to replace a dead stub
        # or to add a backbone, and unloaded, to drain the server.
        "--model-control-mode=explicit",
        "--load-model=*",
        # Our configurations are complete. To complete them, Triton would start each Python model once more.
        "--disable-auto-complete-config",
        f"--http-header-forward-pattern={_HTTP_HEADERS}",
        f"--grpc-header-forward-pattern={_HEADERS}",
        f"--http-restricted-api={_RESTRICTED}:{SECRET_HEADER}={secret}",
        f"--grpc-restricted-protocol={_RESTRICTED}:{SECRET_HEADER}={secret}",
    ]
