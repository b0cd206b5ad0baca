"""The texts whose vectors are nearest to a text's, and the nearness of two texts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from builder.tasks.examples import Example
from hplm.arrays import Array
from hplm.tasks.answers import TextAnswer
from hplm.tenants.embedding import normalised

NEAREST = 10  # texts that are found
AT_ONCE = 256  # texts whose nearest ones are looked for together
NOTHING = np.zeros((1, 2), dtype=np.int32)


def nearest(examples: Sequence[Example], rows: Sequence[tuple[Array, Array]]) -> list[TextAnswer]:
    """Returns for a rated pair the cosine of its vectors, and for others the positives of all examples, the nearest first.

    `rows`: the vectors of each example's text, its pair and its negative, beside their spans.
    """
    vectors = [normalised(own) for _, own in rows]
    found, asking, positives = dict[int, TextAnswer](), list[int](), dict[str, Array]()
    for number, (example, own) in enumerate(zip(examples, vectors, strict=True)):
        if example.is_rated:
            cosine = own[:1] @ own[1]
            found[number] = TextAnswer([f"{cosine[0]:.6g}"], cosine, own[:1], NOTHING)
        else:
            asking.append(number)
            positives.setdefault(example.pair or "", own[1])
    texts = [*positives]
    for start in range(0, len(asking), AT_ONCE):
        some = asking[start : start + AT_ONCE]
        near: Array = np.stack([vectors[number][0] for number in some]) @ np.stack([*positives.values()]).T
        best = np.argsort(-near, axis=1, kind="stable")[:, :NEAREST]
        for number, own, order in zip(some, near, best, strict=True):
            labels = [texts[i] for i in order.tolist()]
            found[number] = TextAnswer(labels, own[order], vectors[number][:1], NOTHING.repeat(len(labels), axis=0))
    return [found[number] for number in range(len(examples))]
