"""What a controller must not forget: its epoch, and whom it commanded."""

from __future__ import annotations

from pathlib import Path

import pytest

from slurm_pfi.store.epoch import BOOTS_KEPT, CommandedStore, EpochStore, NeverCommanded, Unknown
from slurm_pfi.store.sealed import UnreadableError

GPU = "GPU-1"


def test_the_epoch_grows_with_every_leader_and_survives(tmp_path: Path) -> None:
    path = tmp_path / "epoch.json"
    assert EpochStore(path).first_start
    assert EpochStore(path).next_epoch() == 1
    assert not EpochStore(path).first_start
    assert EpochStore(path).next_epoch(0) == 2
    assert EpochStore(path).next_epoch(7) == 8
    assert EpochStore(path).current() == 8


def test_a_report_raises_the_epoch_by_a_thousand_at_most(tmp_path: Path) -> None:
    store = EpochStore(tmp_path / "epoch.json")
    store.next_epoch()
    assert store.next_epoch(10**15) == 1 + 1000 + 1


@pytest.mark.parametrize("content", ["", "{}", "7", '{"sha256":"00","body":{"epoch":1}}'])
def test_a_damaged_epoch_is_no_epoch(tmp_path: Path, content: str) -> None:
    path = tmp_path / "epoch.json"
    path.write_text(content)
    store = EpochStore(path)
    with pytest.raises(UnreadableError):
        store.next_epoch(5)
    with pytest.raises(UnreadableError):
        _ = store.first_start
    assert path.read_text() == content


def loaded(tmp_path: Path) -> CommandedStore:
    store = CommandedStore(tmp_path / "commanded.json")
    store.load()
    return store


def test_priors_are_known_after_a_restart(tmp_path: Path) -> None:
    store = loaded(tmp_path)
    assert store.prior_for("n1", "b1", GPU) == NeverCommanded()
    assert not store.update_priors("n1", "b1", {GPU: 700_000})
    assert store.prior_for("n1", "b1", GPU) == NeverCommanded()
    store.mark_commanded("n1", "b1")
    assert store.prior_for("n1", "b1", GPU) == Unknown()
    assert store.update_priors("n1", "b1", {GPU: 650_000})
    assert not store.update_priors("n1", "b1", {GPU: 650_000})
    store.mark_commanded("n1", "b1")
    again = loaded(tmp_path)
    assert again.is_commanded("n1", "b1")
    assert again.prior_for("n1", "b1", GPU) == 650_000
    assert again.prior_for("n1", "b1", "GPU-2") == Unknown()
    assert again.prior_for("n1", "b2", GPU) == NeverCommanded()
    assert again.prior_for("n2", "b1", GPU) == NeverCommanded()


def test_a_prior_that_a_report_leaves_out_is_kept(tmp_path: Path) -> None:
    store = loaded(tmp_path)
    store.mark_commanded("n1", "b1", {GPU: 650_000, "GPU-2": 700_000})
    store.update_priors("n1", "b1", {"GPU-2": 600_000})
    assert loaded(tmp_path).prior_for("n1", "b1", GPU) == 650_000
    assert loaded(tmp_path).prior_for("n1", "b1", "GPU-2") == 600_000


def test_old_boots_are_forgotten_and_the_last_ones_kept(tmp_path: Path) -> None:
    store = loaded(tmp_path)
    for boot in range(BOOTS_KEPT + 1):
        store.mark_commanded("n1", f"b{boot}", {GPU: 1000})
    again = loaded(tmp_path)
    assert not again.is_commanded("n1", "b0")
    assert all(again.is_commanded("n1", f"b{boot}") for boot in range(1, BOOTS_KEPT + 1))


def test_a_damaged_record_makes_every_answer_unknown_until_it_is_put_aside(tmp_path: Path) -> None:
    loaded(tmp_path).mark_commanded("n1", "b1", {GPU: 650_000})
    path = tmp_path / "commanded.json"
    damaged = path.read_text().replace("650000", "200000")
    path.write_text(damaged)
    store = loaded(tmp_path)
    assert "checksum" in store.trouble
    assert store.prior_for("n1", "b1", GPU) == Unknown()
    assert store.prior_for("n9", "b9", GPU) == Unknown()
    store.mark_commanded("n2", "b1", {GPU: 700_000})
    assert store.prior_for("n2", "b1", GPU) == 700_000
    assert path.read_text() == damaged
    aside = store.set_aside(now_unix_s=5.0)
    assert aside is not None
    assert aside.read_text() == damaged
    assert loaded(tmp_path).prior_for("n2", "b1", GPU) == 700_000
    assert store.set_aside(now_unix_s=6.0) is None


def test_many_boots_are_marked_together_and_a_known_one_keeps_its_priors(tmp_path: Path) -> None:
    store = loaded(tmp_path)
    store.mark_commanded("n1", "b1", {GPU: 650_000})
    store.mark_all([("n1", "b1", {GPU: 1}), ("n2", "b2", {GPU: 600_000}), ("n1", "b3", {})])
    again = loaded(tmp_path)
    assert again.prior_for("n1", "b1", GPU) == 650_000
    assert again.prior_for("n2", "b2", GPU) == 600_000
    assert again.is_commanded("n1", "b3")
