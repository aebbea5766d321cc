"""The label check itself, without engines: true labels pass, and every kind of lie is caught."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from stitch.demo import task
from stitch.demo.labels import LabelReport, check_labels, shifted
from stitch.demo.learner import Learner, LearnerConfig
from stitch.demo.model import load_model, load_tensors, make_checkpoint, output_logprobs
from stitch.env import Env
from stitch.publisher import Publisher
from stitch.rl.trajectory import Trajectory
from stitch.types import Prefix, Ref, Span

RUN = "demo"
GROUPS, SAMPLES, VERSIONS = 4, 4, 4
TOKENS = task.ANSWER_TOKENS


@dataclass
class History:
    base: Path
    updates: Path
    trajectories: list[Trajectory]
    learnt: float


def sample(model: torch.nn.Module, version: int, rng: random.Random) -> list[Trajectory]:
    """Uniform answers, scored as an engine at `version` would."""
    found = []
    for group in range(GROUPS):
        prompt = task.make_prompt(rng)
        answers = torch.tensor(
            [[rng.randrange(len(task.VOCABULARY)) for _ in range(TOKENS)] for _ in range(SAMPLES)]
        )
        with torch.inference_mode():
            # Unshared, uncached: an oracle for the shared-prompt pass of the check.
            ids = torch.cat([torch.tensor([prompt] * SAMPLES), answers[:, :-1]], dim=1)
            every = model(input_ids=ids, use_cache=False, logits_to_keep=TOKENS).logits
            scores = every.log_softmax(-1).gather(2, answers.unsqueeze(-1)).squeeze(-1)
        for answer, score in zip(answers.tolist(), scores.tolist(), strict=True):
            found.append(
                Trajectory(
                    prompt_ids=tuple(prompt),
                    output_ids=tuple(answer),
                    logprobs=tuple(score),
                    spans=(Span(Ref(RUN, version), 0, TOKENS),),
                    rewards=tuple(task.token_rewards(prompt, answer)),
                    group=group,
                )
            )
    return found


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    """Four learner steps, each published; trajectories of every version."""
    torch.set_num_threads(1)
    root = tmp_path_factory.mktemp("history")
    make_checkpoint(root / "base", seed=5)
    learner = Learner(root / "base", LearnerConfig())
    model = load_model(root / "base")
    rng = random.Random(0)
    every = sample(model, 0, rng)
    first = learner.tensors()
    with Publisher((root / "store").as_uri(), run_id=RUN, base=root / "base") as publisher:
        for version in range(1, VERSIONS + 1):
            learner.step(every[-GROUPS * SAMPLES :])
            publisher.publish(learner.tensors()).wait(30)
            load_tensors(model, learner.tensors())
            every += sample(model, version, rng)
    moved = max(float((first[n] - t).abs().max()) for n, t in learner.tensors().items())
    return History(root / "base", root / "store" / "updates", every, moved)


def judge(history: History, trajectories: list[Trajectory], tmp_path: Path) -> LabelReport:
    return check_labels(
        trajectories,
        base=history.base,
        updates=history.updates,
        run_id=RUN,
        boot_version=0,
        latest=VERSIONS,
        scratch=tmp_path / "scratch",
        tolerance=2e-4,
        reject_min=0.95,
        env=Env(),
    )


def test_the_learner_moves_the_published_weights(history: History) -> None:
    assert history.learnt > 0


def test_true_labels_pass(history: History, tmp_path: Path) -> None:
    report = judge(history, history.trajectories, tmp_path)
    assert report.passed, report
    assert report.accepted == report.spans == len(history.trajectories)
    assert report.neighbours == 8 * GROUPS * SAMPLES  # the first and last have one neighbour
    assert report.rejected == report.neighbours
    assert not (tmp_path / "scratch").exists()


def test_a_trajectory_over_two_versions_passes(history: History, tmp_path: Path) -> None:
    """Recompute semantics: each token is its version's, given the whole prefix."""
    per = GROUPS * SAMPLES
    old, later = history.trajectories[per], history.trajectories[2 * per]
    model = load_model(history.base)
    scores = []
    for at in (1, 2):
        report_dir = tmp_path / f"v{at}"
        from stitch.format.materialize import materialize

        materialize(
            base=history.base, updates=history.updates, version=at, out=report_dir, env=Env()
        )
        from safetensors.torch import load_file

        load_tensors(model, load_file(report_dir / "model.safetensors"))
        with torch.inference_mode():
            row, _ = output_logprobs(model, [old])
        scores.append(row[0].tolist())
    mixed = replace(
        old,
        logprobs=tuple(scores[0][:3] + scores[1][3:]),
        spans=(Span(Ref(RUN, 1), 0, 3), Span(Ref(RUN, 2), 3, TOKENS)),
    )
    assert judge(history, [mixed, later], tmp_path).passed
    assert judge(history, [mixed], tmp_path).multi_span == 1
    late = replace(mixed, spans=(Span(Ref(RUN, 1), 0, 4), Span(Ref(RUN, 2), 4, TOKENS)))
    assert not judge(history, [late], tmp_path).passed, "a boundary one token late was accepted"


def last_span_wrong(trajectories: list[Trajectory]) -> list[Trajectory]:
    liar = trajectories[-1]
    version = liar.spans[0].ref.version - 1
    return [*trajectories[:-1], replace(liar, spans=(Span(Ref(RUN, version), 0, TOKENS),))]


def one_logprob_off(trajectories: list[Trajectory]) -> list[Trajectory]:
    odd = trajectories[7]
    return [
        *trajectories[:7],
        replace(odd, logprobs=(odd.logprobs[0] + 1e-3, *odd.logprobs[1:])),
        *trajectories[8:],
    ]


@pytest.mark.parametrize(
    "lie",
    [
        lambda t: shifted(t, 1, boot_version=0, latest=VERSIONS),
        lambda t: shifted(t, -1, boot_version=0, latest=VERSIONS),
        last_span_wrong,
        one_logprob_off,
        lambda t: [],
    ],
    ids=["one later", "one earlier", "one label wrong", "one logprob off", "no trajectories"],
)
def test_lies_are_caught(
    history: History, tmp_path: Path, lie: Callable[[list[Trajectory]], list[Trajectory]]
) -> None:
    assert not judge(history, lie(history.trajectories), tmp_path).passed


def test_carried_spans_are_counted_not_judged(history: History, tmp_path: Path) -> None:
    spans = (
        Span(Ref(RUN, 1), 0, 3),
        Span(Ref(RUN, 2), 3, TOKENS, Prefix.CARRIED),
    )
    carried = replace(history.trajectories[GROUPS * SAMPLES], spans=spans)
    report = judge(history, [carried], tmp_path)
    assert (report.spans, report.carried) == (1, 1)
    assert report.passed
