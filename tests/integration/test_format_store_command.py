"""`stitch store show` and `stitch store verify` on stores of our own and of other trainers."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from manifest_damages import flip_data, forge_payload, set_key
from publication_forge import snapshot, version_dir
from stitch_tree import digest_of, publish_anchor, publish_delta, small_state, write_chain

from stitch.cli import main
from stitch.format.records import encode_run_record, new_run_record, run_record_key
from stitch.format.wire import ForkPoint
from stitch.types import Ref

SLIME = Path(__file__).resolve().parents[1] / "data" / "slime"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of two runs, the second forked; beside `base/`."""
    root = tmp_path_factory.mktemp("store")
    states = write_chain(root)
    first = new_run_record(
        "run-s", first=True, boot_version=0, base_digest=digest_of(states[0]), writer="w1"
    )
    fork = ForkPoint(run_id="run-s", version=5, manifest_digest=None)
    second = new_run_record(
        "run-t", first=False, boot_version=5, base_digest=None, writer="w2", forked_from=fork
    )
    for record in (first, second):
        path = root / run_record_key(record.run_id)
        path.parent.mkdir(parents=True)
        path.write_bytes(encode_run_record(record))
    updates = root / second.updates_dir
    parent = publish_anchor(updates, Ref("run-t", 6), states[5])
    publish_delta(updates, Ref("run-t", 7), states[5], small_state(), parent=parent)
    (root / "latest").write_text("run-t/weight_v000007")
    return root


@pytest.fixture
def store(whole: Path, tmp_path: Path) -> Path:
    shutil.copytree(whole, tmp_path / "store")
    return tmp_path / "store"


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str]:
    code = main(["store", *(str(argument) for argument in arguments)])
    return code, capsys.readouterr().out


def test_show(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(store)
    code, text = call(capsys, "show", store)
    assert code == 0
    for words in (
        "run-t/weight_v000007",
        "run run-s:",
        "forked from run-s at 5",
        "overwrite/blake3",
        "data bytes",
    ):
        assert words in text
    assert len([line for line in text.splitlines() if "weight_v00000" in line]) == 8
    code, text = call(capsys, "show", f"file://{store}", "--json")
    facts = json.loads(text)
    assert facts["pointer"] == {
        "text": "run-t/weight_v000007",
        "run_id": "run-t",
        "version": 7,
    }
    first, second = facts["runs"]
    assert [v["kind"] for v in first["versions"]] == ["delta", "anchor", "delta", "delta", "delta"]
    assert [v["version"] for v in second["versions"]] == [6, 7]
    assert not any(v["foreign"] for run in facts["runs"] for v in run["versions"])
    assert snapshot(store) == before
    code, text = call(capsys, "show", store, "--json", "--run-id", "run-t")
    assert [run["run_id"] for run in json.loads(text)["runs"]] == ["run-t"]


def test_verify_a_sound_store(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = snapshot(store)
    assert call(capsys, "verify", store)[0] == 0
    assert call(capsys, "verify", store, "--deep", "--base", store / "base")[0] == 0
    code, text = call(capsys, "verify", store, "--json")
    assert json.loads(text)["problems"] == []
    assert (code, json.loads(text)["versions"]) == (0, 7)
    assert snapshot(store) == before
    # Without the base, what comes before the first anchor cannot be rebuilt.
    code, text = call(capsys, "verify", store, "--deep")
    assert code == 1
    assert "--base" in text
    assert call(capsys, "verify", store, "--deep", "--run-id", "run-t")[0] == 0


def test_verify_names_what_is_wrong(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip_data(2, sealed_anew=False)(store / "updates")
    code, text = call(capsys, "verify", store)
    assert code == 1
    assert "weight_v000002" in text
    assert "BLAKE3" in text
    assert "retry: no" in text


def test_only_deep_finds_a_forged_payload(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    forge_payload(1, sealed_anew=True)(store / "updates")
    assert call(capsys, "verify", store, "--run-id", "run-s")[0] == 0
    code, text = call(
        capsys, "verify", store, "--run-id", "run-s", "--deep", "--base", store / "base"
    )
    assert code == 1
    assert "checksum" in text


def test_holes_and_half_versions(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.rmtree(version_dir(store / "updates", 4))
    (version_dir(store / "updates", 3) / "model.safetensors.index.json").unlink()
    set_key(1, "target_digest", "0" * 64)(store / "updates")
    (store / "latest").write_text("run-s/weight_v000009")
    code, text = call(capsys, "verify", store, "--json")
    assert code == 1
    problems = {p["where"]: p for p in json.loads(text)["problems"]}
    assert problems.keys() == {"latest", "weight_v000003", "weight_v000005"}
    assert all(problem["retryable"] for problem in problems.values())
    code, text = call(capsys, "show", store)
    assert code == 0
    assert "! weight_v000003" in text
    assert "! latest" in text


def test_a_foreign_store(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    shutil.copytree(SLIME / "store" / "run-a1", tmp_path / "s")
    code, text = call(capsys, "show", tmp_path / "s", "--json")
    assert code == 0
    (run,) = json.loads(text)["runs"]
    assert (run["run_id"], run["foreign"]) == ("run-a1", True)
    assert call(capsys, "verify", tmp_path / "s", "--deep", "--base", SLIME / "base")[0] == 0
    # A trainer that keeps no pointer.
    (tmp_path / "s" / "latest").unlink()
    assert call(capsys, "verify", tmp_path / "s", "--deep", "--base", SLIME / "base")[0] == 0
    (tmp_path / "s" / "latest").write_text("nonsense")
    assert call(capsys, "verify", tmp_path / "s")[0] == 1


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


@pytest.mark.parametrize("harm", [fifo, link_loop])
def test_irregular_files_are_named_without_waiting(
    harm: Callable[[Path], object], store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    version = version_dir(store / "updates", 2)
    harm(version / "model.safetensors.index.json")
    code, text = call(capsys, "verify", store)
    assert code == 1
    assert "weight_v000002" in text
    data = min(version_dir(store / "updates", 3).glob("*.safetensors"))
    harm(data)
    code, text = call(capsys, "verify", store)
    assert code == 1
    assert "weight_v000003" in text
    assert call(capsys, "show", store)[0] == 0
    harm(store / "latest")
    assert main(["store", "show", str(store)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_folder_that_is_no_run_is_a_problem_of_its_own(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (store / "runs" / "no run").mkdir()
    (store / "runs" / "no run" / "run.json").write_text("{}")
    code, text = call(capsys, "show", store)
    assert code == 0
    assert "! runs/no run" in text
    assert "run run-s:" in text
    assert call(capsys, "verify", store)[0] == 1


@pytest.mark.parametrize("link", ["updates", "runs", "runs/run-s", "updates/weight_v000003"])
def test_a_link_that_leads_out_is_one_problem(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], link: str
) -> None:
    (store / link).rename(tmp_path / "outside")
    (store / link).symlink_to(tmp_path / "outside")
    code, text = call(capsys, "show", store)
    assert code == 0
    assert "weight_v000007" in text or link == "runs"
    assert "by a link" in text


def test_usage(tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "show", str(tmp_path / "nowhere")]) == 2
    assert main(["store", "show", "s3://bucket"]) == 2
    assert main(["store", "show", str(store), "--run-id", "other"]) == 2
    assert main(["store", "verify", str(store), "--deep", "--base", "x" * 300]) == 2
    with pytest.raises(SystemExit):
        main(["store", "verify", str(store), "--threads", "0"])
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 5
    assert all(line.startswith(("stitch store: ", "stitch store verify: ")) for line in errors)
