import pytest
import torch

from hplm.adapters.bank import FORMAT, Bank, record_bytes, write_bank, write_record
from hplm.adapters.layout import Layout
from hplm.adapters.record import Record
from hplm.errors import Broken, InvalidInput
from tests.support.message import mentioning

LAYOUT = Layout("bottleneck", 3, 8, 2, ("attention_out",))


@pytest.fixture
def bank(tmp_path):
    """A bank whose record i belongs to uid 100 + i, version 7, and contains only the number i."""
    records = [(100 + i, 7, torch.full((LAYOUT.layers, LAYOUT.layer_size), float(i))) for i in range(5)]
    write_bank(tmp_path / LAYOUT.file_name, LAYOUT, records)
    return Bank(tmp_path / LAYOUT.file_name)


def _record(i):
    return Record(LAYOUT.file_name, i, 100 + i, 7)


def test_a_record_comes_back_in_its_shapes(bank):
    layers = bank.weights(_record(3))
    assert [{name: tuple(t.shape) for name, t in layer.items()} for layer in layers] == [LAYOUT.shapes] * 2
    assert all((tensor == 3).all() for layer in layers for tensor in layer.values())


def test_a_record_of_another_tenant_is_never_used(bank):
    with pytest.raises(Broken, match=mentioning(3, LAYOUT.file_name)):
        bank.weights(Record(LAYOUT.file_name, 3, 102, 7))
    with pytest.raises(Broken, match=mentioning(3, LAYOUT.file_name)):
        bank.weights(Record(LAYOUT.file_name, 3, 103, 8))
    with pytest.raises(Broken, match=mentioning(5, LAYOUT.file_name)):
        bank.weights(Record(LAYOUT.file_name, 5, 105, 7))


def test_a_corrupt_record_fails_alone(bank):
    data = bytearray(bank.path.read_bytes())
    data[4096 + record_bytes(LAYOUT) + 100] ^= 1
    bank.path.write_bytes(data)
    fresh = Bank(bank.path)
    with pytest.raises(Broken, match=mentioning(1, LAYOUT.file_name)):
        fresh.weights(_record(1))
    assert fresh.weights(_record(2))


def test_a_truncated_bank_fails_only_records_beyond_its_end(bank):
    bank.path.write_bytes(bank.path.read_bytes()[:-1])
    short = Bank(bank.path)
    with pytest.raises(Broken, match=mentioning(4, LAYOUT.file_name)):
        short.weights(_record(4))
    assert short.weights(_record(3))
    with pytest.raises(Broken, match=mentioning(bank.path.with_name("none.bank"))):
        Bank(bank.path.with_name("none.bank"))


def test_a_bank_grows_and_its_readers_see_it(bank):
    write_record(bank.path, LAYOUT, 5, 200, 1, torch.full((LAYOUT.layers, LAYOUT.layer_size), 9.0))
    assert (bank.weights(Record(LAYOUT.file_name, 5, 200, 1))[0]["attention_out/down"] == 9).all()
    write_record(bank.path, LAYOUT, 2, 201, 1, torch.full((LAYOUT.layers, LAYOUT.layer_size), 8.0))
    with pytest.raises(Broken, match=mentioning(2, LAYOUT.file_name)):
        bank.weights(_record(2))
    assert (bank.weights(Record(LAYOUT.file_name, 2, 201, 1))[1]["attention_out/up_bias"] == 8).all()
    assert (bank.weights(_record(4))[0]["attention_out/down"] == 4).all()


def test_a_bank_of_another_format_is_refused(bank):
    bank.path.write_bytes(bank.path.read_bytes().replace(b'"format": %d' % FORMAT, b'"format": 9'))
    with pytest.raises(InvalidInput, match=mentioning(bank.path, 9)):
        Bank(bank.path)


@pytest.mark.parametrize("broken", [b'"size": null', b'"size": 3.0', b'"size": true', b'"size": -3'])
def test_a_bank_whose_header_has_no_whole_numbers_is_broken(bank, broken):
    head, rest = bank.path.read_bytes()[:4096], bank.path.read_bytes()[4096:]
    bank.path.write_bytes(head.replace(b'"size": 3', broken).rstrip(b"\0").ljust(4096, b"\0") + rest)
    with pytest.raises(Broken, match=mentioning(bank.path)):
        Bank(bank.path)
