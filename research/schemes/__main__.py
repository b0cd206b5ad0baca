"""`python -m research.schemes SCHEME`: serves the tenants of a store in another way than hPLMs, for comparison.

Schemes: adapter, shared, dedicated_inprocess, compressed. docs/loadtest.md says what each of them shares.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from bench.run import app_of
from builder.publish.model_configs import ServingOptions
from builder.store.store import Store
from research.options import run
from research.schemes.export import export_scheme

app = app_of("python -m research.schemes", __doc__)
USUAL = ServingOptions()
FLAT = Parameter(name="*")


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
) -> None:
    """Writes Triton's model folders.

    :param scheme: the way to serve the tenants
    :param store: the folder that `hplm build` wrote
    :param repository: the model repository to write
    :param options: as of `hplm export`
    :param resident: models to keep in memory, of a scheme with a model for each tenant
    :param replace: write all files anew, also over another export of this backbone, after its servers have stopped
    """
    exported = export_scheme(Store(store), repository, options, scheme, resident, replace)
    print(f"exported backbone {exported.backbone} as {scheme}: {exported.tenants} tenants")
    print(f"next: hplm serve --repository {repository}")


main = partial(run, app)

if __name__ == "__main__":
    sys.exit(main())
