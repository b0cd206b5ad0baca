"""A model repository whose backbones are all one fake model: `NAME-lookup` answers, `NAME` and `NAME-upper` pass it on.

So the client meets a real Triton, real ensembles with their own words in front of every error, and no weights.
"""

from __future__ import annotations

import shutil
from pathlib import Path

TENSORS = """max_batch_size: 1024
input [
  { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] },
  { name: "TEXT_PAIR" data_type: TYPE_STRING dims: [ 1 ] optional: true }
]
output [
  { name: "LABEL" data_type: TYPE_STRING dims: [ -1 ] },
  { name: "SCORE" data_type: TYPE_FP32 dims: [ -1 ] },
  { name: "LOGITS" data_type: TYPE_FP32 dims: [ -1, -1 ] },
  { name: "SPAN" data_type: TYPE_INT32 dims: [ -1, 2 ] },
  { name: "CONFIDENCE" data_type: TYPE_FP32 dims: [ 1 ] },
  { name: "LEVEL" data_type: TYPE_INT32 dims: [ 1 ] },
  { name: "VERSION" data_type: TYPE_STRING dims: [ 1 ] }
]
"""


def write(repository: Path, backbone: str, answering: str) -> None:
    """Writes the three models of `backbone`. The model that answers may be that of another backbone."""
    for model in (f"{backbone}-lookup", f"{backbone}-upper", backbone):
        (repository / model / "1").mkdir(parents=True, exist_ok=True)
        config = TENSORS
        if model == answering:
            shutil.copy(Path(__file__).parent / "fake_backbone" / "model.py", repository / model / "1")
            config += 'backend: "python"\ninstance_group [ { kind: KIND_CPU count: 1 } ]\n'
        else:
            config += f'platform: "ensemble"\nensemble_scheduling {{ step [ {_step(answering)} ] }}\n'
        (repository / model / "config.pbtxt").write_text(config)


def _step(answering: str) -> str:
    maps = [f'input_map {{ key: "{name}" value: "{name}" }}' for name in ("TEXT", "TEXT_PAIR")]
    outputs = ("LABEL", "SCORE", "LOGITS", "SPAN", "CONFIDENCE", "LEVEL", "VERSION")
    maps += [f'output_map {{ key: "{name}" value: "{name}" }}' for name in outputs]
    return f'{{ model_name: "{answering}" model_version: -1 {" ".join(maps)} }}'
