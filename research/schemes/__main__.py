"""`python -m research.schemes SCHEME`: serves the tenants of a store in another way than hPLMs, for comparison.

Schemes: adapter, shared, dedicated, dedicated_inprocess, compressed. docs/loadtest.md says what each of them shares.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from cyclopts import App

from builder.publish.model_configs import ServingOptions
from builder.store.store import Store
from hplm.errors import HplmError
from research.options import FLAT, JSON
from research.schemes.export import export_scheme

app = App(
    name="python -m research.schemes", help=__doc__, help_format="plaintext", version_flags=[], result_action="return_value"
)
USUAL = ServingOptions()


@app.default
def write(
    scheme: str,
    /,
    *,
    store: Path,
    repository: Path = Path("model_repository"),
    options: Annotated[ServingOptions, FLAT] = USUAL,
    resident: int = 20,
    replace: bool = False,
    while_served: bool = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Writes Triton's model folders.

    Parameters
    ----------
    scheme
        The way to serve the tenants.
    store
        The folder that `hplm build` wrote.
    repository
        The model repository to write.
    options
        As of `hplm export`.
    resident
        Models to keep in memory, of a scheme with a model for each tenant.
    replace
        Remove exported tenants that the store does not have.
    while_served
        Replace the backbone even though a running server serves it: restart that server at once.
    as_json
        End with one line of JSON.
    """
    exported = export_scheme(Store(store), repository, options, scheme, resident, replace, while_served)
    figures = {"scheme": scheme, "backbone": exported.backbone, "tenants": exported.tenants, "repository": str(repository)}
    shown = f"exported backbone {exported.backbone} as {scheme}: {exported.tenants} tenants"
    print(json.dumps(figures) if as_json else f"{shown}\nnext: hplm serve --repository {repository}")


def main(arguments: Sequence[str] | None = None) -> int:
    try:
        app(arguments)
    except HplmError as error:
        print(f"schemes: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
