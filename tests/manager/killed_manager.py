"""A manager as a process that a test kills: `killed_manager.py FOLDER PORT`. Its commands only seem to train, unless the folder
has a `repository`.
"""

import sys
from contextlib import nullcontext
from pathlib import Path

from hplm.server.ports import listen
from hplm_openai.__main__ import server_of
from hplm_openai.app import Gateway, RequestLimits
from hplm_openai.backbones import Backbones
from manager.app import application
from manager.models import Base
from manager.site import Site
from tests.manager.serving import NOWHERE, fake_base, faked, side_by_side

if __name__ == "__main__":
    folder, port = Path(sys.argv[1]), int(sys.argv[2])
    is_real = (folder / "repository").exists()
    with side_by_side(), nullcontext() if is_real else faked():
        store = folder / "store"
        base = Base.open(store, folder / "repository", folder / "state") if is_real else fake_base(store)
        site = Site.open(folder / "manager", [base])
        gateway = Gateway(lambda: Backbones(NOWHERE, [], 5.0), RequestLimits())
        server_of(application(site, gateway)).run(sockets=[listen("127.0.0.1", port, "--port")])
