"""The parts of the router's file for HAProxy 2.6 or later with Lua. `$$` stands for a dollar sign."""

from pathlib import Path
from string import Template

HEAD = Template(Path(__file__).with_name("router.cfg").read_text("utf-8"))  # all but the backends
LUA = Path(__file__).with_name("tenant.lua").read_text("utf-8")

STATS = Template("""
frontend stats
    bind $bind
    http-request use-service prometheus-exporter if { path /metrics }
    stats enable
    stats uri /
""")

# Of replicas with host names: another machine may get the name, and a replica without one yet keeps no other from its work.
RESOLVERS = """
resolvers system
    parse-resolv-conf
    hold valid 1s
    hold obsolete 5s
"""
RESOLVED = " resolvers system resolve-prefer ipv4 init-addr last,libc,none"

CHECK = Template("""\
    http-check connect
    http-check send meth POST uri /v2/models/$model/$path hdr content-type application/json body $body
    http-check expect status 200
""")

_BALANCE = """\
    balance hash var(txn.tenant)  # in turns where a request names none
    hash-type consistent djb2 avalanche
"""
_AWAY = "[draining] no replica has taken the request; retry after 1 s"
OVERFLOW = """\
    hash-balance-factor 125  # a busy tenant's requests overflow to the next replica on the ring
"""

# An inference, because Triton calls a model ready whose process is dead. While a replica drains, the answer is 503.
CHECKED = Template("""\
    option httpchk
$checks    timeout check 10s
    default-server check inter 1s fastinter 100ms fall $fall rise 1 observe layer4 error-limit 1 on-error fastinter
""")

# The homes of all replicas are in one backend, so that `maxconn` is the bound of a replica whatever is away.
HTTP = Template(f"""\
backend $name
{_BALANCE}$rules    default-server weight 100 maxconn $at_once pool-purge-delay 1s$resolved
$servers""")

GRPC = Template(f"""\
backend $name:grpc
{_BALANCE}$rules    http-error status 503 hdr grpc-status 14 hdr grpc-message "{_AWAY}"
    default-server proto h2 weight 100 pool-purge-delay 1s$resolved
$servers""")

# Gets no requests. Its `nbsrv` says whether the home takes any, which no other sample says of a server that drains.
HOME = Template("""\
backend $name
    server $server$resolved
""")
