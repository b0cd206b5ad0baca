"""Questions on passages that are longer than a text may be, and words without a token."""

import numpy as np

from builder.evaluation.tenant import evaluate_tenant
from builder.training.examples import Reader
from builder.training.objectives import UNREAD
from builder.training.tasks import training_task
from testing.toy import WORDS
from tests.builder.training.small_tenants import CPU, write


def test_an_answer_is_learned_in_the_windows_that_have_all_of_it(store, tmp_path):
    """A passage of 120 words has windows of words 0 to 59, 30 to 89 and 60 to 119."""
    words = [WORDS[30 + i] for i in range(120)]
    passage = " ".join(words)

    def asks(first, last):
        answer = " ".join(words[first : last + 1])
        return {"text": WORDS[0], "text_pair": passage, "answers": {"text": [answer], "answer_start": [passage.index(answer)]}}

    path = write(tmp_path / "long.jsonl", [asks(1, 2), asks(40, 41), asks(59, 60), asks(29, 30), asks(119, 119)])
    task = training_task("span")
    for labels, no in ((["start", "end"], [UNREAD, UNREAD]), (["start", "end", "none"], [0, 0])):
        texts = Reader(store, "root", 1).read(task.read(path), task, labels, show_progress=False)
        assert texts.cut == 0 and [example.line for example in texts.examples] == [1, 2, 3, 4, 5]
        assert texts.lengths.tolist() == [64] * 15
        targets = [text.targets.tolist() for text in texts.texts]
        assert [targets[i : i + 3] for i in range(0, 15, 3)] == [
            [[2, 3], no, no],
            [[41, 42], [11, 12], no],
            [no, [30, 31], no],
            [[30, 31], no, no],
            [no, no, [60, 60]],
        ]


def test_a_word_without_a_token_counts_as_wrong(trained, tmp_path):
    """A zero-width space is a word to a client and nothing to the tokenizer."""
    store, _ = trained
    path = write(tmp_path / "odd.jsonl", [{"tokens": [WORDS[0], "\u200b", WORDS[60]], "tags": ["B-P", "O", "O"]}])
    task, labels = training_task("tag"), store.tenant("bio").labels
    reader = Reader(store, "root", 1)
    texts = reader.read(task.read(path), task, labels, show_progress=False)
    assert texts.texts[0].reading.tolist() == [1, UNREAD, 2]
    assert reader.pack(texts, np.array([0]), CPU).targets.tolist() == [labels.index("B-P"), UNREAD, labels.index("O")]
    assert evaluate_tenant(store, "bio", path, CPU, show_progress=False).scores.values["accuracy"] <= 0.6667
