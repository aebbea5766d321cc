"""`stitch bootstrap` writes the newest version, whole or not at all, from a base it proved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from stitch.cli import main
from stitch.env import Env
from stitch.errors import CorruptData, InvalidInput, NotVisibleYet
from stitch.format.checkpoint import Checkpoint
from stitch.reconciler.bootstrap import bootstrap
from stitch.stores.local import LocalStore
from stitch.testing.publications import ScriptedRun, small_model, write_checkpoint
from stitch.types import Kind, Ref


class Site:
    def __init__(self, root: Path) -> None:
        self.env = Env()
        self.root = root
        self.base = write_checkpoint(root / "base", small_model())
        (self.base / "config.json").write_text('{"model_type": "tiny"}')
        self.store = LocalStore(root / "store", env=self.env)
        self.out = root / "out"

    async def claim(self, run_id: str = "run-a", **options: object) -> ScriptedRun:
        return await ScriptedRun.claim(
            self.store,
            self.env,
            run_id,
            small_model(),
            **options,  # type: ignore[arg-type]
        )

    def change(self, run: ScriptedRun, index: int, value: int) -> dict[str, bytes]:
        name = sorted(run.tensors)[index]
        return {name: bytes([value]) * run.tensors[name].nbytes}

    def digest(self) -> str:
        with Checkpoint.open(self.out) as found:
            return found.model_digest()


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


async def test_the_newest_version_is_written_whole(site: Site) -> None:
    run = await site.claim()
    await run.publish(site.change(run, 0, 1))
    ref = await run.publish(site.change(run, 1, 2))
    done = await bootstrap(site.store, site.base, site.out, site.env)
    assert (done.ref, done.base, done.applied) == (ref, "proven", 2)
    assert site.digest() == done.model_digest == run.digests[ref]
    assert (site.out / "config.json").read_text() == '{"model_type": "tiny"}'
    assert await site.store.read_leases() == {}
    assert sorted(p.name for p in site.root.iterdir()) == ["base", "out", "store"]


async def test_an_anchor_makes_the_base_irrelevant(site: Site) -> None:
    run = await site.claim()
    await run.publish(site.change(run, 0, 1))
    await run.publish(site.change(run, 1, 2), kind=Kind.ANCHOR)
    ref = await run.publish(site.change(run, 2, 3))
    other = write_checkpoint(site.root / "other", small_model(seed=9))
    done = await bootstrap(site.store, other, site.out, site.env)
    assert (done.base, done.applied) == ("unused", 2)
    assert site.digest() == run.digests[ref]


async def test_at_the_boot_version_the_base_is_linked(site: Site) -> None:
    run = await site.claim(boot_version=3)
    done = await bootstrap(site.store, site.base, site.out, site.env)
    assert (done.ref, done.linked) == (Ref("run-a", 3), True)
    assert site.digest() == run.digests[run.ref]
    assert (site.out / "model.safetensors").samefile(site.base / "model.safetensors")


async def test_a_fork_is_rebuilt_through_its_parent(site: Site) -> None:
    first = await site.claim()
    await first.publish(site.change(first, 0, 1))
    fork_point, tensors = first.fork_point(), dict(first.tensors)
    await first.publish(site.change(first, 1, 2))
    fork = await ScriptedRun.claim(
        site.store, site.env, "run-b", tensors, first=False, boot_version=1, forked_from=fork_point
    )
    ref = await fork.publish(site.change(fork, 2, 3))
    done = await bootstrap(site.store, site.base, site.out, site.env)
    assert done.ref == ref
    assert site.digest() == fork.digests[ref]


async def test_a_base_that_is_not_the_runs_is_refused(site: Site) -> None:
    run = await site.claim()
    other = write_checkpoint(site.root / "other", small_model(seed=9))
    with pytest.raises(InvalidInput):
        await bootstrap(site.store, other, site.out, site.env)
    await run.publish(site.change(run, 0, 1))
    with pytest.raises(InvalidInput):
        await bootstrap(site.store, other, site.out, site.env)
    assert not site.out.exists()


async def test_a_corrupt_publication_leaves_nothing(site: Site) -> None:
    run = await site.claim()
    await run.publish(site.change(run, 0, 1), damage=True)
    with pytest.raises(CorruptData):
        await bootstrap(site.store, site.base, site.out, site.env)
    assert not site.out.exists()
    assert sorted(p.name for p in site.root.iterdir()) == ["base", "store"]


async def test_no_pointer_needs_a_run(site: Site) -> None:
    with pytest.raises(NotVisibleYet):
        await bootstrap(site.store, site.base, site.out, site.env)
    done = await bootstrap(site.store, site.base, site.out, site.env, run_id="run-a")
    assert (done.ref, done.base) == (Ref("run-a", 0), "unproven")


async def test_another_run_in_the_pointer_is_refused(site: Site) -> None:
    await site.claim()
    with pytest.raises(InvalidInput):
        await bootstrap(site.store, site.base, site.out, site.env, run_id="run-b")


async def test_a_side_effect_free_repeat_is_refused(site: Site) -> None:
    await site.claim()
    site.out.mkdir()
    with pytest.raises(InvalidInput):
        await bootstrap(site.store, site.base, site.out, site.env)


def command(site: Site, *more: str) -> list[str]:
    store = f"file://{site.root / 'store'}"
    return ["bootstrap", "--base", str(site.base), "--store", store, "--out", str(site.out), *more]


class TestCommand:
    @pytest.fixture
    async def run(self, site: Site) -> ScriptedRun:
        return await site.claim()

    def test_json(self, site: Site, run: ScriptedRun, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(command(site, "--json")) == 0
        facts = json.loads(capsys.readouterr().out)
        assert (facts["run_id"], facts["version"]) == ("run-a", 0)
        assert facts["out"] == str(site.out)

    def test_nothing_published_may_come(
        self, site: Site, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(command(site)) == 1
        assert capsys.readouterr().err.strip().endswith("retry: yes")

    def test_a_bad_base_is_the_callers(
        self, site: Site, run: ScriptedRun, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (site.base / "model.safetensors").unlink()
        assert main(command(site)) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert error.strip().endswith("retry: no")

    def test_a_bad_url_is_usage(self, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
        options = command(site)
        options[4] = "s3://bucket"
        assert main(options) == 2
        assert "stitch bootstrap:" in capsys.readouterr().err
