"""Training that was interrupted before or after its tenant was stored."""

from dataclasses import replace

import pytest

from builder.store.store import Store
from tests.builder.training.small_tenants import learn, made

pytestmark = pytest.mark.slow


def test_a_command_interrupted_after_its_tenant_is_stored_makes_no_second_version(store, tmp_path, monkeypatch):
    train, save = made(tmp_path, "classify", 60, 1), Store.save_tenant

    def saved_and_cut(self, *given):
        save(self, *given)
        raise KeyboardInterrupt

    with monkeypatch.context() as cut:
        cut.setattr(Store, "save_tenant", saved_and_cut)
        with pytest.raises(KeyboardInterrupt):
            learn(store, "classify", train, epochs=1)
    assert learn(store, "classify", train, epochs=1).version == 1
    assert not (store.folder / "building/tenants/acme").exists()
    assert learn(store, "classify", train, epochs=2).version == 2


def test_an_interrupted_command_does_not_mistake_an_imported_tenant_for_its_own(store, tmp_path, monkeypatch):
    train = made(tmp_path, "classify", 60, 1)
    other = learn(store, "classify", train, tenant="other", epochs=1)
    with monkeypatch.context() as cut, pytest.raises(KeyboardInterrupt):
        cut.setattr(Store, "save_tenant", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        learn(store, "classify", train, epochs=1)
    store.save_tenant(replace(other, id="acme"), *store.tenant_weights(other), {"task": "classify", "imported": {}})
    trained = learn(store, "classify", train, epochs=1)
    assert trained.version == 2 and "dev" in store.report(trained)


def test_a_training_continues_if_an_import_has_taken_its_version(store, tmp_path, monkeypatch, capsys):
    train = made(tmp_path, "classify", 60, 1)
    other = learn(store, "classify", train, tenant="other", epochs=1)
    with monkeypatch.context() as cut, pytest.raises(KeyboardInterrupt):
        cut.setattr(Store, "save_tenant", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        learn(store, "classify", train, epochs=1)
    left = store.tenant_work_folder("acme") / "kept"
    left.write_text("a savepoint")
    store.save_tenant(replace(other, id="acme"), *store.tenant_weights(other), {"task": "classify", "imported": {}})
    with monkeypatch.context() as cut, pytest.raises(KeyboardInterrupt):
        cut.setattr(Store, "save_tenant", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        learn(store, "classify", train, epochs=1)
    assert left.exists() and not capsys.readouterr().err
    assert learn(store, "classify", train, epochs=1).version == 2
