"""TLS: the certificates that a client trusts, and advice for connections on which only one side expects TLS."""

from __future__ import annotations

import os
import ssl

from hplm_client.errors import InvalidInput, NotTrusted

NEEDED = ": if the server takes only TLS, as the front door does, give its address with https://"
NOT_SPOKEN = ": if the server takes no TLS there, leave out https:// and `ca_file` (--ca-file)"


def trusting(ca_file: str | os.PathLike[str] | None) -> ssl.SSLContext:
    """Returns the settings of connections that trust the certificates in a file, or those of the system."""
    try:
        return ssl.create_default_context(cafile=ca_file)
    except ssl.SSLError as error:
        raise InvalidInput(
            f"ca_file {str(ca_file)!r} has no certificate: give a file in PEM form, with -----BEGIN CERTIFICATE----- in it"
        ) from error
    except OSError as error:
        raise InvalidInput(
            f"ca_file {str(ca_file)!r} cannot be read ({error.strerror}): give the server's certificate, or that of the "
            "authority that signed it"
        ) from error


def not_trusted(url: str, reason: object) -> NotTrusted:
    return NotTrusted(
        f"the certificate of {url} is not trusted ({reason}): ask for a name that it is for, and give its file, or that of the "
        "authority that signed it, as `ca_file` (--ca-file)"
    )
