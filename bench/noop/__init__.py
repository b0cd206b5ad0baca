"""Ensembles of two Python models that do nothing, and pass as many bytes between them as ours. Triton runs the other files.

`noop` (noop B) answers from threads, as a model must whose answers take time. `floor` (noop C) answers from `execute`, which is
faster. `echo` sends each request to another process and back, as a model must whose engine is a process.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from string import Template

from hplm.request.form import TicketHead, write

NOOP, FLOOR, ECHO = "noop", "floor", "echo"

_OUTPUTS = """
  { name: "LABEL"  data_type: TYPE_STRING  dims: [ -1 ] },
  { name: "SCORE"  data_type: TYPE_FP32  dims: [ -1 ] }
"""
_ENSEMBLE = Template("""\
platform: "ensemble"
max_batch_size: 1024
input [ { name: "TEXT"  data_type: TYPE_STRING  dims: [ 1 ] } ]
output [ $outputs ]
ensemble_scheduling {
  step [
    {
      model_name: "$name-lookup"  model_version: -1
      input_map  { key: "TEXT"    value: "TEXT" }
      output_map { key: "TICKET"  value: "ticket" }
    },
    {
      model_name: "$name-upper"  model_version: -1
      input_map  { key: "TICKET"  value: "ticket" }
      output_map { key: "LABEL"   value: "LABEL" }
      output_map { key: "SCORE"   value: "SCORE" }
    }
  ]
}
""")
_MODEL = Template("""\
backend: "python"
max_batch_size: 1024
input [ $inputs ]
output [ $outputs ]
instance_group [ { kind: KIND_CPU  count: 1 } ]
dynamic_batching { }
parameters { key: "$key"  value { string_value: "$value" } }
""")
_TEXT = '{ name: "TEXT"  data_type: TYPE_STRING  dims: [ 1 ]  allow_ragged_batch: true }'
_TICKET = '{ name: "TICKET"  data_type: TYPE_UINT8  dims: [ -1 ] }'


def ticket_bytes(tokens: int) -> tuple[int, int]:
    """Returns the bytes that our lookup model passes on for a request, and those for each of its texts."""
    one, two = (len(_form(texts, tokens)) for texts in (1, 2))
    return 2 * one - two, two - one


def _form(texts: int, tokens: int) -> bytearray:
    """Returns the form of a request to classify texts, with an answer row for each."""
    return write(
        b"",
        TicketHead("general", "tenant-00", 0, 0, 0, 0),
        [tokens] * texts,
        [1] * texts,
        bytes(8 * texts * tokens),
        bytes(texts * tokens),
        bytes(12 * texts),
    )


def add_noops(repository: Path, tokens: int) -> None:
    """Adds the ensembles, for texts of so many tokens."""
    given = " ".join(map(str, ticket_bytes(tokens)))
    for name in (NOOP, FLOOR, ECHO):
        configs = {
            name: _ENSEMBLE.substitute(name=name, outputs=_OUTPUTS),
            f"{name}-lookup": _MODEL.substitute(inputs=_TEXT, outputs=_TICKET, key="bytes", value=given),
            f"{name}-upper": _MODEL.substitute(
                inputs=_TICKET.replace(" }", "  allow_ragged_batch: true }"), outputs=_OUTPUTS, key="answers", value=name
            ),
        }
        for model, config in configs.items():
            (repository / model / "1").mkdir(parents=True)
            (repository / model / "config.pbtxt").write_text(f'name: "{model}"\n{config}')
        for part in ("lookup", "upper"):
            shutil.copy(Path(__file__).with_name(f"{part}.py"), repository / f"{name}-{part}" / "1" / "model.py")
