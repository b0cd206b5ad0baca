"""An ensemble of two Python models that do nothing: what Triton costs without us."""

from __future__ import annotations

import shutil
from pathlib import Path
from string import Template

import bench.noop

NOOP = "noop"

_ENSEMBLE = Template("""\
name: "noop"
platform: "ensemble"
max_batch_size: 1024
input [ { name: "TEXT"  data_type: TYPE_STRING  dims: [ 1 ] } ]
output [
  { name: "LABEL"  data_type: TYPE_STRING  dims: [ -1 ] },
  { name: "SCORE"  data_type: TYPE_FP32  dims: [ -1 ] }
]
ensemble_scheduling {
  step [
    {
      model_name: "noop-first"  model_version: -1
      input_map  { key: "TEXT"      value: "TEXT" }
      output_map { key: "ROWS"      value: "rows" }
      output_map { key: "SEGMENTS"  value: "segments" }
      output_map { key: "SPANS"     value: "spans" }
      output_map { key: "TICKET"    value: "ticket" }
    },
    {
      model_name: "noop-second"  model_version: -1
      input_map  { key: "ROWS"      value: "rows" }
      input_map  { key: "SEGMENTS"  value: "segments" }
      input_map  { key: "SPANS"     value: "spans" }
      input_map  { key: "TICKET"    value: "ticket" }
      output_map { key: "LABEL"     value: "LABEL" }
      output_map { key: "SCORE"     value: "SCORE" }
    }
  ]
}
""")

_BETWEEN = """
  { name: "ROWS"      data_type: TYPE_INT64  dims: [ -1 ]$ragged },
  { name: "SEGMENTS"  data_type: TYPE_UINT8  dims: [ -1 ]$ragged },
  { name: "SPANS"     data_type: TYPE_INT32  dims: [ -1, 3 ]$ragged },
  { name: "TICKET"    data_type: TYPE_UINT8  dims: [ 80 ]$ragged }
"""

_FIRST = Template("""\
name: "noop-first"
backend: "python"
max_batch_size: 1024
input [ { name: "TEXT"  data_type: TYPE_STRING  dims: [ 1 ]  allow_ragged_batch: true } ]
output [ $between ]
instance_group [ { kind: KIND_CPU  count: 1 } ]
dynamic_batching { }
parameters { key: "tokens"  value { string_value: "$tokens" } }
""")

_SECOND = Template("""\
name: "noop-second"
backend: "python"
max_batch_size: 1024
input [ $between ]
output [
  { name: "LABEL"  data_type: TYPE_STRING  dims: [ -1 ] },
  { name: "SCORE"  data_type: TYPE_FP32  dims: [ -1 ] }
]
instance_group [ { kind: KIND_CPU  count: 1 } ]
dynamic_batching { }
""")


def add_noop(repository: Path, tokens: int) -> None:
    """Adds the ensemble of two models that do nothing."""
    ragged = Template(_BETWEEN)
    configs = {
        "noop": _ENSEMBLE.substitute(),
        "noop-first": _FIRST.substitute(between=ragged.substitute(ragged="").strip(), tokens=tokens),
        "noop-second": _SECOND.substitute(between=ragged.substitute(ragged="  allow_ragged_batch: true").strip()),
    }
    code = Path(bench.noop.__path__[0])
    for name, config in configs.items():
        (repository / name / "1").mkdir(parents=True)
        (repository / name / "config.pbtxt").write_text(config)
    for name in ("first", "second"):
        shutil.copy(code / f"{name}.py", repository / f"noop-{name}" / "1" / "model.py")
