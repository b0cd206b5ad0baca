"""All that reads files, with bad ones: they are refused by an error of ours that names them, or read as something valid."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hplm.errors import InvalidInput
from hplm.process.channel import Channel, Ready, Shutdown
from hplm.scheduling.policy import policy
from loadtest.traffic import lengths_of
from tests.refusals.contract import ODD
from tests.refusals.mutations import NAMES, bad
from tests.refusals.readers import READERS, Taken
from tests.support.wait import PATIENCE

pytestmark = pytest.mark.slow
NOTHING = "(?!)"  # a pattern that fits no text


@pytest.mark.parametrize("what", READERS)
def test_bad_files_are_refused_by_their_name_or_read(what, toy, tmp_path):
    """Takes seconds, because it reads some hundred files."""
    reader, taken = READERS[what], Taken(tmp_path, READERS[what].by_users, toy)
    folder, read = reader.make(tmp_path, taken)
    taken.folder = folder
    good = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    names = [name for name in sorted(good) if re.fullmatch(reader.only or ".*", name)]
    for name in names:
        read(name)  # no good file is refused

    def check(name: str, data: bytes) -> None:
        written_anew(folder, {**good, name: data})
        taken.bad = name
        taken(lambda: read(name))
        written_anew(folder, good)

    other = [(name, re.sub(rb'"format": \d', b'"format": 9', good[name], count=1)) for name in names]
    for name, data in (*reader.kept, *[case for case in other if case[1] != good[case[0]]]):
        seen = len(taken.refusals)
        check(name, data)
        assert len(taken.refusals) > seen, f"{name} is taken as {data[:100]!r}"
    cases = st.sampled_from(names).flatmap(lambda name: st.tuples(st.just(name), bad(name, good[name])))
    settings(max_examples=reader.examples, database=None)(given(cases)(lambda case: check(*case)))()
    assert taken.refusals, "nothing is refused"


def written_anew(folder: Path, files: dict[str, bytes]) -> None:
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        data = files.get(path.relative_to(folder).as_posix())
        if data is None or path.read_bytes() != data:
            path.unlink()  # it may still be mapped
    for name, data in files.items():
        if not (folder / name).exists():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("read", "form", "taken"),
    [
        *((policy, form, NOTHING) for form in ("{}", "x:{}", "timely:eta={}", "normal:{},20")),
        (policy, "das:q={}", r"0\.5|1e-09"),
        *((lengths_of, form, NOTHING) for form in ("x:{}", "das:q={}")),
        (lengths_of, "{}", "255|32768|65536|٣|1_0"),
        (lengths_of, "normal:{},20", r"-?[\d_]{1,40}|-?[01]\.[05]|1e-09|1e9|1e\+308"),
    ],
)
def test_odd_options_are_refused_and_only_numbers_within_bounds_are_taken(read, form, taken):
    for value in [*map(str, ODD), *NAMES, "1e400", "nan", "٣", "1_0"]:
        try:
            read(form.format(value))
        except InvalidInput as error:
            assert len(str(error)) <= 1024 and not re.fullmatch(taken, value), error
        else:
            assert re.fullmatch(taken, value), f"{form.format(value)} is taken"


@given(end=st.integers(0, 200), pieces=st.lists(st.integers(1, 40), max_size=6), one_by_one=st.booleans())
def test_a_channel_whose_sender_was_killed_gives_its_whole_messages(end, pieces, one_by_one):
    sent, ends, stream = [Ready(), bytearray(b"a frame"), Shutdown(), bytearray()], [], b""
    mine, other = socket.socketpair()
    sender = Channel(mine.detach())
    for message in sent:
        sender.send_bytes([message]) if isinstance(message, bytearray) else sender.send(message)
        stream += other.recv(1 << 16)
        ends.append(len(stream))
    sender.close()
    near, far = socket.socketpair()
    with other, far:
        left = stream[:end]
        for size in (*pieces, len(left)):
            far.sendall(left[:size])
            left = left[size:]
    receiver, got = Channel(near.detach()), []
    while None not in got:
        got += [receiver.receive()] if one_by_one else receiver.arrived(PATIENCE)
    receiver.close()
    assert got == [*(message for message, ends_at in zip(sent, ends, strict=True) if ends_at <= end), None]
